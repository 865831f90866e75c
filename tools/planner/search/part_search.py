"""The search of one part of a cluster: seeds, local search, parts of it, branch and bound if small, finalists."""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from math import inf

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..costs.schedules import PLAIN
from .balance import relieved
from .bounds import Bounds
from .candidate_cache import CandidateCache, Groups
from .finish import finish
from .moves import hide_transfers, neighbours, schedule_variants, trimmed
from .outcome import PENALTY, Effort, Goal, Progress, SearchResult, effort_for
from .pools import (
    MOST_POOLS,
    Limits,
    Merged,
    all_gpus,
    expand,
    merge,
    nodes_left_out,
    parts,
    pools_left_out,
    rounded_down,
)
from .seeds import SEED_MARGIN, TP_SIZES, best_rate, even_seeds, seeds, with_split_vocabulary

# Branch and bound over all plans of a small cluster: stages in order, each with its replicas and layers.
#
# A partial plan is dropped when even perfect use of the remaining GPUs cannot beat the best known plan (with a
# margin, because finalists are ranked by the simulator).


class _GaveUp(Exception):
    """The search tree is larger than allowed."""


def stage_options(estimator: Estimator, point: Candidate, limits: Limits | None = None) -> list[tuple[Group, ...]]:
    """All multisets of replicas that one stage could have, on all GPUs or within ``limits``."""
    per_pool: list[list[tuple[Group, ...]]] = []
    quotas = limits or all_gpus(estimator)
    for pool, quota in enumerate(quotas):
        tps = [t for t in (1, 2, 4, 8) if estimator.unit(pool, t, point.micro_batch_size, point.recompute)]
        choices: list[tuple[Group, ...]] = []
        for counts in product(*(range(quota // t + 1) for t in tps)):
            if sum(n * t for n, t in zip(counts, tps)) <= quota:
                choices.append(tuple(Group(pool, t, n) for t, n in zip(tps, counts) if n))
        per_pool.append(choices or [()])
    return [tuple(g for part in choice for g in part) for choice in product(*per_pool) if any(choice)]


class _Tree:
    """Branch and bound at one operating point (batch, recompute, ZeRO stage)."""

    def __init__(self, memo: CandidateCache, point: Candidate, margin: float, nodes: int, known: float) -> None:
        self.memo, self.point, self.margin, self.nodes, self.known = memo, point, 1 + margin, nodes, known
        estimator = memo.estimator
        self.estimator = estimator
        self.total = estimator.model.global_batch_size // point.micro_batch_size
        self.options = []
        for groups in stage_options(estimator, point, memo.limits):
            units = [u for g in groups if (u := estimator.unit_of(point, g)) is not None]  # all have figures
            use = [0] * len(estimator.cluster.nodes)
            for g in groups:
                use[g.pool] += g.tp * g.count
            if sum(g.count for g in groups) <= self.total:
                rate = sum(g.count / (u.layer_f + u.layer_b) for g, u in zip(groups, units))
                self.options.append((groups, tuple(use), units, rate))
        self.options.sort(key=lambda option: -option[3])
        pools = range(len(estimator.cluster.nodes))
        self.best_rate = [best_rate(estimator, pool, point) / point.micro_batch_size for pool in pools]

    def limit(self) -> float:
        """Seconds of an iteration from which on a plan cannot be among the best."""
        return min(self.memo.best, self.known) * self.margin

    def run(self) -> None:
        self._grow([], self.memo.limits, self.estimator.model.num_layers, 0.0, 0.0)

    def _bound(self, seconds: float, used_usd_per_s: float) -> float:
        return seconds * used_usd_per_s if self.memo.goal.objective == "cost" else seconds

    def _grow(self, stages: list[Stage], left: tuple[int, ...], layers: int, before: float, price: float) -> None:
        self.nodes -= 1
        if self.nodes < 0 or self.memo.progress.out_of_time:
            raise _GaveUp
        for groups, use, units, _ in self.options:
            if any(u > n for u, n in zip(use, left)):
                continue
            rest = tuple(n - u for n, u in zip(left, use))
            cost = price + sum(self.estimator.price[p] * u for p, u in enumerate(use))
            rate_left = sum(n * r for n, r in zip(rest, self.best_rate))
            for n in range(1, layers + 1):
                rate, least = 0.0, 1e30
                for g, u in zip(groups, units):
                    seconds = u.both_s(n, not stages, n == layers)
                    rate += g.count / seconds
                    least = min(least, seconds)
                busy = before + max(self.total / rate, least)
                if self._bound(busy, cost) > self.limit():
                    break
                here = [*stages, Stage(n, groups)]
                if n == layers:
                    self.nodes -= 1
                    self.memo.try_slack(self.point.with_(stages=tuple(here)))
                elif rate_left:
                    ahead = before + least + self.total * (layers - n) / rate_left
                    if self._bound(ahead, cost) <= self.limit():
                        self._grow(here, rest, layers - n, before + least, cost)


def branch_and_bound(memo: CandidateCache, nodes: int, margin: float, known: float = inf) -> bool:
    """Search all 1F1B plans; True when the search was complete.

    Args:
        margin: Plans that are slower than the best by no more than this share are kept.
    """
    model = memo.estimator.model
    zeros = (0, 1) if model.distributed_optimizer else (0,)
    if PLAIN not in memo.goal.allowed or not memo.estimator.may_hold(memo.limits):
        return False
    try:
        for zero, recompute, batch in product(zeros, model.recompute, reversed(model.batch_sizes)):
            tree = _Tree(memo, Candidate((), batch, recompute, zero_stage=zero), margin, nodes, known)
            try:
                tree.run()
            finally:
                nodes = tree.nodes
    except _GaveUp:
        return False
    return True


CLEAR_GAIN = 0.01  # a neighbour that is better by this share is taken without looking at the others
MANY = 64  # neighbours that are looked at before a much better one is taken at once
KEPT = 16  # plans of a further part that are kept
BRIEF = 100, 12, 80
"""Starting points to look at and to evaluate on a further part, and evaluations of the local search from its best."""
PAST, PAST_OF_PART = 12, 5  # steps past the end of a local search that find nothing better, one after the other
MOST_TRIED = 8  # neighbours of which the best is such a step
MOST_LEFT_OUT = 4  # nodes that are left out one after the other
FEW_PARTS = 2  # parts to search if no plan of the whole is near the known one
MOST_EVEN, MOST_EVEN_TRIED = 600, 8
"""Starting points of equal width that are looked at, and tried, under schedules that want them."""
START_MARGIN = 1.15  # starting points that look worse than a known plan by this factor will not be better
_Sketched = tuple[float, tuple[int, int], Groups, Candidate]  # sketch, sequence number, stages, other settings
MOST_RELIEVED = 8  # plans of each schedule with full recomputation whose recomputation is reduced
POLISHED = 1.1  # plans within this factor of the best get their layers shifted one by one


@dataclass(slots=True)
class SearchContext:
    """State shared by the searches of the parts of one cluster."""

    estimator: Estimator
    goal: Goal
    progress: Progress
    asked: Effort | None = None  # the requested effort; None: as suits each part
    known: float = inf  # value of an earlier plan
    merged: Merged = field(init=False)  # the cluster with the zones of each region merged
    bounds: Bounds = field(init=False)
    whole: Limits = field(init=False)  # all GPUs
    is_near: bool = field(init=False)  # whether parts are also searched as clusters of their own (up to ``near_gpus``)
    is_small: bool = field(init=False)  # whether these include the cluster without a pool or two nodes
    first: CandidateCache | None = None  # the cache of the first search, whose sketches the others share

    def __post_init__(self) -> None:
        self.merged = merge(self.estimator)
        self.bounds = Bounds(self.merged.estimator, self.goal, of_search=True)
        self.whole = all_gpus(self.merged.estimator)
        effort, gpus = self.asked or effort_for(sum(self.whole)), sum(self.whole)
        self.is_near, self.is_small = gpus <= effort.near_gpus, gpus <= effort.small_gpus

    @property
    def has_many_pools(self) -> bool:
        """Whether the cluster is large and has too many pools to search every subset of them."""
        return not self.is_near and len(self.whole) > MOST_POOLS


def part_search(
    context: SearchContext, limits: Limits, bound: float = inf, effort: Effort | None = None
) -> SearchResult:
    """Search a part of the cluster as a cluster of its own.  Ctrl-C ends it with the best so far.

    Args:
        limits: GPUs of each (merged) pool.
        bound: Value of a known plan; worse plans are skipped.
        effort: Effort of the search; None: as suits the part.
    """
    merged, goal, progress = context.merged, context.goal, context.progress
    gpus = sum(limits)
    effort = effort or context.asked or effort_for(gpus)
    # The closed form of a small plan may be far off, so that nothing is given up for it.
    beaten = bound if gpus > effort.near_gpus or goal.objective == "cost" else inf
    memo = CandidateCache(merged.estimator, goal, progress, limits, context.first, bound=beaten, simulated=bound)
    context.first = context.first or memo
    outcome = SearchResult("auto")
    try:
        explore(memo, effort, limits)
        if gpus <= effort.exact_gpus and not merged.estimator.model.kinds:
            progress.text = "branch and bound"
            outcome.exact = branch_and_bound(memo, effort.exact_nodes, effort.exact_promising, bound)
        if effort.parts and not outcome.exact:
            _parts(memo, effort, context.bounds, limits, effort.small_gpus < gpus <= effort.near_gpus)
        _climb_by_stages(memo, effort, limits)
        _walk(memo, effort, limits, PAST, min(memo.bound, bound))
        _variants(memo, effort, limits)
        _polish(memo)
        hide_transfers(memo)
    except KeyboardInterrupt:
        outcome.interrupted = True
        effort = replace(effort, simulated_operations=1000)  # the user waits after Ctrl-C
    if bound < inf and limits != context.whole:  # what looks slower is not simulated
        effort = replace(effort, first=0)
    place = partial(expand, merged, context.estimator.cluster)
    finish(memo, outcome, context.estimator, goal, effort, place, bound=bound)
    return outcome


def explore(memo: CandidateCache, effort: Effort, limits: Limits) -> None:
    """Seeds on a part of the cluster, and local search from the best of them."""
    memo.progress.text = "seeds"
    starts = _seed(memo, effort, limits)
    memo.progress.text = "local search"
    for candidate in starts:
        _climb(memo, effort, candidate, limits)
        if memo.progress.out_of_time:
            raise KeyboardInterrupt


def _climb_by_stages(memo: CandidateCache, effort: Effort, limits: Limits) -> None:
    """Local search from the best of each number of stages: what is best may be reached from another number."""
    best = sorted(memo.by_stages.values(), key=lambda entry: entry[0])
    for score, candidate in best[: effort.counts]:
        if score < SEED_MARGIN * memo.to_beat:
            _climb(memo, effort, candidate, limits)


def _walk(memo: CandidateCache, effort: Effort, limits: Limits, most_steps: int, known: float) -> None:
    """Continue after local search: go to the best neighbour that has not been visited, even if that is worse.

    Only candidates better than all before are kept, so that they displace no other finalist.

    Args:
        most_steps: Most successive steps that find nothing better.
        known: Value of another plan; there is no walk from a much worse one.
    """
    if memo.best >= POLISHED * known:
        return
    before, found, best, steps = memo.best, set(memo.good), memo.best, 0
    current = next(iter(memo.top(1)))[0]
    visited = {current}
    while steps < most_steps and not memo.progress.out_of_time:
        tried: list[tuple[float, Candidate]] = []
        for groups, like in _promising(memo, effort, current, limits, hasty=False):
            score, candidate = memo.try_groups(groups, like)
            if candidate is not None and candidate not in visited:
                tried.append((score, candidate))
                if score < best * (1 - 1e-9) or len(tried) == MOST_TRIED:
                    break
        score, current = min(tried, key=lambda item: item[0], default=(inf, current))
        if score == inf:
            break
        visited.add(current)
        best, steps = (score, 0) if score < best * (1 - 1e-9) else (best, steps + 1)
    for candidate in [c for c, (score, _) in memo.good.items() if c not in found and score >= before]:
        del memo.good[candidate]


def _parts(memo: CandidateCache, effort: Effort, bounds: Bounds, whole: Limits, is_near: bool) -> None:
    """Explore every part of the cluster that can hold a better plan than the best so far.

    First come single pools, which take little time, then other subsets of whole pools, then parts with one node
    less or half of a pool, each in the order of their bounds.  On clusters that are not too large, all parts follow
    that a smaller cluster would search, so that one node more hardly ever makes a plan worse.
    """
    # Where the whole has no plan near the known one, parts that differ by little have none either.
    left = effort.parts if memo.best < inf or memo.bound == inf else FEW_PARTS
    smaller = replace(effort, sketches=effort.part_sketches, seeds=effort.part_seeds, steps=effort.part_steps, beam=1)
    seen = {whole}

    def order(limits: Limits) -> tuple[bool, bool, float]:
        cut = any(n and n < most for n, most in zip(limits, whole))
        return sum(map(bool, limits)) > 1, cut, bounds.value(limits)

    def is_better(limits: Limits, how: Effort) -> bool:
        """Whether the part has a better plan."""
        before = memo.best
        seen.add(limits)
        own = CandidateCache(memo.estimator, memo.goal, memo.progress, limits, memo, simulated=memo.simulated)
        explore(own, how, limits)
        _climb_by_stages(own, how, limits)
        _walk(own, how, limits, PAST_OF_PART, memo.best)
        for candidate, _ in own.top(KEPT):
            memo.try_candidate(candidate)
        return memo.best < before

    def hopeful(found: list[Limits]) -> Iterator[Limits]:
        for limits in dict.fromkeys(found):
            known = min(memo.to_beat * (1 + effort.promising), memo.simulated)
            if limits not in seen and not bounds.excludes(limits, known):
                yield limits

    better = []
    for limits in hopeful(sorted(parts(memo.estimator, whole), key=order)):
        seen.add(limits)
        before = memo.best
        explore(memo, smaller, limits)
        better += [limits] if memo.best < before else []
        left -= 1
        if not left:
            break
    if not is_near:
        return
    brief = replace(smaller, sketches=BRIEF[0], seeds=BRIEF[1], steps=BRIEF[2], counts=1)
    further = nodes_left_out(memo.estimator, whole) + rounded_down(memo.estimator, whole) + pools_left_out(whole)
    if len(whole) <= MOST_POOLS:
        further += nodes_left_out(memo.estimator, whole, 2)
    for _ in range(MOST_LEFT_OUT):
        better += [limits for limits in hopeful(further) if is_better(limits, brief)]
        if not better:
            return
        further, better = nodes_left_out(memo.estimator, better[-1]), []


def _seed(memo: CandidateCache, effort: Effort, limits: Limits) -> list[Candidate]:
    """Sketch all seeds and evaluate the best of them; returns the best candidates with different stages."""
    sketched: list[tuple[float, int, Groups, Candidate]] = []
    hope = [inf]
    for i, (groups, like) in enumerate(seeds(memo, effort.sketches, limits, hope)):
        value = memo.sketch.value(groups, like, SEED_MARGIN * min(memo.to_beat, hope[0]), memo.simulated)
        if len(groups) > 1 and len({sum([g.count for g in stage]) for stage in groups}) == 1:
            memo.even.setdefault((groups, like.micro_batch_size, like.recompute, like.zero_stage), like)
        if value < inf:
            sketched.append((value, i, groups, like))
            hope[0] = min(hope[0], value)
        if i % 64 == 0 and memo.progress.spent:
            break
    sketched.sort(key=lambda item: item[:2])
    scored: list[tuple[float, int, Candidate]] = []
    tried: dict[object, int] = {}
    for value, i, groups, like in sketched:
        kind = tuple(tuple(g.pool for g in stage) for stage in groups)
        tried[kind] = tried.get(kind, 0) + 1
        if len(scored) == effort.seeds or value > SEED_MARGIN * min(memo.to_beat, hope[0]):
            break
        if tried[kind] <= effort.alike:
            score, candidate = memo.try_groups(groups, like)
            if candidate is not None:
                scored.append((score, i, candidate))
        if memo.progress.spent:
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
        if new or (len(counts) < effort.counts and count not in counts and score < SEED_MARGIN * scored[0][0]):
            out.append(candidate)
            shapes.add(shape)
            counts.add(count)
    return out


def _climb(memo: CandidateCache, effort: Effort, start: Candidate, limits: Limits, share: int = 1) -> None:
    """Improvement over the neighbourhood until nothing improves or a share of the budget is spent."""
    current, score = start, memo.try_candidate(start)
    spent, budget, hasty = 0, effort.steps // share, effort.hasty
    while spent < budget and not memo.progress.out_of_time:
        step = current, hasty
        if step not in memo.steps:
            best, tried, whole = _better(memo, effort, current, score, limits, hasty, budget=budget - spent)
            spent += tried
            if whole:
                memo.steps[step] = best
        else:  # another climb has visited this candidate
            best = memo.steps[step]
        if best is None and not hasty:
            break
        hasty = effort.hasty and best is not None
        if best is not None:
            score, current = best


def _better(
    memo: CandidateCache, effort: Effort, current: Candidate, score: float, limits: Limits, hasty: bool, budget: int
) -> tuple[tuple[float, Candidate] | None, int, bool]:
    """A better neighbour (None: there is none), the number of evaluations, and whether the budget was enough.

    Neighbours are evaluated in the order of their sketches.  A clear improvement is taken at once, a small one
    when no neighbour with an equally good sketch is better.
    """
    best: tuple[float, Candidate] | None = None
    spent = 0
    for groups, like in _promising(memo, effort, current, limits, hasty):
        found, candidate = memo.try_groups(groups, like)
        spent += 1
        if candidate is not None and found < (best[0] if best else score) * (1 - 1e-9):
            best = (found, candidate)
        if best is not None and best[0] < score * (1 - CLEAR_GAIN):
            break
        if spent >= budget:
            return best, spent, False
    return best, spent, True


def _promising(
    memo: CandidateCache, effort: Effort, current: Candidate, limits: Limits, hasty: bool
) -> list[tuple[Groups, Candidate]]:
    """The neighbours whose sketches are not much worse than the candidate's, the best first.

    Args:
        hasty: Of many neighbours only the first are sketched, if one of them is much better.
    """
    here = memo.sketch.value(tuple(s.groups for s in current.keeping().stages), current)
    most = here * (1 + effort.near) if current in memo.good else inf
    clear = here * (1 - 3 * CLEAR_GAIN) if hasty and current in memo.good else 0.0
    known = memo.good[current][1] if current in memo.good else memo.estimator.estimate(current)
    slowest, found = known.bottleneck if known else 0, list[_Sketched]()
    near = neighbours(memo.estimator, memo.goal, current, slowest, limits, effort.spread)
    for i, (groups, like) in enumerate(near):
        value = memo.sketch.value(groups, like, most, memo.simulated)
        if value < most:
            most = min(most, _keep(found, (value, (i, 0), groups, like), effort.neighbours))
        if i >= MANY and min(value, most) < clear:
            break
    return [(groups, like) for _, _, groups, like in found]


def _keep(best: list[_Sketched], entry: _Sketched, count: int) -> float:
    """Insert an entry into the best ``count``; returns the value that the next one must stay below."""
    insort(best, entry)
    del best[count:]
    return best[-1][0] if len(best) == count else inf


def _variants(memo: CandidateCache, effort: Effort, limits: Limits) -> None:
    """Other schedules for the best stages, then again for what got better."""
    starts = [c for c, _ in memo.top(effort.beam, PLAIN.name)]
    starts += [c for _, (_, c) in sorted(memo.by_stages.items())[: 2 * effort.beam] if c not in starts]
    if any(schedule.needs_equal_widths for schedule in memo.goal.allowed):
        starts += [c for count, (_, c) in sorted(memo.alike.items()) if count > 1]
    if not starts and memo.nearest is not None:
        starts = [memo.nearest[1]]
    starts += [] if memo.good else _on_one_stage(memo, limits)
    for candidate in starts:
        groups: Groups = tuple(s.groups for s in candidate.keeping().stages)
        for variant in schedule_variants(memo.estimator, memo.goal, candidate):
            memo.try_groups(groups, variant)
    _even_seeds(memo, limits)
    # What is found with whole vocabularies does not depend on plans that split them.
    for schedule, is_split in product(memo.goal.allowed, (False, True)):
        if schedule is not PLAIN:
            for candidate, _ in memo.top(1, schedule.name, is_split):
                if memo.try_candidate(candidate) < SEED_MARGIN * memo.to_beat_under(schedule.name):
                    _climb(memo, effort, candidate, limits, share=2)


def _on_one_stage(memo: CandidateCache, limits: Limits) -> Iterator[Candidate]:
    """One stage of all GPUs, by TP size: ministages may fit where nothing else does, with sharded, offloaded state."""
    model, nodes = memo.estimator.model, memo.estimator.cluster.nodes
    for tp in TP_SIZES:
        groups = [Group(p, tp, n // tp) for p, n in enumerate(limits) if tp <= min(n, nodes[p].gpus_per_node)]
        if groups:
            stage = Stage(model.num_layers, tuple(groups))
            yield Candidate((stage,), model.batch_sizes[0], zero_stage=int(model.distributed_optimizer))


def _even_seeds(memo: CandidateCache, limits: Limits) -> None:
    """Starting points with equally many replicas on every stage, under the schedules that these suit best.

    Ministages are tried here, too: elsewhere they are variants of 1F1B candidates, whose memory limits differ.  Where
    the head is long for such stages, a split vocabulary is tried as well.
    """
    looked_at: dict[tuple[str, bool], list[_Sketched]] = {}
    most_of = {
        (s.name, is_split): min(START_MARGIN * memo.simulated, POLISHED * memo.to_beat_under(s.name))
        for s, is_split in product(memo.goal.allowed, (False, True))
    }
    known: dict[tuple[Candidate, int, int], list[Candidate]] = {}
    met = [(groups, like) for (groups, *_), like in memo.even.items()][:MOST_EVEN]
    found = with_split_vocabulary(memo.estimator, chain(even_seeds(memo, limits, MOST_EVEN), met))
    for i, (groups, like) in enumerate(found):
        kind = like, len(groups), sum([g.count for g in groups[0]])
        if kind not in known:
            known[kind] = _even_variants(memo, groups, like)
        for j, variant in enumerate(known[kind]):
            name = variant.schedule, bool(variant.rows)
            most = most_of[name]
            if memo.sketch.least(groups, variant) > min(most, memo.simulated):
                continue
            value = memo.sketch.value(groups, variant, most, memo.simulated)
            if value < inf:
                entry = value, (i, j), groups, variant
                most_of[name] = min(most, _keep(looked_at.setdefault(name, []), entry, 4 * MOST_EVEN_TRIED))
    for mine in looked_at.values():
        usable = 0
        # Some differ in a ZeRO stage only, which the schedule decides.
        for (groups, variant), value in {(groups, variant): value for value, _, groups, variant in mine}.items():
            usable += memo.try_groups(groups, variant)[0] < PENALTY * value  # otherwise it lacks memory
            if usable == MOST_EVEN_TRIED:
                break


def _even_variants(memo: CandidateCache, groups: Groups, like: Candidate) -> list[Candidate]:
    """Every schedule for stages of this number and width, as if they had equally many layers."""
    layers = memo.estimator.model.num_layers // len(groups)
    plain = like.with_(stages=tuple([Stage(layers, stage) for stage in groups]))
    schedules = [s for s in memo.goal.allowed if layers and not (like.rows and s.shards_parameters)]
    return [variant for schedule in schedules for variant in schedule.variants(memo.estimator, plain)]


def _polish(memo: CandidateCache) -> None:
    """Small changes of the best of each schedule: numbers of ministages, orders, layers, and no useless replicas."""
    for schedule in memo.goal.allowed:
        full = [c for c, _ in memo.top(len(memo.good), schedule.name) if c.recompute == "full"]
        for candidate in full[:MOST_RELIEVED]:
            memo.try_relieved(memo.try_candidate(candidate), candidate)
        for candidate, _ in memo.top(2, schedule.name):
            for refined in schedule.refined(candidate):
                memo.try_groups(tuple(s.groups for s in candidate.stages), refined)
            if not candidate.sizes and not candidate.across_replicas:
                memo.try_candidate(trimmed(memo.estimator, candidate))
        for candidate, _ in memo.top(2, schedule.name):
            if memo.try_candidate(candidate) < POLISHED * memo.to_beat_under(schedule.name):
                _shift_layers(memo, candidate)


def _shift_layers(memo: CandidateCache, current: Candidate) -> None:
    """Single layers from a stage to another as long as that makes the candidate better."""
    score, count = memo.try_candidate(current), len(current.stages)
    improved = True
    while improved:
        improved = False
        for i, j in product(range(count), repeat=2):
            if i == j or current.stages[i].layers <= 1 or (count > 6 and abs(i - j) > 1):
                continue
            shifted = relieved(memo.estimator, current.shifted(i, j))
            found = memo.try_candidate(shifted)
            if found < score * (1 - 1e-9):
                current, score, improved = shifted, found, True
