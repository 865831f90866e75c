"""The cluster as the page draws it: who sits where, and what every link carries in an iteration."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_het.plan import Plan
from megatron_het.schedule.cost import layer_share, message_bytes
from megatron_het.schedule.ir import RECEIVES
from megatron_het.schedule.kinds import Effect
from megatron_het.schedule.result import Result

from ..costs.candidate import Candidate, Group
from ..costs.estimate import Estimator
from ..costs.estimates import rank_parameters
from ..costs.schedules import schedule_of
from ..inputs.cluster import Cluster, NodeGroup
from ..inputs.packing import Seat
from .data import ClusterMap, LinkOnMap, NodeOnMap, PoolOnMap, ZoneOnMap

MAX_NODES = 256
"""Nodes that are drawn."""
MAX_LINKS = 200

Seats = Sequence[Sequence[Sequence[Seat]]]
Node = tuple[int, int]
"""(entry of the cluster file, node within it)"""
Flow = dict[tuple[Node, Node], float]
"""Bytes per iteration from a node to another one."""


def cluster_map(estimator: Estimator, candidate: Candidate, plan: Plan, seated: Seats, result: Result) -> ClusterMap:
    """Where a plan's ranks sit and what flows between nodes in the simulated iteration."""
    cluster = estimator.cluster
    transfers = transfer_flow(seated, result)
    collectives = collective_flow(estimator, candidate, seated, result)
    seconds = result.makespan_s
    pools = _pools(estimator, plan, seated)
    drawn = {(p, k): node for p, pool in enumerate(pools) for k, node in enumerate(pool["nodes"])}
    for (source, target), count in (*transfers.items(), *collectives.items()):
        if source in drawn:
            drawn[source]["sent_bytes"] += count
        if target in drawn:
            drawn[target]["received_bytes"] += count
    for (p, _), node in drawn.items():
        busiest = max(node["sent_bytes"], node["received_bytes"])
        node["load"] = busiest / (cluster.nodes[p].network_bytes_per_s * seconds)
    return ClusterMap(
        name=cluster.name, pools=pools, zones=_zones(cluster), links=_links(cluster, transfers, collectives, seconds)
    )


def transfer_flow(seated: Seats, result: Result) -> Flow:
    """Activations, gradients, keys and values between devices, as the program sends them."""
    flat = [replica[0] for stage in seated for replica in stage]
    relative = result.program.shape.relative_sizes()
    flow: Flow = {}
    sizes: dict[tuple[object, ...], float] = {}
    for d, ops in enumerate(result.program.ops):
        for op in ops:
            if op.kind not in RECEIVES:
                continue
            if flat[op.peer].host == flat[d].host:
                continue
            edge = flat[op.peer][:2], flat[d][:2]
            key = (op.kind, op.peer, op.peer_chunk, op.start, op.stop, relative[op.microbatch])
            if key not in sizes:
                sizes[key] = message_bytes(result.costs, result.program, op.peer, op)
            flow[edge] = flow.get(edge, 0.0) + sizes[key]
    return flow


def collective_flow(estimator: Estimator, candidate: Candidate, seated: Seats, result: Result) -> Flow:
    """Sums of gradients and gathers of parameters: a ring per TP rank through the nodes of a stage, in their order."""
    moved = _moved_parameters(candidate, seated, result)
    element = float(estimator.model.element_bytes)
    flow: Flow = {}
    for s, stage in enumerate(seated):
        d = len(stage) * candidate.cp
        nodes = list({seat.host: seat[:2] for replica in stage for seat in replica}.values())
        if d < 2 or len(nodes) < 2:
            continue
        gathered, reduced = moved[s]
        ring = 0.0
        for replica in stage:
            tp = len(replica) // candidate.cp
            unit = estimator.unit_of(candidate, Group(replica[0].pool, tp, 1))
            assert unit is not None  # the plan has been priced
            count = rank_parameters(candidate, unit, s)
            bytes_ = (d - 1) / d * tp * count * (gathered * element + reduced * 4.0)
            ring = max(ring, bytes_)
        for a, b in zip(nodes, [*nodes[1:], nodes[0]]):
            flow[a, b] = flow.get((a, b), 0.0) + ring
    return flow


