"""Small changes of the best plans, judged by the simulator: it tells apart what the closed form takes for equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from ..build import seats
from ..candidate import Candidate, Stage
from ..estimate import Estimate, Estimator
from ..search.goal import Goal
from ..search.outcome import Found
from ..simulation import operations_of

LEAST_TRIES = 4
"""Plans of which not even so many changes could be simulated are left as they are."""
HOPEFUL = 1.03
"""Changes that the closed form takes for worse by more than this factor are not simulated."""

Simulate = Callable[[Candidate, Estimate, float], Found | None]
"""Simulates a candidate, given the best value so far."""


def refine(estimator: Estimator, goal: Goal, found: Found, operations: int, simulate: Simulate) -> Found:
    """The plan with stages in other places and layers shifted, as long as that makes it better.

    Args:
        found: A simulated plan.
        operations: Compute operations that may be simulated.
    """
    each = operations_of(estimator, found.candidate)
    if len(found.candidate.stages) < 3 or each * LEAST_TRIES > operations:
        return found
    current, improved = found, True
    seen = {found.candidate}
    while improved:
        improved = False
        for candidate in _changes(current.candidate):
            if candidate in seen:
                continue
            seen.add(candidate)
            estimate = estimator.estimate(candidate)
            if estimate is None or not estimator.fits(estimate) or goal.violation(candidate, estimate) > 0:
                continue
            if goal.value(estimate) > HOPEFUL * goal.value(current.estimate):
                continue
            if seats(estimator.cluster, candidate.stages) is None:
                continue
            operations -= each
            if operations < 0:
                return current
            tried = simulate(candidate, estimate, current.value(goal))
            if tried is not None and tried.value(goal) < current.value(goal) * (1 - 1e-6):
                current, improved = tried, True
                break
    return current


def _changes(candidate: Candidate) -> Iterator[Candidate]:
    """Two stages in each other's place; a layer from one stage to another."""
    stages = candidate.stages
    for i, j in combinations(range(len(stages)), 2):
        if stages[i] != stages[j]:
            changed = list(stages)
            changed[i], changed[j] = stages[j], stages[i]
            yield candidate.with_(stages=tuple(changed))
    for i, j in combinations(range(len(stages)), 2):
        for a, b in ((i, j), (j, i)):
            if stages[a].layers > candidate.chunks:
                changed = list(stages)
                changed[a] = Stage(stages[a].layers - 1, stages[a].groups)
                changed[b] = Stage(stages[b].layers + 1, stages[b].groups)
                yield candidate.with_(stages=tuple(changed))
