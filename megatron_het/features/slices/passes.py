"""Schedules over slices of the sequence: SlimPipe, and for comparison TeraPipe and Seq1F1B."""

import math
from collections.abc import Sequence

from megatron_het.schedule.generators import listing
from megatron_het.schedule.ir import Kind, Op, Program, Shape


def slice_orders(shape: Shape, device: int) -> tuple[list[Op], list[Op]]:
    """Forward and backward order of a device, before they are merged.

    Forward: per microbatch, per group of ``2 * stages`` slices, per chunk, the slices of the group.  Backward:
    the exact reverse inside each microbatch, microbatches in order (SlimPipe, section 4.1.2: the last slice
    goes first, so that its keys and values are released at once).  The paper does not say how chunks and
    slices interleave.  All groups of at least ``stages`` slices have the same memory and, with equal slices,
    the same bubble.  In groups of ``stages`` the next chunk needs a slice at the moment when it
    leaves the last stage, so that every such transfer is waited for.  In groups of twice that, transfers have
    the time of ``stages`` slices.  In larger groups the slices that run at one time differ more in attention.
    """
    chunks = range(len(shape.layers[shape.devices[device].stage]))
    size = 2 * shape.stages
    groups = [range(s, min(s + size, shape.slices)) for s in range(0, shape.slices, size)]
    forward: list[Op] = []
    backward: list[Op] = []
    for microbatch in shape.microbatches_of(device):
        own = [op for g in groups for c in chunks for op in listing.compute_ops(Kind.FORWARD, (microbatch,), g, c)]
        forward += own
        backward += [op._replace(kind=Kind.BACKWARD) for op in reversed(own)]
    return forward, backward


def _check_chunks(name: str, shape: Shape) -> int:
    chunks = listing.most_chunks(shape)
    listing.require(name, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    listing.require(
        name,
        chunks == 1 or shape.slices % shape.stages == 0,
        f"slices = {shape.slices}: with {chunks} chunks per stage a multiple of the {shape.stages} stages is needed",
    )
    return chunks


def _sliced(
    name: str,
    shape: Shape,
    warmup: Sequence[int],
    forward_only: bool,
    speeds: Sequence[float] | None,
    order: str = "greedy",
) -> Program:
    """Merges the slice orders; ``warmup`` per stage, for one replica per stage and for separate pipelines.

    Where stages have different numbers of chunks, the order comes from a simulation.  A stage may then hold one more
    group of slices for each chunk that it lacks: these pass through the chunks of other stages meanwhile.
    """
    listing.require_order(name, order)
    if forward_only:
        return listing.forward_program(name, shape, [forward for forward, _ in _all_orders(shape)])
    listing.Speeds.of(shape, speeds)  # checks them
    given = [1.0] * len(shape.devices) if speeds is None else speeds

    def make(part: Shape, own: Sequence[float]) -> tuple[tuple[Op, ...], ...]:
        orders = _all_orders(part)
        if listing.single_replicas(part) and listing.equal_chunks(part):
            return tuple(listing.alternate(f, b, w) for (f, b), w in zip(orders, warmup))
        most, limits = listing.most_chunks(part), []
        for d, (stage, _) in enumerate(part.devices):
            share, chunks = len(part.microbatches_of(d)) / part.microbatches, len(part.layers[stage])
            ahead = math.ceil(share * sum(part.replicas[stage + 1 :]) - 1e-9)
            per_step = (warmup[stage] + 1 - part.slices * most) // max(part.stages - 1 - stage, 1)
            away = min(2 * part.stages, part.slices) * (most - chunks)
            limits.append(part.slices * chunks + away + max(per_step, 1) * ahead)
        forward, backward = zip(*orders)
        return listing.merge(part, forward, backward, limits, listing.Speeds.of(part, own), order)

    return Program(name, shape, listing.by_part(shape, listing.parts_of(shape), given, make))


def _all_orders(shape: Shape) -> list[tuple[list[Op], list[Op]]]:
    if listing.single_replicas(shape) and listing.equal_chunks(shape):  # the same for every stage: build it once
        return [slice_orders(shape, 0)] * shape.stages
    return [slice_orders(shape, d) for d in range(len(shape.devices))]


def slimpipe(
    shape: Shape, *, forward_only: bool = False, speeds: Sequence[float] | None = None, order: str = "greedy"
) -> Program:
    """SlimPipe: 1F1B over uniform slices, plain or interleaved (section 4.1).

    Stage ``s`` runs ``slices * chunks + 2 * (stages - 1 - s)`` forwards before its first backward.  The
    depth is deliberate: it aligns forwards with forwards and backwards with backwards across devices, and
    hides the latency of transfers.

    Args:
        shape: where a stage has several chunks, ``slices`` must be a multiple of the number of stages.
        order: with stages that divide the microbatches differently, one of
            :data:`~megatron_het.schedule.generators.listing.ORDERS`.

    Raises:
        ValueError: the shape does not fit, or ``order`` is unknown.
    """
    chunks = _check_chunks("slimpipe", shape)
    last = shape.stages - 1
    warmup = [shape.slices * chunks - 1 + 2 * (last - s) for s in range(shape.stages)]
    return _sliced("slimpipe", shape, warmup, forward_only, speeds, order)


def seq1f1b(shape: Shape, *, forward_only: bool = False, speeds: Sequence[float] | None = None) -> Program:
    """Seq1F1B: as SlimPipe with the shallowest warm-up, ``slices - 1 + stages - 1 - s`` forwards.

    Its published interleaved form orders slices wrongly when there are more slices than stages, so only one
    chunk per stage is accepted.

    Raises:
        ValueError: the shape does not fit.
    """
    chunks = _check_chunks("seq1f1b", shape)
    listing.require("seq1f1b", chunks == 1, "one chunk per stage only")
    warmup = [shape.slices - 1 + shape.stages - 1 - s for s in range(shape.stages)]
    return _sliced("seq1f1b", shape, warmup, forward_only, speeds)


def terapipe(shape: Shape, *, forward_only: bool = False) -> Program:
    """TeraPipe: all forwards over slices, then all backwards, exactly reversed.

    Raises:
        ValueError: the shape does not fit.
    """
    _check_chunks("terapipe", shape)
    orders = _all_orders(shape)
    if forward_only:
        return listing.forward_program("terapipe", shape, [forward for forward, _ in orders])
    ops = tuple(tuple(f + [op._replace(kind=Kind.BACKWARD) for op in reversed(f)]) for f, _ in orders)
    return Program("terapipe", shape, ops)
