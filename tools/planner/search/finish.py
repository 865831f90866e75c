"""The end of every search: finalists are put into real zones, simulated event by event, and ordered by time."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain, combinations, islice, pairwise, product
from math import inf
from typing import NamedTuple

from megatron_het.schedule.generators.listing import ORDERS

from ..costs.build import build_plan, seats
from ..costs.candidate import MEETING, Candidate, Group
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import PLAIN, SCHEDULES, is_ordered, schedule_of
from ..costs.simulation import MOST_COUPLED, block_s, is_built, operations_of, simulate_parts, work_of
from ..errors import PlannerError
from .balance import balance, relieved, stage_load
from .candidate_cache import CandidateCache, Sketch, in_regions, there
from .moves import deeper, least_s, neighbours
from .outcome import Effort, Found, Goal, Progress, SearchResult
from .pools import all_gpus

# Small changes of the best plans, judged by the simulator, which also separates plans with equal closed forms.


LEAST_TRIES = 4  # a plan is not refined unless at least this many changes can be simulated
NEARLY_AS_GOOD = 1.03  # changes whose closed form is worse by more than this factor are not simulated
MOST_REGROUPED = 64  # plans with moved replicas whose closed form is computed, the best by their sketch

Simulate = Callable[[Candidate, Estimate, float], Found | None]  # simulates a candidate, given the best value so far


def refine(
    estimator: Estimator, goal: Goal, found: Found, operations: int, simulate: Simulate, regroups: bool
) -> Found:
    """The plan with stages in other places and layers shifted, as long as that makes it better.

    Args:
        operations: Compute operations that may be simulated.
        regroups: Replicas may move between stages too.
    """
    each = work_of(estimator, found.candidate)
    if len(found.candidate.stages) < 3 or each * LEAST_TRIES > operations:
        return found
    current, improved = found, True
    seen, way, known = {found.candidate}, list[Candidate](), estimator.known_refined.setdefault(goal, {})
    sketch = sketch_of(estimator, goal) if regroups else None
    while improved and current.candidate not in known:
        improved = False
        way.append(current.candidate)
        for candidate, estimate in _hopeful(estimator, goal, current, seen, sketch):
            if seats(estimator.cluster, candidate.stages, candidate.cp) is None:
                continue
            operations -= work_of(estimator, candidate)
            if operations < 0:
                break
            # A plan's price goes with its time.
            if least_s(estimator, candidate, estimate) / estimate.iteration_s * goal.value(estimate) > current.value(
                goal
            ):
                continue
            tried = simulate(candidate, estimate, current.value(goal))
            if tried is not None and tried.value(goal) < current.value(goal) * (1 - 1e-6):
                current, improved = tried, True
                break
    current = known.get(current.candidate, current)  # continue where another refinement has arrived
    known.update(dict.fromkeys(way, current))
    return current


def sketch_of(estimator: Estimator, goal: Goal) -> Sketch:
    """Returns the :class:`Sketch` that all refinements of an estimator share."""
    if goal.objective not in estimator.known_sketches:
        estimator.known_sketches[goal.objective] = Sketch(estimator, goal)
    return estimator.known_sketches[goal.objective]


def _hopeful(
    estimator: Estimator, goal: Goal, current: Found, seen: set[Candidate], sketch: Sketch | None
) -> list[tuple[Candidate, Estimate]]:
    """New changes whose closed form is not much worse, the best first."""
    found: list[tuple[float, int, Candidate, Estimate]] = []
    most = NEARLY_AS_GOOD * goal.value(current.estimate)
    changes = _changes(current.candidate, _may_compute(estimator, goal, current, most))
    regrouped = _regrouped(estimator, goal, current, sketch) if sketch is not None else ()
    for candidate in chain(changes, regrouped):
        if candidate in seen:
            continue
        seen.add(candidate)
        estimate = goal.usable(estimator, candidate, most_s=goal.seconds(estimator, candidate, most))
        if estimate is not None and goal.value(estimate) <= most:
            found.append((goal.value(estimate), len(found), candidate, estimate))
    return [(candidate, estimate) for _, _, candidate, estimate in sorted(found, key=lambda item: item[:2])]


def _regrouped(estimator: Estimator, goal: Goal, current: Found, sketch: Sketch) -> Iterator[Candidate]:
    """Candidates with replicas moved, added and removed, and layers balanced anew: the best by their sketches."""
    limits, like = all_gpus(estimator), current.candidate.keeping()
    most = NEARLY_AS_GOOD * sketch.value(tuple(stage.groups for stage in like.stages), like)
    looked_at = []
    for i, (groups, changed) in enumerate(neighbours(estimator, goal, like, current.estimate.bottleneck, limits)):
        value = sketch.value(groups, changed, most)
        if value <= most and there(estimator, limits, groups) and in_regions(estimator, goal, groups):
            looked_at.append((value, i, groups, changed))
    for _, _, groups, changed in sorted(looked_at, key=lambda item: item[:2])[:MOST_REGROUPED]:
        depths = changed.depths if len(groups) == len(changed.stages) else ()
        balanced = balance(estimator, groups, changed.with_(depths=depths, shares=None))
        if balanced is not None and balanced.stages:
            yield relieved(estimator, balanced)


MayCompute = Callable[[int, int, tuple[Group, ...]], bool]
"""Whether the closed form of a plan with so many layers and these replicas on a stage may be below a limit."""


def _may_compute(estimator: Estimator, goal: Goal, current: Found, most: float) -> MayCompute:
    """Returns a quick test before the closed form: whether a stage computes all microbatches within ``most``.

    The plan has the GPUs of ``current``, so that its price is proportional to its time.
    """
    c, estimate = current.candidate, current.estimate
    usd = estimate.gpu_usd_per_iteration if goal.objective == "cost" else estimate.iteration_s
    # Layers of several kinds have no common time.
    limit_s = inf if estimator.model.kinds or c.sizes or not usd else most / usd * estimate.iteration_s
    each_s = limit_s * (1 + 1e-9) * c.micro_batch_size / estimator.model.global_batch_size
    ends = [tuple(map(float, c.ends_of(s))) for s in range(len(c.stages))]

    @cache
    def may_compute(s: int, layers: int, groups: tuple[Group, ...]) -> bool:
        load = stage_load(estimator, groups, c, *ends[s])
        return load is None or load.time(layers) <= each_s

    return may_compute


def _changes(candidate: Candidate, may_compute: MayCompute) -> Iterator[Candidate]:
    """Candidates with two stages swapped or one layer moved, in which no stage computes too long."""
    stages = candidate.stages
    for i, j in combinations(range(len(stages)), 2):
        if stages[i] != stages[j] and may_compute(i, *stages[j]) and may_compute(j, *stages[i]):
            changed = list(stages)
            changed[i], changed[j] = stages[j], stages[i]
            yield candidate.with_(stages=tuple(changed))
    for i, j in combinations(range(len(stages)), 2):
        for a, b in ((i, j), (j, i)):
            if stages[a].layers > candidate.chunks and may_compute(b, stages[b].layers + 1, stages[b].groups):
                yield candidate.shifted(a, b)


class Class(NamedTuple):
    """Finalists whose simulated times are about as far from their closed forms."""

    schedule: str
    divides: bool  # whether the narrowest stage divides all others
    pools: tuple[tuple[int, ...], ...]  # of every stage
    is_split: bool

    @property
    def changes_of_kind(self) -> int:
        """How often neighbouring stages have different kinds of GPUs."""
        return sum([a != b for a, b in pairwise(self.pools)])


class Waiting(NamedTuple):
    """A finalist that has not been simulated."""

    candidate: Candidate
    estimate: Estimate
    operations: int  # compute operations to simulate


COMPILED = 8  # operations of 1F1B, whose loops are compiled, that take the time of one of another schedule
BUILT = 4  # weight of an operation of a program that is built: it takes longer, but its simulation tells more
ALIKE = 0.001  # finalists within this share count as equal; the one whose kinds of GPU alternate least comes first
MOST_OPERATIONS = 200_000
"""Larger plans are judged by the closed form alone: simulating one would take longer than the search."""
MOST_CONFIRMED = 150_000  # plans with more operations keep the simulated time of one of their equal pipelines
HOPEFUL_SHARE = 0.85  # a schedule's first finalists are simulated if this share of their closed form is below the best
UNKNOWN = 0.97  # assumed ratio of simulation to closed form in a class without simulations
MET = 4  # simulations of a schedule after which a new class is assumed to be no better than the best known class
UNEVEN = 1.1
"""``UNKNOWN`` for large plans whose stages divide microbatches differently, not under 1F1B."""
ORDER_WINDOW = 0.03  # other orders are tried for plans within this share of the best (they gain less)
SMALL_OPERATIONS = 5_000
"""Plans of at most this many compute operations are simulated even if they are unlikely to be the best, and are all
tried with more microbatches in flight if that may make them the best."""
REFINED, MOST_REFINED = 1.06, 6
"""Plans within this factor of the best are refined by small changes; at most so many 1F1B plans."""
MOST_REFINED_OF_FEW = 3  # refined plans of every other schedule on small clusters; elsewhere only the best one
MOST_FREED = 4  # plans of a schedule whose layers are balanced without the memory limit, some of them recomputed
DEEPENED = 2  # plans of a schedule with depths whose depths are chosen, however large the plans are


def finish(
    memo: CandidateCache,
    outcome: SearchResult,
    estimator: Estimator,
    goal: Goal,
    effort: Effort,
    place: Callable[[Candidate], Candidate],
    bound: float = inf,
) -> None:
    """Simulate the finalists of every schedule, and order them.

    Schedules come one after the other, each with whole and with split vocabularies, and are judged by their own
    simulations.  A finalist is skipped if it certainly takes longer than a plan of an earlier schedule, or
    can hardly come near it; earlier plans have no other influence.  So the result of a schedule hardly depends on
    the other schedules.

    Args:
        place: Puts a candidate into the real zones.
        bound: Value of a known plan: finalists that can hardly be better are skipped.
    """
    each = effort.exact_operations if outcome.exact else effort.simulated_operations
    most = MOST_REFINED_OF_FEW if sum(memo.limits) <= effort.small_gpus else 1
    queues = _queues(memo, 1000 if outcome.exact else 120)
    found: list[Found] = []
    memo.progress.finishing = True
    try:
        for schedule, is_split in product(SCHEDULES, (False, True)):
            mine = {c: q for c, q in queues.items() if (c.schedule, c.is_split) == (schedule, is_split)}
            known, own = min([bound, *[entry.value(goal) for entry in found]]), list[Found]()
            for entry in _finalists(memo, outcome, estimator, effort, mine, place, bound=bound, known=known):
                if is_within(goal, entry):
                    own.append(entry)
                    found.append(entry)
                    memo.progress.kept.append(entry)
            if own and not outcome.interrupted:
                better = _improved(estimator, goal, own, each, memo.progress, effort, known=known, most=most)
                found += better
                memo.progress.kept += better
    except KeyboardInterrupt:
        outcome.interrupted = True
        for candidate, estimate in memo.finalists(1) if not found else ():  # better one by its closed form than none
            placed = _placed(estimator, goal, place(candidate), candidate, estimate)
            memo.progress.kept += [] if placed is None else [Found(*placed)]
        found = found or memo.progress.kept[:]
    memo.progress.finishing = False
    outcome.found, outcome.evaluations = confirm(estimator, goal, found, bound), memo.estimator.evaluations
    if not outcome.found and memo.nearest is not None:
        outcome.nearest = (place(memo.nearest[1]), memo.nearest[2])


def of_method(
    name: str,
    memo: CandidateCache,
    estimator: Estimator,
    goal: Goal,
    effort: Effort,
    *,
    bound_s: float,
    look: Callable[[], None],
    place: Callable[[Candidate], Candidate] = lambda candidate: candidate,
) -> SearchResult:
    """The outcome of a published method; Ctrl-C ends it with the best so far.

    Args:
        look: Fills the cache.
    """
    started, outcome = time.process_time(), SearchResult(name)
    try:
        look()
    except KeyboardInterrupt:
        outcome.interrupted = True
    finish(memo, outcome, estimator, goal, replace(effort, regroups=False), place, bound=bound_s)
    outcome.cpu_s = time.process_time() - started
    return outcome


def _finalists(
    memo: CandidateCache,
    outcome: SearchResult,
    estimator: Estimator,
    effort: Effort,
    queues: dict[Class, list[Waiting]],
    place: Callable[[Candidate], Candidate],
    *,
    bound: float,
    known: float,
) -> Iterator[Found]:
    """The finalists of one schedule, simulated as long as they are expected to be as good as the best.

    The closed form is more optimistic for stages that mix GPUs or differ in width.  So finalists are grouped into
    classes with the same kinds of GPUs in every stage and widths that divide each other or not.  The first finalists
    are always simulated.  After that a finalist is expected to take its closed form times the lowest ratio of
    simulation to closed form in its class.

    Args:
        bound: See :func:`finish`.
        known: ``bound``, or the value of the best finalist of another schedule if that is lower.
    """
    goal, is_small = memo.goal, outcome.exact or sum(memo.limits) <= effort.small_gpus
    margin = effort.exact_promising if is_small else effort.promising
    left = effort.exact_operations if is_small else effort.simulated_operations
    most = 2 * left  # limit for the first one, which is simulated whatever has been spent
    ratios, best = _Ratios(effort.first), bound
    while queues and not (best < inf and memo.progress.spent):
        hopes = {c: goal.value(queue[0].estimate) * ratios.of(c, queue[0].operations) for c, queue in queues.items()}
        nearly = min(hopes.values()) * (1 + ALIKE)
        own = min([c for c in hopes if hopes[c] <= nearly], key=lambda c: (c.changes_of_kind, hopes[c]))
        # A finalist that is worse than the refined plans of other schedules is not worth refining either.
        if hopes[own] * (1 - margin) > min(best, REFINED * known):
            del queues[own]
            continue
        candidate, estimate, operations = queues[own].pop(0)
        if not queues[own]:
            del queues[own]
        is_allowed = _taken(candidate, operations, 1) <= (left if ratios.met else most)
        least = least_s(memo.estimator, candidate, estimate) / estimate.iteration_s * goal.value(estimate)
        if least > known or (min(best, known) < inf and not is_allowed):
            continue
        placed = _placed(estimator, goal, place(candidate), candidate, estimate)
        if placed is None:
            continue
        outcome.simulations += len(placed[0].stages) > 1
        tries = 0 if operations > MOST_OPERATIONS else max(1, left // max(1, operations))
        to_beat = min(best, known)
        entry = _simulated(estimator, goal, *placed, to_beat, tries) if tries else Found(*placed, confirmed=True)
        left -= _taken(placed[0], operations, tries)
        if entry is not None:
            ratios.add(own, entry.iteration_s / entry.estimate.iteration_s)
            if is_within(goal, entry):
                best = min(best, entry.value(goal))
            yield entry


def _taken(candidate: Candidate, operations: int, tries: int) -> int:
    """Operations of all simulations of a finalist: one per order, at most ``tries``."""
    times = min(tries, len(ORDERS) if is_ordered(candidate) else 1)
    # Programs of ministages are built, too; their refinements (``work_of``) count plain operations all the same.
    if is_built(candidate) or schedule_of(candidate).shards_parameters:
        return operations * times * BUILT
    return operations * times // (COMPILED if candidate.schedule == PLAIN.name else 1)


def _improved(
    estimator: Estimator,
    goal: Goal,
    found: list[Found],
    operations: int,
    progress: Progress,
    effort: Effort,
    known: float,
    most: int,
) -> list[Found]:
    """Improved plans of one schedule: more microbatches in flight across slow links, and small changes of the best.

    Args:
        found: The plans of the schedule; they are sorted in place.
        most: Number of plans to refine under other schedules than 1F1B.
    """
    found.sort(key=lambda f: f.value(goal))
    best, better = min(known, found[0].value(goal)), list[Found]()
    deepened = 0
    for entry in found:
        if progress.spent:
            return better
        if not schedule_of(entry.candidate).has_depths or set(entry.candidate.depths) - {MEETING}:
            continue
        is_large = work_of(estimator, entry.candidate) > SMALL_OPERATIONS
        # A plan's price goes with its time.
        hope = least_s(estimator, entry.candidate, entry.estimate) / entry.iteration_s * entry.value(goal)
        if hope >= best or (is_large and deepened >= DEEPENED):
            continue
        deep = deeper(estimator, goal, entry, briefly=deepened >= DEEPENED)
        deepened += 1
        if deep is not entry:
            better.append(deep)
            best = min(best, deep.value(goal))
    simulate = partial(_simulated, estimator, goal, tries=1)
    for entry in sorted(found + better, key=lambda f: f.value(goal))[:MOST_FREED]:
        if progress.spent or work_of(estimator, entry.candidate) > MOST_OPERATIONS:
            continue
        for tried in freed(estimator, goal, entry, simulate, best):
            if tried.value(goal) < best:
                better.append(tried)
                best = tried.value(goal)
    is_plain = found[0].candidate.schedule == PLAIN.name  # whose loops are compiled
    starts: dict[object, Found] = {}
    for entry in sorted(found + better, key=lambda f: f.value(goal)):
        starts.setdefault(pools_of(entry.candidate), entry)
    for i, entry in enumerate(list(starts.values())[: MOST_REFINED if is_plain else most]):
        if entry.value(goal) > REFINED * best or progress.spent:
            break
        allowed = operations * (effort.refined if is_plain and not entry.candidate.rows else 1) // (i + 1)
        refined = refine(estimator, goal, entry, allowed, simulate, effort.regroups)
        if refined is not entry and refined not in better:
            better.append(refined)
            best = min(best, refined.value(goal))
    return better


def freed(estimator: Estimator, goal: Goal, found: Found, simulate: Simulate, best: float) -> Iterator[Found]:
    """Plans balanced without the memory limit, in which stages that lack memory recompute a few layers.

    Args:
        found: A plan without recomputation.
    """
    candidate, groups = found.candidate, tuple([s.groups for s in found.candidate.stages])
    free = balance(estimator, groups, candidate, fits=False) if candidate.recompute == "none" else None
    if free is None or free.stages == candidate.stages or "full" not in estimator.model.recompute:
        return
    changed: Candidate | None = free.with_(recompute="full")
    tried = set[Candidate]()
    while changed is not None and changed not in tried:
        tried.add(changed)
        partly = relieved(estimator, changed, goal.seconds(estimator, candidate, best))
        estimate = goal.usable(estimator, partly) if any(g.kept for s in partly.stages for g in s.groups) else None
        if estimate is None or partly in tried:
            return
        tried.add(partly)
        simulated = simulate(partly, estimate, best)
        if simulated is not None:
            yield deeper(estimator, goal, simulated)
        changed = balance(estimator, groups, partly)


class _Ratios:
    """Lowest ratios of simulation to closed form of a schedule, by class.

    Args:
        first: Number of first finalists that are judged by ``HOPEFUL_SHARE`` instead of a ratio.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.met = 0
        self.lowest: dict[Class, float] = {}

    def of(self, own: Class, operations: int) -> float:
        """The ratio of simulation to closed form to expect at best.

        Args:
            operations: Size of the finalist; large ones get no optimistic ratio.
        """
        schedule = SCHEDULES[own.schedule]
        if operations > SMALL_OPERATIONS and not (own.divides or schedule.has_slack or schedule.shards_parameters):
            return self.lowest.get(own, UNEVEN)
        if self.met < self.first:
            return HOPEFUL_SHARE
        others = min(self.lowest.values()) if self.met >= MET else 1.0
        return self.lowest.get(own, UNKNOWN * max(1.0, others))

    def add(self, own: Class, ratio: float) -> None:
        """Record the ratio of one simulation."""
        self.met += 1
        self.lowest[own] = min(self.lowest.get(own, inf), ratio)


