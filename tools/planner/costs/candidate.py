"""Candidates (plans without rank numbers, which the search varies), and the results of the closed form."""

import functools
import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import floor, gcd
from typing import Any, NamedTuple, TypeVar

from megatron_het.plan.schema import layers_of
from megatron_het.schedule.generators.listing import ORDERS
from megatron_het.schedule.generators.one_f_one_b import SLACK
from megatron_het.schedule.ir import Place, path_of, path_of_schedule, placement_of
from megatron_het.schedule.memory import Moment

from .unit import Unit

T = TypeVar("T")


class SequencePart(NamedTuple):
    """A context-parallel rank of a replica: the pool of its TP group, and how much of every sequence it holds."""

    pool: int
    share: int  # relative to the other ranks of the replica


class Group(NamedTuple):
    """Equal replicas of one stage: ``count`` TP groups of size ``tp`` from one pool (entry of ``cluster.nodes``).

    ``ep`` is the expert-parallel size of each; 0 for the largest that the candidate's ``ep`` and ``tp`` allow.  Where
    it is larger than ``tp``, the replicas of the stage share experts.  ``parts`` are the context-parallel ranks of each
    replica, if they are not ``cp`` (of the candidate) equal parts in one pool; ``pool`` is then that of the first part,
    and the shares have no common divisor.  ``kept`` is the share of the stage's layers (whole layers) that full
    recomputation does not recompute.
    """

    pool: int
    tp: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    ep: int = 0
    parts: tuple[SequencePart, ...] = ()
    kept: float = 0.0

    @property
    def pools(self) -> tuple[int, ...]:
        """All pools that a replica has ranks in."""
        return tuple(dict.fromkeys([self.pool, *[part.pool for part in self.parts]]))

    def in_pools(self, pools: Sequence[int]) -> "Group":
        """The group with other numbers of pools: ``pools[p]`` in place of ``p``."""
        parts = tuple(part._replace(pool=pools[part.pool]) for part in self.parts)
        return self._replace(pool=pools[self.pool], parts=parts)


plain_group = functools.cache(Group)
"""Equal groups as one object, which is made and looked up faster."""


class Stage(NamedTuple):
    """Transformer layers and replicas of one pipeline stage."""

    layers: int
    groups: tuple[Group, ...]

    def of(self, layers: int) -> "Stage":
        """The stage with another number of layers."""
        groups = [g._replace(kept=int(g.kept * layers + 1e-6) / layers) if g.kept else g for g in self.groups]
        return Stage(layers, tuple(groups))


MEETING = 2  # depths of 1F1B with which stages of equal width meet for the output layer without waiting
Passes = tuple[int, ...]  # sequences of each pass of one replica


