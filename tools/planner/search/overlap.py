"""The choice between plans that are about as fast: the plainest, which depends least on transfers beside compute."""

from __future__ import annotations

from dataclasses import replace

from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator
from .finish import confirm
from .goal import Goal
from .outcome import Found, Outcome, PassedOver

SMALL = 0.005
"""So much longer an iteration may be for less dependence on overlap.

A plan with one node more is compared with one of fewer nodes within the same share: both may have been chosen so.
"""
PLAINER = 0.02
"""So much longer an iteration may be for a plainer plan."""
SHARED_BUS = 1e11
"""Bytes per second of a GPU to its node below which TP goes over PCIe."""


def irregularity(estimator: Estimator, candidate: Candidate) -> tuple[int, int, int]:
    """Counts different stages beyond one per kind of GPU, stages with TP over PCIe, and stages of one layer."""
    stages, intra = candidate.stages, estimator.network.intra
    shapes = {s.groups for s in stages}
    kinds = {frozenset(g.pool for g in groups) for groups in shapes}
    shared = sum(any(g.tp > 1 and intra[g.pool] < SHARED_BUS for g in s.groups) for s in stages)
    short = sum(s.layers == 1 for s in stages) if len(stages) < estimator.model.num_layers else 0
    return len(shapes) - len(kinds), shared, short


def prefer_plain(estimator: Estimator, goal: Goal, outcome: Outcome) -> None:
    """Put the plainest of the plans first that are nearly as good as the best, and name the one passed over."""
    best = outcome.best
    if best is None or outcome.interrupted:
        return
    limit, least = best.value(goal) * (1 + PLAINER), irregularity(estimator, best.candidate)
    near = [f for f in outcome.found if f.runnable and f.value(goal) <= limit]
    for found in sorted(near, key=lambda f: (irregularity(estimator, f.candidate), f.value(goal))):
        if irregularity(estimator, found.candidate) >= least:
            break
        confirmed = confirm(estimator, goal, [found])
        if confirmed and confirmed[0].value(goal) <= limit:
            outcome.found = [confirmed[0], *[f for f in outcome.found if f is not found]]
            outcome.passed_over = _passed_over(estimator, best, confirmed[0], is_plainer=True)
            return
    _prefer_independent(estimator, goal, outcome)


def _in_words(estimator: Estimator, candidate: Candidate) -> str:
    """What is irregular about a plan."""
    _, shared, short = irregularity(estimator, candidate)
    words = f"{len(candidate.stages)} stages, {len({s.groups for s in candidate.stages})} different ones"
    words += f", {short} of one layer" if short else ""
    return words + (f", {shared} with TP over PCIe" if shared else "")


def _passed_over(estimator: Estimator, best: Found, chosen: Found, is_plainer: bool) -> PassedOver:
    return PassedOver(
        best.iteration_s,
        _blocked_s(estimator, best),
        _blocked_s(estimator, chosen),
        _in_words(estimator, best.candidate) if is_plainer else "",
    )


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


def _prefer_independent(estimator: Estimator, goal: Goal, outcome: Outcome) -> None:
    """Of plans that are about as fast as the best, put the one first that takes least where transfers block.

    It must gain more there than it loses where they do not.  Under a goal of cost the cheapest plan stays.
    """
    best = outcome.best
    if best is None or goal.objective == "cost" or not _overlaps(estimator):
        return
    limit_s, blocked_s = best.iteration_s * (1 + SMALL), _blocked_s(estimator, best)
    near = [f for f in outcome.found if f.runnable and f is not best and f.iteration_s <= limit_s]
    for found in sorted(near, key=lambda f: _blocked_s(estimator, f)):
        if blocked_s - _blocked_s(estimator, found) <= max(0.0, found.iteration_s - best.iteration_s):
            return
        confirmed = confirm(estimator, goal, [found])
        if confirmed and confirmed[0].iteration_s <= limit_s:
            outcome.found = [confirmed[0], *[f for f in outcome.found if f is not found]]
            outcome.passed_over = _passed_over(estimator, best, confirmed[0], is_plainer=False)
            return


def _blocked_s(estimator: Estimator, found: Found) -> float:
    """Seconds of an iteration where transfers wait for compute."""
    return found.iteration_s * (blocking_ratio(estimator, found.candidate, found.estimate) or 1.0)
