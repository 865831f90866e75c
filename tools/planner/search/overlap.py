"""What a plan loses where transfers do not run beside compute, and the choice between plans that are about as fast."""

from __future__ import annotations

from dataclasses import replace

from ..candidate import Candidate
from ..estimate import Estimate, Estimator
from .finish import confirm
from .goal import Goal
from .outcome import Found, Outcome, PassedOver

SMALL = 0.005
"""So much longer an iteration may be for less dependence on overlap.

A plan with one node more is compared with one of fewer nodes within the same share: both may have been chosen so.
"""


def blocking_ratio(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float | None:
    """How much longer an iteration takes where transfers wait for compute; None where nothing overlaps anyway."""
    if len(candidate.stages) == 1 or not _overlaps(estimator):
        return None
    in_turn = replace(estimator.runtime, transfers_in_turn=True)
    other = Estimator(estimator.cluster, estimator.model, estimator.costs, in_turn, estimator.memory_margin)
    found = other.estimate(candidate)
    return None if found is None else max(1.0, found.iteration_s / estimate.iteration_s)


def _overlaps(estimator: Estimator) -> bool:
    """Whether the runtime has transfers beside compute."""
    return not (estimator.runtime.transfers_in_turn or estimator.runtime.host_blocks)


def prefer_independent(estimator: Estimator, goal: Goal, outcome: Outcome) -> None:
    """Of plans that are about as fast as the best, put the one first that takes least where transfers block.

    It must gain more there than it loses where they do not.  Under a goal of cost the cheapest plan stays.
    """
    best = outcome.best
    if best is None or goal.objective == "cost" or not _overlaps(estimator) or outcome.interrupted:
        return
    limit_s, blocked_s = best.iteration_s * (1 + SMALL), _blocked_s(estimator, best)
    near = [f for f in outcome.found if f.runnable and f is not best and f.iteration_s <= limit_s]
    for found in sorted(near, key=lambda f: _blocked_s(estimator, f)):
        if blocked_s - _blocked_s(estimator, found) <= max(0.0, found.iteration_s - best.iteration_s):
            return
        confirmed = confirm(estimator, goal, [found])
        if confirmed and confirmed[0].iteration_s <= limit_s:
            outcome.found = [confirmed[0], *[f for f in outcome.found if f is not found]]
            outcome.passed_over = PassedOver(best.iteration_s, blocked_s, _blocked_s(estimator, confirmed[0]))
            return


def _blocked_s(estimator: Estimator, found: Found) -> float:
    """Seconds of an iteration where transfers wait for compute."""
    return found.iteration_s * (blocking_ratio(estimator, found.candidate, found.estimate) or 1.0)
