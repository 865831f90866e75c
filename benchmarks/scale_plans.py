"""Plans of any world size for ``benchmarks.scale``, and what can be counted of them without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_het.distributed import Edge, group_specs, in_rounds
from megatron_het.lowering.programs import build
from megatron_het.lowering.ranks import BoundaryMap, edges
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.schedule.ir import Program

SEQUENCE = 4096
STAGES = 8
BLOCK = 16
"""Ranks of a stage that share microbatches with each other, in plans of blocks."""
_SIZES = ((8, 4, 2, 1, 1), (4, 4, 4, 4), (8, 8), (2, 2, 4, 4, 2, 2))
"""TP sizes of a block's replicas, by stage in turn."""
ROLES = 7
"""Roles of groups that a rank is in at most, and the world."""


def sizes_of(stage: int, ranks: int) -> tuple[int, ...]:
    """TP sizes of the replicas of ``ranks`` ranks of a stage; a power of two of them."""
    if ranks >= BLOCK:
        return _SIZES[stage % len(_SIZES)] * (ranks // BLOCK)
    scaled = tuple(max(1, size * ranks // BLOCK) for size in _SIZES[stage % len(_SIZES)])
    kept: list[int] = []
    for size in scaled:
        if sum(kept) + size <= ranks:
            kept.append(size)
    return tuple(kept) + (1,) * (ranks - sum(kept))


def plan_of(world_size: int, microbatches: int, mixed: bool) -> Plan:
    """Eight stages of replicas with TP 1 to 8, under 1F1B.

    Args:
        world_size: A power of two, at least 16.
        microbatches: Of an iteration.
        mixed: Whether microbatches go from any replica to any replica; else within blocks of 16 ranks per stage.
    """
    per_stage = world_size // STAGES
    width = per_stage if mixed else min(BLOCK, per_stage)
    blocks = per_stage // width
    rank, stages = 0, []
    for s in range(STAGES):
        replicas = []
        for block in range(blocks):
            sizes = sizes_of(s, width)
            own = range(block, microbatches, blocks)
            for ids, size in zip(_dealt(own, sizes, s), sizes, strict=True):
                replicas.append(Replica(tuple(range(rank, rank + size)), ids, speed=size / max(sizes)))
                rank += size
        stages.append(Stage((4,), tuple(replicas)))
    model = ModelShape(4 * STAGES, 4096, 32, 8, SEQUENCE)
    training = TrainingShape(1, microbatches, "bf16", sequence_parallel=True, distributed_optimizer=True)
    return Plan(model, training, tuple(stages), ScheduleSpec("1f1b"))


def _dealt(ids: Sequence[int], sizes: Sequence[int], stage: int) -> list[tuple[int, ...]]:
    """Microbatches in proportion to the TP sizes, dealt in another order on every stage."""
    places = [q for q, size in enumerate(sizes) for _ in range(size)]
    turn = 1 + 2 * stage
    found: list[list[int]] = [[] for _ in sizes]
    for i, m in enumerate(ids):
        found[places[(i * turn) % len(places)]].append(m)
    return [tuple(own) for own in found]


@dataclass(frozen=True)
class Counted:
    """Holds what one rank has.

    Attributes:
        groups: Process groups, the world included.
        peers: Ranks with which it exchanges transfers.
        rounds: In which its groups of two are created.
        memberships: Groups of all ranks together, counted once per member.
        chain_by_rank: Groups that are waited for one after the other where edges are created in the order of ranks.
    """

    groups: int
    peers: int
    rounds: int
    memberships: int
    chain_by_rank: int


def edges_of(plan: Plan, programs: Sequence[Program]) -> list[Edge]:
    """Directed edges of the transfers."""
    return edges(programs, BoundaryMap(Placement(plan), SEQUENCE, True))


def counted(plan: Plan) -> Counted:
    """Of the rank with the most groups above its peers, over the whole plan."""
    pairs = {(min(e), max(e)) for e in edges_of(plan, list(build(plan).values()))}
    peers = dict.fromkeys(range(plan.world_size), 0)
    for pair in pairs:
        for rank in pair:
            peers[rank] += 1
    roles = dict.fromkeys(range(plan.world_size), 1)  # the world
    for spec in group_specs(Placement(plan)):
        for rank in spec.ranks:
            roles[rank] += 1
    rank = max(peers, key=lambda r: (peers[r] + roles[r], r))
    chain: dict[int, int] = {}
    for a, b in sorted(pairs):
        chain[a] = chain[b] = max(chain.get(a, 0), chain.get(b, 0)) + 1
    return Counted(
        peers[rank] + roles[rank],
        peers[rank],
        max(number for number, _ in in_rounds(pairs)) + 1,
        2 * len(pairs) + sum(roles.values()),
        max(chain.values()),
    )
