"""The default search: seeds, local search, proof by branch and bound where the cluster is small, simulation."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, product
from math import inf

from ..candidate import Candidate, Stage
from ..estimate import Estimator
from ..schedules import PLAIN
from ..search.book import Book, Groups
from ..search.effort import NORMAL, Effort, effort_for
from ..search.exact import branch_and_bound
from ..search.finish import confirm, finish
from ..search.goal import Goal
from ..search.moves import neighbours, schedule_variants
from ..search.outcome import Outcome, Progress
from ..search.bounds import Bounds
from ..search.pools import Limits, all_gpus, one_node_less, parts
from ..search.regions import expand, merge
from ..search.seeds import WORTH, seeds

CLEAR = 0.01
"""A neighbour that is better by this share is taken without looking at the others."""
FEW = replace(NORMAL, first=0)
"""For the published methods: only finalists that look better than a known plan are simulated."""
MANY = 64
"""Neighbours that are looked at before a much better one is taken at once."""
MOST_SWAPPED = 10
"""Stages of which two change places."""
POLISHED = 1.1
"""Plans within this factor of the best get their layers shifted one by one."""


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
    progress, asked = progress or Progress(), effort
    effort = effort or effort_for(estimator.cluster.total_gpus)
    started = time.process_time()
    merged = merge(estimator)
    book = Book(merged.estimator, goal, progress)
    outcome = Outcome("auto")
    whole, bounds = all_gpus(merged.estimator), Bounds(merged.estimator, goal)
    try:
        explore(book, effort, whole)
        if estimator.cluster.total_gpus <= effort.exact_gpus:
            progress.text = "branch and bound"
            outcome.exact = branch_and_bound(book, effort.exact_nodes, effort.exact_promising)
        if not outcome.exact:
            _parts(book, effort, bounds)
        _climb_by_stages(book, effort, whole)
        _bandwidth_groups(merged.estimator, book, effort, whole)
        _variants(book, effort, whole)
        _polish(book)
    except KeyboardInterrupt:
        outcome.interrupted = True
        effort = replace(effort, simulated_operations=1000)  # somebody is waiting
    finish(book, outcome, estimator, goal, effort, lambda c: expand(merged, estimator.cluster, c), bound_s)
    if not outcome.interrupted:
        try:
            _kinds_alone(outcome, estimator, goal, progress, asked)
            _published_methods(outcome, estimator, goal, progress, bound_s)
        except KeyboardInterrupt:  # what was found before stands
            outcome.interrupted = True
    outcome.cpu_s = time.process_time() - started
    return outcome


def explore(book: Book, effort: Effort, limits: Limits) -> None:
    """Seeds on a part of the cluster, and local search from the best of them."""
    book.progress.text = "seeds"
    starts = _seed(book, effort, limits)
    book.progress.text = "local search"
    for candidate in starts:
        _climb(book, effort, candidate, limits)
        if book.progress.out_of_time:
            raise KeyboardInterrupt


def _climb_by_stages(book: Book, effort: Effort, limits: Limits) -> None:
    """Local search from the best of each number of stages: what is best may be reached from another number."""
    best = sorted(book.by_stages.values(), key=lambda entry: entry[0])
    for score, candidate in best[: effort.counts]:
        if score < WORTH * book.best:
            _climb(book, effort, candidate, limits)


def _parts(book: Book, effort: Effort, bounds: Bounds) -> None:
    """The same on every part of the cluster that can hold a better plan than the best so far.

    First come pools alone, which are searched in no time, then what can be best by its bound.

    Small clusters less one node are searched as thoroughly as the cluster, so that their plans stay candidates.
    """
    left, whole = effort.parts, all_gpus(book.estimator)
    smaller = replace(effort, sketches=effort.part_sketches, seeds=effort.part_seeds, steps=effort.part_steps, beam=1)
    for limits in sorted(parts(book.estimator), key=lambda part: (sum(map(bool, part)) > 1, bounds.value(part))):
        if bounds.value(limits) >= book.best:
            continue
        near = sum(whole) <= effort.near_gpus and one_node_less(book.estimator, limits)
        explore(book, effort if near else smaller, limits)
        left -= 1
        if not left:
            return


def _seed(book: Book, effort: Effort, limits: Limits) -> list[Candidate]:
    """Sketch all seeds and evaluate what looks best; the best with different stages."""
    sketched: list[tuple[float, int, Groups, Candidate]] = []
    hope = [inf]
    for i, (groups, like) in enumerate(seeds(book, effort.sketches, limits, hope)):
        value = book.sketch.value(groups, like, WORTH * min(book.best, hope[0]))
        if value < inf:
            sketched.append((value, i, groups, like))
            hope[0] = min(hope[0], value)
        if book.progress.out_of_time:
            break
    sketched.sort(key=lambda item: item[:2])
    scored: list[tuple[float, int, Candidate]] = []
    tried: dict[object, int] = {}
    for value, i, groups, like in sketched:
        kind = tuple(tuple(g.pool for g in stage) for stage in groups)
        tried[kind] = tried.get(kind, 0) + 1
        if len(scored) == effort.seeds or value > WORTH * min(book.best, hope[0]):
            break
        if tried[kind] <= effort.alike:
            score, candidate = book.try_groups(groups, like)
            if candidate is not None:
                scored.append((score, i, candidate))
        if book.progress.out_of_time:
            break
    scored.sort(key=lambda item: item[:2])
    return _starts(scored, effort)


def _starts(scored: list[tuple[float, int, Candidate]], effort: Effort) -> list[Candidate]:
    """The best with different kinds of GPUs in their stages, and the best of several numbers of stages."""
    out: list[Candidate] = []
    shapes: set[object] = set()
    counts: set[int] = set()
    for score, _, candidate in scored:
        shape, count = tuple(tuple(g.pool for g in s.groups) for s in candidate.stages), len(candidate.stages)
        new = len(shapes) < effort.beam and shape not in shapes
        if new or (len(counts) < effort.counts and count not in counts and score < WORTH * scored[0][0]):
            out.append(candidate)
            shapes.add(shape)
            counts.add(count)
    return out


def _climb(book: Book, effort: Effort, start: Candidate, limits: Limits, share: int = 1) -> Candidate:
    """Improvement over the neighbourhood until nothing improves or the budget is spent.

    Neighbours are evaluated in the order of their sketches.  A clear improvement is taken at once, a small one
    when none of those that look as good holds anything better.

    Args:
        share: Divides the budget.
    """
    current, score = start, book.try_candidate(start)
    spent, budget, hasty = 0, effort.steps // share, effort.hasty
    while spent < budget and not book.progress.out_of_time:
        best: tuple[float, Candidate] | None = None
        for groups, like in _promising(book, effort, current, limits, hasty):
            found, candidate = book.try_groups(groups, like)
            spent += 1
            if candidate is not None and found < (best[0] if best else score) * (1 - 1e-9):
                best = (found, candidate)
            if spent >= budget or (best is not None and best[0] < score * (1 - CLEAR)):
                break
        if best is None and not hasty:
            break
        hasty = effort.hasty and best is not None
        if best is not None:
            score, current = best
    return current


def _promising(
    book: Book, effort: Effort, current: Candidate, limits: Limits, hasty: bool
) -> list[tuple[Groups, Candidate]]:
    """The neighbours that look no worse than the candidate, the best first.

    Args:
        hasty: Of many neighbours only the first are looked at, if one of them looks much better.
    """
    here = book.sketch.value(tuple(s.groups for s in current.stages), current)
    most = here * (1 + effort.near) if current in book.good else inf
    clear = here * (1 - 3 * CLEAR) if hasty and current in book.good else 0.0
    found = []
    for i, (groups, like) in enumerate(
        neighbours(book.estimator, book.goal, current, _bottleneck(book, current), limits)
    ):
        value = book.sketch.value(groups, like, most)
        if value < most:
            found.append((value, i, groups, like))
            if i >= MANY and value < clear:
                break
    found.sort(key=lambda item: item[:2])
    return [(groups, like) for _, _, groups, like in found[: effort.neighbours]]


def _bottleneck(book: Book, candidate: Candidate) -> int:
    known = book.good.get(candidate)
    estimate = known[1] if known else book.estimator.estimate(candidate)
    return estimate.bottleneck if estimate else 0


def _variants(book: Book, effort: Effort, limits: Limits) -> None:
    """Other schedules for the best stages, then again for what got better."""
    starts = [c for c, _ in book.top(effort.beam)]
    starts += [c for _, (_, c) in sorted(book.by_stages.items())[: 2 * effort.beam] if c not in starts]
    if any(schedule.needs_equal_widths for schedule in book.goal.allowed):
        starts += [c for count, (_, c) in sorted(book.alike.items()) if count > 1]
    if not starts and book.nearest is not None:
        starts = [book.nearest[1]]
    for candidate in starts:
        groups: Groups = tuple(s.groups for s in candidate.stages)
        for variant in schedule_variants(book.estimator, book.goal, candidate):
            book.try_groups(groups, variant)
    for schedule in book.goal.allowed:
        if schedule is not PLAIN:
            for candidate, _ in book.top(1, schedule.name):
                _climb(book, effort, candidate, limits, share=2)


def _bandwidth_groups(estimator: Estimator, book: Book, effort: Effort, limits: Limits) -> None:
    """Zorse's groups as further starting points, where cutting the bandwidth graph is cheap."""
    if sum(n.count for n in estimator.cluster.nodes) > effort.cut_nodes:
        return
    from ..search.zorse import configure_groups

    before = book.best
    configure_groups(book, 1, few=True)
    if book.best < before:
        _climb(book, effort, book.top(1)[0][0], limits)


