"""Candidates, which the search varies: plans without rank numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NamedTuple

from megatron_het.plan.schema import layers_of
from megatron_het.schedule.generators.listing import ORDERS
from megatron_het.schedule.generators.one_f_one_b import SLACK
from megatron_het.schedule.ir import Place, path_of, path_of_schedule, placement_of


class Group(NamedTuple):
    """Equal replicas of one stage: ``count`` TP groups of size ``tp`` from one pool (entry of ``cluster.nodes``).

    ``ep`` is the expert-parallel size of each; 0 for the largest that the candidate's ``ep`` and ``tp`` allow.  Where
    it is larger than ``tp``, the replicas of the stage share experts.
    """

    pool: int
    tp: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody needs
    ep: int = 0


class Stage(NamedTuple):
    """Transformer layers and replicas of one pipeline stage."""

    layers: int
    groups: tuple[Group, ...]


Passes = tuple[int, ...]
"""Sequences of each pass of one replica."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of the search space.

    Attributes:
        stages: In pipeline order.
        micro_batch_size: Sequences per microbatch.
        recompute: none, selective or full.
        schedule: One of ``schedules.SCHEDULES``, or another one that a plan asks for.
        chunks: Model chunks (ministages) per stage; the most of a stage where they differ.
        chunk_counts: By stage, where they differ; the search does not try that, plans may ask for it.
        slices: Slices per sequence.
        zero_stage: 0 plain data parallelism, 1 distributed optimizer, 2 and 3 sharded gradients and parameters.
        offload: Parameters, optimizer state and boundary activations live in host memory when unused (ministage).
        even: Every replica of a stage gets the same number of microbatches.
        slack: Further microbatches in flight where stages divide them differently (1F1B), as a share.
        order: How replicas decide between a forward and a backward where stages divide the microbatches
            differently (``megatron_het.schedule.generators.listing.ORDERS``).
        shares: Per stage and group, the part of the stage's state that one replica keeps (ministage); None:
            equal parts, or in proportion to free memory where equal ones do not fit.
        depths: By boundary between stages, how many microbatches more the stage before it has in flight (1F1B);
            empty: one more each.
        cp: Context-parallel size: a replica has ``tp * cp`` GPUs, each with its part of every sequence.
        ep: Expert-parallel size: the experts of a layer are divided over so many parts of every TP group, or over
            the greatest common divisor of both (:meth:`cut_of`).
        across_replicas: The experts are divided over ``ep`` ranks of a stage, or over as many as divide a stage's
            ranks, whichever replica they belong to, and each is whole.
        rows: With a split vocabulary: per stage, the parts of the embeddings and of the output layer that it has;
            empty: the first stage has all of the embeddings, the last one all of the output layer.
        sizes: Of a single stage whose microbatches differ in size (Poplar): per group and replica, the sequences of
            each of its passes; ``micro_batch_size`` is the largest of all.  Empty: all microbatches are equal.
        exchange: Stages attend for each other (slices): the context exchange.
        host_activations: Share of the activations of each forward that waits in main memory.
    """

    stages: tuple[Stage, ...]
    micro_batch_size: int
    recompute: str = "none"
    schedule: str = "1f1b"
    chunks: int = 1
    slices: int = 1
    zero_stage: int = 0
    offload: bool = False
    even: bool = False
    slack: float = SLACK
    shares: tuple[tuple[float, ...], ...] | None = None
    order: str = ORDERS[0]
    depths: tuple[int, ...] = ()
    cp: int = 1
    ep: int = 1
    across_replicas: bool = False
    rows: tuple[tuple[float, float], ...] = ()
    sizes: tuple[tuple[Passes, ...], ...] = ()
    exchange: bool = False
    host_activations: float = 0.0
    chunk_counts: tuple[int, ...] = ()

    def with_(self, **changes: object) -> Candidate:
        """A changed copy; with other stages or chunks all stages have equally many chunks."""
        stages = changes.get("stages", self.stages)
        if self.chunk_counts and (
            changes.keys() & {"chunks", "schedule"} or len(self.chunk_counts) != len(stages)  # type: ignore[arg-type]
        ):
            changes = {"chunk_counts": (), **changes}
        return replace(self, **changes)  # type: ignore[arg-type]

    def chunks_of(self, s: int) -> int:
        """Model chunks of a stage."""
        return self.chunk_counts[s] if self.chunk_counts else self.chunks

    def as_of(self, s: int) -> Candidate:
        """Returns the candidate for callers that look at one stage only: its number of chunks is that of all."""
        return replace(self, chunks=self.chunks_of(s), chunk_counts=()) if self.chunk_counts else self

    def in_pools(self, pools: Sequence[int]) -> Candidate:
        """Returns the candidate with other numbers of pools: ``pools[p]`` in place of ``p``."""
        stages = [Stage(s.layers, tuple(sorted(g._replace(pool=pools[g.pool]) for g in s.groups))) for s in self.stages]
        groups = [pools[g.pool] for s in self.stages for g in s.groups] if self.sizes else []
        sizes = tuple(self.sizes[i] for i in sorted(range(len(groups)), key=lambda i: groups[i]))
        return self.with_(stages=tuple(stages), sizes=sizes)

    def gpus(self) -> dict[int, int]:
        """GPUs used per pool."""
        used: dict[int, int] = {}
        for stage in self.stages:
            for group in stage.groups:
                used[group.pool] = used.get(group.pool, 0) + group.tp * self.cp * group.count
        return used

    def cut_of(self, group: Group) -> tuple[int, int]:
        """(parts over which a replica divides the experts of a layer, ranks that cut one expert)."""
        if self.across_replicas:
            return group.ep or gcd(self.ep, group.count * group.tp * self.cp), 1
        ep = group.ep or gcd(self.ep, group.tp)
        return ep, max(1, group.tp // ep)

    def over_replicas(self, ep: int) -> Candidate:
        """Returns the candidate with experts over so many ranks of a stage, or as many as a stage's ranks allow.

        Where no stage has more of them than a replica's, or a replica would have a layer's experts twice, they are
        divided inside replicas.
        """
        found = self.with_(ep=ep, across_replicas=True)
        cuts = [(found.cut_of(g)[0], g.tp) for s in self.stages for g in s.groups]
        if all(n <= tp for n, tp in cuts) or any(n % tp for n, tp in cuts):
            return self.with_(ep=gcd(ep, max([tp for _, tp in cuts], default=ep)), across_replicas=False)
        return found.with_(ep=max(n for n, _ in cuts))

    def spans(self, group: Group) -> bool:
        """Whether the group's replicas share experts with others of their stage."""
        ep, expert_tp = self.cut_of(group)
        return ep * expert_tp > group.tp

    def copies_of(self, s: int, group: Group) -> int:
        """How many ranks of stage ``s`` hold the same part of the experts as a rank of the group."""
        ep, expert_tp = self.cut_of(group)
        alike = sum(g.count for g in self.stages[s].groups if g.tp == group.tp)
        return max(1, alike * self.cp * group.tp // (ep * expert_tp))

    def reducing(self, s: int) -> tuple[Group, ...]:
        """The ranks of a stage that sum gradients, per TP rank: replicas, and with CP all ranks of each."""
        groups = self.stages[s].groups
        return groups if self.cp == 1 else tuple(g._replace(count=g.count * self.cp) for g in groups)

    @property
    def experts_over(self) -> tuple[int, bool]:
        """How experts are divided, for keys of what is remembered."""
        return self.ep, self.across_replicas

    @property
    def path(self) -> tuple[Place, ...]:
        """(stage, chunk) in the order in which a microbatch visits them."""
        if self.chunk_counts:
            return path_of(self.chunk_counts, placement_of(self.schedule))
        return path_of_schedule(self.schedule, len(self.stages), self.chunks)

    @property
    def head_stage(self) -> int:
        """The stage of the output layer and the loss."""
        return self.path[-1][0]

    def ends_of(self, s: int) -> tuple[float, float]:
        """The parts of the embedding and of the output layer that a stage computes, 0 to 1."""
        if self.rows:
            return (self.rows[s][0],) * 2
        return float(s == 0), float(s == self.head_stage)

    def sends(self, s: int) -> tuple[int, int]:
        """Chunks of a stage whose outputs, and whose gradients, go to another stage."""
        stages = [stage for stage, _ in self.path]
        pairs = [(a, b) for a, b in itertools.pairwise(stages) if a != b]
        return sum(a == s for a, _ in pairs), sum(b == s for _, b in pairs)

    @property
    def blocks(self) -> int:
        """Independent equal pipelines that the replicas can be dealt into (the gcd of all counts).

        Block ``j`` runs the microbatches that are ``j`` modulo this number; its replicas exchange
        activations with each other only.
        """
        if self.sizes:
            return 1
        return gcd(*[g.count for s in self.stages for g in s.groups])

    def block(self) -> Candidate:
        """One of the equal pipelines."""
        n = self.blocks
        if n == 1:
            return self

        def part(g: Group) -> Group:
            return g._replace(count=g.count // n, ep=self.cut_of(g)[0] if self.across_replicas else g.ep)

        return self.with_(stages=tuple(Stage(s.layers, tuple(map(part, s.groups))) for s in self.stages))

    @property
    def world_size(self) -> int:
        """GPUs used."""
        return sum(self.gpus().values())


@functools.lru_cache(maxsize=4096)
def _cut(pattern: str, path: tuple[Place, ...], layers: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, ...], ...]:
    kinds, found, at = layers_of(pattern), [[""] * len(chunks) for chunks in layers], 0
    for stage, chunk in path:
        count = layers[stage][chunk]
        found[stage][chunk], at = kinds[at : at + count], at + count
    return tuple(map(tuple, found))


def layers_at(candidate: Candidate, pattern: str) -> tuple[tuple[str, ...], ...]:
    """The layers of a hybrid model in every chunk of every stage, as symbols.

    Args:
        pattern: The model's.
    """
    counts = tuple(chunk_layers(stage.layers, candidate.chunks_of(s)) for s, stage in enumerate(candidate.stages))
    return _cut(pattern, tuple(candidate.path), counts)


def normalised(stages: list[tuple[int, dict[tuple[int, ...], int]]]) -> tuple[Stage, ...]:
    """Stages from ``(layers, {(pool, tp): count})``, groups in a fixed order, empty groups dropped.

    Keys may have a third number, the expert-parallel size of the group.
    """
    return tuple(
        Stage(layers, tuple(Group(k[0], k[1], n, *k[2:]) for k, n in sorted(groups.items()) if n > 0))
        for layers, groups in stages
    )


def chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage, as even as possible."""
    return tuple(layers // chunks + (1 if c < layers % chunks else 0) for c in range(chunks))
