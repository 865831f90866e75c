"""Converts a candidate to a Plan (rank numbers, routes, predictions) with the nodes of its ranks, and back."""

import dataclasses
import heapq
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import accumulate, combinations, islice, pairwise
from math import gcd, inf
from typing import Any

from megatron_het.features.registry import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import (
    ModelShape,
    Plan,
    Prediction,
    RankPrediction,
    Replica,
    ScheduleSpec,
    TrainingShape,
    load_plan,
)
from megatron_het.plan import Stage as PlanStage
from megatron_het.plan.placement import DOCUMENTS, WHOLE, state_parts
from megatron_het.plan.validate import check_plan
from megatron_het.schedule.generators.listing import ORDERS, Part
from megatron_het.schedule.generators.one_f_one_b import SLACK
from megatron_het.schedule.memory import Moment, moments

from ..errors import PlannerError, plan_errors
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.packing import Room, Seat, pack, seat_replicas
from .candidate import Candidate, Group, SequencePart, Stage, allocate, chunk_layers, normalised
from .estimate import Estimate, Estimator
from .operating import mean_size
from .schedules import SCHEDULES, is_ordered, schedule_of
from .stages import extra_parameters, extras_of_plan, routes_of, sizes_of_plan


def rooms_of(cluster: Cluster) -> list[Room]:
    """The cluster's nodes as :class:`Room` objects, into which TP groups are packed."""
    return [Room(n.gpu, n.gpus_per_node, n.count, n.quota, n.zone, n.shared_node) for n in cluster.nodes]


def seats(cluster: Cluster, stages: tuple[Stage, ...], cp: int = 1) -> list[list[list[Seat]]] | None:
    """Seats of every replica, ``[stage][replica][position]``; None when TP groups do not fit into nodes.

    Args:
        cp: TP groups of a replica (context-parallel size).
    """
    return _seats(tuple(rooms_of(cluster)), tuple(stage.groups for stage in stages), cp)


@lru_cache(maxsize=4)
def _seats(rooms: tuple[Room, ...], stages: tuple[tuple[Group, ...], ...], cp: int) -> list[list[list[Seat]]] | None:
    """Cached part of :func:`seats`: a search asks for the same stages several times in a row."""
    pools = [[[p.pool for p in g.parts] or [g.pool] * cp for g in _single(groups)] for groups in stages]
    wanted = [((p,), g.tp) for mine, groups in zip(pools, stages) for of, g in zip(mine, _single(groups)) for p in of]
    found = pack(rooms, wanted)
    if found is None:
        return None
    left = iter(found)
    return [[[seat for _ in of for seat in next(left)] for of in mine] for mine in pools]


def _single(groups: tuple[Group, ...]) -> list[Group]:
    return [one for g in groups for one in [g._replace(count=1)] * g.count]


def model_shape(model: Model) -> ModelShape:
    """The model as plans describe it."""
    found = {each.name: getattr(model, each.name) for each in fields(ModelShape)}
    return ModelShape(**found | {"num_query_groups": model.groups})


def read_plan(file: str | os.PathLike[str]) -> Plan:
    """Read a plan file; raises PlannerError."""
    with plan_errors(str(file)):
        return load_plan(file)


def check_same_model(plan: Plan, model: Model, plan_file: str, model_file: str) -> None:
    """Compare a plan with the model that it is used with.

    Raises:
        PlannerError: What differs; what a plan does not say is not compared.
    """
    mine = model_shape(model)
    pairs = [
        (f"model.{item.name}", getattr(plan.model, item.name), getattr(mine, item.name))
        for item in dataclasses.fields(mine)
        # Without a width of heads they have the usual one; other fields may be left open.
        if getattr(plan.model, item.name) is not None or item.name == "head_size"
    ]
    pairs.append(("training.global_batch_size", plan.training.global_batch_size, model.global_batch_size))
    for key, found, wanted in pairs:
        if found != wanted:
            raise PlannerError(plan_file, key, found, f"{model_file} says {wanted}", "Plan again for this model")


