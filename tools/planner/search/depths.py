"""More microbatches in flight across slow links, for finalists under 1F1B."""

from __future__ import annotations

from dataclasses import replace

from megatron_het.schedule.depths import choose_depths

from ..candidate import Candidate
from ..errors import PlannerError
from ..estimate import Estimator
from ..schedules import schedule_of
from ..simulation import block_s
from .goal import Goal
from .outcome import Found


def deeper(estimator: Estimator, goal: Goal, found: Found) -> Found:
    """The finalist with as many microbatches in flight as make it fastest and fit into memory.

    Args:
        found: Simulated, in the order that suits it best.
    """
    candidate = found.candidate
    if len(candidate.stages) < 2 or not schedule_of(candidate).has_depths:
        return found
    tried = {(1,) * (len(candidate.stages) - 1): found}

    def time_of(depths: tuple[int, ...]) -> float | None:
        if depths not in tried:
            other = candidate.with_(depths=depths)
            estimate = estimator.estimate(other)
            if estimate is None or not estimator.fits(estimate) or goal.violation(other, estimate) > 0:
                return None
            try:
                seconds = block_s(estimator, other, estimate)
            except PlannerError:
                return None
            tried[depths] = replace(found, candidate=other, estimate=estimate, simulated_s=seconds)
        return tried[depths].iteration_s

    transfers = estimator.transfer_times(candidate)
    chosen = choose_depths(_passes_s(estimator, candidate), transfers, time_of)
    return tried[chosen] if chosen else found


def _passes_s(estimator: Estimator, candidate: Candidate) -> list[float]:
    """By stage, seconds of one microbatch, forward and backward, on its quickest replica.

    What is in flight is counted per replica, so a stage of many replicas has no more need of it than one of few.
    """
    last, out = candidate.head_stage, []
    for s, stage in enumerate(candidate.stages):
        units = [estimator.unit_of(candidate, g) for g in stage.groups]
        out.append(min(u.both_s(stage.layers, s == 0, s == last) for u in units if u is not None))
    return out