def _moved_parameters(candidate: Candidate, seated: Seats, result: Result) -> list[tuple[float, float]]:
    """Per stage, how often all its parameters are gathered and all its gradients reduced, in halves of an all-reduce.

    Under a parameter window both are operations of the program; else one reduction follows it.
    """
    if not schedule_of(candidate).shards_parameters:
        return [(1.0, 1.0) if candidate.zero_stage >= 1 else (0.0, 2.0)] * len(seated)
    program = result.program
    out = []
    first = 0
    for s, stage in enumerate(seated):
        layers, gathered, reduced = program.shape.layers[s], 0.0, 0.0
        for op in program.ops[first]:
            if op.kind.effect in (Effect.GATHER, Effect.REDUCE):
                share = layers[op.chunk] / sum(layers) * layer_share(program, first, op)
                gathered += share if op.kind.effect is Effect.GATHER else 0.0
                reduced += share if op.kind.effect is Effect.REDUCE else 0.0
        out.append((gathered, reduced))
        first += len(stage)
    return out


def _pools(estimator: Estimator, plan: Plan, seated: Seats) -> list[PoolOnMap]:
    cluster = estimator.cluster
    held: dict[Node, dict[int, list[int]]] = {}
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            for seat, rank in zip(seated[s][q], replica.ranks):
                held.setdefault(seat[:2], {})[seat.gpu] = [s, q, rank]
    room = MAX_NODES
    out = []
    for p, node in enumerate(cluster.nodes):
        count = min(node.count, max(1, room))
        room -= count
        used = sum(len(gpus) for (pool, _), gpus in held.items() if pool == p)
        busy = {k for pool, k in held if pool == p}
        hidden = sum(k >= count for k in busy)
        text = f"{node.count - count} more nodes are not drawn, {hidden} of them in use" if count < node.count else ""
        nodes = [
            NodeOnMap(
                name=node.hosts[k] if node.hosts else f"node {k}",
                gpus=[held.get((p, k), {}).get(g, []) for g in range(node.gpus_per_node)],
                sent_bytes=0.0,
                received_bytes=0.0,
                load=0.0,
            )
            for k in range(count)
        ]
        out.append(_pool(estimator, node, used, nodes, text))
    return out


def _pool(estimator: Estimator, node: NodeGroup, used: int, nodes: list[NodeOnMap], left_out: str) -> PoolOnMap:
    price = node.usd_per_gpu_hour
    return PoolOnMap(
        gpu=node.gpu,
        gpus_per_node=node.gpus_per_node,
        count=node.count,
        used_gpus=used,
        quota=node.quota,
        usd_per_gpu_hour=estimator.cluster.gpu(node.gpu).usd_per_hour if price is None else price,
        network_bytes_per_s=node.network_bytes_per_s,
        nodes=nodes,
        left_out=left_out,
    )


def _zones(cluster: Cluster) -> list[ZoneOnMap]:
    zones: dict[str, ZoneOnMap] = {}
    for p, node in enumerate(cluster.nodes):
        zone = zones.setdefault(node.zone, ZoneOnMap(name=node.zone, region=node.where, pools=[]))
        zone["pools"].append(p)
    return list(zones.values())


def _links(cluster: Cluster, transfers: Flow, collectives: Flow, seconds: float) -> list[LinkOnMap]:
    """Flows between pools, the most loaded first."""
    found: dict[tuple[int, int], LinkOnMap] = {}
    for a, b in sorted({*transfers, *collectives}):
        moved, summed = transfers.get((a, b), 0.0), collectives.get((a, b), 0.0)
        first, second = sorted((a[0], b[0]))
        rate, _, _ = cluster.link(cluster.nodes[first], cluster.nodes[second])
        link = found.setdefault(
            (first, second),
            LinkOnMap(first=first, second=second, transfer_bytes=0.0, collective_bytes=0.0, load=0.0, bytes_per_s=rate),
        )
        link["transfer_bytes"] += moved
        link["collective_bytes"] += summed
        link["load"] = max(link["load"], (moved + summed) / (rate * seconds))
    return sorted(found.values(), key=lambda link: -link["load"])[:MAX_LINKS]