def _queues(memo: CandidateCache, count: int) -> dict[Class, list[Waiting]]:
    """The best candidates of each class."""
    out: dict[Class, list[Waiting]] = {}
    for candidate, estimate in memo.finalists(count):
        divides = candidate.blocks == min(sum(g.count for g in s.groups) for s in candidate.stages)
        own = Class(candidate.schedule, divides, pools_of(candidate), bool(candidate.rows))
        out.setdefault(own, []).append(Waiting(candidate, estimate, operations_of(memo.estimator, candidate)))
    return out


def pools_of(candidate: Candidate) -> tuple[tuple[int, ...], ...]:
    """The pools of every stage."""
    return tuple(tuple(dict.fromkeys(p for g in s.groups for p in g.pools)) for s in candidate.stages)


def waits_for_nobody(candidate: Candidate) -> bool:
    """Whether the closed form is exact: one stage, whose replicas gather no parameters from each other."""
    return len(candidate.stages) == 1 and not schedule_of(candidate).shards_parameters


def _placed(
    estimator: Estimator, goal: Goal, real: Candidate, candidate: Candidate, estimate: Estimate
) -> tuple[Candidate, Estimate] | None:
    """The candidate in real zones with its estimate; None where it does not fit there."""
    if not real.stages or seats(estimator.cluster, real.stages, real.cp) is None:
        return None
    if real == candidate:
        return real, estimate
    again = goal.usable(estimator, real)
    return None if again is None else (real, again)


