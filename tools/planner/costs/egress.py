"""Bytes over links that have a price, and what they cost."""

from __future__ import annotations

from .candidate import Candidate, Group
from .estimates import StageTimes, rank_parameters
from .operating import OperatingPoints


def egress(estimator: OperatingPoints, candidate: Candidate, stages: list[StageTimes]) -> tuple[float, float]:
    """(bytes per iteration over links with a price, their price)."""
    moved = usd = 0.0
    if not estimator.network.has_egress:
        return moved, usd
    size = estimator.boundary_bytes_per_sequence * estimator.model.global_batch_size
    for s in range(len(stages)):
        groups = candidate.stages[s].groups
        if s + 1 < len(stages):
            nxt = candidate.stages[s + 1].groups
            shares = _pool_shares(stages[s], groups)
            for pool, share in shares.items():
                for other, weight in _pool_shares(stages[s + 1], nxt).items():
                    rate = estimator.network.usd_per_byte(pool, other) if pool != other else 0.0
                    if rate:
                        moved += 2 * size * share * weight * candidate.chunks
                        usd += 2 * size * share * weight * candidate.chunks * rate
        pools = sorted({g.pool for g in groups})
        for first, second in zip(pools, pools[1:]):
            rate = estimator.network.usd_per_byte(first, second)
            if rate:
                volume = 4 * 4.0 * rank_parameters(candidate, stages[s].units[0], s) * groups[0].tp
                moved += volume
                usd += volume * rate
    return moved, usd


def _pool_shares(stage: StageTimes, groups: tuple[Group, ...]) -> dict[int, float]:
    if "pools" in stage.memo:
        return stage.memo["pools"]
    whole = sum(g.count * k for g, k in zip(groups, stage.microbatches))
    out: dict[int, float] = {}
    for g, k in zip(groups, stage.microbatches):
        out[g.pool] = out.get(g.pool, 0.0) + g.count * k / whole
    stage.memo["pools"] = out
    return out
