"""Planners of Zorse (splitting the bandwidth graph) and Sailor (dynamic programming over stages and resources)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from math import inf

from ..costs.build import chunk_layers
from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..costs.schedules import MINISTAGES
from .candidate_cache import CandidateCache, Groups
from .finish import of_method
from .outcome import NORMAL, Effort, Goal, Progress, SearchResult
from .pools import Limits, all_gpus, expand, merge

# Zorse (section 4.3): SPLIT the bandwidth graph into GPU groups, then place layers and count ministages.


Part = dict[tuple[int, int], int]
"""Nodes of a group: ``(pool, parts of the node that are in the group) -> number of such nodes``."""

MAX_GROUPS = 32
MOST_CLASSES = 8  # up to this many classes of nodes, all cuts are enumerated


def whole_cluster(estimator: Estimator, parts: int, limits: Limits | None = None) -> Part:
    """All nodes, each in ``parts`` equal parts: the vertices of the bandwidth graph."""
    out: Part = {}
    for p, (node, most) in enumerate(zip(estimator.cluster.nodes, limits or all_gpus(estimator), strict=True)):
        nodes = min(node.count, -(-most // node.gpus_per_node))
        if nodes:
            out[p, _pieces(estimator, p, parts)] = nodes
    return out


def _pieces(estimator: Estimator, pool: int, parts: int) -> int:
    """Number of equal parts into which the nodes of a pool are cut: at most ``parts``."""
    size = estimator.cluster.nodes[pool].gpus_per_node
    return max(n for n in range(1, parts + 1) if size % n == 0)


def minimum_cut(estimator: Estimator, part: Part) -> tuple[float, Part, Part]:
    """A minimum 2-cut of a group's bandwidth graph: its weight and both sides.

    Parts of a node are twins (equal bandwidth to everything else), and so are equal nodes of a pool.  The
    weight of a cut is concave in the number of twins on one side, so that twins stay together, or a single
    one of them is cut off alone.  The other cuts are between classes of twins (Stoer and Wagner).
    """
    network = estimator.network

    def weight(a: tuple[int, int], b: tuple[int, int]) -> float:
        return a[1] * b[1] * network.rate(a[0], b[0], 8)

    options: list[tuple[float, Part, Part]] = []
    for kind, count in part.items():
        outside = sum((n - (other == kind)) * weight(kind, other) for other, n in part.items())
        pool, size = kind
        if count > 1 or len(part) > 1:
            options.append((outside, {kind: 1}, _less(part, kind, size)))
        if size > 1:
            options.append((outside / size + (size - 1) * network.intra[pool], {(pool, 1): 1}, _less(part, kind, 1)))
    kinds = list(part)
    between = {(a, b): part[a] * part[b] * weight(a, b) for a, b in combinations(kinds, 2)}
    if len(kinds) > MOST_CLASSES:
        import networkx as nx  # of this method only

        graph = nx.Graph()
        graph.add_weighted_edges_from((a, b, between[a, b]) for a, b in between)
        sides = [set(nx.stoer_wagner(graph)[1][0])]
    else:  # enumerate the sides without the first class, because importing networkx takes longer
        sides = [set(side) for n in range(1, len(kinds)) for side in combinations(kinds[1:], n)]
    for side in sides:
        value = sum(between[pair] for pair in between if len(side.intersection(pair)) == 1)
        first, second = ({kind: n for kind, n in part.items() if (kind in side) == inside} for inside in (False, True))
        options.append((value, first, second))
    return min(options, key=lambda option: option[0])


def _less(part: Part, kind: tuple[int, int], size: int) -> Part:
    """The group without ``size`` parts of one node of this kind."""
    out = dict(part)
    out[kind] -= 1
    rest = (kind[0], kind[1] - size)
    if rest[1]:
        out[rest] = out.get(rest, 0) + 1
    return {k: n for k, n in out.items() if n}


def split(estimator: Estimator, parts: int, most: int, limits: Limits | None = None) -> Iterator[list[Part]]:
    """SPLIT (Saran and Vazirani): remove the lightest minimum 2-cut until there are ``most`` groups.

    Args:
        parts: Equal parts of a node.

    Yields:
        The partitions into 1, 2, ..., ``most`` groups; each is within ``2 - 2/k`` of the minimum k-cut.
    """
    groups = [whole_cluster(estimator, parts, limits)]
    cuts = {}
    yield list(groups)
    while len(groups) < most:
        best: tuple[float, int, Part, Part] | None = None
        for i, part in enumerate(groups):
            if sum(n * size for (_, size), n in part.items()) < 2:
                continue
            key = tuple(sorted(part.items()))
            if key not in cuts:
                cuts[key] = minimum_cut(estimator, part)
            weight, first, second = cuts[key]
            if best is None or weight < best[0]:
                best = (weight, i, first, second)
        if best is None:
            return
        _, i, first, second = best
        groups = [*groups[:i], first, second, *groups[i + 1 :]]
        yield list(groups)


def _groups(estimator: Estimator, part: Part, parts: int) -> tuple[Group, ...]:
    counts: dict[int, int] = {}
    for (pool, size), nodes in part.items():
        each = estimator.cluster.nodes[pool].gpus_per_node // _pieces(estimator, pool, parts)
        counts[pool] = counts.get(pool, 0) + nodes * size * each
    return tuple(Group(pool, 1, n) for pool, n in sorted(counts.items()))


def _inner_bandwidth(estimator: Estimator, part: Part) -> float:
    """The slowest link inside a group."""
    pools = sorted({pool for pool, _ in part})
    if sum(part.values()) == 1:
        return estimator.network.intra[pools[0]]
    return min(estimator.network.rate(a, b, 8) for a in pools for b in pools)


def search_zorse(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> SearchResult:
    """Zorse's planner: all numbers of groups, batch sizes and ministages; layers in proportion to the groups' speed.

    Args:
        bound_s: Plans that certainly take longer are skipped.
    """
    memo = CandidateCache(estimator, goal, progress or Progress())
    nodes = sum(n.count for n in estimator.cluster.nodes)

    def look() -> None:
        for parts in (1, 2, 4):
            if nodes * parts > 4 * MAX_GROUPS and parts > 1:
                break
            memo.progress.text = f"cutting the bandwidth graph, {parts} part(s) per node"
            configure_groups(memo, parts, bound=bound_s)
            if memo.progress.out_of_time:
                raise KeyboardInterrupt

    return of_method("zorse", memo, estimator, goal, effort, bound_s=bound_s, look=look)


def configure_groups(memo: CandidateCache, parts: int, bound: float = inf) -> None:
    """Phase 1 for every number of groups, then phase 2 for each."""
    estimator = memo.estimator
    nodes = sum(whole_cluster(estimator, 1, memo.limits).values())
    most = min(MAX_GROUPS, nodes * parts, estimator.model.num_layers)
    for partition in split(estimator, parts, most, memo.limits):
        order = sorted(partition, key=lambda part: -_inner_bandwidth(estimator, part))
        _configure(memo, tuple(_groups(estimator, part, parts) for part in order), bound)
        if memo.progress.spent:
            return


def _configure(memo: CandidateCache, groups: Groups, bound: float) -> None:
    """Phase 2: every batch size and number of ministages, with and without offloading."""
    model = memo.estimator.model
    zero = 1 if model.distributed_optimizer else 0
    for batch, recompute in product(model.batch_sizes, model.recompute):
        plain = Candidate((), batch, recompute, zero_stage=zero)
        if len(groups) > model.num_layers or memo.sketch.least(groups, plain) > bound:
            continue
        memo.try_groups(groups, plain)
        if not zero or MINISTAGES not in memo.goal.allowed:
            continue
        for chunks, offload in product(range(2, model.num_layers // len(groups) + 1), (False, True)):
            _, candidate = memo.try_groups(groups, MINISTAGES.of(plain, chunks, offload))
            if candidate is not None and min(s.layers for s in candidate.stages) < chunks:
                return


# Sailor (section 4.2): the same data parallelism everywhere; dynamic programming over stages and resources.

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
PARTS = 4  # a stage's replicas are dealt to GPU types in quarters (the paper enumerates all combinations)


def search_sailor(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> SearchResult:
    """Sailor's planner: H1 TP in nodes, H2 smallest TP that fits, H3/H4 order of D with early stop, H5/H6 regions.

    Args:
        bound_s: Branches whose iterations are certainly longer are skipped.
    """
    merged, model = merge(estimator), estimator.model
    memo = CandidateCache(merged.estimator, replace(goal, keep_data_parallel_in_region=True), progress or Progress())

    def look() -> None:
        counts = [stages for stages in STAGES if stages <= model.num_layers]
        for stages, batch, recompute in product(counts, model.batch_sizes, model.recompute):
            memo.progress.text = f"{stages} stage(s), micro batch {batch}"
            _degrees(memo, stages, Candidate((), batch, recompute, even=True), bound_s)
            if memo.progress.out_of_time:
                raise KeyboardInterrupt

    place = partial(expand, merged, estimator.cluster)
    return of_method("sailor", memo, estimator, goal, effort, bound_s=bound_s, look=look, place=place)


def _degrees(memo: CandidateCache, stages: int, like: Candidate, bound_s: float) -> None:
    """Data-parallel degrees in decreasing order until throughput stops rising (H3), or the reverse for cost (H4)."""
    estimator = memo.estimator
    total = estimator.model.global_batch_size // like.micro_batch_size
    layers = chunk_layers(estimator.model.num_layers, stages)
    tps = [smallest_tp(estimator, stages, s, layers[s], like) for s in range(stages)]
    units = sum(
        max((n.quota // tps[s][p] for s in range(stages) if p in tps[s]), default=0)
        for p, n in enumerate(estimator.cluster.nodes)
    )
    degrees = [d for d in range(1, total + 1) if total % d == 0 and d * stages <= units]
    best, misses = inf, 0
    for degree in degrees if memo.goal.objective == "cost" else reversed(degrees):
        if bound_s < inf and total / degree * _straggler_s(estimator, layers, tps, degree, like) > bound_s:
            continue
        found = _solve(memo, layers, tps, degree, like, bound_s)
        if found is None:
            continue
        score = memo.try_candidate(found)
        if score < best:
            best, misses = score, 0
        else:
            misses += 1
            if misses == 2:
                return


def _straggler_s(
    estimator: Estimator, layers: tuple[int, ...], tps: list[dict[int, int]], degree: int, like: Candidate
) -> float:
    """Lower bound on the seconds of a microbatch on the slowest replica: the fastest pools fill up first."""
    fastest: list[tuple[float, int]] = []
    for pool, node in enumerate(estimator.cluster.nodes):
        kinds = [
            (layers[s] * (u.layer_f + u.layer_b), tp[pool])
            for s, tp in enumerate(tps)
            if pool in tp and (u := estimator.unit(pool, tp[pool], like.micro_batch_size, like.recompute))
        ]
        if kinds:
            fastest.append((min(t for t, _ in kinds), node.quota // min(tp for _, tp in kinds)))
    wanted = degree * len(layers)
    for seconds, replicas in sorted(fastest):
        wanted -= replicas
        if wanted <= 0:
            return seconds
    return inf


def smallest_tp(estimator: Estimator, stages: int, s: int, layers: int, like: Candidate) -> dict[int, int]:
    """Per pool, the smallest TP with which this stage fits a GPU's memory (H2)."""
    out = {}
    for pool, node in enumerate(estimator.cluster.nodes):
        for tp in (1, 2, 4, 8):
            unit = estimator.unit(pool, tp, like.micro_batch_size, like.recompute)
            if unit is None or tp > node.gpus_per_node:
                continue
            count = layers * unit.layer_parameters
            held = min(stages - s, 1 << 20)
            kept = held * layers * unit.layer_bytes
            if s == 0:
                count, kept = count + unit.embedding_parameters, kept + held * unit.embedding_bytes
            if s == stages - 1:
                count, kept = count + unit.head_parameters, kept + unit.head_bytes
            need = count * estimator.state_per_parameter + kept + unit.workspace_bytes + unit.reserved_bytes
            if need <= estimator.memory_margin * unit.capacity_bytes:
                out[pool] = tp
                break
    return out


