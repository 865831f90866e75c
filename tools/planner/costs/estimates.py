"""Figures of the closed form: of a candidate, its stages and its groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import Any, NamedTuple

from .candidate import Candidate, Group


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
        """A figure of a layer, summed over the layers of every chunk of a stage.

        Args:
            name: The figure.
            layers: Of each chunk.
        """
        if not self.kinds:
            return [n * getattr(self, name) for n in layers]
        rows = [[n * getattr(unit, name) for n in counts] for unit, counts in self.kinds]
        return [sum(column) for column in zip(*rows, strict=True)]

    def forward_s(self, layers: float, first: float, last: float, chunks: int = 1) -> float:
        """Forward of one microbatch through a stage (or its layers, on average).

        Args:
            layers: Of the stage.
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
            layers: Of each chunk.
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
        units, replica_f, replica_b, microbatches: Of each kind of replica.
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
        counts: Replicas of each kind.
        total: Microbatches to give away.

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
