"""The default search: seeds, local search, proof by branch and bound where the cluster is small, simulation."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import inf

from tools.planner.build import build_plan, seats
from tools.planner.candidate import Candidate, Stage
from tools.planner.errors import PlannerError
from tools.planner.estimate import Estimate, Estimator
from tools.planner.search.book import Book, Groups
from tools.planner.search.exact import branch_and_bound
from tools.planner.search.goal import Goal
from tools.planner.search.moves import neighbours, schedule_variants
from tools.planner.search.outcome import Found, Outcome, Progress
from tools.planner.search.regions import expand, merge
from tools.planner.search.seeds import seeds
from tools.planner.simulation import simulate_block


CHEAP_OPERATIONS = 2000


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to search.

    Attributes:
        seeds: Starting points to evaluate.
        beam: Starting points to improve by local search.
        steps: Evaluations of the local search per starting point.
        cut_nodes: Clusters up to this many nodes are also cut by bandwidth, as Zorse does.
        exact_gpus: Clusters up to this size are searched to the proven optimum.
        exact_nodes: Nodes of the search tree before the proof is given up.
        simulated_operations: Compute operations to simulate at the end, over all finalists.
        window: Finalists whose closed form is within this share of the best are simulated.
        exact_window, exact_operations: The same two for clusters searched to the optimum, where plans are
            small, cheap to simulate, and the closed form is off by more.
    """

    seeds: int = 700
    beam: int = 4
    steps: int = 350
    cut_nodes: int = 16
    exact_gpus: int = 8
    exact_nodes: int = 60_000
    simulated_operations: int = 5_000
    window: float = 0.03
    exact_window: float = 0.15
    exact_operations: int = 80_000


LARGE = Effort(seeds=1500, beam=10, steps=600, simulated_operations=20_000)
"""For clusters of more than 160 GPUs, where a better plan is worth a few seconds."""


def search_auto(estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort | None = None) -> Outcome:
    """See the module's text.  Interrupting it (Ctrl-C) returns the best found so far."""
    progress = progress or Progress()
    effort = effort or (LARGE if estimator.cluster.total_gpus > 160 else Effort())
    started = time.process_time()
    merged = merge(estimator)
    book = Book(merged.estimator, goal, progress)
    outcome = Outcome("auto")
    try:
        progress.text = "seeds"
        starts = _seed(book, effort)
        progress.text = "local search"
        for candidate in starts:
            _climb(book, candidate, effort.steps)
            if progress.out_of_time:
                raise KeyboardInterrupt
        if estimator.cluster.total_gpus <= effort.exact_gpus:
            progress.text = "branch and bound"
            outcome.exact = branch_and_bound(book, effort.exact_nodes, effort.exact_window)
        _variants(book, effort)
        _bandwidth_groups(merged.estimator, book, effort)
        _polish(book)
    except KeyboardInterrupt:
        outcome.interrupted = True
        effort = replace(effort, simulated_operations=1000)  # somebody is waiting
    finish(book, outcome, estimator, goal, effort, lambda c: expand(merged, estimator.cluster, c))
    if not outcome.interrupted:
        _published_methods(outcome, estimator, goal, progress, effort)
    outcome.cpu_s = time.process_time() - started
    return outcome


def _seed(book: Book, effort: Effort) -> list[Candidate]:
    """Evaluate seeds; the best with different stages."""
    scored: list[tuple[float, int, Candidate]] = []
    for i, (groups, like) in enumerate(seeds(book, effort.seeds)):
        score, candidate = book.try_groups(groups, like)
        if candidate is not None:
            scored.append((score, i, candidate))
        if book.progress.out_of_time:
            break
    scored.sort(key=lambda item: item[:2])
    out: list[Candidate] = []
    seen: set[object] = set()
    for _, _, candidate in scored:
        shape = tuple(tuple(g.pool for g in s.groups) for s in candidate.stages)
        if shape not in seen:
            seen.add(shape)
            out.append(candidate)
        if len(out) == effort.beam:
            break
    return out


