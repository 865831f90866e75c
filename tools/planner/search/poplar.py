"""Poplar's planner: no pipeline, uneven batches over ZeRO data parallelism."""

from collections.abc import Iterable
from math import inf

from megatron_het.auto_batch.allocation import Curve, accumulated

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..costs.operating import pass_s
from ..costs.schedules import MINISTAGES
from ..costs.stages import tail_s
from .candidate_cache import CandidateCache
from .finish import of_method
from .outcome import NORMAL, Effort, Goal, Progress, SearchResult

# Microbatches of different sizes for a plan of one stage: Poplar's curves and algorithm 2 on predicted times.


BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Microbatch sizes whose times are computed; other times are interpolated, as between measured ones."""


def can_differ(estimator: Estimator, candidate: Candidate) -> bool:
    """Whether a candidate's microbatches may differ in size.

    Poplar's allocation is for replicas that synchronise once per iteration.  A model file that names the sizes leaves
    no choice, and the balancing loss of experts counts the tokens of a microbatch.
    """
    model, wide = estimator.model, sum(g.count for s in candidate.stages for g in s.groups)
    plain = len(candidate.stages) == 1 and candidate.schedule == "1f1b" and candidate.zero_stage < 2
    return plain and not model.micro_batch_sizes and model.experts is None and wide <= model.global_batch_size


def unequal(estimator: Estimator, candidate: Candidate) -> Candidate | None:
    """The candidate with the microbatch sizes that Poplar's allocation gives each replica.

    Every group of replicas has a curve up to the largest microbatch that fits its memory.

    Args:
        candidate: A candidate that ``can_differ``; its micro batch size does not matter.

    Returns:
        A candidate with equal microbatches if the allocation is even; None if a group lacks figures or memory.
    """
    groups, curves = candidate.stages[0].groups, _curves(estimator, candidate)
    if curves is None:
        return None
    passes = accumulated([c for g, c in zip(groups, curves) for _ in range(g.count)], estimator.model.global_batch_size)
    if len({n for own in passes for n in own}) == 1:
        return candidate.with_(micro_batch_size=passes[0][0])
    rows = iter(tuple(own) for own in passes)
    sizes = tuple(tuple(next(rows) for _ in range(g.count)) for g in groups)
    return candidate.with_(micro_batch_size=max(n for own in passes for n in own), sizes=sizes)


def _curves(estimator: Estimator, candidate: Candidate) -> list[Curve] | None:
    """The curve of each group; None where one sequence does not fit, or has no figures."""
    groups, most = candidate.stages[0].groups, estimator.model.global_batch_size
    points: list[dict[int, float]] = [{} for _ in groups]
    for size in (n for n in BATCH_SIZES if n <= most):
        smaller = sum(n < size for n in BATCH_SIZES)
        fitting = _fitting(estimator, candidate, size, [i for i, own in enumerate(points) if len(own) == smaller])
        for i in fitting:
            points[i][size] = pass_s(estimator, candidate, groups[i], size)
        if not fitting:
            break
    if not all(points):
        return None
    for i, own in enumerate(points):  # between the largest that fits and the next in the list
        low = max(own)
        high = min((n for n in BATCH_SIZES if n > low), default=low + 1) - 1
        while low < high:
            middle = (low + high + 1) // 2
            fits = middle <= most and _fitting(estimator, candidate, middle, [i])
            low, high = (middle, high) if fits else (low, middle - 1)
        own[low] = pass_s(estimator, candidate, groups[i], low)
    return [Curve.of(own) for own in points]


def _fitting(estimator: Estimator, candidate: Candidate, size: int, wanted: list[int]) -> list[int]:
    """Returns the wanted groups that have figures and memory for a pass of this size."""
    stage, found = candidate.stages[0], []
    for i in wanted:
        one = tuple(((size if j == i else 1,),) * g.count for j, g in enumerate(stage.groups))
        estimate = estimator.estimate(candidate.with_(micro_batch_size=size, sizes=one))
        if estimate is not None:
            m = estimate.memory[i]
            if m.total_bytes <= estimator.memory_margin * m.capacity_bytes:
                found.append(i)
    return found


def _fits(estimator: Estimator, pool: int, zero: int, batch: int, recompute: str) -> bool:
    """Whether the GPUs of a pool hold the model and one micro batch at this ZeRO stage."""
    if estimator.unit(pool, 1, batch, recompute) is None:
        return False
    everywhere = widest(estimator, range(len(estimator.cluster.nodes)), batch, recompute)
    found = estimator.estimate(
        Candidate((Stage(estimator.model.num_layers, everywhere),), batch, recompute, zero_stage=zero)
    )
    if found is None:
        return False
    mine = [m for m in found.memory if m.group.pool == pool]
    return all(m.total_bytes <= estimator.memory_margin * m.capacity_bytes for m in mine)


def _layer_s(estimator: Estimator, pool: int, tp: int, batch: int, recompute: str) -> float:
    unit = estimator.unit(pool, tp, batch, recompute)
    return unit.layer_f + unit.layer_b if unit else inf


def widest(estimator: Estimator, pools: Iterable[int], batch: int, recompute: str, tp: int = 1) -> tuple[Group, ...]:
    """All replicas of these pools, or the fastest of them if there are fewer microbatches than replicas."""

    left, counts = estimator.model.global_batch_size // batch, {}
    for pool in sorted(pools, key=lambda pool: _layer_s(estimator, pool, tp, batch, recompute)):
        counts[pool] = min(left, estimator.cluster.nodes[pool].quota // tp)
        left -= counts[pool]
    return tuple(Group(pool, tp, n) for pool, n in sorted(counts.items()) if n)


def _try_unequal(memo: CandidateCache, pools: Iterable[int], recompute: str, zero: int, bound_s: float) -> None:
    """Try Poplar's unequal microbatches on all pools, and without the slowest ones.

    Candidates that certainly take longer than ``bound_s`` are skipped.
    """
    estimator = memo.estimator
    whole = widest(estimator, pools, 1, recompute)
    fastest = sorted(whole, key=lambda group: _layer_s(estimator, group.pool, 1, 1, recompute))
    for count in range(len(fastest), 0, -1):
        stage = Stage(estimator.model.num_layers, tuple(sorted(fastest[:count])))
        base = Candidate((stage,), 1, recompute, zero_stage=zero)
        if _least_s(estimator, base) > bound_s:
            continue
        candidate = unequal(estimator, base) if can_differ(estimator, base) else None
        if candidate is not None:
            memo.try_candidate(candidate)


def _least_s(estimator: Estimator, candidate: Candidate) -> float:
    """Least seconds: all layers of all sequences at every GPU's best microbatch size, then the gradient reduction."""
    stage, model, rate = candidate.stages[0], estimator.model, 0.0
    for g in stage.groups:
        best = [(b, estimator.unit(g.pool, g.tp, b, candidate.recompute)) for b in BATCH_SIZES]
        rate += g.count * max((b / (u.layer_f + u.layer_b) for b, u in best if u is not None), default=0.0)
    units = [estimator.unit_of(candidate, g) for g in stage.groups]
    there = [u for u in units if u is not None]
    if not rate or len(there) < len(units):
        return inf
    return model.global_batch_size * stage.layers / rate + sum(tail_s(estimator, candidate, there, 0))


