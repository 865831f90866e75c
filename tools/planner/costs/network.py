"""Seconds for moving activations between stages and for summing gradients inside a stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf

from ..inputs.cluster import Cluster, NodeGroup
from ..inputs.profile_schema import LinkProfile
from .candidate import Group
from .runtime import Runtime


class Network:
    """Rates of a cluster, looked up by pool (index into ``cluster.nodes``)."""

    def __init__(self, cluster: Cluster, runtime: Runtime, measured: Sequence[LinkProfile] = ()) -> None:
        self.cluster, self.runtime = cluster, runtime
        self.measured = list(measured)
        self.intra = [n.intra_node_bytes_per_s or cluster.gpu(n.gpu).intra_node_bytes_per_s for n in cluster.nodes]
        self.collective = [
            cluster.gpu(n.gpu).collective_rate * i / cluster.gpu(n.gpu).intra_node_bytes_per_s
            for n, i in zip(cluster.nodes, self.intra)
        ]
        self.host = [n.host_bytes_per_s or cluster.gpu(n.gpu).host_bytes_per_s for n in cluster.nodes]
        self.region = [n.where for n in cluster.nodes]
        self.pair = cache(self._pair)
        self.transfer_s = cache(self._transfer_s)
        self.ends = cache(self._ends)
        self.around = cache(self._around)
        self.has_egress = any(link.usd_per_gb for link in cluster.links)

    def _pair(self, first: int, second: int) -> tuple[float, float, float]:
        return self.cluster.link(self.cluster.nodes[first], self.cluster.nodes[second])

    def _link(self, operation: str, pools: Sequence[int], participants: int, local: bool) -> LinkProfile | None:
        """The measured link between these kinds with the nearest number of participants, None without one."""
        kinds = {self.cluster.nodes[p].gpu for p in pools}
        fitting = [
            k
            for k in self.measured
            if k.operation == operation
            and {k.first_kind, k.second_kind} >= kinds
            and (k.scope == "node") == (local and any(m.scope == "node" for m in self.measured))
        ]
        return min(fitting, key=lambda k: (abs(k.participants - participants), -k.latency_s), default=None)

    def rate(self, first: int, second: int, streams: int, size: float = inf) -> float:
        """Bytes per second between two nodes for so many GPU pairs at once, each with a message of ``size`` bytes."""
        node, single, ends = self.ends(first, second)
        if not ends:
            return min(node, streams * single)
        return min(node, streams * single, *[n.measured_rate(streams, size) for n in ends])

    def _ends(self, first: int, second: int) -> tuple[float, float, list[NodeGroup]]:
        """Rates of the nodes and of one stream between two pools, and those of the two that have measured rates."""
        ends = [self.cluster.nodes[p] for p in (first, second)]
        single = min(n.stream_bytes_per_s or inf for n in ends)
        return self.pair(first, second)[0], single, [n for n in ends if n.measured_rates]

    def _around(self, pools: tuple[int, ...]) -> dict[int, tuple[float, float, float, bool]]:
        """Of each of some pools, the worst of its connections to all of them.

        Latency, rate of the nodes, rate of one stream, and whether rates between any two of them are measured.
        """
        found = {}
        for pool in pools:
            ends = [self.ends(pool, other) for other in pools]
            latency = max(self.pair(pool, other)[1] for other in pools)
            node, single = min(e[0] for e in ends), min(e[1] for e in ends)
            found[pool] = latency, node, single, any(e[2] for e in ends)
        return found

    def _transfer_s(self, first: int, first_tp: int, second: int, second_tp: int, size: float, local: bool) -> float:
        """One boundary tensor of ``size`` bytes from a replica to a replica of the next stage."""
        runtime, nodes = self.runtime, self.cluster.nodes
        local = local or self.cluster.in_one_node(nodes[first], nodes[second])
        link = self._link("p2p", (first, second), 2, local) if self.measured else None
        if link is not None:
            copies = 1 if local or runtime.split_transfers or runtime.leader_transfers else second_tp
            return runtime.transfer_latency_s + link.latency_s + copies * size / link.bytes_per_s
        if local:
            return runtime.transfer_latency_s + size / min(self.intra[first], self.intra[second])
        _, latency, _ = self.pair(first, second)
        once = runtime.split_transfers or runtime.leader_transfers
        streams = 1 if runtime.leader_transfers else min(first_tp, second_tp)
        rate = self.rate(first, second, streams, size / streams if once else size)
        seconds = runtime.transfer_latency_s + latency + (1 if once else second_tp) * size / rate
        if once and second_tp > 1:
            seconds += size * (second_tp - 1) / second_tp / self.intra[second]
        return seconds

    def sync_s(self, groups: tuple[Group, ...], rank_bytes: dict[Group, float], share: float = 1.0) -> float:
        """All-reduce of gradients over the replicas of a stage.

        One ring per TP rank goes through all nodes of the stage, so a node's network carries
        ``2 (d - 1) / d`` of the stage's gradients in each direction, shared by its rings.  The messages of a
        ring of ``d`` replicas are a ``d``-th of a rank's gradients.

        Args:
            groups: The replicas.
            rank_bytes: Gradient bytes of one rank of each group.
            share: 0.5 for a reduce-scatter or an all-gather alone.
        """
        replicas = sum(g.count for g in groups)
        if replicas == 1:
            return 0.0
        factor = share * 2.0 * (replicas - 1) / replicas
        pools = tuple(sorted({g.pool for g in groups}))
        worst = 0.0
        nodes = [self.cluster.nodes[p] for p in pools]
        single_node = (len(pools) == 1 and sum(g.count * g.tp for g in groups) <= nodes[0].gpus_per_node) or (
            len(pools) > 1 and all(self.cluster.in_one_node(nodes[0], other) for other in nodes[1:])
        )
        link = self._link("all_reduce", pools, replicas, single_node) if self.measured else None
        for group in groups:
            size = rank_bytes[group]
            if link is not None:
                scale = replicas / (replicas - 1) * (link.participants - 1) / link.participants
                worst = max(worst, share * (link.latency_s + size / (link.bytes_per_s * scale)))
                continue
            if single_node:
                worst = max(worst, factor * size / self.collective[group.pool] + 30e-6)
                continue
            latency, node, single, is_measured = self.around(pools)[group.pool]
            rate = min(node, group.tp * single)
            if is_measured:
                rate = min(self.rate(group.pool, other, group.tp, size / replicas) for other in pools)
            rate /= group.tp
            cap = min(self.cluster.nodes[group.pool].collective_bytes_per_s or inf, self.runtime.collective_bytes_per_s)
            seconds = factor * size * (1.0 / rate + 1.0 / cap) + 2 * (replicas - 1) * min(latency, 1e-3) / max(
                1, replicas // 8
            )
            worst = max(worst, seconds)
        return worst

    def usd_per_byte(self, first: int, second: int) -> float:
        """Egress price between two pools."""
        return self.pair(first, second)[2] / 1e9