def _kinds_alone(outcome: Outcome, estimator: Estimator, goal: Goal, progress: Progress, effort: Effort | None) -> None:
    """The plan of every kind of GPU alone joins the outcome, where its bound leaves it a chance.

    Each is searched as if there were nothing else, so that more kinds never make a plan worse.
    """
    nodes = estimator.cluster.nodes
    kinds = dict.fromkeys(n.gpu for n in nodes)
    bounds = Bounds(estimator, goal)
    for kind in kinds if len(kinds) > 1 else ():
        pools = [p for p, n in enumerate(nodes) if n.gpu == kind]
        least = bounds.value(tuple(n.quota if n.gpu == kind else 0 for n in nodes))
        if outcome.best is not None and least >= outcome.best.value(goal):
            continue
        now = time.process_time() - progress.started
        progress.text = f"{kind} alone"
        known = outcome.best.iteration_s if outcome.best is not None and goal.objective == "throughput" else inf
        limit = Progress(limit_s=progress.limit_s - now)
        theirs = search_auto(estimator.only(pools), goal, limit, effort, known)
        for found in theirs.found:
            candidate = found.candidate.in_pools(pools)
            estimate = estimator.estimate(candidate)
            if estimate is not None and found.runnable:
                outcome.found.append(replace(found, candidate=candidate, estimate=estimate))
        outcome.found = confirm(estimator, goal, outcome.found)
        outcome.evaluations += theirs.evaluations
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


