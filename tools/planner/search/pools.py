"""Parts of a cluster that are searched on their own, and zones of one region that are searched as one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import inf

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..inputs.cluster import Cluster, NodeGroup, ZoneLink
from .outcome import Found, Goal, Progress, SearchResult, in_pools

Limits = tuple[int, ...]  # GPUs that may be used of each pool
MOST_POOLS = 4  # with more pools not every choice of them is a part


def all_gpus(estimator: Estimator) -> Limits:
    """Everything within the quotas."""
    return tuple(node.quota for node in estimator.cluster.nodes)


def parts(estimator: Estimator, whole: Limits | None = None) -> list[Limits]:
    """Parts of the cluster, or of a part of it, to be searched on their own; the whole is not among them.

    First every choice of whole pools (on clusters of many pools: one pool alone or left out, one or two kinds or
    regions alone), then one node less of each pool, then half of each pool.
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
        count: Nodes that are left out, of one pool or of different ones.
    """
    if count > 1:
        fewer = [
            part for less in nodes_left_out(estimator, most, count - 1) for part in nodes_left_out(estimator, less)
        ]
        return list(dict.fromkeys(fewer))
    sizes = [node.gpus_per_node for node in estimator.cluster.nodes]
    found = [(*most[:p], max(0, most[p] - 1) // n * n, *most[p + 1 :]) for p, n in enumerate(sizes)]
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

    These divide into stages of equal width.
    """
    powers = zip(estimator.cluster.nodes, map(power_below, most))
    return [(*most[:p], n, *most[p + 1 :]) for p, (node, n) in enumerate(powers) if node.gpus_per_node <= n]


def _by_attribute(estimator: Estimator, most: Limits) -> set[Limits]:
    """One pool alone, one left out, one or two kinds of GPU, one or two regions."""
    nodes = estimator.cluster.nodes
    pools = [p for p, n in enumerate(most) if n]
    kept: list[set[int]] = [{p} for p in pools] + [set(pools) - {p} for p in pools]
    for values in ([n.gpu for n in nodes], [n.where for n in nodes]):
        for count in (1, 2):
            for chosen in combinations(dict.fromkeys(values[p] for p in pools), count):
                kept.append({p for p in pools if values[p] in chosen})
    return {tuple(q if p in keep else 0 for p, q in enumerate(most)) for keep in kept}


def search_apart(
    estimator: Estimator,
    goal: Goal,
    progress: Progress,
    parts: Sequence[Sequence[int]],
    find: Callable[[Estimator, float], SearchResult],
) -> SearchResult:
    """Search parts of a cluster one after the other; returns the best result, with the plans on other parts after it.

    Args:
        parts: The pools of each vendor; or those whose ranks run faster layers alone, and all.
        find: Searches a part, given the value of the best plan so far.
    """
    limit_s, known, outcomes = progress.limit_s, inf, list[tuple[bool, float, Sequence[int], SearchResult]]()
    for left, pools in zip(range(len(parts), 0, -1), parts):
        spent_s = time.process_time() - progress.started
        progress.limit_s, progress.is_over, progress.kept = spent_s + (limit_s - spent_s) / left, False, []
        theirs = find(estimator.only(pools), known)
        theirs.found = in_pools(estimator, theirs.found, pools)
        near = [] if theirs.nearest is None else in_pools(estimator, [Found(*theirs.nearest)], pools)
        theirs.nearest = (near[0].candidate, near[0].estimate) if near else None
        if theirs.best is not None:
            value = theirs.best.value(goal)
            known = min(known, value)
        else:  # by how much the nearest plan misses
            value = goal.score(estimator, *theirs.nearest) / goal.value(theirs.nearest[1]) if theirs.nearest else inf
        outcomes.append((theirs.best is None, value, pools, theirs))
        if theirs.interrupted and not progress.spent:
            break
    progress.limit_s = limit_s
    (*_, own, best), *others = sorted(outcomes, key=lambda entry: entry[:2])
    for *_, pools, theirs in others:
        best.add(theirs)
        if set(pools).isdisjoint(own):
            names = " and ".join(sorted({estimator.cluster.nodes[p].gpu for p in pools}))
            best.other_vendors[names] = None if theirs.best is None else theirs.best.iteration_s
    return best


