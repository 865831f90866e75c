"""Contents of a plan's page, from the cost model and the simulator."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from megatron_het.plan import Plan
from megatron_het.schedule.cost import layer_share, message_bytes
from megatron_het.schedule.ir import RECEIVES, SENDS, TRANSFERS, Kind, Op
from megatron_het.schedule.kinds import COLLECTIVES, Role, Stream, Work
from megatron_het.schedule.simulate import Result

from ..costs.build import replica_group
from ..costs.candidate import Candidate, rank_parameters
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import schedule_of
from ..costs.simulation import Simulation, simulate_candidate
from ..inputs.cluster import Cluster
from ..inputs.packing import Seat
from .data import ClusterMap, Figure, Lane, LinkOnMap, NodeOnMap, PageData, PoolOnMap, TimelineData, ZoneOnMap
from .tables import part_in_words, schedule_in_words, state_in_words, summary

# The cluster as the page draws it: the place of each rank, and the traffic of every link in an iteration.


MAX_NODES = 256  # nodes that are drawn
MAX_LINKS = 200

Seats = Sequence[Sequence[Sequence[Seat]]]
Node = tuple[int, int]  # (entry of the cluster file, node within it)
Flow = dict[tuple[Node, Node], float]  # bytes per iteration from a node to another one


def cluster_map(estimator: Estimator, candidate: Candidate, plan: Plan, seated: Seats, result: Result) -> ClusterMap:
    """Returns the places of a plan's ranks and the traffic between nodes in the simulated iteration."""
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
    zones: dict[str, ZoneOnMap] = {}
    for p, group in enumerate(cluster.nodes):
        zones.setdefault(group.zone, ZoneOnMap(name=group.zone, region=group.where, pools=[]))["pools"].append(p)
    links = _links(cluster, transfers, collectives, seconds)
    return ClusterMap(name=cluster.name, pools=pools, zones=list(zones.values()), links=links)


def transfer_flow(seated: Seats, result: Result) -> Flow:
    """Activations, gradients, keys and values between devices, as the program sends them."""
    flat = [replica[0] for stage in seated for replica in stage]
    relative = result.program.shape.relative_sizes()
    flow: Flow = {}
    sizes: dict[tuple[object, ...], float] = {}
    for d, ops in enumerate(result.program.ops):
        for op in ops:
            if op.kind not in RECEIVES or flat[op.peer].host == flat[d].host:
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
        d = sum(part.count for part in candidate.reducing(s))
        nodes = list({seat.host: seat[:2] for replica in stage for seat in replica}.values())
        if d < 2 or len(nodes) < 2:
            continue
        gathered, reduced = moved[s]
        ring = 0.0
        for g in candidate.stages[s].groups:
            unit = estimator.unit_of(candidate, g)
            assert unit is not None  # the plan has been priced
            count = rank_parameters(candidate, unit, s)
            bytes_ = (d - 1) / d * g.tp * count * (gathered * element + reduced * estimator.gradient_per_parameter)
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
            if op.kind in COLLECTIVES:
                share = layers[op.chunk] / sum(layers) * layer_share(program, first, op)
                gathered += share if "parameter_bytes" in op.kind.effect.absent else 0.0
                reduced += share if "gradient_bytes" in op.kind.effect.absent else 0.0
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
        price = node.usd_per_gpu_hour
        pool_on_map = PoolOnMap(
            gpu=node.gpu,
            gpus_per_node=node.gpus_per_node,
            count=node.count,
            used_gpus=used,
            quota=node.quota,
            usd_per_gpu_hour=cluster.gpu(node.gpu).usd_per_hour if price is None else price,
            network_bytes_per_s=node.network_bytes_per_s,
            nodes=nodes,
            left_out=text,
        )
        out.append(pool_on_map)
    return out


def _links(cluster: Cluster, transfers: Flow, collectives: Flow, seconds: float) -> list[LinkOnMap]:
    """Returns the traffic between pools, the most loaded first."""
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