def _polish(book: Book) -> None:
    """Every number of ministages, other orders of stages, layers shifted one by one, for the best of each schedule."""
    for schedule in book.goal.allowed:
        for candidate, _ in book.top(2, schedule.name):
            for refined in schedule.refined(candidate):
                book.try_groups(tuple(s.groups for s in candidate.stages), refined)
        for candidate, _ in book.top(2, schedule.name):
            if book.try_candidate(candidate) < POLISHED * book.best:
                _swap_stages(book, candidate)
                _shift_layers(book, candidate)


def _swap_stages(book: Book, candidate: Candidate) -> None:
    """The same stages with two of them in each other's place: the simulator tells apart what the closed form cannot."""
    groups = [s.groups for s in candidate.stages]
    for i, j in combinations(range(min(len(groups), MOST_SWAPPED)), 2):
        if groups[i] != groups[j]:
            swapped = list(groups)
            swapped[i], swapped[j] = groups[j], groups[i]
            book.try_groups(tuple(swapped), candidate)


def _shift_layers(book: Book, current: Candidate) -> None:
    """Single layers from a stage to another as long as that makes the candidate better."""
    score, count = book.try_candidate(current), len(current.stages)
    improved = True
    while improved:
        improved = False
        for i, j in product(range(count), repeat=2):
            if i == j or current.stages[i].layers <= 1 or (count > 6 and abs(i - j) > 1):
                continue
            changed = list(current.stages)
            changed[i] = Stage(changed[i].layers - 1, changed[i].groups)
            changed[j] = Stage(changed[j].layers + 1, changed[j].groups)
            shifted = current.with_(stages=tuple(changed))
            found = book.try_candidate(shifted)
            if found < score * (1 - 1e-9):
                current, score, improved = shifted, found, True