def _combinations(degree: int, pools: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ways to divide ``degree`` replicas over at most two pools, in quarters: ((pool, replicas), ...)."""
    for p in pools:
        yield ((p, degree),)
    for p, q in combinations(pools, 2):
        for k in range(1, PARTS):
            n = degree * k // PARTS
            if 0 < n < degree:
                yield ((p, n), (q, degree - n))


Offer = tuple[float, float, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""Least value, seconds of the stage, replicas by pool, and GPUs by pool."""


def _offers_of(
    memo: CandidateCache, layers: tuple[int, ...], tps: list[dict[int, int]], dp: int, like: Candidate, bound_s: float
) -> Callable[[int], list[Offer]]:
    """Returns a function: the resources that a stage may get if all GPUs are free, the least value first.

    The value is a lower bound for this stage to the last, as if these did not compete for GPUs.

    Args:
        tps: Per stage: TP by pool.
    """
    estimator, last = memo.estimator, len(layers) - 1
    nodes, region = estimator.cluster.nodes, estimator.network.region
    total = estimator.model.global_batch_size // like.micro_batch_size // dp
    seconds: list[dict[int, float]] = []
    for s, tp in enumerate(tps):
        units = {p: estimator.unit(p, tp[p], like.micro_batch_size, like.recompute) for p in tp}
        seconds.append({p: u.both_s(layers[s], s == 0, s == last) for p, u in units.items() if u is not None})

    @cache
    def offers(s: int) -> list[Offer]:
        out: list[Offer] = []
        later = [min(of.values(), default=inf) for of in seconds[s + 1 :]]
        slowest, rest = max(later, default=0.0), sum(later)
        for name in dict.fromkeys(region):
            pools = [p for p, pass_s in seconds[s].items() if region[p] == name and pass_s <= bound_s / total]
            for combination in _combinations(dp, pools):
                needs = tuple([(pool, n * tps[s][pool]) for pool, n in combination])
                if any(n > nodes[pool].quota for pool, n in needs):
                    continue
                mine = max([seconds[s][pool] for pool, _ in combination])
                least = (total - 1) * max(mine, slowest) + mine + rest
                if least <= bound_s:
                    out.append((least, mine, combination, needs))
        return sorted(out, key=lambda offer: offer[0])

    return offers


def _solve(
    memo: CandidateCache, layers: tuple[int, ...], tps: list[dict[int, int]], dp: int, like: Candidate, bound_s: float
) -> Candidate | None:
    """Listing 1: the straggler time plus the stages' sum, minimal over the resources given to each stage."""
    estimator = memo.estimator
    total = estimator.model.global_batch_size // like.micro_batch_size // dp
    offers = _offers_of(memo, layers, tps, dp, like, bound_s)
    last = len(layers) - 1

    @cache
    def best(
        s: int, free: tuple[int, ...]
    ) -> tuple[float, float, float, tuple[tuple[tuple[int, int], ...], ...]] | None:
        """(value, straggler, sum, resources per stage) of stages s to the last."""
        if s > last:
            return 0.0, 0.0, 0.0, ()
        if memo.progress.out_of_time:
            raise KeyboardInterrupt
        found = None
        for least, mine, combination, needs in offers(s):
            if found is not None and least >= found[0]:
                break
            rest = list(free)
            for pool, n in needs:
                rest[pool] -= n
            if min(rest) < 0:
                continue
            after = best(s + 1, tuple(rest))
            if after is None:
                continue
            straggler, whole = max(mine, after[1]), mine + after[2]
            value = (total - 1) * straggler + whole
            if found is None or value < found[0]:
                found = (value, straggler, whole, (combination, *after[3]))
        return found

    solved = best(0, tuple(n.quota for n in estimator.cluster.nodes))
    if solved is None:
        return None
    stages = tuple(
        Stage(layers[s], tuple(Group(p, tps[s][p], n) for p, n in sorted(combination)))
        for s, combination in enumerate(solved[3])
    )
    return like.with_(stages=stages)
