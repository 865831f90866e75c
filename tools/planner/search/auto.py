"""The default search: the cluster and its parts searched by all means, and the published methods beside them."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from ..estimate import Estimator
from ..search.effort import NORMAL, Effort, effort_for
from ..search.finish import confirm
from ..search.goal import Goal
from ..search.outcome import Outcome, Progress
from ..search.pools import Limits, nodes_left_out
from ..search.thorough import Ground, thorough

FEW = replace(NORMAL, first=0)
"""For the published methods: only finalists that look better than a known plan are simulated."""


def search_auto(
    estimator: Estimator,
    goal: Goal,
    progress: Progress | None = None,
    effort: Effort | None = None,
    bound_s: float = inf,
) -> Outcome:
    """See the module's text.  Interrupting it (Ctrl-C) returns the best found so far.

    Args:
        bound_s: Time of a plan that is known already; slower ones are of no use.
    """
    progress = progress or Progress()
    started = time.process_time()
    ground = Ground(estimator, goal, progress, effort)
    outcome = thorough(ground, ground.whole, bound_s)
    if not outcome.interrupted:
        try:
            _parts_alone(ground, outcome)
            _published_methods(outcome, estimator, goal, progress, bound_s)
        except KeyboardInterrupt:  # what was found before stands
            outcome.interrupted = True
    outcome.cpu_s = time.process_time() - started
    return outcome


def _parts_alone(ground: Ground, outcome: Outcome) -> None:
    """The plans of parts of the cluster join the outcome, each as it would be found if there were nothing else.

    So more kinds of GPUs and, on clusters that are not too large, more schedules than Megatron's own and one node
    more never make a plan worse.  Parts are left out where their bound leaves them no chance.
    """
    effort, goal = ground.asked or effort_for(sum(ground.whole)), ground.goal
    near = sum(ground.whole) <= effort.near_gpus
    nodes = ground.merged.estimator.cluster.nodes
    for kind in dict.fromkeys(n.gpu for n in nodes) if len({n.gpu for n in nodes}) > 1 else ():
        limits = tuple(n.quota if n.gpu == kind else 0 for n in nodes)
        if _may_be_better(ground, outcome, limits):
            ground.progress.text = f"{kind} alone"
            _join(ground, outcome, _kind_alone(ground, outcome, kind) if near else _thorough(ground, outcome, limits))
    searches: list[tuple[Limits, Goal]] = []
    if near and not outcome.exact:  # a proof knows smaller clusters
        searches += [(limits, goal) for limits in nodes_left_out(ground.merged.estimator)]
    stock = tuple(s.name for s in goal.allowed if s.is_stock)
    if near and 0 < len(stock) < len(goal.allowed):
        searches.append((ground.whole, replace(goal, schedules=stock)))
    for limits, narrow in searches:
        if _may_be_better(ground, outcome, limits):
            ground.progress.text = "parts alone"
            _join(ground, outcome, _thorough(ground, outcome, limits, narrow))


def _may_be_better(ground: Ground, outcome: Outcome, limits: Limits) -> bool:
    best = inf if outcome.best is None else outcome.best.value(ground.goal)
    return not ground.bounds.excludes(limits, best)


def _known_s(ground: Ground, outcome: Outcome) -> float:
    """Time of the best plan so far, where slower ones are of no use."""
    return outcome.best.iteration_s if outcome.best is not None and ground.goal.objective != "cost" else inf


def _thorough(ground: Ground, outcome: Outcome, limits: Limits, goal: Goal | None = None) -> Outcome:
    return thorough(ground, limits, _known_s(ground, outcome), goal)


def _kind_alone(ground: Ground, outcome: Outcome, kind: str) -> Outcome:
    """The whole search where nothing but this kind is known, its plans in the pools of the cluster."""
    estimator, goal, progress = ground.estimator, ground.goal, ground.progress
    pools = [p for p, n in enumerate(estimator.cluster.nodes) if n.gpu == kind]
    limit = Progress(limit_s=progress.limit_s - (time.process_time() - progress.started))
    theirs = search_auto(estimator.only(pools), goal, limit, ground.asked, _known_s(ground, outcome))
    found = []
    for entry in theirs.found:
        candidate = entry.candidate.in_pools(pools)
        estimate = estimator.estimate(candidate)
        if estimate is not None and entry.runnable:
            found.append(replace(entry, candidate=candidate, estimate=estimate))
    theirs.found = found
    theirs.evaluations += outcome.evaluations
    return theirs


def _join(ground: Ground, outcome: Outcome, theirs: Outcome) -> None:
    """What a part has brought.

    Raises:
        KeyboardInterrupt: Its search was interrupted.
    """
    known = {found.candidate for found in outcome.found}
    outcome.found += [found for found in theirs.found if found.candidate not in known]
    outcome.found = confirm(ground.estimator, ground.goal, outcome.found)
    outcome.evaluations = max(outcome.evaluations, theirs.evaluations)
    outcome.simulations += theirs.simulations
    if theirs.interrupted:
        raise KeyboardInterrupt


def _published_methods(outcome: Outcome, estimator: Estimator, goal: Goal, progress: Progress, bound_s: float) -> None:
    """The searches of Poplar, Zorse and Sailor: what they find joins the outcome; the best of all is taken.

    They leave out what certainly takes longer than the best plan so far, which makes them short except
    Sailor's on clusters of very many kinds of nodes; each ends when it has taken a tenth of the time before it.
    """
    from ..search.poplar import search_poplar
    from ..search.sailor import search_sailor
    from ..search.zorse import search_zorse

    for search in (search_poplar, search_zorse, search_sailor):
        now = time.process_time() - progress.started
        share = Progress(limit_s=min(progress.limit_s - now, max(2.0, now / 10)))
        progress.text = f"the method of {search.__name__.removeprefix('search_').capitalize()}"
        known_s = min(bound_s, outcome.best.iteration_s if outcome.best is not None else inf)
        known_s = known_s if goal.objective == "throughput" else inf
        theirs = search(estimator, goal, share, FEW if known_s < inf else NORMAL, known_s)
        known = {found.candidate for found in outcome.found}
        outcome.found += [found for found in theirs.found if found.candidate not in known and found.runnable]
        outcome.found = confirm(estimator, goal, outcome.found)
        outcome.evaluations = max(outcome.evaluations, theirs.evaluations)  # counted by the estimator
        outcome.simulations += theirs.simulations
        if outcome.best is not None:
            outcome.nearest = None
        elif outcome.nearest is None:
            outcome.nearest = theirs.nearest
        if progress.limit_s <= time.process_time() - progress.started:
            outcome.interrupted = True
            return