def _climb(book: Book, start: Candidate, budget: int) -> Candidate:
    """Best improvement over the neighbourhood until nothing improves or the budget is spent."""
    current, score = start, book.try_candidate(start)
    spent = 0
    while spent < budget and not book.progress.out_of_time:
        best: tuple[float, Candidate] | None = None
        for groups, like in neighbours(book.estimator, book.goal, current, _bottleneck(book, current)):
            found, candidate = book.try_groups(groups, like)
            spent += 1
            if candidate is not None and found < (best[0] if best else score) * (1 - 1e-9):
                best = (found, candidate)
            if spent >= budget:
                break
        if best is None:
            break
        score, current = best
    return current


def _bottleneck(book: Book, candidate: Candidate) -> int:
    known = book.good.get(candidate)
    estimate = known[1] if known else book.estimator.estimate(candidate)
    return estimate.bottleneck if estimate else 0


def _variants(book: Book, effort: Effort) -> None:
    """Other schedules for the best stages, then again for what got better."""
    starts = [c for c, _ in book.top(effort.beam)]
    starts += [c for _, (_, c) in sorted(book.by_stages.items())[: 2 * effort.beam] if c not in starts]
    if "interleaved" in book.goal.schedules:
        starts += [c for count, (_, c) in sorted(book.alike.items()) if count > 1]
    if not starts and book.nearest is not None:
        starts = [book.nearest[1]]
    for candidate in starts:
        groups: Groups = tuple(s.groups for s in candidate.stages)
        for variant in schedule_variants(book.estimator, book.goal, candidate):
            book.try_groups(groups, variant)
    best = book.top(1)
    if best and best[0][0].schedule != "1f1b":
        _climb(book, best[0][0], effort.steps // 2)


def _bandwidth_groups(estimator: Estimator, book: Book, effort: Effort) -> None:
    """Zorse's groups as further starting points, where cutting the bandwidth graph is cheap."""
    if sum(n.count for n in estimator.cluster.nodes) > effort.cut_nodes:
        return
    from tools.planner.search.zorse import configure_groups

    before = book.best
    configure_groups(book, 1, few=True)
    if book.best < before:
        _climb(book, book.top(1)[0][0], effort.steps)


def _published_methods(outcome: Outcome, estimator: Estimator, goal: Goal, progress: Progress, effort: Effort) -> None:
    """The searches of Poplar, Zorse and Sailor: what they find joins the outcome, so that ``auto`` is never worse.

    They leave out what certainly takes longer than the best plan so far, which makes them short except
    Sailor's on clusters of very many kinds of nodes; each ends when it has taken as long as everything before it.
    """
    from tools.planner.search.poplar import search_poplar
    from tools.planner.search.sailor import search_sailor
    from tools.planner.search.zorse import search_zorse

    for search in (search_poplar, search_zorse, search_sailor):
        now = time.process_time() - progress.started
        share = Progress(limit_s=min(progress.limit_s - now, max(2.0, now)))
        progress.text = f"the method of {search.__name__.removeprefix('search_').capitalize()}"
        more: dict[str, float] = {}
        if outcome.best is not None and goal.objective == "throughput" and search is not search_poplar:
            more["bound_s"] = outcome.best.iteration_s
        theirs = search(estimator, goal, share, **more)
        known = {found.candidate for found in outcome.found}
        outcome.found += [found for found in theirs.found if found.candidate not in known and found.runnable]
        outcome.found.sort(key=lambda f: (f.value(goal), f.candidate.world_size))
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
    """Every number of ministages, and single layers shifted between stages, for the best candidates."""
    for candidate, _ in book.top(3):
        if candidate.schedule == "ministage":
            for chunks in range(2, min(s.layers for s in candidate.stages) + 1):
                book.try_groups(tuple(s.groups for s in candidate.stages), candidate.with_(chunks=chunks))
    for candidate, _ in book.top(3):
        current, score = candidate, book.try_candidate(candidate)
        improved = True
        while improved:
            improved = False
            count = len(current.stages)
            for i in range(count):
                for j in range(count):
                    if i == j or current.stages[i].layers <= 1 or (count > 6 and abs(i - j) > 1):
                        continue
                    changed = list(current.stages)
                    changed[i] = Stage(changed[i].layers - 1, changed[i].groups)
                    changed[j] = Stage(changed[j].layers + 1, changed[j].groups)
                    shifted = current.with_(stages=tuple(changed))
                    found = book.try_candidate(shifted)
                    if found < score * (1 - 1e-9):
                        current, score, improved = shifted, found, True


def finish(book: Book, outcome: Outcome, estimator: Estimator, goal: Goal, effort: Effort, place,  # noqa: ANN001, PLR0913
           bound_s: float = inf) -> None:
    """Put the finalists into real zones, simulate them, and order them.

    Args:
        bound_s: Finalists with a replica that computes for longer are left out.
    """
    found: list[Found] = []
    left = effort.exact_operations if outcome.exact else effort.simulated_operations
    window = effort.exact_window if outcome.exact else effort.window
    best = inf
    finalists = _finalists(book, 1000 if outcome.exact else 120)
    affordable = [entry for entry in finalists if entry[2] <= left]
    for candidate, estimate, operations in affordable or sorted(finalists, key=lambda entry: entry[2])[:1]:
        if goal.value(estimate) * (1 - window) > best or max(estimate.stage_busy_s) > bound_s:
            continue
        if operations > left and found:
            continue
        real = place(candidate)
        if not real.stages or seats(estimator.cluster, real.stages) is None:
            continue
        if real != candidate:
            again = estimator.estimate(real)
            if again is None or not estimator.fits(again) or goal.violation(real, again) > 0:
                continue
            estimate = again
        left -= operations
        outcome.simulations += len(real.stages) > 1
        simulated = _simulated(estimator, real, estimate)
        if simulated is None:
            continue
        entry = Found(real, estimate, simulated)
        if _within(goal, entry):
            found.append(entry)
            best = min(best, entry.value(goal))
    outcome.found = sorted(found, key=lambda f: (f.value(goal), f.candidate.world_size))
    outcome.evaluations = book.estimator.evaluations
    if not outcome.found and book.nearest is not None:
        outcome.nearest = (place(book.nearest[1]), book.nearest[2])


def _finalists(book: Book, count: int) -> list[tuple[Candidate, Estimate, int]]:
    """The best candidates with the number of operations it takes to simulate them: none for a single stage.

    Plans that fall into equal blocks take few; the best of those come before irregular ones that
    would take most of the budget.
    """
    model = book.estimator.model
    listed = []
    for candidate, estimate in book.top(count):
        operations = 2 * len(candidate.stages) * candidate.chunks * candidate.slices * (
            model.global_batch_size // candidate.micro_batch_size) // candidate.blocks if len(candidate.stages) > 1 else 0
        listed.append((candidate, estimate, operations))
    cheap = [entry for entry in listed if entry[2] <= CHEAP_OPERATIONS]
    dear = [entry for entry in listed if entry[2] > CHEAP_OPERATIONS]
    return cheap[: count // 3] + dear + cheap[count // 3 :]


def _within(goal: Goal, found: Found) -> bool:
    """Constraints with the simulated time."""
    if goal.max_usd_per_iteration is not None and found.usd_per_iteration > goal.max_usd_per_iteration:
        return False
    return goal.min_iterations_per_s is None or found.iteration_s * goal.min_iterations_per_s <= 1


def _simulated(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float | None:
    """Simulated iteration time; None when the schedule cannot run this shape.

    Replicas of a single stage wait for nobody: the closed form is exact, and only the plan is checked.
    """
    try:
        if len(candidate.stages) == 1:
            build_plan(estimator, candidate, estimate, one_block=True)
            return estimate.iteration_s
        return simulate_block(estimator, candidate, estimate).iteration_s
    except PlannerError:
        return None
