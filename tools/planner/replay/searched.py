"""Iteration times of pools: the best plan that the planner's search finds for the nodes that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from megatron_het.elastic.worth import grows_s

from ..costs.estimate import Estimator
from ..costs.estimates import Estimate
from ..inputs.cluster import Cluster, NodeGroup
from ..report.tables import describe
from ..search.limit import cpu_limit
from ..search.methods import search
from ..search.outcome import Goal, Progress
from .trace import Pool


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Holds what was found for a pool.

    Attributes:
        pool: Its nodes.
        iteration_s: Of the best plan; None where none fits.
        plan: In one line.
        grows_s: Seconds of a change to it that grow with state, links and groups.
    """

    pool: Pool
    iteration_s: float | None
    plan: str = ""
    grows_s: float = 0.0


def search_pools(
    estimator: Estimator, goal: Goal, method: str, pools: Sequence[Pool], limit_s: float
) -> dict[Pool, PoolPlan]:
    """A plan for every pool; one that is found for a part of a pool is one for the pool.

    Args:
        estimator: Of the whole cluster.
        goal: What is searched.
        method: See ``plan --search``.
        pools: Nodes of every group of the cluster file.
        limit_s: CPU seconds of all searches together.

    Raises:
        PlannerError: A search found nothing in its time.
    """
    found: dict[Pool, PoolPlan] = {}
    for pool in sorted(set(pools), key=sum):
        best = _search_pool(estimator, goal, method, pool, limit_s / len(set(pools)))
        for smaller in found.values():
            fits = smaller.iteration_s is not None and _is_part(smaller.pool, pool)
            if fits and (smaller.iteration_s or 0.0) < (best.iteration_s or inf):
                best = replace(smaller, pool=pool)
        found[pool] = best
    return found


def _search_pool(estimator: Estimator, goal: Goal, method: str, pool: Pool, limit_s: float) -> PoolPlan:
    cluster = limited(estimator.cluster, pool)
    if cluster is None:
        return PoolPlan(pool, None)
    part = Estimator(cluster, estimator.model, estimator.costs, estimator.runtime, estimator.memory_margin)
    progress = Progress(limit_s=limit_s)
    with cpu_limit(progress):
        best = search(method, part, goal, progress).best
    if best is None or not best.runnable:
        return PoolPlan(pool, None)
    return PoolPlan(pool, best.iteration_s, describe(part, best.candidate), _grows_s(cluster, best.estimate))


def _grows_s(cluster: Cluster, best: Estimate) -> float:
    """The ranks of a node share its network."""
    state_bytes = max(m.parameter_bytes + m.optimizer_bytes for m in best.memory)
    share_bytes_per_s = min(node.network_bytes_per_s / node.gpus_per_node for node in cluster.nodes)
    return grows_s(state_bytes, share_bytes_per_s, 2 + 2 * max(m.group.count for m in best.memory))


def _is_part(small: Pool, large: Pool) -> bool:
    return all(a <= b for a, b in zip(small, large, strict=True))


def limited(cluster: Cluster, pool: Pool) -> Cluster | None:
    """The cluster with the nodes of a pool; None where there is none."""
    nodes: list[NodeGroup] = []
    for group, count in zip(cluster.nodes, pool, strict=True):
        if count:
            nodes.append(group.model_copy(update={"count": count, "hosts": group.hosts[:count]}))
    if not any(node.quota for node in nodes):
        return None
    places = {name for node in nodes for name in (node.zone, node.where)}
    links = tuple(link for link in cluster.links if all(end in places for end in link.between))
    return cluster.model_copy(update={"nodes": tuple(nodes), "links": links})
