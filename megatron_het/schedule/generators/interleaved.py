"""Interleaved 1F1B: several chunks per stage (Megatron's virtual pipeline)."""

import math
from collections.abc import Sequence

from megatron_het.schedule.generators.listing import (
    Part,
    Speeds,
    alternate,
    by_part,
    compute_ops,
    equal_chunks,
    forward_program,
    merge,
    most_chunks,
    parts_of,
    require,
    require_order,
    single_replicas,
)
from megatron_het.schedule.ir import Kind, Op, Program, Shape

# Zorse's schedule: GPipe over ministages (Zorse, section 4.1.1).


MINISTAGE = "ministage"


def ministage(shape: Shape, *, forward_only: bool = False) -> Program:
    """All microbatches of a ministage, then the next ministage; backward exactly reversed.

    A ministage is a chunk; stages may have different numbers of them, of different sizes, and any
    replicas and routes.  Parameters are needed one ministage at a time, which is the point of it.

    Args:
        shape: any with ``placement`` loop and without slices.
        forward_only: forwards only.

    Raises:
        ValueError: slices, or the V placement.
    """
    require(MINISTAGE, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(MINISTAGE, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    orders = []
    for d, device in enumerate(shape.devices):
        own = shape.microbatches_of(d)
        orders.append(
            [op for c in range(len(shape.layers[device.stage])) for op in compute_ops(Kind.FORWARD, own, (0,), c)]
        )
    if forward_only:
        return forward_program(MINISTAGE, shape, orders)
    ops = tuple(tuple(order + [op._replace(kind=Kind.BACKWARD) for op in reversed(order)]) for order in orders)
    return Program(MINISTAGE, shape, ops)


NAME = "interleaved"


def interleaved(
    shape: Shape,
    *,
    forward_only: bool = False,
    group: int | None = None,
    speeds: Sequence[float] | None = None,
    order: str = "greedy",
) -> Program:
    """Interleaved 1F1B.

    Microbatches go in groups: every chunk forwards the whole group before the next chunk does; backwards
    likewise from the last chunk.  With one replica per stage the warm-up is Megatron's,
    ``(chunks - 1) * group + 2 * (stages - 1 - stage)`` forwards; with several, the order comes from a
    simulation whose limit of forwards in flight is the same number scaled by the device's share.
    Replicas that fall into separate pipelines, each with microbatches for whole groups, get the order of
    their pipeline alone, as Megatron's data-parallel replicas do.

    Stages may have different numbers of chunks: microbatches leave a stage out in the sweeps that it has no chunk
    for.  Its order then comes from the simulation, and it may hold as many forwards as if it had all the chunks: a
    group is under way through the chunks of others while it waits for the way back.

    Args:
        shape: no slices.
        forward_only: forwards only.
        group: microbatches of a pipeline per group, at least the number of stages (the default).
        speeds: relative speed of each device, used with several replicas.
        order: how the simulation decides, one of :data:`~megatron_het.schedule.generators.listing.ORDERS`.

    Raises:
        ValueError: slices, an unknown ``order``, or a number of microbatches that leaves
            a group smaller than the number of stages.
    """
    chunks, stages = most_chunks(shape), shape.stages
    group = stages if group is None else group
    require(NAME, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(NAME, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    require(NAME, group >= stages, f"group = {group}: must be at least the {stages} stages")
    require_order(NAME, order)
    parts = parts_of(shape)
    if not all(_whole_groups(part.shape, group) for part in parts):
        parts = [Part(tuple(range(len(shape.devices))), tuple(range(shape.microbatches)), shape)]
        require(
            NAME,
            _whole_groups(shape, group),
            f"{shape.microbatches} microbatches leave a group of {shape.microbatches % group}, "
            f"fewer than the {stages} stages",
        )
    Speeds.of(shape, speeds)  # checks them
    given = [1.0] * len(shape.devices) if speeds is None else speeds

    def make(part: Shape, own: Sequence[float]) -> tuple[tuple[Op, ...], ...]:
        forward = [_order(part, d, group, Kind.FORWARD) for d in range(len(part.devices))]
        if forward_only:
            return tuple(map(tuple, forward))
        backward = [_order(part, d, group, Kind.BACKWARD) for d in range(len(part.devices))]
        if single_replicas(part) and equal_chunks(part):
            return tuple(alternate(f, b, w) for f, b, w in zip(forward, backward, _warmup(stages, chunks, group)))
        return merge(part, forward, backward, _limits(part, chunks, group), Speeds.of(part, own), order)

    return Program(NAME, shape, by_part(shape, parts, given, make), forward_only)


def _warmup(stages: int, chunks: int, group: int) -> list[int]:
    """Megatron's forwards before the first backward, by stage."""
    return [(chunks - 1) * group * (chunks > 1) + (1 + (chunks > 1)) * (stages - 1 - s) for s in range(stages)]


def _whole_groups(shape: Shape, group: int) -> bool:
    """Whether the last group of microbatches has at least as many as there are stages."""
    rest = shape.microbatches % group
    return most_chunks(shape) == 1 or rest == 0 or rest >= shape.stages


def _limits(shape: Shape, chunks: int, group: int) -> list[int]:
    """Forwards in flight on every device: Megatron's number, scaled by the device's share."""
    limits = []
    for d, (stage, _) in enumerate(shape.devices):
        own = shape.microbatches_of(d)
        largest = max((sum(m // group == g for m in own) for g in range(-(-shape.microbatches // group))), default=1)
        share = len(own) / shape.microbatches
        ahead = 2 * math.ceil(share * sum(shape.replicas[stage + 1 :]) - 1e-9)
        limits.append((chunks - 1) * largest + ahead + 1)
    return limits


def _order(shape: Shape, device: int, group: int, kind: Kind) -> list[Op]:
    own = shape.microbatches_of(device)
    chunks = range(len(shape.layers[shape.devices[device].stage]))
    order: list[Op] = []
    for first in range(0, shape.microbatches, group):
        members = [m for m in own if first <= m < first + group]
        for chunk in chunks if kind == Kind.FORWARD else reversed(chunks):
            order += compute_ops(kind, members, (0,), chunk)
    return order
