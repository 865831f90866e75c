"""Candidates, which the search varies (plans without rank numbers), and figures of the closed form."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor, gcd
from typing import Any, NamedTuple

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


Passes = tuple[int, ...]  # sequences of each pass of one replica


class Candidate(NamedTuple):
    """A point of the search space.

    Attributes:
        stages: In pipeline order.
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
        cuts_documents: Context-parallel ranks have the same places of every slice, whatever documents are there.
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
    cuts_documents: bool = False

    def with_(self, **changes: object) -> Candidate:
        """A changed copy; with other stages or chunks all stages have equally many chunks."""
        stages = changes.get("stages", self.stages)
        if self.chunk_counts and (
            changes.keys() & {"chunks", "schedule"} or len(self.chunk_counts) != len(stages)  # type: ignore[arg-type]
        ):
            changes = {"chunk_counts": (), **changes}
        fields: list[Any] = list(self)  # what ``_replace`` does, in half the time
        for name, value in changes.items():
            fields[_AT[name]] = value
        return Candidate._make(fields)

    def chunks_of(self, s: int) -> int:
        """Model chunks of a stage."""
        return self.chunk_counts[s] if self.chunk_counts else self.chunks

    def as_of(self, s: int) -> Candidate:
        """Returns the candidate for callers that look at one stage only: its number of chunks is that of all."""
        return self._replace(chunks=self.chunks_of(s), chunk_counts=()) if self.chunk_counts else self

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


# Figures of the closed form: of a candidate, its stages and its groups.


@dataclass(frozen=True, slots=True)
class Unit:
    """Per-rank figures of one replica kind at one operating point (seconds per microbatch, bytes).

    Figures of a layer are means where layers differ.  ``kinds`` says more of the layers of one stage of a hybrid model:
    the figures of each kind, and its layers in every chunk.
    """

    layer_f: float
    layer_b: float
    embedding_f: float
    embedding_b: float
    head_f: float
    head_b: float
    layer_parameters: float
    embedding_parameters: int
    head_parameters: int
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    workspace_bytes: float
    head_workspace_bytes: float
    capacity_bytes: float
    reserved_bytes: float
    sliced_share: float = 1.0
    attention_f: float = 0.0
    attention_b: float = 0.0
    pass_f: float = 0.0
    pass_b: float = 0.0
    kinds: tuple[tuple[Unit, tuple[int, ...]], ...] = ()

    def of_chunks(self, name: str, layers: Sequence[int]) -> list[float]:
        """A figure of a layer, summed over the layers of every chunk of a stage."""
        if not self.kinds:
            return [n * getattr(self, name) for n in layers]
        rows = [[n * getattr(unit, name) for n in counts] for unit, counts in self.kinds]
        return [sum(column) for column in zip(*rows, strict=True)]

    def forward_s(self, layers: float, first: float, last: float, chunks: int = 1) -> float:
        """Forward of one microbatch through a stage (or its layers, on average).

        Args:
            first, last: The parts of the embedding and of the head that the stage has, 0 to 1.
            chunks: Passes in which it goes through them.
        """
        seconds = layers * self.layer_f + chunks * self.pass_f
        if first:
            seconds += first * self.embedding_f
        return seconds + last * self.head_f if last else seconds

    def backward_s(self, layers: float, first: float, last: float, chunks: int = 1) -> float:
        """Returns the seconds of the backward of so many layers."""
        seconds = layers * self.layer_b + chunks * self.pass_b
        if first:
            seconds += first * self.embedding_b
        return seconds + last * self.head_b if last else seconds

    def ends_s(self, first: float, last: float) -> float:
        """These parts of embedding and head, forward and backward."""
        return first * (self.embedding_f + self.embedding_b) + last * (self.head_f + self.head_b)

    def both_s(self, layers: float, first: float, last: float) -> float:
        """Forward and backward of one microbatch through a stage."""
        return layers * (self.layer_f + self.layer_b) + self.pass_f + self.pass_b + self.ends_s(first, last)

    def chunks_s(
        self, layers: Sequence[int], first: float, last: float, back: bool, fixed_s: float = 0.0
    ) -> list[float]:
        """One pass of one microbatch through each chunk of a stage.

        Args:
            first, last: The parts of the embedding and of the head that the stage has, 0 to 1.
            back: The backward.
            fixed_s: Host time of every operation.
        """
        each = self.pass_b if back else self.pass_f
        out = [s + each + fixed_s for s in self.of_chunks("layer_b" if back else "layer_f", layers)]
        if first:
            out[0] += first * (self.embedding_b if back else self.embedding_f)
        if last:
            out[-1] += last * (self.head_b if back else self.head_f)
        return out


def unit_of_kinds(unit: Unit, kinds: tuple[tuple[Unit, tuple[int, ...]], ...]) -> Unit:
    """The unit of a stage whose layers are of these kinds, each with its layers in every chunk."""
    counted = [(of, sum(chunks)) for of, chunks in kinds]
    total = sum(count for _, count in counted)
    if not total:
        return unit

    def mean(name: str) -> float:
        return sum(count * getattr(of, name) for of, count in counted) / total

    kept = mean("layer_bytes")
    sliced = sum(count * of.layer_bytes * of.sliced_share for of, count in counted) / total
    return replace(
        unit,
        layer_f=mean("layer_f"),
        layer_b=mean("layer_b"),
        layer_bytes=kept,
        layer_parameters=mean("layer_parameters"),
        attention_f=mean("attention_f"),
        attention_b=mean("attention_b"),
        pass_f=mean("pass_f"),
        pass_b=mean("pass_b"),
        workspace_bytes=max(of.workspace_bytes for of, count in counted if count),
        sliced_share=sliced / kept if kept else 1.0,
        kinds=kinds,
    )


