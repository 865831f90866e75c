"""More microbatches in flight across slow links, for finalists under 1F1B."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from megatron_het.schedule.generators.one_f_one_b import FASTER, NOTICEABLE, choose_depths

from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import schedule_of
from ..costs.stages import stage_tails
from ..errors import PlannerError
from ..simulate.simulation import block_s, work_of
from .book import Book
from .outcome import Found, Goal

# What a candidate takes for certain, before it is simulated.


def least_s(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float:
    """Seconds of an iteration of these stages at least, in any order of their operations.

    Every stage computes, after one microbatch (or its part, with chunks) has come through the earlier stages, and
    before it has gone back.  Slices differ, so that nothing is said of the first one.
    """
    before = after = least = 0.0
    tails = stage_tails(estimator, candidate, estimate)
    cut = 0.0 if candidate.slices > 1 else 1 / candidate.chunks
    rows = zip(candidate.stages, estimate.stage_busy_s, tails, strict=True)
    for s, (stage, busy_s, tail_s) in enumerate(rows):
        least = max(least, before + busy_s + max(after, tail_s))
        units = [u for g in stage.groups if (u := estimator.unit_of(candidate, g, s)) is not None]
        before += cut * stage.layers * min(u.layer_f for u in units)
        after += cut * stage.layers * min(u.layer_b for u in units)
    return least


MOST_OPERATIONS = 20_000
"""Plans that take longer to simulate than so many compute operations are not simulated for every trial."""


def deeper(estimator: Estimator, goal: Goal, found: Found, briefly: bool = False) -> Found:
    """The finalist with as many microbatches in flight as make it fastest and fit into memory.

    Trials are simulated.  Of large plans only two are: what the closed form chooses, and what hides every transfer.

    Args:
        found: Simulated, in the order that suits it best.
        briefly: Where hiding every transfer brings nothing, nothing else is tried.
    """
    candidate = found.candidate
    if len(candidate.stages) < 2 or not schedule_of(candidate).has_depths or candidate.depths:
        return found
    if found.iteration_s * (1 - FASTER) <= least_s(estimator, candidate, found.estimate):
        return found
    plain = (1,) * (len(candidate.stages) - 1)
    tried = {plain: found}

    def simulated(depths: tuple[int, ...]) -> float | None:
        if depths not in tried:
            estimate = _fitting(estimator, goal, candidate, depths)
            if estimate is None:
                return None
            other = candidate.with_(depths=depths)
            try:
                seconds = block_s(estimator, other, estimate)
            except PlannerError:
                return None
            tried[depths] = replace(found, candidate=other, estimate=estimate, simulated_s=seconds)
        return tried[depths].iteration_s

    def estimated(depths: tuple[int, ...]) -> float | None:
        estimate = found.estimate if depths == plain else _fitting(estimator, goal, candidate, depths)
        return None if estimate is None else estimate.iteration_s

    passes, transfers = _passes_s(estimator, candidate), estimator.transfer_times(candidate)
    if briefly:
        hidden_s = simulated(_hiding(passes, transfers))
        if hidden_s is None or hidden_s >= found.iteration_s:
            return found
    if work_of(estimator, candidate) <= MOST_OPERATIONS:
        chosen = choose_depths(passes, transfers, simulated)
        return tried[chosen] if chosen else found
    for depths in dict.fromkeys((choose_depths(passes, transfers, estimated), _hiding(passes, transfers))):
        if depths and depths != plain:
            simulated(depths)
    best = min(tried.values(), key=lambda f: f.iteration_s)
    return best if best.iteration_s < found.iteration_s * (1 - FASTER) else found


def hide_transfers(book: Book) -> None:
    """Candidates with as many in flight as hide every transfer, where the closed form says that this is faster.

    Those of the best of each number of stages, and of those with as many replicas on every stage, which may become the
    best of all by it.
    """
    estimator = book.estimator
    best: dict[tuple[int, bool], tuple[float, Candidate]] = {}
    for candidate, (score, _) in book.good.items():
        if len(candidate.stages) < 2 or not schedule_of(candidate).has_depths or candidate.depths:
            continue
        kind = len(candidate.stages), len({sum([g.count for g in s.groups]) for s in candidate.stages}) == 1
        if kind not in best or score < best[kind][0]:
            best[kind] = score, candidate
    for score, candidate in best.values():
        depths = _hiding(_passes_s(estimator, candidate), estimator.transfer_times(candidate))
        deep = candidate.with_(depths=depths)
        estimate = estimator.estimate(deep) if max(depths) > 1 else None
        if estimate is not None and book.goal.value(estimate) < score * (1 - FASTER):
            book.try_candidate(deep)


def _hiding(passes: list[float], transfers: list[float]) -> tuple[int, ...]:
    """Returns as many more passes as hide each transfer, there and back, and one of reserve where that is any."""
    hidden = [ceil(2 * seconds / max(passes)) if 2 * seconds > NOTICEABLE * max(passes) else 0 for seconds in transfers]
    return tuple(2 + n if n else 1 for n in hidden)


def _fitting(estimator: Estimator, goal: Goal, candidate: Candidate, depths: tuple[int, ...]) -> Estimate | None:
    """Returns what the closed form says with these depths; None where that does not fit."""
    other = candidate.with_(depths=depths)
    estimate = estimator.estimate(other)
    fits = estimate is not None and estimator.fits(estimate) and goal.violation(other, estimate) == 0
    return estimate if fits else None


def _passes_s(estimator: Estimator, candidate: Candidate) -> list[float]:
    """By stage, seconds of one microbatch, forward and backward, on its quickest replica.

    What is in flight is counted per replica, so a stage of many replicas has no more need of it than one of few.
    """
    out = []
    for s, stage in enumerate(candidate.stages):
        units = [estimator.unit_of(candidate, g, s) for g in stage.groups]
        out.append(min(u.both_s(stage.layers, *candidate.ends_of(s)) for u in units if u is not None))
    return out
