"""Small changes of a candidate: the neighbourhood of a local search, and depths across slow links for finalists."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, permutations

from megatron_het.schedule.generators.one_f_one_b import FASTER, choose_depths

from ..costs.candidate import MEETING, Candidate, Stage, allocate, plain_group
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import PLAIN, schedule_of
from ..costs.simulation import block_s, work_of
from ..costs.stages import stage_tails
from ..errors import PlannerError
from .balance import hiding, passes_s, relieved
from .candidate_cache import CandidateCache, Groups
from .outcome import Found, Goal
from .pools import Limits, power_below
from .seeds import TP_SIZES, has_long_head, most_expert_parallel, sizes_over_replicas

# A lower bound on the time of a candidate, before it is simulated.


def least_s(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> float:
    """Least seconds of an iteration of these stages, in any order of their operations.

    Every stage computes, after one microbatch (or its part, with chunks) has come through the earlier stages, and
    before it has gone back.  Slices differ, so that their first one is not counted.
    """
    before = after = least = 0.0
    tails = stage_tails(estimator, candidate)
    cut = 0.0 if candidate.slices > 1 else 1 / candidate.chunks
    rows = zip(candidate.stages, estimate.stage_busy_s, tails, strict=True)
    for s, (stage, busy_s, tail_s) in enumerate(rows):
        least = max(least, before + busy_s + max(after, tail_s))
        units = [u for g in stage.groups if (u := estimator.unit_of(candidate, g, s)) is not None]
        before += cut * stage.layers * min(u.layer_f for u in units)
        after += cut * stage.layers * min(u.layer_b for u in units)
    return least


MOST_OPERATIONS = 20_000
"""Plans with more compute operations get only a few simulated trials."""


def deeper(estimator: Estimator, goal: Goal, found: Found, briefly: bool = False) -> Found:
    """The finalist with the depths that make it fastest and fit into memory.

    Trials are simulated; of large plans only two: the closed form's depths, and those that hide all transfers.

    Args:
        found: A simulated plan, in its best order.
        briefly: Try nothing else if hiding every transfer does not help, or if stages meet already (``MEETING``).
    """
    candidate = found.candidate
    if len(candidate.stages) < 2 or not schedule_of(candidate).has_depths or set(candidate.depths) - {MEETING}:
        return found
    if found.iteration_s * (1 - FASTER) <= least_s(estimator, candidate, found.estimate):
        return found
    plain = candidate.depths or (1,) * (len(candidate.stages) - 1)
    tried = {plain: found}

    def simulated(depths: tuple[int, ...]) -> float | None:
        if depths not in tried:
            fitting = _fitting(estimator, goal, candidate, depths)
            if fitting is None:
                return None
            other, estimate = fitting
            try:
                seconds = block_s(estimator, other, estimate)
            except PlannerError:
                return None
            tried[depths] = replace(found, candidate=other, estimate=estimate, simulated_s=seconds)
        return tried[depths].iteration_s

    def estimated(depths: tuple[int, ...]) -> float | None:
        fitting = (candidate, found.estimate) if depths == plain else _fitting(estimator, goal, candidate, depths)
        return None if fitting is None else fitting[1].iteration_s

    passes, transfers = passes_s(estimator, candidate), estimator.transfers_of(candidate)[0]
    if briefly or candidate.depths:
        hidden_s = simulated(hidden) if max(hidden := hiding(passes, transfers)) > MEETING else None
        if hidden_s is None or hidden_s >= found.iteration_s:
            return found
    if work_of(estimator, candidate) <= MOST_OPERATIONS:
        chosen = tried.get(choose_depths(passes, transfers, simulated), found)
        return min(found, chosen, key=lambda f: f.iteration_s)
    for depths in dict.fromkeys((choose_depths(passes, transfers, estimated), hiding(passes, transfers))):
        if depths and depths != plain:
            simulated(depths)
    best = min(tried.values(), key=lambda f: f.iteration_s)
    return best if best.iteration_s < found.iteration_s * (1 - FASTER) else found


def hide_transfers(memo: CandidateCache) -> None:
    """Add candidates with depths that hide every transfer, where the closed form is then faster."""
    estimator = memo.estimator
    best: dict[tuple[int, bool], tuple[float, Candidate]] = {}
    for candidate, (score, _) in memo.good.items():
        if len(candidate.stages) < 2 or not schedule_of(candidate).has_depths or candidate.depths:
            continue
        kind = len(candidate.stages), len({sum([g.count for g in s.groups]) for s in candidate.stages}) == 1
        if kind not in best or score < best[kind][0]:
            best[kind] = score, candidate
    for score, candidate in best.values():
        depths = hiding(passes_s(estimator, candidate), estimator.transfers_of(candidate)[0])
        fitting = _fitting(estimator, memo.goal, candidate, depths) if max(depths) > 1 else None
        if fitting is not None and memo.goal.value(fitting[1]) < score * (1 - FASTER):
            memo.try_candidate(fitting[0])


def _fitting(
    estimator: Estimator, goal: Goal, candidate: Candidate, depths: tuple[int, ...]
) -> tuple[Candidate, Estimate] | None:
    """The candidate with these depths, with more recomputation if memory requires it; None where it does not fit."""
    other = relieved(estimator, candidate.with_(depths=depths))
    estimate = goal.usable(estimator, other)
    return None if estimate is None else (other, estimate)


def trimmed(estimator: Estimator, candidate: Candidate) -> Candidate:
    """Remove replicas that save no time: the slowest replica of their stage has equally much work without them."""
    stages = []
    total = estimator.model.global_batch_size // candidate.micro_batch_size
    for s, stage in enumerate(candidate.stages):
        units = [estimator.unit_of(candidate, g, s) for g in stage.groups]
        times = [u.both_s(stage.layers, *candidate.ends_of(s)) for u in units if u is not None]
        counts = [g.count for g in stage.groups]
        whole = allocate(times, counts, total)
        for i in range(len(counts)) if whole else ():
            while counts[i] > 1:
                counts[i] -= 1
                fewer = allocate(times, counts, total)
                if whole is None or fewer is None or fewer[0] > whole[0] * (1 + 1e-9):
                    counts[i] += 1
                    break
        groups = tuple([g._replace(count=n) for g, n in zip(stage.groups, counts)])
        stages.append(Stage(stage.layers, groups))
    return candidate.with_(stages=tuple(stages), shares=None)


Stages = list[dict[tuple[int, int], int]]


def _close(stages: Stages, before: Stages, known: Groups) -> Groups | None:
    """Groups of changed stages; unchanged stages reuse the groups in ``known``."""
    out = []
    for i, stage in enumerate(stages):
        if i < len(before) and (stage is before[i] or stage == before[i]):
            out.append(known[i])
            continue
        groups = tuple([plain_group(p, t, n) for (p, t), n in sorted(stage.items()) if n > 0])
        if not groups:
            return None
        out.append(groups)
    return tuple(out)


def _copied(stages: Stages, *changing: int) -> Stages:
    """The stages, some of which may be changed."""
    return [dict(stage) if i in changing else stage for i, stage in enumerate(stages)]


def _amounts(count: int) -> set[int]:
    """Numbers of replicas to move at once: a few, a share, all, and the number that leaves a power of two."""
    return {n for n in (1, 2, count // 8, count // 2, count - power_below(count), count) if 1 <= n <= count}


def neighbours(
    estimator: Estimator, goal: Goal, candidate: Candidate, bottleneck: int, limits: Limits, spread: bool = False
) -> Iterator[tuple[Groups, Candidate]]:
    """Changed candidates (stages and everything else); layers are balanced anew by the caller.

    Args:
        spread: Include candidates with a pool redistributed over its stages, which changes many stages at once.
    """
    candidate = candidate.keeping()
    stages: Stages = [{(g.pool, g.tp): g.count for g in s.groups} for s in candidate.stages]
    groups = tuple(s.groups for s in candidate.stages)
    for like in _settings(estimator, goal, candidate):
        yield groups, like
    spare = dict(enumerate(limits))
    for pool, used in candidate.gpus().items():
        spare[pool] -= used
    changes = (
        _resized(estimator, stages, spare, bottleneck),
        _moved(stages, bottleneck),
        _retyped(estimator, stages),
        _replaced(stages, spare),
        _reordered(stages),
        _recut(stages, spare, estimator),
        _respread(estimator, stages, limits) if spread else (),
        _equalised(stages, spare),
        _without(stages),
    )
    for changed in chain.from_iterable(changes):
        closed = _close(changed, stages, groups)
        if closed is not None:
            yield closed, candidate


def _settings(estimator: Estimator, goal: Goal, c: Candidate) -> Iterator[Candidate]:
    sizes = estimator.model.batch_sizes
    at = sizes.index(c.micro_batch_size)
    for i in (at - 1, at + 1):
        if 0 <= i < len(sizes):
            yield c.with_(micro_batch_size=sizes[i])
    for recompute in estimator.model.recompute:
        if recompute != c.recompute:
            yield c.with_(recompute=recompute)
    if estimator.model.distributed_optimizer:
        yield c.with_(zero_stage=1 - c.zero_stage)
    most = min(most_expert_parallel(estimator), max(g.tp for s in c.stages for g in s.groups))
    for ep in (n for n in TP_SIZES if n <= most and (n, False) != c.experts_over):
        yield c.with_(ep=ep, across_replicas=False)
    if schedule_of(c).shards_parameters:  # what is gathered changes so much that climbs from there end early
        return
    yield from over_replicas(estimator, c)
    if len(c.stages) > 1:
        if c.rows:
            yield c.with_(rows=())
        elif has_long_head(estimator, c.stages[-1].groups[0], c):
            yield c.with_(rows=((1.0, 1.0),))


def over_replicas(estimator: Estimator, c: Candidate) -> Iterator[Candidate]:
    """Yields the candidate with a layer's experts divided over the replicas of a stage."""
    if max(g.count for s in c.stages for g in s.groups) > 1 and not c.sizes:
        found = {c.over_replicas(ep): 0 for ep in sizes_over_replicas(estimator)}
        yield from (changed for changed in found if changed != c)