class GroupMemory(NamedTuple):
    """Predicted bytes of one rank of a group, by category.

    ``state_share`` is the part of its stage's state that a replica keeps, None for equal parts; ``host_bytes``
    is what the rank offloads to the node's main memory (not part of the total).  A replica has ``cp`` TP groups.
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

    @property
    def ranks(self) -> int:
        """Such ranks."""
        return self.group.tp * self.cp * self.group.count

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.workspace_bytes
            + self.reserved_bytes
        )


class Estimate(NamedTuple):
    """Holds what the closed form says about a candidate.

    Attributes:
        iteration_s: Predicted iteration time.
        busy_s: Compute of the stage that decides it.
        fill_s: Warm-up and drain around it (pipeline bubble).
        sync_s, update_s: Exposed gradient reduction and optimizer step.
        gather_s: Exposed parameter gathers (ministage).
        microbatches: Per stage and group, microbatches of each replica (some have one fewer).
        memory: Per stage and group.
        usd_per_iteration: GPU hours and egress.
        egress_bytes: Bytes per iteration over links with a price.
        stage_busy_s: Compute of every stage.
        fullest: Largest share of a rank's memory that is used.
    """

    iteration_s: float
    busy_s: float
    fill_s: float
    sync_s: float
    update_s: float
    gather_s: float
    bottleneck: int
    microbatches: tuple[tuple[int, ...], ...]
    memory: tuple[GroupMemory, ...]
    usd_per_iteration: float
    gpu_usd_per_iteration: float
    egress_bytes: float
    stage_busy_s: tuple[float, ...]
    fullest: float

    @property
    def worst_memory(self) -> GroupMemory:
        """The rank nearest to (or furthest beyond) its capacity."""
        return max(self.memory, key=lambda m: m.total_bytes / m.capacity_bytes)


@dataclass(slots=True)
class StageTimes:
    """One stage of a candidate at its operating point.  Candidates with the same stage share it.

    Attributes:
        busy_s: Compute of the slowest replica over the iteration.
        forward_s, backward_s: Means over the microbatches.
        sync_s, update_s: Gradient reduction and update after the last backward.
        parameters: Of one rank of each kind of replica.
        in_flight: Microbatches that each kind of replica may hold.
        memory: Of one rank of each kind of replica.
        fullest: Largest share of a rank's memory that is used.
        memo: What schedules remember about the stage, whatever is in flight.
    """

    units: list[Unit]
    replica_f: list[float]
    replica_b: list[float]
    microbatches: list[int]
    busy_s: float
    forward_s: float
    backward_s: float
    sync_s: float = 0.0
    update_s: float = 0.0
    parameters: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()
    memory: tuple[GroupMemory, ...] = ()
    fullest: float = 0.0
    memo: dict[object, Any] = field(default_factory=dict)
    _figures: bytes = field(default=b"", init=False, repr=False, compare=False)

    @property
    def figures(self) -> bytes:
        """The times of the stage as the compiled closed form wants them."""
        if not self._figures:
            found = array("d", (self.forward_s, self.backward_s, self.busy_s, len(self.replica_f)))
            for kind in zip(self.replica_f, self.replica_b, self.microbatches, self.in_flight, strict=True):
                found.extend(kind)
            self._figures = found.tobytes()
        return self._figures

    @property
    def slowest(self) -> int:
        """The kind of replica that computes longest."""
        times = [(f + b) * k for f, b, k in zip(self.replica_f, self.replica_b, self.microbatches)]
        return times.index(max(times))


class Pipeline(NamedTuple):
    """The time of a pipeline by the closed form of its schedule.

    Attributes:
        end_s: Of the last operation.
        busy_s: Compute of the stage that decides it.
        bottleneck: That stage.
        gather_s: Exposed gathers of parameters.
        earliest: Per stage, the earliest end of its last backward, where the schedule knows more than ``end_s``.
    """

    end_s: float
    busy_s: float
    bottleneck: int
    gather_s: float
    earliest: Sequence[float]


def rank_parameters(candidate: Candidate, unit: Unit, s: int) -> float:
    """Parameters of one rank of stage ``s``, embedding and head included."""
    count = float(candidate.stages[s].layers * unit.layer_parameters)
    if candidate.rows:
        words, output = candidate.rows[s]
        return count + words * unit.embedding_parameters + output * unit.head_parameters
    if s == 0:
        count += unit.embedding_parameters
    if s == candidate.head_stage:
        count += unit.head_parameters
    return count


def rank_bytes(candidate: Candidate, units: Sequence[Unit], s: int, per_parameter: float) -> dict[Group, float]:
    """Returns what the parameters of one rank of each group of a stage take."""
    groups = candidate.stages[s].groups
    return {g: rank_parameters(candidate, units[i], s) * per_parameter for i, g in enumerate(groups)}


def divided_alike(candidate: Candidate, microbatches: Sequence[Sequence[int]]) -> bool:
    """Whether all stages divide the microbatches in the same way over their replicas (1F1B needs no slack)."""
    first: list[tuple[int, int]] | None = None
    for stage, counts in zip(candidate.stages, microbatches):
        mine = [(g.count, k) for g, k in zip(stage.groups, counts)]
        if first is not None and mine != first:
            return False
        first = mine
    return True


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
