"""Microbatches of different sizes without a pipeline (Poplar, section 3): what the passes of each replica take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from megatron_het.plan import Plan

from .candidate import Candidate, Group
from .estimates import Unit
from .runtime import Runtime

_TIMES = ("layer_f", "layer_b", "embedding_f", "embedding_b", "head_f", "head_b", "attention_f", "attention_b")
_KEPT = ("layer_bytes", "embedding_bytes", "head_bytes")

Passes = tuple[int, ...]
"""Sequences of each pass of one replica."""


class Figures(Protocol):
    """Holds what is asked of ``operating.OperatingPoints``, which asks here for what passes of different sizes take."""

    runtime: Runtime

    def unit_of(self, candidate: Candidate, group: Group) -> Unit | None:
        """Figures of a group's replicas at the candidate's operating point; None where there are none."""


def unit_of_group(estimator: Figures, candidate: Candidate, group: Group) -> Unit | None:
    """The mean pass of the slowest replica of a group, with the memory of its largest pass; None without figures."""
    i = _place(candidate, group)
    found = _slowest(estimator, candidate, i)
    return None if found is None else found[1]


def passes_of(estimator: Figures, candidate: Candidate) -> list[int]:
    """Returns the number of passes of the slowest replica of each group; there are figures for all of them."""
    slowest = (_slowest(estimator, candidate, i) for i in range(len(candidate.sizes)))
    return [0 if found is None else len(found[0]) for found in slowest]


def _place(candidate: Candidate, group: Group) -> int:
    """Which of the stage's groups it is, however many replicas are asked for."""
    kinds = [(g.pool, g.tp, candidate.cut_of(g)) for g in candidate.stages[0].groups]
    return kinds.index((group.pool, group.tp, candidate.cut_of(group)))


def pass_s(estimator: Figures, candidate: Candidate, group: Group, size: int) -> float:
    """Seconds of one pass of ``size`` sequences on a replica of a group that has figures for it."""
    unit = _of_size(estimator, candidate, group, size)
    assert unit is not None
    return unit.both_s(candidate.stages[0].layers, True, True) + estimator.runtime.operation_s


def mean_size(candidate: Candidate, group: Group) -> float:
    """Sequences of a pass of a group's replicas, in the mean."""
    i = _place(candidate, group)
    passes = [n for own in candidate.sizes[i] for n in own]
    return sum(passes) / len(passes)


def _slowest(estimator: Figures, candidate: Candidate, i: int) -> tuple[Passes, Unit] | None:
    """The passes of the replica of group ``i`` that computes longest, and their mean."""
    group, layers = candidate.stages[0].groups[i], candidate.stages[0].layers
    different = dict.fromkeys(candidate.sizes[i])
    largest = max(map(max, different))
    best: tuple[float, Passes, Unit] | None = None
    for own in different:
        unit = _mean(estimator, candidate, group, own, largest)
        if unit is None:
            return None
        seconds = len(own) * (unit.both_s(layers, True, True) + estimator.runtime.operation_s)
        if best is None or seconds > best[0]:
            best = seconds, own, unit
    return None if best is None else best[1:]


def _mean(estimator: Figures, candidate: Candidate, group: Group, own: Passes, largest: int) -> Unit | None:
    """The mean of passes, with the memory of one of ``largest`` sequences."""
    found = {n: _of_size(estimator, candidate, group, n) for n in {*own, largest}}
    if any(unit is None for unit in found.values()):
        return None
    times = {name: sum(getattr(found[n], name) for n in own) / len(own) for name in _TIMES}
    return replace(found[largest], **times)  # type: ignore[type-var]


def _of_size(estimator: Figures, candidate: Candidate, group: Group, size: int) -> Unit | None:
    plain = candidate.with_(micro_batch_size=size, sizes=())
    return estimator.unit_of(plain, group)


def unit_of_device(estimator: Figures, candidate: Candidate, group: Group, own: Passes) -> Unit:
    """Returns what a replica takes of a microbatch of the plan's largest size, if it ran one.

    The simulator gives a smaller microbatch its share of the largest one's time and memory.  Small passes take more
    than their share: the replica's figures are such that its passes take together what they really do.

    Args:
        own: Its passes; there are figures for them.
    """
    unit = _mean(estimator, candidate, group, own, max(own))
    assert unit is not None
    most = candidate.micro_batch_size
    slower, larger = most * len(own) / sum(own), most / max(own)
    figures = {name: getattr(unit, name) * slower for name in _TIMES}
    return replace(unit, **figures, **{name: getattr(unit, name) * larger for name in _KEPT})


def routes_of(candidate: Candidate) -> tuple[list[list[int]], tuple[int, ...]]:
    """Ids of the passes of every replica, in the order of its groups, and the size of each id.

    The global order of samples goes round: the first passes of all replicas, then the second ones, and so on.
    """
    rows = [own for replicas in candidate.sizes for own in replicas]
    ids: list[list[int]] = [[] for _ in rows]
    sizes = []
    for m, (turn, q) in enumerate(sorted((turn, q) for q, own in enumerate(rows) for turn in range(len(own)))):
        ids[q].append(m)
        sizes.append(rows[q][turn])
    return ids, tuple(sizes)


def passes_of_plan(plan: Plan) -> list[Passes]:
    """The passes of every replica of a plan's only stage; nothing where microbatches are equal, or of a pipeline."""
    sizes = plan.training.micro_batch_sizes
    if not sizes or len(plan.stages) > 1:
        return []
    return [tuple(sizes[m] for m in replica.microbatches) for replica in plan.stages[0].replicas]


def sizes_of_plan(plan: Plan, kinds: Sequence[tuple[int, ...]]) -> tuple[tuple[Passes, ...], ...]:
    """``Candidate.sizes`` of a plan.

    Args:
        kinds: Pool, TP and EP of every replica of its stage.
    """
    groups: dict[tuple[int, ...], list[Passes]] = {}
    for kind, own in zip(kinds, passes_of_plan(plan)):
        groups.setdefault(kind, []).append(own)
    return tuple(tuple(groups[kind]) for kind in sorted(groups))
