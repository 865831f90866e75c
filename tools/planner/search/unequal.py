"""Microbatches of different sizes for a plan of one stage: Poplar's curves and algorithm 2 on predicted times."""

from __future__ import annotations

from megatron_het.auto_batch.allocation import Curve, accumulated

from ..costs.candidate import Candidate
from ..costs.estimate import Estimator
from ..costs.passes import pass_s

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Passes whose time is looked up; in between it is interpolated, as of measured ones."""


def can_differ(estimator: Estimator, candidate: Candidate) -> bool:
    """Whether a candidate's microbatches may differ in size.

    Poplar's allocation is for replicas that meet once per iteration.  A model file that names the sizes leaves no
    choice, and experts are balanced over the tokens of a microbatch.
    """
    model, wide = estimator.model, sum(g.count for s in candidate.stages for g in s.groups)
    plain = len(candidate.stages) == 1 and candidate.schedule == "1f1b" and candidate.zero_stage < 2
    return plain and not model.micro_batch_sizes and model.experts is None and wide <= model.global_batch_size


def unequal(estimator: Estimator, candidate: Candidate) -> Candidate | None:
    """The candidate with the passes that Poplar's allocation gives each replica.

    Every group of replicas has a curve up to the largest pass that fits its memory.

    Args:
        candidate: One that ``can_differ``; its micro batch size does not matter.

    Returns:
        One with equal microbatches where that is what comes out; None where a group has no figures or no memory.
    """
    groups, curves = candidate.stages[0].groups, _curves(estimator, candidate)
    if curves is None:
        return None
    passes = accumulated([c for g, c in zip(groups, curves) for _ in range(g.count)], estimator.model.global_batch_size)
    if len({n for own in passes for n in own}) == 1:
        return candidate.with_(micro_batch_size=passes[0][0])
    rows = iter(tuple(own) for own in passes)
    sizes = tuple(tuple(next(rows) for _ in range(g.count)) for g in groups)
    return candidate.with_(micro_batch_size=max(n for own in passes for n in own), sizes=sizes)


def _curves(estimator: Estimator, candidate: Candidate) -> list[Curve] | None:
    """The curve of each group; None where one sequence does not fit, or has no figures."""
    groups, most = candidate.stages[0].groups, estimator.model.global_batch_size
    points: list[dict[int, float]] = [{} for _ in groups]
    for size in (n for n in SIZES if n <= most):
        fitting = _fitting(estimator, candidate, size, [i for i, own in enumerate(points) if len(own) == _before(size)])
        for i in fitting:
            points[i][size] = pass_s(estimator, candidate, groups[i], size)
        if not fitting:
            break
    if not all(points):
        return None
    for i, own in enumerate(points):  # between the largest that fits and the next in the list
        low = max(own)
        high = min((n for n in SIZES if n > low), default=low + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = middle <= most and _fitting(estimator, candidate, middle, [i])
            low, high = (middle, high) if fits else (low, middle - 1)
        own[low] = pass_s(estimator, candidate, groups[i], low)
    return [Curve.of(own) for own in points]


def _before(size: int) -> int:
    """Sizes of the list that are smaller."""
    return sum(n < size for n in SIZES)


def _fitting(estimator: Estimator, candidate: Candidate, size: int, wanted: list[int]) -> list[int]:
    """Of the wanted groups, those with figures and memory for a pass of this size."""
    stage, found = candidate.stages[0], []
    for i in wanted:
        one = tuple(((size if j == i else 1,),) * g.count for j, g in enumerate(stage.groups))
        estimate = estimator.estimate(candidate.with_(micro_batch_size=size, sizes=one))
        if estimate is not None:
            m = estimate.memory[i]
            if m.total_bytes <= estimator.memory_margin * m.capacity_bytes:
                found.append(i)
    return found