# A simulated iteration as the page draws it: lanes, operations, and limits for large plans.


MAX_EVENTS = 40_000  # operations on a page: about 2 MB, and what a browser draws without a noticeable delay
MAX_LANES = 96

COLUMNS = ("lane", "start", "duration", "label", "microbatch", "slice", "chunk", "peer", "bytes")


class Event(NamedTuple):
    """One operation in time; ``size`` is None if it moves no data."""

    lane: int
    kind: Kind
    start_s: float
    end_s: float
    microbatch: int
    slice: int
    chunk: int
    peer: int
    size: float | None


def group_of(kind: Kind) -> str:
    """Returns the colour group of a kind of operation on the page."""
    if kind in TRANSFERS:
        return "transfer"
    if kind in COLLECTIVES:
        return "collective"
    if kind.stream is not Stream.COMPUTE:
        return "host copy"
    if kind.role is not Role.PASS:
        return "other compute"
    if Work.FORWARD in kind.work:
        return "forward"
    return "backward" if Work.INPUT in kind.work else "weight gradient"


def timeline_of(
    result: Result,
    title: str,
    names: Sequence[str],
    parameter_bytes: Sequence[float] = (),
    *,
    max_events: int = MAX_EVENTS,
    max_lanes: int = MAX_LANES,
) -> TimelineData:
    """Returns the timeline of a simulation: all operations with a duration, or as many as a page can hold.

    Args:
        parameter_bytes: Of one rank of every device; sizes of gathers and reductions follow from them.
        max_events, max_lanes: Bounds of what is drawn.
    """
    shape, graph = result.program.shape, result.graph
    shown, left_out = _chosen_lanes(result, max_lanes)
    lane_of = {device: lane for lane, device in enumerate(shown)}
    size_of = _sizes(result, parameter_bytes)
    events = [
        Event(
            lane=lane_of[d],
            kind=op.kind,
            start_s=result.start_s[i],
            end_s=result.end_s[i],
            microbatch=op.microbatch,
            slice=op.slice,
            chunk=op.chunk,
            peer=lane_of.get(op.peer, -1),
            size=size_of(d, op),
        )
        for i, (d, op) in enumerate(zip(graph.device, graph.ops))
        if d in lane_of and op.kind not in SENDS and result.end_s[i] > result.start_s[i]
    ]
    lanes = [
        Lane(
            name=names[d],
            stage=shape.devices[d].stage,
            compute_s=result.compute_s[d],
            idle_s={key.removesuffix("_s"): value for key, value in asdict(result.bubble[d]).items()},
        )
        for d in shown
    ]
    return pack(title, result.makespan_s, lanes, events, left_out, max_events)


def pack(
    title: str,
    makespan_s: float,
    lanes: list[Lane],
    events: list[Event],
    left_out: Sequence[str] = (),
    max_events: int = MAX_EVENTS,
) -> TimelineData:
    """Returns lanes and operations as columns; operations beyond the bound are left out with a note on the page."""
    events, dropped = _bounded(events, max_events)
    kinds = list(dict.fromkeys(e.kind for e in events))
    label = {kind: i for i, kind in enumerate(kinds)}
    rows = [
        (
            e.lane,
            round(e.start_s * 1e9),
            round((e.end_s - e.start_s) * 1e9),
            label[e.kind],
            e.microbatch,
            e.slice,
            e.chunk,
            e.peer,
            -1 if e.size is None else round(e.size),
        )
        for e in sorted(events, key=lambda e: (e.lane, e.start_s))
    ]
    columns = zip(*rows) if rows else ((),) * len(COLUMNS)
    return TimelineData(
        title=title,
        makespan_s=makespan_s,
        lanes=lanes,
        labels=[[k.mnemonic, k.name.lower().replace("_", " "), group_of(k)] for k in kinds],
        events={name: list(column) for name, column in zip(COLUMNS, columns)},
        left_out=[*left_out, *dropped],
    )


