"""Zones of one region count as one while searching (Sailor's H6); the result is put into zones afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimator
from ..inputs.cluster import Cluster, NodeGroup, ZoneLink


@dataclass(frozen=True, slots=True)
class Merged:
    """A cluster with equal nodes of a region as one pool, and which real pools each stands for."""

    estimator: Estimator
    members: tuple[tuple[int, ...], ...]


def _key(node: NodeGroup) -> tuple[object, ...]:
    """Returns what has to be equal; only the zone may differ."""
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
        nodes.append(
            parts[0].model_copy(
                update={
                    "count": whole,
                    "max_gpus": sum(p.quota for p in parts),
                    "zone": f"{parts[0].where}/*",
                    "region": parts[0].where,
                    "network_bytes_per_s": min(rates),
                    "network_latency_s": latency,
                    "usd_per_gpu_hour": price,
                    "hosts": (),
                }
            )
        )
    links = _region_links(cluster)
    merged = Cluster(name=cluster.name, nodes=tuple(nodes), links=links, gpus=cluster.gpus)
    return Merged(
        Estimator(merged, estimator.model, estimator.costs, estimator.runtime, estimator.memory_margin),
        tuple(tuple(g) for g in members.values()),
    )


def _region_links(cluster: Cluster) -> tuple[ZoneLink, ...]:
    """The slowest and dearest link between each pair of regions."""
    region = {n.zone: n.where for n in cluster.nodes} | {n.where: n.where for n in cluster.nodes}
    worst: dict[tuple[str, ...], ZoneLink] = {}
    for link in cluster.links:
        ends = tuple(sorted(region[z] for z in link.between))
        if ends[0] == ends[1]:
            continue
        old = worst.get(ends)
        worst[ends] = ZoneLink(
            between=(ends[0], ends[1]),
            bytes_per_s=min(link.bytes_per_s, old.bytes_per_s if old else link.bytes_per_s),
            latency_s=max(link.latency_s, old.latency_s if old else 0.0),
            usd_per_gb=max(link.usd_per_gb, old.usd_per_gb if old else 0.0),
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
            need = g.count
            while need > 0:
                fitting = [p for p in merged.members[g.pool] if left[p] >= need * g.tp]
                pool = (
                    min(fitting, key=lambda p: left[p])
                    if fitting
                    else max(merged.members[g.pool], key=lambda p: left[p] // g.tp)
                )
                take = min(need, left[pool] // g.tp)
                if take == 0:
                    return candidate.with_(stages=())
                left[pool] -= take * g.tp
                groups[pool, g.tp] = groups.get((pool, g.tp), 0) + take
                need -= take
        stages.append(Stage(stage.layers, tuple(Group(p, t, n) for (p, t), n in sorted(groups.items()))))
    return candidate.with_(stages=tuple(stages))