class Candidate(NamedTuple):
    """A point of the search space."""

    stages: tuple[Stage, ...]  # in pipeline order
    micro_batch_size: int
    recompute: str = "none"  # none, selective or full
    schedule: str = "1f1b"  # one of ``schedules.SCHEDULES``, or another one that a plan asks for
    chunks: int = 1  # model chunks (ministages) per stage; the largest number where stages differ
    slices: int = 1  # slices per sequence
    zero_stage: int = 0  # 0 plain data parallelism, 1 distributed optimizer, 2 and 3 sharded gradients and parameters
    # parameters, optimizer state and boundary activations live in host memory when unused (ministage)
    offload: bool = False
    even: bool = False  # every replica of a stage gets the same number of microbatches
    slack: float = SLACK  # share of additional microbatches in flight where stages divide them differently (1F1B)
    # per stage and group, the part of the stage's state that one replica keeps (ministage); None: equal parts, or in
    # proportion to free memory where equal ones do not fit
    shares: tuple[tuple[float, ...], ...] | None = None
    # how replicas decide between a forward and a backward where stages divide the microbatches differently
    # (``megatron_het.schedule.generators.listing.ORDERS``)
    order: str = ORDERS[0]
    # by boundary between stages, the additional microbatches in flight of the stage before it (1F1B); empty: one
    # each
    depths: tuple[int, ...] = ()
    # context-parallel size: a replica has ``tp * cp`` GPUs, each with its part of every sequence; a group with
    # ``parts`` has one context-parallel rank per part instead
    cp: int = 1
    # expert-parallel size: the experts of a layer are divided over so many parts of every TP group, or over the
    # greatest common divisor of both (:meth:`cut_of`)
    ep: int = 1
    # the experts are divided over ``ep`` ranks of a stage, or over as many as divide a stage's ranks, whichever replica
    # they belong to, and each is whole
    across_replicas: bool = False
    # with a split vocabulary: per stage, the parts of the embeddings and of the output layer that it has; empty: the
    # first stage has all of the embeddings, the last one all of the output layer
    rows: tuple[tuple[float, float], ...] = ()
    # Of a single stage whose microbatches differ in size (Poplar): per group and replica, the sequences of each of its
    # passes; ``micro_batch_size`` is the largest of all.  Empty: all microbatches are equal.
    sizes: tuple[tuple[Passes, ...], ...] = ()
    exchange: bool = False  # the context exchange (with slices)
    host_activations: float = 0.0  # share of the activations of each forward that is offloaded to main memory
    # by stage, where they differ; the search does not try that, plans may ask for it
    chunk_counts: tuple[int, ...] = ()
    # context-parallel ranks hold fixed positions of every slice, independent of its documents
    cuts_documents: bool = False
    # for a plan whose schedule the search does not try: per stage, the moments at which memory may be largest
    moments: tuple[tuple[Moment, ...], ...] = ()

    def with_(self, **changes: object) -> "Candidate":
        """A changed copy; a change of stages or chunks gives all stages equally many chunks."""
        stages = changes.get("stages", self.stages)
        if (self.chunk_counts or self.moments) and (
            changes.keys() & {"chunks", "schedule"} or len(self.stages) != len(stages)  # type: ignore[arg-type]
        ):
            changes = {"chunk_counts": (), "moments": (), **changes}
        if "recompute" in changes and self.recompute == "full":
            changes = {"stages": self.keeping().stages, **changes}
        fields: list[Any] = list(self)  # does the work of ``_replace`` in half the time
        for name, value in changes.items():
            fields[_AT[name]] = value
        return tuple.__new__(Candidate, fields)

    def keeping(self, shares: Sequence[Sequence[float]] = ()) -> "Candidate":
        """The candidate that keeps the activations of these shares of layers, by stage and group; none by default."""
        if not shares and not any(g.kept for s in self.stages for g in s.groups):
            return self
        rows = shares or [[0.0] * len(s.groups) for s in self.stages]
        stages = [
            s._replace(groups=tuple([g._replace(kept=share) for g, share in zip(s.groups, row)]))
            for s, row in zip(self.stages, rows)
        ]
        return self.with_(stages=tuple(stages), chunk_counts=self.chunk_counts)

    def shifted(self, a: int, b: int) -> "Candidate":
        """Returns the candidate with one layer moved from stage ``a`` to stage ``b``."""
        stages = list(self.stages)
        stages[a], stages[b] = stages[a].of(stages[a].layers - 1), stages[b].of(stages[b].layers + 1)
        return self.with_(stages=tuple(stages))

    def chunks_of(self, s: int) -> int:
        """Model chunks of a stage."""
        return self.chunk_counts[s] if self.chunk_counts else self.chunks

    def as_of(self, s: int) -> "Candidate":
        """Returns the candidate for callers that look at stage ``s`` only: all stages get its number of chunks."""
        return self._replace(chunks=self.chunks_of(s), chunk_counts=()) if self.chunk_counts else self

    def in_pools(self, pools: Sequence[int]) -> "Candidate":
        """Returns the candidate with other numbers of pools: ``pools[p]`` in place of ``p``."""
        stages = [Stage(s.layers, tuple(sorted(g.in_pools(pools) for g in s.groups))) for s in self.stages]
        groups = [pools[g.pool] for s in self.stages for g in s.groups] if self.sizes else []
        sizes = tuple(self.sizes[i] for i in sorted(range(len(groups)), key=lambda i: groups[i]))
        return self.with_(stages=tuple(stages), sizes=sizes)

    def gpus(self) -> dict[int, int]:
        """GPUs used per pool."""
        used: dict[int, int] = {}
        for stage in self.stages:
            for group in stage.groups:
                if not group.parts:
                    used[group.pool] = used.get(group.pool, 0) + group.tp * self.cp * group.count
                for part in group.parts:
                    used[part.pool] = used.get(part.pool, 0) + group.tp * group.count
        return used

    def cp_of(self, group: Group) -> int:
        """Context-parallel size of a group's replicas."""
        return len(group.parts) or self.cp

    def parts_of(self, group: Group) -> list[tuple[Group, float]]:
        """The context-parallel ranks of a group's replicas by kind: (ranks of the kind, each rank's share of 1)."""
        if not group.parts:
            return [(group if self.cp == 1 else group._replace(count=group.count * self.cp), 1 / self.cp)]
        whole = sum(part.share for part in group.parts)
        return [
            (group._replace(pool=part.pool, count=group.count * alike, parts=()), part.share / whole)
            for part, alike in Counter(group.parts).items()
        ]

    def cut_of(self, group: Group) -> tuple[int, int]:
        """(parts over which a replica divides the experts of a layer, ranks that cut one expert)."""
        if self.across_replicas:
            return group.ep or gcd(self.ep, group.count * group.tp * self.cp_of(group)), 1
        ep = group.ep or gcd(self.ep, group.tp)
        return ep, max(1, group.tp // ep)

    def over_replicas(self, ep: int) -> "Candidate":
        """Returns the candidate with experts divided over ``ep`` ranks of a stage, or as many as its ranks allow.

        They are divided inside replicas if no expert group would be larger than a TP group, or if a replica would
        hold a layer's experts twice.
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
        """Number of ranks of stage ``s`` that hold the same part of the experts as a rank of the group."""
        ep, expert_tp = self.cut_of(group)
        alike = sum(g.count * self.cp_of(g) for g in self.stages[s].groups if g.tp == group.tp)
        return max(1, alike * group.tp // (ep * expert_tp))

    def reducing(self, s: int) -> tuple[Group, ...]:
        """The ranks of a stage that sum gradients, per TP rank: replicas, and with CP all ranks of each, by kind."""
        groups = self.stages[s].groups
        if self.cp == 1 and not any(g.parts for g in groups):
            return groups
        return tuple(part for g in groups for part, _ in self.parts_of(g))

    def by_part(self, s: int, values: Iterable[T]) -> list[T]:
        """The values of a stage's groups, repeated for each entry of :meth:`reducing`."""
        kinds = [len(set(g.parts)) or 1 for g in self.stages[s].groups]
        return [value for count, value in zip(kinds, values, strict=True) for _ in range(count)]

    @property
    def experts_over(self) -> tuple[int, bool]:
        """The division of experts, as a part of cache keys."""
        return self.ep, self.across_replicas

    @property
    def path(self) -> tuple[Place, ...]:
        """(stage, chunk) in the order in which a microbatch visits them."""
        if self.chunk_counts:
            return path_of(self.chunk_counts, placement_of(self.schedule))
        return path_of_schedule(self.schedule, len(self.stages), self.chunks)

    def first_layers(self, s: int, first: int) -> int:
        """How many of so many layers at the start a stage has."""
        found = 0
        for stage, chunk in self.path:
            if not first:
                break
            taken = min(first, chunk_layers(self.stages[stage].layers, self.chunks_of(stage))[chunk])
            first, found = first - taken, found + taken * (stage == s)
        return found

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

    def block(self) -> "Candidate":
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


_AT = {name: i for i, name in enumerate(Candidate._fields)}


@functools.lru_cache(maxsize=4096)
def _cut(pattern: str, path: tuple[Place, ...], layers: tuple[tuple[int, ...], ...]) -> tuple[tuple[str, ...], ...]:
    kinds, found, at = layers_of(pattern), [[""] * len(chunks) for chunks in layers], 0
    for stage, chunk in path:
        count = layers[stage][chunk]
        found[stage][chunk], at = kinds[at : at + count], at + count
    return tuple(map(tuple, found))


def layers_at(candidate: Candidate, pattern: str) -> tuple[tuple[str, ...], ...]:
    """The layers of a hybrid model in every chunk of every stage, as symbols."""
    counts = tuple(chunk_layers(stage.layers, candidate.chunks_of(s)) for s, stage in enumerate(candidate.stages))
    return _cut(pattern, tuple(candidate.path), counts)


def normalised(stages: list[tuple[int, dict[tuple[Any, ...], int]]]) -> tuple[Stage, ...]:
    """Stages from ``(layers, {(pool, tp): count})``, groups in a fixed order, empty groups dropped.

    Keys may have a third number, the expert-parallel size of the group, and its parts.
    """
    return tuple(
        Stage(layers, tuple(Group(k[0], k[1], n, *k[2:]) for k, n in sorted(groups.items()) if n > 0))
        for layers, groups in stages
    )


def chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage, as even as possible."""
    return tuple(layers // chunks + (1 if c < layers % chunks else 0) for c in range(chunks))


# Figures of the closed form: of a candidate, its stages and its groups.


class GroupMemory(NamedTuple):
    """Predicted bytes of one rank of a group, by category.

    ``state_share`` is the part of its stage's state that a replica keeps, None for equal parts; ``host_bytes``
    is what the rank offloads to the node's main memory (not part of the total).  A replica has ``cp`` TP groups.  For
    replicas with ``parts`` each kind of part has an entry: ``group`` is then on its pool, and ``cp`` its number.
    """

    stage: int
    group: Group
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    workspace_bytes: float
    reserved_bytes: float
    capacity_bytes: float
    state_share: float | None = None
    host_bytes: float = 0.0
    cp: int = 1
    logits_bytes: float = 0.0  # the part of the activations that is from output layer and loss

    @property
    def ranks(self) -> int:
        """Number of such ranks."""
        return self.group.tp * self.cp * self.group.count

    @property
    def full(self) -> float:
        """The share of the memory that is used."""
        return self.total_bytes / self.capacity_bytes

    @property
    def total_bytes(self) -> float:
        """Sum of all categories."""
        on_device = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
        return on_device + self.workspace_bytes + self.reserved_bytes


class Estimate(NamedTuple):
    """The closed form's result for a candidate."""

    iteration_s: float  # predicted iteration time
    busy_s: float  # compute of the stage that decides it
    fill_s: float  # warm-up and drain around it (pipeline bubble)
    # sync_s, update_s: exposed gradient reduction and optimizer step
    sync_s: float
    update_s: float
    gather_s: float  # exposed parameter gathers (ministage)
    bottleneck: int
    microbatches: tuple[tuple[int, ...], ...]  # per stage and group, microbatches of each replica (some have one fewer)
    memory: tuple[GroupMemory, ...]  # per stage and group
    usd_per_iteration: float  # GPU hours and egress
    gpu_usd_per_iteration: float
    egress_bytes: float  # bytes per iteration over links with a price
    stage_busy_s: tuple[float, ...]  # compute of every stage
    fullest: float  # largest share of a rank's memory that is used

    @property
    def worst_memory(self) -> GroupMemory:
        """The rank nearest to (or furthest beyond) its capacity."""
        return max(self.memory, key=lambda m: m.full)

    def memory_of(self, candidate: Candidate, s: int) -> list[tuple[GroupMemory, ...]]:
        """Memory of each group of a stage, one entry per part of the group."""
        mine = iter([m for m in self.memory if m.stage == s])
        return [tuple(next(mine) for _ in candidate.parts_of(g)) for g in candidate.stages[s].groups]


@dataclass(slots=True)
class StageTimes:
    """One stage of a candidate at its operating point.  Candidates with the same stage share it."""

    units: list[Unit]
    replica_f: list[float]
    replica_b: list[float]
    microbatches: list[int]
    counts: list[int]  # replicas of each kind in one of the candidate's equal pipelines
    busy_s: float  # compute of the slowest replica over the iteration
    # forward_s, backward_s: means over the microbatches
    forward_s: float
    backward_s: float
    # sync_s, update_s: gradient reduction and update after the last backward
    sync_s: float = 0.0
    update_s: float = 0.0
    parameters: tuple[float, ...] = ()  # of one rank of each kind of replica
    scattered: bool = False  # replicas are on several nodes, even if one could hold them
    in_flight: tuple[int, ...] = ()  # microbatches that each kind of replica may hold
    memory: tuple[GroupMemory, ...] = ()  # of one rank of each kind of replica
    fullest: float = 0.0  # largest share of a rank's memory that is used
    # values that schedules cache for the stage, which do not depend on the microbatches in flight
    memo: dict[object, Any] = field(default_factory=dict)
    _figures: bytes = field(default=b"", init=False, repr=False, compare=False)

    @property
    def figures(self) -> bytes:
        """The times of the stage, packed for the compiled closed form."""
        if not self._figures:
            found = array("d", (self.forward_s, self.backward_s, self.busy_s, len(self.replica_f)))
            times, held = (self.replica_f, self.replica_b, self.microbatches), self.in_flight
            for kind in zip(*times, held, self.counts, strict=True):
                found.extend(kind)
            self._figures = found.tobytes()
        return self._figures

    @property
    def slowest(self) -> int:
        """The kind of replica that computes longest."""
        times = [(f + b) * k for f, b, k in zip(self.replica_f, self.replica_b, self.microbatches)]
        return times.index(max(times))


class Line(NamedTuple):
    """The stages of a pipeline."""

    stages: Sequence[StageTimes]
    transfers: Sequence[float]  # seconds of one transfer over each boundary
    cards_s: Sequence[float]  # per stage, for how long a microbatch's messages fill a replica's share of its network


class Pipeline(NamedTuple):
    """The time of a pipeline by the closed form of its schedule."""

    end_s: float  # of the last operation
    busy_s: float  # compute of the stage that decides it
    bottleneck: int  # that stage
    gather_s: float  # exposed gathers of parameters
    # per stage, the earliest end of its last backward, where the schedule knows more than ``end_s``
    earliest: Sequence[float]


def rank_parameters(candidate: Candidate, unit: Unit, s: int) -> float:
    """Parameters of one rank of stage ``s``, embedding and head included."""
    count = float(candidate.stages[s].layers * unit.layer_parameters)
    first, fewer = unit.first_layers
    if first:
        share = candidate.stages[s].layers / sum([stage.layers for stage in candidate.stages])
        count += fewer * (first * share - candidate.first_layers(s, first))
    if candidate.rows:
        words, output = candidate.rows[s]
        return count + words * unit.embedding_parameters + output * unit.head_parameters
    if s == 0:
        count += unit.embedding_parameters
    if s == candidate.head_stage:
        count += unit.head_parameters - unit.tied_parameters * (len(candidate.stages) == candidate.chunks == 1)
    return count


def divided_alike(candidate: Candidate, microbatches: Sequence[Sequence[int]]) -> bool:
    """Whether all stages divide the microbatches in the same way over their replicas (then 1F1B needs no slack)."""
    rows = [[(g.count, k) for g, k in zip(its.groups, counts)] for its, counts in zip(candidate.stages, microbatches)]
    return all(row == rows[0] for row in rows)


def allocate(times: list[float], counts: list[int], total: int) -> tuple[float, list[int]] | None:
    """Microbatches per replica so that the slowest replica is as early as possible (exact).

    Args:
        times: Seconds per microbatch of each kind of replica.

    Returns:
        (time of the slowest, largest number per replica of each kind), or None when some replica
        would get nothing.
    """
    if len(times) == 1:
        share = -(-total // counts[0])
        return (share * times[0], [share]) if total >= counts[0] else None
    limit = max(total / sum(n / t for n, t in zip(counts, times)), *times)
    while True:
        shares = [floor(limit / t + 1e-9) for t in times]
        given = sum(n * k for n, k in zip(counts, shares))
        if given >= total:
            break
        limit = min((k + 1) * t for k, t in zip(shares, times))
    spare = given - total
    order = sorted(range(len(times)), key=lambda i: -shares[i] * times[i])
    largest = list(shares)
    for i in order:
        if spare <= 0:
            break
        whole = spare // counts[i]
        if whole and shares[i] > 1:
            take = min(whole, shares[i] - 1)
            largest[i] -= take
            spare -= take * counts[i]
    if spare > sum(n for n, k in zip(counts, largest) if k > 1):
        return None
    return max(k * t for k, t in zip(largest, times)), largest