def schedule_variants(estimator: Estimator, goal: Goal, c: Candidate) -> Iterator[Candidate]:
    """Yields the same stages under other schedules; under a parameter window without a split vocabulary."""
    plain = c.with_(schedule=PLAIN.name, chunks=1, slices=1, offload=False)
    for schedule in goal.allowed:
        yield from schedule.variants(estimator, plain) if not (c.rows and schedule.shards_parameters) else ()


def _without(stages: Stages) -> Iterator[Stages]:
    """Yields stages without one pool, or without one kind of its replicas."""
    keys = {key for stage in stages for key in stage}
    for left_out in ({*keys} | {(pool, 0) for pool, _ in keys}) if len(keys) > 1 else ():
        kept = [
            {k: n for k, n in s.items() if k != left_out and not (left_out[1] == 0 and k[0] == left_out[0])}
            for s in stages
        ]
        if any(kept):
            yield [s for s in kept if s]


def _moved(stages: Stages, bottleneck: int) -> Iterator[Stages]:
    for i, j in permutations(range(len(stages)), 2):
        for key, count in stages[i].items() if len(stages) <= 4 or bottleneck in (i, j) else ():
            for n in _amounts(count):
                changed = _copied(stages, i, j)
                changed[i][key] -= n
                changed[j][key] = changed[j].get(key, 0) + n
                yield changed