def _simulated(
    estimator: Estimator, goal: Goal, candidate: Candidate, estimate: Estimate, best: float, tries: int
) -> Found | None:
    """The candidate simulated in its own order, and in other orders where these may help; None when it cannot run.

    Replicas of a single stage do not wait for each other: the closed form is exact, and only the plan is checked.

    Args:
        tries: Most orders to simulate.
    """
    if waits_for_nobody(candidate):
        try:
            build_plan(estimator, candidate, estimate, one_block=True)
        except PlannerError:
            return None
        return Found(candidate, estimate, estimate.iteration_s)
    found: Found | None = None
    others = [order for order in ORDERS if is_ordered(candidate) and order != candidate.order]
    for order in islice((candidate.order, *others), tries):
        tried = candidate.with_(order=order)
        entry = simulated(estimator, tried, estimate)
        if entry is None:
            continue
        if tried.blocks == 1 and not is_ordered(tried):  # the simulated program is the whole plan
            entry = replace(entry, confirmed=True)
        if found is None or entry.iteration_s < found.iteration_s * (1 - 1e-6):
            found = entry
        if found.value(goal) > best * (1 + ORDER_WINDOW):
            return found
    return found


def simulated(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> Found | None:
    """The candidate with its simulated time; None where the runtime refuses it."""
    try:
        return Found(candidate, estimate, block_s(estimator, candidate, estimate))
    except PlannerError:
        return None


def is_within(goal: Goal, found: Found) -> bool:
    """Whether a plan meets the constraints with its simulated time."""
    if goal.max_usd_per_iteration is not None and found.usd_per_iteration > goal.max_usd_per_iteration:
        return False
    return goal.min_iterations_per_s is None or found.iteration_s * goal.min_iterations_per_s <= 1


def confirm(estimator: Estimator, goal: Goal, found: list[Found], bound: float = inf) -> list[Found]:
    """The finalists in order, the best of them simulated as the whole plan that will be written.

    Finalists are first simulated as one of their equal pipelines.  The other pipelines may be slower: their ranks are
    on other nodes, or they have one microbatch more.

    Args:
        bound: Value of a known plan: only better finalists are confirmed.
    """
    waiting = sorted(found, key=lambda f: (f.value(goal), f.candidate.world_size))
    done: list[Found] = []
    best = bound
    while waiting and waiting[0].value(goal) < best:
        entry = whole(estimator, waiting.pop(0))
        if entry is not None and is_within(goal, entry):
            done.append(entry)
            best = min(best, entry.value(goal))
    done.sort(key=lambda f: (f.value(goal), f.candidate.world_size))
    return done + waiting


def whole(estimator: Estimator, found: Found) -> Found | None:
    """Returns the plan with the simulated time of its whole program; None when it cannot run."""
    if found.confirmed:
        return found
    c = found.candidate
    operations = 2 * c.chunks * estimator.model.global_batch_size // c.micro_batch_size  # of all replicas of one stage
    if len(c.stages) == 1 and (waits_for_nobody(c) or operations > MOST_COUPLED):
        return replace(found, confirmed=True)
    if operations_of(estimator, found.candidate) * found.candidate.blocks > MOST_CONFIRMED and found.simulated_s:
        return replace(found, confirmed=True)

    def simulate_it() -> float:
        plan = build_plan(estimator, found.candidate, found.estimate)
        seated = seats(estimator.cluster, found.candidate.stages, found.candidate.cp)
        return simulate_parts(estimator, found.candidate, found.estimate, plan, seated or [])

    try:
        seconds = estimator.simulated_s(found.candidate, True, simulate_it)
    except PlannerError:
        return None
    return replace(found, simulated_s=seconds, confirmed=True)
