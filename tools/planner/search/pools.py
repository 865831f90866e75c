"""Parts of a cluster that are searched on their own."""

from __future__ import annotations

from itertools import combinations, product

from ..costs.estimate import Estimator

Limits = tuple[int, ...]
"""GPUs that may be used of each pool."""
MOST_POOLS = 4
"""With more pools not every choice of them is a part."""


def all_gpus(estimator: Estimator) -> Limits:
    """Everything within the quotas."""
    return tuple(node.quota for node in estimator.cluster.nodes)


def parts(estimator: Estimator, whole: Limits | None = None) -> list[Limits]:
    """Parts of the cluster, or of a part of it, worth a search of their own; the whole is not among them.

    First every choice of whole pools (on clusters of many pools: one pool, kind or region alone or left out, and
    pairs of kinds), then one node less of each pool, then half of each pool.
    """
    nodes, most = estimator.cluster.nodes, whole or all_gpus(estimator)
    if sum(map(bool, most)) <= MOST_POOLS:
        chosen = {limits for limits in product(*({0, q} for q in most)) if any(limits)}
    else:
        chosen = _by_attribute(estimator, most)
    out = sorted(chosen, key=lambda limits: (-sum(limits), limits))
    for less in (lambda q, n: max(0, q - 1) // n * n, lambda q, n: q // 2 // n * n):
        for p, node in enumerate(nodes):
            out.append(tuple(less(q, node.gpus_per_node) if i == p else q for i, q in enumerate(most)))
    return [limits for limits in dict.fromkeys(out) if any(limits) and limits != most]


def nodes_left_out(estimator: Estimator, most: Limits, count: int = 1) -> list[Limits]:
    """A part of the cluster without one node, for every pool.

    Args:
        most: GPUs of each pool in that part.
        count: Nodes that are left out, of one pool or of different ones.
    """
    if count > 1:
        fewer = [
            part for less in nodes_left_out(estimator, most, count - 1) for part in nodes_left_out(estimator, less)
        ]
        return list(dict.fromkeys(fewer))
    found = []
    for p, node in enumerate(estimator.cluster.nodes):
        less = max(0, most[p] - 1) // node.gpus_per_node * node.gpus_per_node
        found.append((*most[:p], less, *most[p + 1 :]))
    return [limits for limits in dict.fromkeys(found) if any(limits) and limits != most]


def pools_left_out(most: Limits) -> list[Limits]:
    """A part of the cluster without one pool, for every pool that is in use beside others."""
    if sum(map(bool, most)) < 2:
        return []
    return [(*most[:p], 0, *most[p + 1 :]) for p, quota in enumerate(most) if quota]


def power_below(count: int) -> int:
    """The largest power of two below a number; 0 where there is none."""
    return 1 << (count - 1).bit_length() - 1 if count > 1 else 0


def rounded_down(estimator: Estimator, most: Limits) -> list[Limits]:
    """A part of the cluster with the next lower power of two of GPUs of one pool.

    Of these, stages of one width can be made.
    """
    found = []
    for p, quota in enumerate(most):
        power = power_below(quota)
        if estimator.cluster.nodes[p].gpus_per_node <= power:
            found.append((*most[:p], power, *most[p + 1 :]))
    return found


def _by_attribute(estimator: Estimator, most: Limits) -> set[Limits]:
    """One pool alone, one left out, one kind of GPU, one region, pairs of kinds."""
    nodes = estimator.cluster.nodes
    pools = [p for p, n in enumerate(most) if n]
    kept: list[set[int]] = [{p} for p in pools] + [set(pools) - {p} for p in pools]
    for values in ([n.gpu for n in nodes], [n.where for n in nodes]):
        for count in (1, 2):
            for chosen in combinations(dict.fromkeys(values[p] for p in pools), count):
                kept.append({p for p in pools if values[p] in chosen})
    return {tuple(q if p in keep else 0 for p, q in enumerate(most)) for keep in kept}
