"""The default search: our own search on the cluster and its parts, and the three published methods."""

import time
from collections.abc import Iterable
from dataclasses import replace
from math import inf

from ..costs.estimate import Estimator
from .finish import confirm, is_within
from .outcome import NORMAL, Effort, Goal, Progress, SearchResult, collector_paused, in_pools
from .part_search import MOST_LEFT_OUT, SearchContext, part_search
from .pools import Limits, nodes_left_out, pools_left_out

FEW = replace(NORMAL, first=0)
"""For the published methods: only finalists that look better than a known plan are simulated."""
OF_A_SIZE = replace(NORMAL, seeds=40, beam=2, counts=2, parts=1, exact_gpus=0)
"""Effort for single kinds and small parts of a cluster, because many of these are searched."""
OVERFULL = 1.5
"""If nothing fits and the nearest candidate fills a GPU this many times, only the whole cluster is searched."""
MOST_IN_USE = 2  # best plans whose nodes are searched as a cluster of their own
LEAST_S = {True: 2.0, False: 0.3}
"""Least CPU seconds of a published method, by whether the cluster is small enough for a thorough search."""


def search_auto(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort | None = None, known: float = inf
) -> SearchResult:
    """Run the default search.  Interrupting it (Ctrl-C) returns the best plans found so far.

    Args:
        known: Value of a known plan, in seconds or USD; worse plans are skipped.
    """
    progress = progress or Progress()
    started = time.process_time()
    with collector_paused():
        context = SearchContext(estimator, goal, progress, effort, known)
        outcome = SearchResult("auto")
        try:
            limit = goal.min_iterations_per_s if goal.objective == "cost" else goal.max_usd_per_iteration
            if limit is not None:
                _of_the_other_objective(context, outcome)
                if outcome.nearest is not None:
                    outcome.cpu_s = time.process_time() - started
                    return outcome
            if goal.objective == "cost":
                _sizes_alone(context, outcome)
            elif context.has_many_pools:
                _kinds_alone(context, outcome)
            whole = part_search(context, context.whole, _least(context, outcome))
            outcome.exact = whole.exact
            _join(context, outcome, whole)
            if outcome.nearest is None or outcome.nearest[1].fullest < OVERFULL:  # otherwise fewer GPUs fit even less
                if goal.objective != "cost" and not context.has_many_pools:
                    _kinds_alone(context, outcome)
                if context.is_near and not outcome.exact:  # a proven optimum covers smaller clusters
                    _parts_alone(context, outcome)
                _published_methods(context, outcome)
        except KeyboardInterrupt:  # earlier results are kept
            outcome.interrupted = True
    outcome.cpu_s = time.process_time() - started
    return outcome


def _kinds_alone(context: SearchContext, outcome: SearchResult) -> None:
    """Search each kind of GPU as a cluster of its own, and add the plans to the outcome.

    So more kinds of GPUs never make a plan worse.  Kinds whose bound is above the best value are skipped.  On
    large clusters of many pools the kinds come first: their plans let the search of the whole cluster skip much.
    """
    estimator = context.merged.estimator
    nodes = estimator.cluster.nodes
    kinds = {kind: tuple(n.quota if n.gpu == kind else 0 for n in nodes) for kind in {n.gpu for n in nodes}}
    if len(kinds) == 1:
        return
    for kind, limits in sorted(kinds.items(), key=lambda item: (context.bounds.value(item[1]), item[0])):
        has_faster_layers = estimator.running([p for p, n in enumerate(limits) if n]) is not estimator  # searched apart
        if not has_faster_layers and _may_be_better(context, outcome, limits):
            context.progress.text = f"{kind} alone"
            if context.is_near:
                _join(context, outcome, _kind_alone(context, outcome, kind))
            else:
                _join(context, outcome, part_search(context, limits, _least(context, outcome)))