# Zones of one region count as one while searching (Sailor's H6); the result is put into zones afterwards.


@dataclass(frozen=True, slots=True)
class Merged:
    """A cluster with equal nodes of a region as one pool, and the real pools that each stands for."""

    estimator: Estimator
    members: tuple[tuple[int, ...], ...]


def _key(node: NodeGroup) -> tuple[object, ...]:
    """Returns the fields that must be equal for nodes to be merged; only the zone may differ."""
    skipped = {"count", "max_gpus", "zone", "region", "hosts", "slurm", "kubernetes", "skypilot"}
    return (node.where, *(getattr(node, name) for name in NodeGroup.model_fields if name not in skipped))


def merge(estimator: Estimator) -> Merged:
    """One pool per (GPU, region, node size).  Links inside a pool become the slowest between its zones."""
    cluster = estimator.cluster
    members: dict[tuple[object, ...], list[int]] = {}
    for i, node in enumerate(cluster.nodes):
        members.setdefault(_key(node), []).append(i)
    if len(members) == len(cluster.nodes):
        return Merged(estimator, tuple((i,) for i in range(len(cluster.nodes))))
    nodes = []
    for group in members.values():
        parts = [cluster.nodes[i] for i in group]
        rates = [cluster.link(a, b)[0] for a in parts for b in parts]
        latency = max(cluster.link(a, b)[1] for a in parts for b in parts)
        price = max(estimator.price[i] for i in group) * 3600
        whole = sum(p.count for p in parts)
        where, quota = parts[0].where, sum(p.quota for p in parts)
        common = {"count": whole, "max_gpus": quota, "zone": f"{where}/*", "region": where, "hosts": ()}
        common |= {"network_bytes_per_s": min(rates), "network_latency_s": latency, "usd_per_gpu_hour": price}
        nodes.append(parts[0].model_copy(update=common))
    links = _region_links(cluster)
    merged = Cluster(name=cluster.name, nodes=tuple(nodes), links=links, gpus=cluster.gpus)
    return Merged(estimator.on(merged), tuple(tuple(g) for g in members.values()))


def _region_links(cluster: Cluster) -> tuple[ZoneLink, ...]:
    """The slowest and dearest link between each pair of regions."""
    region = {n.zone: n.where for n in cluster.nodes} | {n.where: n.where for n in cluster.nodes}
    worst: dict[tuple[str, ...], ZoneLink] = {}
    for link in cluster.links:
        ends = sorted({region[z] for z in link.between if z in region})  # a part of a cluster lacks some zones
        if len(ends) < 2:
            continue
        one, other = ends
        old = worst.get((one, other), link)
        worst[one, other] = ZoneLink(
            between=(one, other),
            bytes_per_s=min(link.bytes_per_s, old.bytes_per_s),
            latency_s=max(link.latency_s, old.latency_s),
            usd_per_gb=max(link.usd_per_gb, old.usd_per_gb),
        )
    return tuple(worst.values())


def expand(merged: Merged, cluster: Cluster, candidate: Candidate) -> Candidate:
    """The candidate in real pools: stage by stage, the zone with the most free GPUs that still fits first."""
    if all(len(m) == 1 for m in merged.members):
        return candidate
    left = [n.quota for n in cluster.nodes]
    stages = []
    for stage in candidate.stages:
        groups: dict[tuple[int, int], int] = {}
        for g in stage.groups:
            need, gpus = g.count, g.tp * candidate.cp
            while need > 0:
                members = merged.members[g.pool]
                fitting = [p for p in members if left[p] >= need * gpus]
                pool = min(fitting, key=lambda p: left[p]) if fitting else max(members, key=lambda p: left[p] // gpus)
                take = min(need, left[pool] // gpus)
                if take == 0:
                    return candidate.with_(stages=())
                left[pool] -= take * gpus
                groups[pool, g.tp] = groups.get((pool, g.tp), 0) + take
                need -= take
        stages.append(Stage(stage.layers, tuple(Group(p, t, n) for (p, t), n in sorted(groups.items()))))
    return candidate.with_(stages=tuple(stages))