def _chosen_lanes(result: Result, most: int) -> tuple[list[int], list[str]]:
    """Devices to draw: all, or about equally many of every stage."""
    devices = result.program.devices
    if len(devices) <= most:
        return list(range(len(devices))), []
    by_stage: dict[int, list[int]] = {}
    for d, device in enumerate(devices):
        by_stage.setdefault(device.stage, []).append(d)
    stages = list(by_stage.values())[:most]
    taken = [1] * len(stages)
    left = most - len(stages)
    while left > 0:
        open_ = [i for i, mine in enumerate(stages) if taken[i] < len(mine)]
        for i in open_[:left]:
            taken[i] += 1
        left -= max(1, min(left, len(open_)))
    shown = [d for n, mine in zip(taken, stages) for d in mine[:n]]
    text = f"{len(shown)} of {len(devices)} replicas are drawn: the first ones of "
    text += "every stage" if len(stages) == len(by_stage) else f"the first {len(stages)} of {len(by_stage)} stages"
    return shown, [text]


def _bounded(events: list[Event], most: int) -> tuple[list[Event], list[str]]:
    """Limit the operations: leave out transfers and copies first, then the end of the iteration."""
    if len(events) <= most:
        return events, []
    computed = [e for e in events if e.kind.stream is Stream.COMPUTE]
    said = [f"{len(events) - len(computed)} transfers, collectives and copies are not drawn: too many for a page"]
    if len(computed) <= most:
        return computed, said
    first = sorted(computed, key=lambda e: e.start_s)[:most]
    said.append(f"{most} of {len(computed)} computations are drawn: those that start before {first[-1].start_s:.4g} s")
    return first, said


def _sizes(result: Result, parameter_bytes: Sequence[float]) -> Callable[[int, Op], float | None]:
    """Bytes that an operation moves, or that a pass keeps or frees."""
    program, costs = result.program, result.costs
    memory, slices, relative = costs.memory, program.shape.slices, program.shape.relative_sizes()

    def size(device: int, op: Op) -> float | None:
        if op.kind in RECEIVES:
            return message_bytes(costs, program, op.peer, op)
        if op.kind in COLLECTIVES:
            if not parameter_bytes:
                return None
            layers = program.shape.layers[program.devices[device].stage]
            return parameter_bytes[device] * layers[op.chunk] / sum(layers) * layer_share(program, device, op)
        if op.kind.fields.names_pass and not (op.kind.meets or op.kind.fields.has_peer) and memory.activation_bytes:
            return memory.activation_bytes[device][op.chunk] / slices * relative[op.microbatch]
        return None

    return size


CAUSES = {
    "compute": "compute of the stage that decides",
    "fill_and_drain": "filling and draining around it",
    "gather": "gathers of parameters",
    "gradient_reduction": "gradient reduction",
    "update": "optimizer step",
}


def collect(
    estimator: Estimator,
    candidate: Candidate,
    estimate: Estimate,
    plan: Plan,
    seated: Seats,
    *,
    title: str,
    notes: Sequence[str] = (),
) -> tuple[PageData, dict[str, Any]]:
    """The page of one plan, and the figures of ``simulate --json`` that are on it.

    Args:
        candidate, estimate, seated: The plan as it is priced (``commands.priced``).

    Raises:
        PlannerError: The schedule cannot run the plan's shape.
    """
    found = simulate_candidate(estimator, candidate, estimate, plan, [[list(r) for r in s] for s in seated])
    body = summary(estimator, candidate, estimate, found.iteration_s)
    model, cluster = estimator.model, estimator.cluster
    gpus = ", ".join(f"{count} {name}" for name, count in body["gpus"].items())
    computes = _computes(estimator, plan, seated, found.result)
    page = PageData(
        title=title,
        subtitle=f"{model.name} on {cluster.name}: {schedule_in_words(body)}; {gpus}",
        figures=_figures(body, found, candidate),
        cluster=cluster_map(estimator, candidate, plan, seated, found.result),
        stages=[
            r
            | {
                "busy_s": computes[r["stage"], r["gpu"], r["zone"], r["tp"]],
                "limit_bytes": estimator.memory_margin * r["capacity_bytes"],
                "note": (part_in_words(r) + state_in_words(r)).removeprefix("; "),
            }
            for r in body["stages"]
        ],
        timelines=[_timeline(estimator, candidate, plan, seated, found)],
        causes={CAUSES[name]: seconds for name, seconds in body["by_cause_s"].items() if seconds > 0},
        notes=list(notes),
        plan=plan.to_json(),
    )
    return page, body