def _sizes_alone(context: SearchContext, outcome: SearchResult) -> None:
    """For the objective ``cost``: search numbers of nodes of each pool alone (1, 2, 3, 4, 6, 8, 12, ... and all).

    These numbers do not depend on the rest of the cluster, so that a larger cluster costs no more than a smaller one.
    """
    goal = context.goal
    for p, node in enumerate(context.merged.estimator.cluster.nodes):
        whole = -(-node.quota // node.gpus_per_node)
        counts = {n for k in range(whole.bit_length()) for n in (1 << k, 3 << k) if n < whole} | {whole}
        for count in sorted(counts):
            gpus = min(node.quota, count * node.gpus_per_node)
            if goal.max_gpus is not None and gpus > goal.max_gpus:
                break
            limits = tuple(gpus if i == p else 0 for i in range(len(context.whole)))
            if context.bounds.is_in_time(limits) and limits != context.whole:
                context.progress.text = f"{gpus} {node.gpu} alone"
                _join(context, outcome, part_search(context, limits, _least(context, outcome), effort=OF_A_SIZE))


def _of_the_other_objective(context: SearchContext, outcome: SearchResult) -> None:
    """Search with the objective that the goal limits (price or time), and add the plans that meet the limit.

    If none meets it, the best of them becomes ``outcome.nearest``.
    """
    goal, progress = context.goal, context.progress
    left = Progress(limit_s=progress.limit_s - (time.process_time() - progress.started))
    limit, other = replace(goal, min_iterations_per_s=None), replace(goal, objective="cost", max_usd_per_iteration=None)
    if goal.objective == "cost":
        limit = replace(goal, max_usd_per_iteration=None)
        other = replace(limit, objective="throughput", min_iterations_per_s=None)
    theirs = search_auto(context.estimator, other, left)
    if theirs.best is not None and not is_within(limit, theirs.best):
        outcome.nearest = theirs.best.candidate, theirs.best.estimate
        return
    theirs.found = [found for found in theirs.found if is_within(goal, found)]
    _join(context, outcome, theirs)


def _parts_alone(context: SearchContext, outcome: SearchResult) -> None:
    """Search parts of a cluster as clusters of their own, as long as that gives better plans, and add these.

    A small cluster is searched without one node, one pool or two nodes, with as many numbers of stages as the whole
    cluster, because one node changes much there and a search is short.  From the best part one more node is left out.
    On a larger cluster, the nodes of the best plans are searched: starting points on exactly these nodes are
    nearer to a good plan than those that include useless nodes.  Last comes the cluster without the one node whose
    loss raises the bound least.
    """
    estimator, whole = context.merged.estimator, context.whole
    effort = context.asked or (replace(OF_A_SIZE, counts=NORMAL.counts) if context.is_small else OF_A_SIZE)
    effort, seen = replace(effort, parts=0), {whole}

    def best_of(parts: Iterable[Limits]) -> Limits | None:
        better = None
        for limits in dict.fromkeys(parts):
            least = _least(context, outcome)
            if limits not in seen and _may_be_better(context, outcome, limits):
                context.progress.text = "parts alone"
                _join(context, outcome, part_search(context, limits, least, effort=effort))
                better = limits if _least(context, outcome) < least else better
            seen.add(limits)
        return better

    fewer = nodes_left_out(estimator, whole)
    parts = _in_use(context, outcome)
    if context.is_small:
        parts = fewer + pools_left_out(whole)
        if context.goal.objective != "cost":  # the bound of ``cost`` excludes hardly any part
            parts += nodes_left_out(estimator, whole, 2)
    for _ in range(MOST_LEFT_OUT):
        better = best_of(parts)
        if better is None:
            break
        parts = nodes_left_out(estimator, better) if context.is_small else _in_use(context, outcome)
    best_of(sorted(fewer, key=context.bounds.value)[:1])


def _in_use(context: SearchContext, outcome: SearchResult) -> list[Limits]:
    """The nodes of the best plans, as whole nodes of at least two kinds of GPU; the best plan's first."""
    nodes, goal, out = context.merged.estimator.cluster.nodes, context.goal, dict[Limits, None]()
    for found in sorted((f for f in outcome.found if f.runnable), key=lambda f: f.value(goal)):
        gpus = found.candidate.gpus()
        used = [sum(gpus.get(p, 0) for p in members) for members in context.merged.members]
        limits = [min(n.quota, -(-k // n.gpus_per_node) * n.gpus_per_node) for n, k in zip(nodes, used)]
        if len({n.gpu for n, k in zip(nodes, used) if k}) > 1 and len(out) < MOST_IN_USE:
            out[tuple(limits)] = None
    return list(out)


def _may_be_better(context: SearchContext, outcome: SearchResult, limits: Limits) -> bool:
    return not context.bounds.excludes(limits, _least(context, outcome))


def _least(context: SearchContext, outcome: SearchResult) -> float:
    """Value of the best plan so far, or of the known plan if that is better."""
    return context.known if outcome.best is None else min(context.known, outcome.best.value(context.goal))


def _kind_alone(context: SearchContext, outcome: SearchResult, kind: str) -> SearchResult:
    """Search the cluster of this kind of GPU only; the plans are translated to the pools of the cluster."""
    estimator, goal, progress = context.estimator, context.goal, context.progress
    pools = [p for p, n in enumerate(estimator.cluster.nodes) if n.gpu == kind]
    limit = Progress(limit_s=progress.limit_s - (time.process_time() - progress.started))
    theirs = search_auto(estimator.only(pools), goal, limit, context.asked, _least(context, outcome))
    theirs.found = in_pools(estimator, theirs.found, pools)
    theirs.exact = False  # proven for that kind only
    theirs.evaluations += outcome.evaluations
    return theirs


def _join(context: SearchContext, outcome: SearchResult, theirs: SearchResult) -> None:
    _add(context, outcome, theirs)
    if theirs.interrupted:
        raise KeyboardInterrupt


def _add(context: SearchContext, outcome: SearchResult, theirs: SearchResult) -> None:
    """Add the plans and the counters of another search to the outcome."""
    goal, known = context.goal, {found.candidate for found in outcome.found}
    outcome.found += [
        found
        for found in theirs.found
        if found.candidate not in known and found.runnable and found.candidate.schedule in goal.schedules
    ]
    outcome.found = confirm(context.estimator, goal, outcome.found, context.known)
    outcome.evaluations = max(outcome.evaluations, theirs.evaluations)  # counted by the estimator
    outcome.simulations += theirs.simulations
    if outcome.best is not None:
        outcome.nearest = None
    else:
        near = [found for found in (outcome.nearest, theirs.nearest) if found is not None]
        outcome.nearest = min(near, key=lambda found: goal.score(context.estimator, *found), default=None)


def _published_methods(context: SearchContext, outcome: SearchResult) -> None:
    """Run the methods of Poplar, Zorse and Sailor, and add their plans to the outcome.

    They skip candidates that certainly take longer than the best plan so far.  Each ends after a tenth of the time
    before it, or ``LEAST_S``; only Sailor's method needs that, on clusters of very many kinds of nodes.
    """
    from .papers import search_sailor, search_zorse
    from .poplar import search_poplar

    estimator, goal, progress = context.estimator, context.goal, context.progress
    if goal.objective == "cost" and outcome.best is not None:
        return  # their bounds are on time
    for search in (search_poplar, search_zorse, search_sailor):
        now = time.process_time() - progress.started
        share = Progress(limit_s=min(progress.limit_s - now, max(LEAST_S[context.is_near], now / 10)))
        progress.text = f"the method of {search.__name__.removeprefix('search_').capitalize()}"
        known_s = _least(context, outcome) if goal.objective == "throughput" else inf
        theirs = search(estimator, goal, share, FEW if known_s < inf else NORMAL, known_s)
        _add(context, outcome, theirs)
        if progress.limit_s <= time.process_time() - progress.started:
            outcome.interrupted = True
            return
