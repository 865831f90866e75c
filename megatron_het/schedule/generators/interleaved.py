"""Interleaved 1F1B: several chunks per stage (Megatron's virtual pipeline)."""

import math
from collections.abc import Sequence

from megatron_het.schedule.generators.listing import (
    Speeds,
    alternate,
    compute_ops,
    forward_program,
    merge,
    require,
    single_replicas,
)
from megatron_het.schedule.ir import Kind, Op, Program, Shape

NAME = "interleaved"


def interleaved(
    shape: Shape, *, forward_only: bool = False, group: int | None = None, speeds: Sequence[float] | None = None
) -> Program:
    """Interleaved 1F1B.

    Microbatches go in groups: every chunk forwards the whole group before the next chunk does; backwards
    likewise from the last chunk.  With one replica per stage the warm-up is Megatron's,
    ``(chunks - 1) * group + 2 * (stages - 1 - stage)`` forwards; with several, the order comes from a
    simulation whose limit of forwards in flight is the same number scaled by the device's share.

    Args:
        shape: the same number of chunks on every stage, no slices.
        forward_only: forwards only.
        group: microbatches per group, at least the number of stages (the default).
        speeds: relative speed of each device, used with several replicas.

    Raises:
        ValueError: unequal chunk counts, slices, or a number of microbatches that leaves a group smaller
            than the number of stages.
    """
    chunks, stages = len(shape.layers[0]), shape.stages
    group = stages if group is None else group
    require(NAME, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(NAME, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    require(NAME, all(len(c) == chunks for c in shape.layers), f"layers = {shape.layers}: unequal chunk counts")
    require(NAME, group >= stages, f"group = {group}: must be at least the {stages} stages")
    rest = shape.microbatches % group
    require(
        NAME,
        chunks == 1 or rest == 0 or rest >= stages,
        f"{shape.microbatches} microbatches leave a group of {rest}, fewer than the {stages} stages",
    )
    forward = [_order(shape, d, group, Kind.FORWARD) for d in range(len(shape.devices))]
    if forward_only:
        return forward_program(NAME, shape, forward)
    backward = [_order(shape, d, group, Kind.BACKWARD) for d in range(len(shape.devices))]
    costs = Speeds.of(shape, speeds)
    if single_replicas(shape):
        warm = [(chunks - 1) * group + 2 * (stages - 1 - s) if chunks > 1 else stages - 1 - s for s in range(stages)]
        return Program(NAME, shape, tuple(alternate(f, b, w) for f, b, w in zip(forward, backward, warm)))
    limits = []
    for d, (stage, _) in enumerate(shape.devices):
        own = shape.microbatches_of(d)
        largest = max((sum(m // group == g for m in own) for g in range(-(-shape.microbatches // group))), default=1)
        share = len(own) / shape.microbatches
        ahead = 2 * math.ceil(share * sum(shape.replicas[stage + 1 :]) - 1e-9)
        limits.append((chunks - 1) * largest + ahead + 1)
    return Program(NAME, shape, merge(shape, forward, backward, limits, costs))


def _order(shape: Shape, device: int, group: int, kind: Kind) -> list[Op]:
    own = shape.microbatches_of(device)
    chunks = range(len(shape.layers[0]))
    order: list[Op] = []
    for first in range(0, shape.microbatches, group):
        members = [m for m in own if first <= m < first + group]
        for chunk in chunks if kind == Kind.FORWARD else reversed(chunks):
            order += compute_ops(kind, members, (0,), chunk)
    return order