def search_poplar(
    estimator: Estimator, goal: Goal, progress: Progress | None = None, effort: Effort = NORMAL, bound_s: float = inf
) -> SearchResult:
    """Poplar's planner: ZeRO-0, and the next stage whenever one sample does not fit; batches by measured speed.

    With ZeRO-0 and 1 every GPU runs microbatches of its own size, and a smaller last one (``unequal``); equal
    microbatches of every size are tried, too.  ZeRO-2 and 3 are run by the parameter
    window (schedule ``ministage`` on one stage, all its chunk counts): parameters and gradients are sharded, and
    gathered and reduced once per ministage instead of once per microbatch.  Only where ministages are not allowed,
    the outcome holds plain ZeRO-2 and 3, which ``Found.runnable`` marks as not for this runtime.

    Args:
        bound_s: Time of a known plan; slower ones are skipped.
    """
    memo = CandidateCache(estimator, goal, progress or Progress())
    nodes, last = estimator.cluster.nodes, 3 if estimator.model.distributed_optimizer else 0
    plain: list[Candidate] = []

    def look() -> None:
        for recompute in estimator.model.recompute:
            for zero in range(last + 1):
                memo.progress.text = f"ZeRO-{zero}"
                smallest = estimator.model.batch_sizes[0]
                usable = [p for p in range(len(nodes)) if _fits(estimator, p, zero, smallest, recompute)]
                if len(usable) < len(nodes) and zero < last:
                    continue
                # If one sample fits nowhere, all GPUs are tried, so that the caller can name the missing memory.
                for batch in estimator.model.batch_sizes:
                    groups = widest(estimator, usable or range(len(nodes)), batch, recompute)
                    if not groups:
                        continue
                    stage = Stage(estimator.model.num_layers, groups)
                    candidate = Candidate((stage,), batch, recompute, zero_stage=zero)
                    if zero < 2:
                        memo.try_candidate(candidate)
                        continue
                    plain.append(candidate)
                    for chunks in range(2, estimator.model.num_layers + 1):
                        memo.try_candidate(MINISTAGES.of(candidate, chunks))
                _try_unequal(memo, usable or range(len(nodes)), recompute, zero, bound_s)
                break
        if not memo.good:
            for candidate in plain:
                memo.try_candidate(candidate)

    return of_method("poplar", memo, estimator, goal, effort, bound_s=bound_s, look=look)