def _resized(estimator: Estimator, stages: Stages, spare: dict[int, int], bottleneck: int) -> Iterator[Stages]:
    """Yields stages with fewer replicas, and with more: some or all unused ones, or all but those of a node."""
    for i, stage in enumerate(stages):
        for key, count in stage.items():
            for n in _amounts(count):
                changed = _copied(stages, i)
                changed[i][key] -= n
                yield changed
    known = {key for stage in stages for key in stage}
    tps = {t for _, t in known}
    for pool, free in spare.items():
        less = free - estimator.cluster.nodes[pool].gpus_per_node
        for tp in tps:
            for n in _amounts(free // tp) | ({less // tp} if less >= tp else set()):
                for i in range(len(stages)) if len(stages) <= 6 else (bottleneck,):
                    changed = _copied(stages, i)
                    changed[i][pool, tp] = changed[i].get((pool, tp), 0) + n
                    yield changed


def _equalised(stages: Stages, spare: dict[int, int]) -> Iterator[Stages]:
    """Yields stages with one number of replicas: in all stages, and in the stages of each pool."""
    widths = [sum(s.values()) for s in stages]
    if len(stages) < 2 or any(len([n for n in s.values() if n]) != 1 for s in stages):
        return
    keys = [next(k for k, n in s.items() if n) for s in stages]
    for width in sorted({min(widths), sum(widths) // len(widths), 1 << (min(widths).bit_length() - 1)}):
        yield [{k: width} for k in keys]
    mean: dict[tuple[int, int], list[int]] = {}
    for k, w in zip(keys, widths):
        mean.setdefault(k, []).append(w)
    if len(mean) > 1:
        least = {k: min(ws) for k, ws in mean.items()}
        yield [{k: least[k]} for k in keys]
        narrow = min(least.values())
        yield [{k: least[k] // narrow * narrow} for k in keys]
        yield [{k: sum(mean[k]) // len(mean[k]) // narrow * narrow or narrow} for k in keys]


def _retyped(estimator: Estimator, stages: Stages) -> Iterator[Stages]:
    keys = {key for stage in stages for key in stage}
    for pool, tp in keys:
        for other in (tp * 2, tp // 2):
            if other < 1 or other > estimator.cluster.nodes[pool].gpus_per_node:
                continue
            everywhere = [dict(s) for s in stages]
            possible = True
            for i, stage in enumerate(stages):
                count = stage.get((pool, tp), 0)
                if not count:
                    continue
                new = count * tp // other
                changed = _copied(stages, i)
                for target in (changed, everywhere):
                    target[i].pop((pool, tp), None)
                    if new:
                        target[i][pool, other] = target[i].get((pool, other), 0) + new
                possible = possible and new > 0
                if new:
                    yield changed
                if count > 1 and other > tp:
                    pair = _copied(stages, i)
                    pair[i][pool, tp] -= other // tp
                    pair[i][pool, other] = pair[i].get((pool, other), 0) + 1
                    yield pair
            if possible:
                yield everywhere


def _replaced(stages: Stages, spare: dict[int, int]) -> Iterator[Stages]:
    """Yields stages in which unused GPUs of another pool replace the replicas of one kind."""
    for i, stage in enumerate(stages):
        for (pool, tp), count in stage.items():
            for other, free in spare.items():
                n = min(count, free // tp)
                if other != pool and n:
                    changed = _copied(stages, i)
                    del changed[i][pool, tp]
                    changed[i][other, tp] = changed[i].get((other, tp), 0) + n
                    yield changed


def _reordered(stages: Stages) -> Iterator[Stages]:
    for i in range(len(stages) - 1):
        if stages[i] != stages[i + 1]:
            yield [*stages[:i], stages[i + 1], stages[i], *stages[i + 2 :]]
    if len(stages) > 2:
        yield stages[::-1]


def _respread(estimator: Estimator, stages: Stages, limits: Limits) -> Iterator[Stages]:
    """Yields stages of equal width, equally many or one more or less, in place of all stages of one pool."""
    own: dict[int, list[int]] = {}
    for i, stage in enumerate(stages):
        pools = {pool for pool, _ in stage}
        if len(pools) == 1:
            own.setdefault(pools.pop(), []).append(i)
    for pool, at in own.items():
        node = estimator.cluster.nodes[pool].gpus_per_node
        others = [(i, stage) for i, stage in enumerate(stages) if i not in at]
        before, after = [s for i, s in others if i < at[0]], [s for i, s in others if i > at[0]]
        elsewhere = sum([n * t for _, stage in others for (p, t), n in stage.items() if p == pool])
        for tp in sorted({t for i in at for _, t in stages[i]}):
            units = (limits[pool] - elsewhere) // node * (node // tp)
            for count in (len(at) - 1, len(at), len(at) + 1):
                if 0 < count <= units:
                    yield [*before, *[{(pool, tp): units // count} for _ in range(count)], *after]


def _recut(stages: Stages, spare: dict[int, int], estimator: Estimator) -> Iterator[Stages]:
    for i in range(len(stages) - 1):
        joined = dict(stages[i])
        for key, count in stages[i + 1].items():
            joined[key] = joined.get(key, 0) + count
        yield [*stages[:i], joined, *stages[i + 2 :]]
    for i, stage in enumerate(stages):
        if sum(stage.values()) > 1:
            first = {k: -(-n // 2) for k, n in stage.items()}
            second = {k: n // 2 for k, n in stage.items()}
            yield [*stages[:i], first, second, *stages[i + 1 :]]
        if len(stage) > 1:
            for key in stage:
                rest = {k: n for k, n in stage.items() if k != key}
                yield [*stages[:i], {key: stage[key]}, rest, *stages[i + 1 :]]
                yield [*stages[:i], rest, {key: stage[key]}, *stages[i + 1 :]]
    for pool, free in spare.items():
        for tp in {t for s in stages for p, t in s} | {1}:
            count = free // tp
            if count:
                for n in {1, count}:
                    yield [{(pool, tp): n}, *stages]
                    yield [*stages, {(pool, tp): n}]
