"""Small changes of the best plans, judged by the simulator: it tells apart what the closed form takes for equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations

from ..costs.build import seats
from ..costs.candidate import Candidate, Stage
from ..costs.estimate import Estimate, Estimator
from ..search.balance import balance
from ..search.book import in_regions, there
from ..search.goal import Goal
from ..search.moves import neighbours
from ..search.outcome import Found
from ..search.pools import all_gpus
from ..search.sketch import Sketch
from ..simulate.simulation import work_of

LEAST_TRIES = 4
"""Plans of which not even so many changes could be simulated are left as they are."""
HOPEFUL = 1.03
"""Changes that the closed form takes for worse by more than this factor are not simulated."""
MOST_REGROUPED = 64
"""Of plans with replicas in other places, so many that look best are priced."""

Simulate = Callable[[Candidate, Estimate, float], Found | None]
"""Simulates a candidate, given the best value so far."""


def refine(
    estimator: Estimator, goal: Goal, found: Found, operations: int, simulate: Simulate, regroups: bool
) -> Found:
    """The plan with stages in other places and layers shifted, as long as that makes it better.

    Args:
        found: A simulated plan.
        operations: Compute operations that may be simulated.
        regroups: Replicas may move between stages too.
    """
    each = work_of(estimator, found.candidate)
    if len(found.candidate.stages) < 3 or each * LEAST_TRIES > operations:
        return found
    current, improved = found, True
    seen = {found.candidate}
    sketch = Sketch(estimator, goal) if regroups else None
    while improved:
        improved = False
        for candidate, estimate in _hopeful(estimator, goal, current, seen, sketch):
            if seats(estimator.cluster, candidate.stages, candidate.cp) is None:
                continue
            operations -= work_of(estimator, candidate)
            if operations < 0:
                return current
            tried = simulate(candidate, estimate, current.value(goal))
            if tried is not None and tried.value(goal) < current.value(goal) * (1 - 1e-6):
                current, improved = tried, True
                break
    return current


def _hopeful(
    estimator: Estimator, goal: Goal, current: Found, seen: set[Candidate], sketch: Sketch | None
) -> list[tuple[Candidate, Estimate]]:
    """Changes that have not been seen and do not look much worse, the best first."""
    found: list[tuple[float, int, Candidate, Estimate]] = []
    regrouped = _regrouped(estimator, goal, current, sketch) if sketch is not None else ()
    for candidate in chain(_changes(current.candidate), regrouped):
        if candidate in seen:
            continue
        seen.add(candidate)
        estimate = estimator.estimate(candidate)
        if estimate is None or not estimator.fits(estimate) or goal.violation(candidate, estimate) > 0:
            continue
        if goal.value(estimate) <= HOPEFUL * goal.value(current.estimate):
            found.append((goal.value(estimate), len(found), candidate, estimate))
    return [(candidate, estimate) for _, _, candidate, estimate in sorted(found, key=lambda item: item[:2])]


def _regrouped(estimator: Estimator, goal: Goal, current: Found, sketch: Sketch) -> Iterator[Candidate]:
    """Replicas moved between stages, added and left out, with the layers that balance them: what looks best."""
    limits, like = all_gpus(estimator), current.candidate
    most = HOPEFUL * sketch.value(tuple(stage.groups for stage in like.stages), like)
    looked_at = []
    for i, (groups, changed) in enumerate(neighbours(estimator, goal, like, current.estimate.bottleneck, limits)):
        value = sketch.value(groups, changed, most)
        if value <= most and there(estimator, limits, groups) and in_regions(estimator, goal, groups):
            looked_at.append((value, i, groups, changed))
    for _, _, groups, changed in sorted(looked_at, key=lambda item: item[:2])[:MOST_REGROUPED]:
        depths = changed.depths if len(groups) == len(changed.stages) else ()
        balanced = balance(estimator, groups, changed.with_(depths=depths, shares=None))
        if balanced is not None and balanced.stages:
            yield balanced


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