def rows_of(estimator: Estimator, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of ``compare`` and ``explain`` for the page."""
    tokens = estimator.model.global_batch_size * estimator.model.seq_length
    return [
        r
        | {
            "tokens_per_s": tokens / r["iteration_s"] if r["iteration_s"] else None,
            "usd_per_iteration": None if r["gpus_without_price"] else r["usd_per_iteration"],
        }
        for r in rows
    ]


def _figures(body: dict[str, Any], found: Simulation, candidate: Candidate) -> list[Figure]:
    unpriced = ", ".join(body["gpus_without_price"])
    price = f"without {unpriced}: no price known" if unpriced else ""
    if body["catalog_prices"]:
        price = "catalog price, not yours" + (f"; {price}" if price else "")
    bubble = found.result.bubble_fraction
    utilisation = body["model_flops_utilisation"]
    peak = "" if utilisation is None else f"{100 * utilisation:.1f} % of the GPUs' peak"
    rows: list[tuple[str, float | None, str, str]] = [
        ("Iteration", body["iteration_s"], "s", f"simulated; ±{100 * body['uncertainty']:.0f} % expected"),
        ("Throughput", body["tokens_per_s"], "tokens/s", ""),
        ("Model FLOP/s", body["model_tflops"] * 1e12, "FLOP/s", peak),
        ("Bubble", bubble, "share", "idle time over compute, mean of the replicas"),
        ("Price of an iteration", body["usd_per_iteration"] or None, "usd", price),
        ("Price of 10⁹ tokens", body["usd_per_billion_tokens"] or None, "usd", price),
        ("GPUs", candidate.world_size, "count", f"{(n := len(candidate.stages))} stage{'s' * (n > 1)}"),
    ]
    return [Figure(name=name, value=value, unit=unit, note=note) for name, value, unit, note in rows]


def _computes(estimator: Estimator, plan: Plan, seated: Seats, result: Result) -> dict[tuple[object, ...], float]:
    """Simulated seconds in which the slowest replica of a stage, kind of node and TP size computes."""
    found: dict[tuple[object, ...], float] = {}
    replicas = [(s, q, replica) for s, stage in enumerate(plan.stages) for q, replica in enumerate(stage.replicas)]
    for (s, q, replica), compute_s in zip(replicas, result.compute_s, strict=True):
        for pool in {seat.pool for seat in seated[s][q]}:
            node = estimator.cluster.nodes[pool]
            key = s, node.gpu, node.zone, replica.tp
            found[key] = max(found.get(key, 0.0), compute_s)
    return found


def _timeline(estimator: Estimator, candidate: Candidate, plan: Plan, seated: Seats, found: Simulation) -> Any:
    """The simulated iteration, devices named by stage, replica and GPU."""
    names, held = [], []
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            tp = f" TP {replica.tp}" if replica.tp > 1 else ""
            names.append(f"{s}.{q} {replica.device}{tp}")
            unit = estimator.unit_of(candidate, replica_group(replica, seated[s][q], candidate.cp, stage))
            assert unit is not None  # the plan has been priced
            held.append(rank_parameters(candidate, unit, s) * estimator.model.element_bytes)
    return timeline_of(found.result, "Predicted", names, held)