def _block_counts(estimator: Estimator, candidate: Candidate, s: int, total: int) -> list[int]:
    """Microbatches of every replica of one stage of one block, adding up to ``total``."""
    groups = candidate.block().stages[s].groups
    counts = [g.count for g in groups]
    if candidate.even:
        return [total // sum(counts)] * sum(counts)
    times = [_unit_time(estimator, candidate, s, g) for g in groups]
    found = allocate(times, counts, total)
    if found is None:
        problem = f"more than the {total} microbatches that they divide: some would have none"
        hint = "Use fewer replicas or a smaller micro batch"
        raise PlannerError("plan", f"stages[{s}].replicas", sum(counts), problem, hint)
    share = [k for k, n in zip(found[1], counts) for _ in range(n)]
    slowness = [t for t, n in zip(times, counts) for _ in range(n)]
    longest = [(-k * t, -i) for i, (k, t) in enumerate(zip(share, slowness)) if k > 1]
    heapq.heapify(longest)
    for _ in range(sum(share) - total):
        i = -longest[0][1]
        share[i] -= 1
        if share[i] > 1:
            heapq.heapreplace(longest, (-share[i] * slowness[i], -i))
        else:
            heapq.heappop(longest)
    return share


def _all_routes(estimator: Estimator, candidate: Candidate, total: int) -> list[list[list[int]]]:
    """Microbatch ids per stage and replica, in the order of its groups, dealt into blocks."""
    blocks, block = candidate.blocks, candidate.block()
    of_length = {
        n: _block_routes(estimator, candidate, n) for n in {len(range(j, total, blocks)) for j in range(blocks)}
    }
    if blocks == 1:
        return of_length[total]
    out: list[list[list[int]]] = []
    for s, stage in enumerate(block.stages):
        per_block = []
        for j in range(blocks):
            ids = range(j, total, blocks)
            per_block.append([[ids[m] for m in route] for route in of_length[len(ids)][s]])
        mine: list[list[int]] = []
        first = 0
        for g in stage.groups:
            for j in range(blocks):
                mine += per_block[j][first : first + g.count]
            first += g.count
        out.append(mine)
    return out


def _block_routes(estimator: Estimator, candidate: Candidate, total: int) -> list[list[list[int]]]:
    """Returns the routes of one of the equal pipelines."""
    seconds = [
        [_unit_time(estimator, candidate, s, g) for g in stage.groups for _ in range(g.count)]
        for s, stage in enumerate(candidate.block().stages)
    ]
    counts = [_block_counts(estimator, candidate, s, total) for s in range(len(candidate.stages))]
    return schedule_of(candidate).routes(seconds, counts, total)


def build_plan(
    estimator: Estimator,
    candidate: Candidate,
    estimate: Estimate,
    notes: str = "",
    *,
    one_block: bool = False,
    checked: bool = True,
) -> Plan:
    """The plan of a candidate.

    Args:
        one_block: Only the first of its equal, independent pipelines (for simulation).
        checked: Whether an inconsistent plan, or one that the runtime refuses, is an error.

    Raises:
        PlannerError: TP groups that do not fit into nodes, or an inconsistent plan.
    """
    cluster, model = estimator.cluster, estimator.model
    seated = seats(cluster, candidate.stages, candidate.cp)
    if seated is None:
        raise PlannerError("cluster", "nodes", candidate.stages, "these TP groups do not fit into the nodes")
    total = model.global_batch_size // candidate.micro_batch_size
    batch = model.global_batch_size
    if one_block and not candidate.sizes:
        total = -(-total // candidate.blocks)
        batch = total * candidate.micro_batch_size
        candidate = candidate.block()
    # Of an expert group one of its equal pipelines has a part, with which nobody trains.
    checked = checked and not (one_block and any(candidate.spans(g) for s in candidate.stages for g in s.groups))
    stages: list[PlanStage] = []
    per_rank: list[RankPrediction] = []
    routed, sizes = routes_of(candidate) if candidate.sizes else ([], ())
    all_routes = [routed] if routed else _all_routes(estimator, candidate, total)
    fastest = max(
        layers / _sequence_time(estimator, candidate, s, g)
        for s, (layers, groups) in enumerate(candidate.stages)
        for g in groups
    )
    for s, routes in enumerate(all_routes):
        stage, predicted = _stage(estimator, candidate, estimate, s, routes, fastest, rank=len(per_rank))
        stages.append(stage)
        per_rank += predicted
    parameters = _parameters(estimator, candidate, estimate, all_routes)
    plan = Plan(
        model=model_shape(model),
        training=TrainingShape(
            micro_batch_size=candidate.micro_batch_size,
            global_batch_size=batch,
            precision="fp32" if model.precision == "tf32" else model.precision,  # tf32 is only a mode of fp32 products
            sequence_parallel=model.sequence_parallel,
            recompute=candidate.recompute,
            distributed_optimizer=candidate.zero_stage >= 1,
            micro_batch_sizes=sizes,
        ),
        stages=tuple(stages),
        schedule=ScheduleSpec(candidate.schedule, parameters),
        predicted=Prediction(estimate.iteration_s, _bubble(candidate, estimate), tuple(per_rank)),
        notes=notes,
    )
    if not checked:
        return plan
    with plan_errors():
        check_plan(plan)
        if "zero_stage" not in parameters:  # ZeRO-2 and 3 without a window exist for comparisons only
            check_plan_alone(plan)
    return plan


def _stage(
    estimator: Estimator,
    candidate: Candidate,
    estimate: Estimate,
    s: int,
    routes: Sequence[Sequence[int]],
    fastest: float,
    rank: int,
) -> tuple[PlanStage, list[RankPrediction]]:
    """One stage of the plan, and the predictions for its ranks.

    Args:
        fastest: Layers per second of the fastest replica of all.
    """
    layers, groups = candidate.stages[s]
    replicas: list[Replica] = []
    per_rank: list[RankPrediction] = []
    assert len(routes) == sum(g.count for g in groups)
    waiting = iter(routes)
    for g, memory in zip(groups, estimate.memory_of(candidate, s), strict=True):
        time_s = _unit_time(estimator, candidate, s, g)
        share = 1.0 if memory[0].state_share is None else round(memory[0].state_share, 4)
        speed = max(1e-4, round(layers / _sequence_time(estimator, candidate, s, g) / fastest, 4))
        parts = g.parts or (SequencePart(g.pool, 1),) * candidate.cp
        nodes = [estimator.cluster.nodes[part.pool] for part in parts]
        names, shares = tuple(node.gpu for node in nodes), tuple(part.share for part in parts)
        zones = {(other.gpu, other.zone) for other in estimator.cluster.nodes if other.gpu in names}
        # A replica names one zone, which its ranks on other kinds of GPU may not be in.
        is_said = len(zones) > len(set(names)) and len({node.zone for node in nodes}) == 1
        zone = nodes[0].zone if is_said else ""
        alike = sum((other.gpu, other.zone) == (nodes[0].gpu, nodes[0].zone) for other in estimator.cluster.nodes)
        entry = g.pool if alike > 1 and not g.parts else -1
        ep, expert_tp = candidate.cut_of(g)
        etp = 0 if expert_tp == max(1, g.tp // ep) else expert_tp
        by_part = dict(zip(dict.fromkeys(parts), memory, strict=True))
        figures = [
            [int(n) for n in (m.parameter_bytes, m.gradient_bytes, m.optimizer_bytes, m.activation_bytes)]
            for m in map(by_part.__getitem__, parts)
        ]
        device = " + ".join(dict.fromkeys(names))
        like = Replica((), (), device, speed, zone, entry, cp=len(parts), state_share=share, ep=ep, etp=etp)
        if g.kept and candidate.recompute == "full":
            like = replace(like, recompute_layers=_again(layers, candidate.chunks_of(s), g.kept))
        if len(set(shares)) > 1:
            like = replace(like, cp_shares=shares)
        if len(set(names)) > 1:
            like = replace(like, cp_devices=names)
        for mine in islice(waiting, g.count):
            ranks = tuple(range(rank, rank + g.tp * len(parts)))
            rank += len(ranks)
            replicas.append(replace(like, ranks=ranks, microbatches=tuple(mine)))
            per_rank += [RankPrediction(r, len(mine) * time_s, *figures[i // g.tp]) for i, r in enumerate(ranks)]
    return PlanStage(chunk_layers(layers, candidate.chunks_of(s)), tuple(replicas)), per_rank


def _again(layers: int, chunks: int, kept: float) -> tuple[int, ...]:
    """Recomputed layers of each chunk if a share of all is kept: nearly equal, more in chunks held longest."""
    again, ends = layers - round(kept * layers), accumulate(chunk_layers(layers, chunks), initial=0)
    return tuple(-(-b * again // layers) - -(-a * again // layers) for a, b in pairwise(ends))


def _parameters(
    estimator: Estimator, candidate: Candidate, estimate: Estimate, all_routes: Sequence[Sequence[Sequence[int]]]
) -> dict[str, object]:
    alike = all(routes == all_routes[0] for routes in all_routes)
    parameters = schedule_of(candidate).parameters(candidate, estimate, alike)
    parameters |= extra_parameters(estimator, candidate) | schedule_of(candidate).cut(estimator, candidate)
    if is_ordered(candidate):
        parameters["order"] = candidate.order
    return parameters


def in_order_of(plan: Plan, candidate: Candidate) -> Plan:
    """A plan of the same stages with the candidate's order and microbatches in flight."""
    parameters = {name: value for name, value in plan.schedule.parameters.items() if name not in ("order", "depths")}
    if candidate.depths:
        parameters["depths"] = list(candidate.depths)
    if is_ordered(candidate):
        parameters["order"] = candidate.order
    return replace(plan, schedule=ScheduleSpec(candidate.schedule, parameters))


def _bubble(candidate: Candidate, estimate: Estimate) -> float:
    """Idle time divided by compute time, averaged over the replicas, as the simulator counts it."""
    replicas = [sum(g.count for g in stage.groups) for stage in candidate.stages]
    compute_s = sum(n * busy_s for n, busy_s in zip(replicas, estimate.stage_busy_s))
    # Without a bubble, rounding may make the difference of two sums negative.
    return max(sum(replicas) * estimate.iteration_s / compute_s - 1, 0.0) if compute_s else 0.0


def _unit_time(estimator: Estimator, candidate: Candidate, s: int, g: Group) -> float:
    u = estimator.unit_of(candidate, g, s)
    assert u is not None
    return u.both_s(candidate.stages[s].layers, *candidate.ends_of(s))


def _sequence_time(estimator: Estimator, candidate: Candidate, s: int, g: Group) -> float:
    """Seconds of a replica, in a unit that is the same for all replicas of a plan."""
    seconds = _unit_time(estimator, candidate, s, g)
    return seconds / mean_size(candidate, g) if candidate.sizes else seconds


def candidate_of(plan: Plan, cluster: Cluster, file: str = "plan.json") -> tuple[Candidate, list[list[list[Seat]]]]:
    """A plan as a candidate on a cluster, and the nodes of its ranks (``packing.seat_replicas``).

    The candidate's groups are in a canonical order; the seats are in the plan's order.

    Raises:
        PlannerError: a plan that cannot be put on the cluster, or that the cost model does not price.
    """
    seated = seat_replicas(plan, rooms_of(cluster), file)
    _check_parts(plan, cluster, seated, file)
    _check_expert_tensor_parallel(plan, file)
    most_ep = max(r.ep for stage in plan.stages for r in stage.replicas)
    alike = all(r.ep == gcd(most_ep, r.tp) for stage in plan.stages for r in stage.replicas)
    stages: list[tuple[int, dict[tuple[Any, ...], int]]] = []
    shares: list[tuple[float, ...]] = []
    for s, stage in enumerate(plan.stages):
        groups: dict[tuple[Any, ...], int] = {}
        most: dict[tuple[Any, ...], float] = {}
        parts = state_parts(stage)
        for q, replica in enumerate(stage.replicas):
            g = replica_group(replica, seated[s][q], plan.most_cp, stage)
            key = g.pool, g.tp, 0 if alike else g.ep, g.parts, g.kept
            groups[key] = groups.get(key, 0) + 1
            most[key] = max(most.get(key, 0.0), parts[q])
        stages.append((sum(stage.layers), groups))
        shares.append(tuple(share for _, share in sorted(most.items())))
    training, parameters = plan.training, plan.schedule.parameters
    counts = [len(stage.layers) for stage in plan.stages]
    zero = _number(parameters, "zero_stage", 1 if training.distributed_optimizer else 0, file)
    found = Candidate(
        normalised(stages),
        training.micro_batch_size,
        training.recompute,
        plan.schedule.name,
        chunks=plan.most_chunks,
        slices=int(_number(parameters, "slices", 1, file, least=1)),
        zero_stage=int(zero),
        offload=bool(parameters.get("offload", False)),
        slack=_number(parameters, "slack", SLACK, file),
        order=_order(parameters, file),
        depths=_depths(parameters, len(plan.stages), file),
        cp=plan.most_cp,
        ep=most_ep,
        chunk_counts=tuple(counts) if len(set(counts)) > 1 else (),
        **extras_of_plan(plan),
    )
    if most_ep > max(r.tp for stage in plan.stages for r in stage.replicas):
        found = _over_replicas(found)
    if schedule_of(found).shards_parameters:
        found = found.with_(shares=tuple(shares))
    if plan.schedule.name not in SCHEDULES:
        found = found.with_(moments=_moments(plan, file))
    if training.micro_batch_sizes and len(plan.stages) == 1:
        kinds = [
            replica_group(r, mine, found.cp, plan.stages[0]) for mine, r in zip(seated[0], plan.stages[0].replicas)
        ]
        found = found.with_(sizes=sizes_of_plan(plan, kinds))
    return found, seated


def _moments(plan: Plan, file: str) -> tuple[tuple[Moment, ...], ...]:
    """Per stage, the moments at which memory may be largest, from the order of passes."""
    with plan_errors(file):
        program = build(plan)[False]
    found: list[set[Moment]] = [set() for _ in plan.stages]
    for d, device in enumerate(program.shape.devices):
        found[device.stage] |= moments(program, d)
    return tuple(tuple(sorted(of)) for of in found)


def as_said(estimator: Estimator, candidate: Candidate, plan: Plan) -> Candidate:
    """Returns a plan's candidate, with documents cut at fixed positions unless the plan asks for whole ones."""
    planned = schedule_of(candidate).cut(estimator, candidate)
    cuts = DOCUMENTS in planned and plan.schedule.parameters.get(DOCUMENTS) != WHOLE
    return candidate.with_(cuts_documents=True) if cuts else candidate


def _over_replicas(candidate: Candidate) -> Candidate:
    """The candidate with one EP size for all groups, where that is equivalent to its sizes by group."""
    stages = tuple(s._replace(groups=tuple(g._replace(ep=0) for g in s.groups)) for s in candidate.stages)
    found = candidate.with_(stages=stages, across_replicas=True)
    same = all(
        found.cut_of(g) == candidate.cut_of(own)
        for s, mine in zip(found.stages, candidate.stages)
        for g, own in zip(s.groups, mine.groups)
    )
    return found if same else candidate


def replica_group(replica: Replica, seats: Sequence[Seat], cp: int, stage: PlanStage) -> Group:
    """A replica of a stage as a group of one; it gets ``parts`` unless it has ``cp`` equal parts in one pool."""
    divisor = gcd(*replica.shares)
    parts = tuple(
        SequencePart(seat.pool, n // divisor) for seat, n in zip(seats[:: replica.tp], replica.shares, strict=True)
    )
    plain = len(parts) == cp and len(set(parts)) == 1
    layers = sum(stage.layers)
    kept = (layers - sum(replica.recompute_layers)) / layers if replica.recompute_layers else 0.0
    return Group(seats[0].pool, replica.tp, 1, replica.ep, () if plain else parts, kept)


def _check_parts(plan: Plan, cluster: Cluster, seated: list[list[list[Seat]]], file: str) -> None:
    """Refuse context-parallel ranks between which egress has a price."""
    for s, stage in enumerate(plan.stages):
        for q, replica in enumerate(stage.replicas):
            nodes = [cluster.nodes[seat.pool] for seat in seated[s][q][:: replica.tp]]
            if any(cluster.link(a, b)[2] for a, b in combinations(nodes, 2) if a is not b):
                key, hint = f"stages[{s}].replicas[{q}].cp", "Only emit and the training take such plans"
                problem = "its ranks are in regions between which bytes have a price, and there are no figures for that"
                raise PlannerError(file, key, replica.cp, problem, hint)


def _check_expert_tensor_parallel(plan: Plan, file: str) -> None:
    """Refuse expert TP sizes other than TP / EP, because the cost model prices only these."""
    found = next((r.cut for stage in plan.stages for r in stage.replicas if r.cut.etp), None)
    if found is not None:
        problem = "there are figures for TP size / EP size, at least 1, only"
        hint = "Only emit and the training take such plans"
        raise PlannerError(file, "stages[*].replicas[*].etp", found.etp, problem, hint)


def _order(parameters: dict[str, Any], file: str) -> str:
    value = parameters.get("order", ORDERS[0])
    if value not in ORDERS:
        raise PlannerError(file, "schedule.parameters.order", value, f"must be one of {', '.join(ORDERS)}")
    return value


def _depths(parameters: dict[str, Any], stages: int, file: str) -> tuple[int, ...]:
    value = parameters.get("depths", [])
    whole = isinstance(value, list) and all(type(n) is int and n > 0 for n in value)
    if not whole or len(value) not in (0, stages - 1):
        problem = f"must be a list of {stages - 1} positive whole numbers"
        raise PlannerError(file, "schedule.parameters.depths", value, problem)
    return tuple(value)


def part_of(plan: Plan, part: Part) -> Plan:
    """The plan of some replicas that exchange nothing with the others, with ranks and microbatches renumbered."""
    number = {m: i for i, m in enumerate(part.microbatches)}
    flat = [(s, r) for s, stage in enumerate(plan.stages) for r in stage.replicas]
    rank = 0
    by_stage: list[list[Replica]] = [[] for _ in plan.stages]
    for device in part.devices:
        s, replica = flat[device]
        ranks = tuple(range(rank, rank + len(replica.ranks)))
        rank += len(ranks)
        by_stage[s].append(
            replace(replica, ranks=ranks, microbatches=tuple(number[m] for m in replica.microbatches), state_share=1.0)
        )
    stages = tuple(replace(stage, replicas=tuple(mine)) for stage, mine in zip(plan.stages, by_stage))
    batch = len(part.microbatches) * plan.training.micro_batch_size
    training = replace(plan.training, global_batch_size=batch)
    return replace(plan, stages=stages, training=training, predicted=None)


def _number(parameters: dict[str, Any], name: str, default: float, file: str, least: int = 0) -> float:
    """A number among a schedule's parameters; whole where its default is."""
    value = parameters.get(name, default)
    wanted = int if isinstance(default, int) else int | float
    if not isinstance(value, wanted) or isinstance(value, bool) or not least <= value < inf:
        kind = "whole number" if isinstance(default, int) else "number"
        raise PlannerError(file, f"schedule.parameters.{name}", value, f"must be a {kind}, at least {least}")
    return value
