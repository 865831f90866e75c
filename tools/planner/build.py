"""From a candidate to a Plan (rank numbers, routes, predictions) and to the nodes the ranks sit on; and back."""

from __future__ import annotations

from math import inf
from typing import Any

from megatron_het.config_plan import check_plan_alone
from megatron_het.plan import (
    ModelShape,
    Plan,
    PlanError,
    Prediction,
    RankPrediction,
    Replica,
    ScheduleSpec,
    TrainingShape,
)
from megatron_het.plan import Stage as PlanStage
from megatron_het.plan.routing import route
from megatron_het.plan.shares import state_shares
from megatron_het.plan.validate import check_plan
from megatron_het.schedule.generators.one_f_one_b import SLACK
from tools.planner.candidate import Candidate, Group, Stage, normalised
from tools.planner.cluster import Cluster
from tools.planner.errors import PlannerError
from tools.planner.estimate import Estimate, Estimator, allocate
from tools.planner.formulas import divided_alike
from tools.planner.model import Model
from tools.planner.packing import Room, Seat, pack, seat_replicas


def rooms_of(cluster: Cluster) -> list[Room]:
    """The cluster's nodes, as TP groups are packed into them."""
    return [Room(n.gpu, n.gpus_per_node, n.count, n.quota) for n in cluster.nodes]


def seats(cluster: Cluster, stages: tuple[Stage, ...]) -> list[list[list[Seat]]] | None:
    """Seats of every replica, ``[stage][replica][tp rank]``; None when TP groups do not fit into nodes."""
    found = pack(rooms_of(cluster), [((g.pool,), g.tp) for stage in stages for g in _single(stage.groups)])
    if found is None:
        return None
    groups = iter(found)
    return [[next(groups) for _ in _single(stage.groups)] for stage in stages]


def _single(groups: tuple[Group, ...]) -> list[Group]:
    return [Group(g.pool, g.tp, 1) for g in groups for _ in range(g.count)]


def model_shape(model: Model) -> ModelShape:
    """The model as plans describe it."""
    return ModelShape(
        num_layers=model.num_layers, hidden_size=model.hidden_size, num_attention_heads=model.num_attention_heads,
        num_query_groups=model.groups, seq_length=model.seq_length, ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size, tied_embeddings=model.tied_embeddings,
    )


def _block_counts(estimator: Estimator, candidate: Candidate, s: int, total: int) -> list[int]:
    """Microbatches of every replica of one stage of one block, adding up to ``total``."""
    groups = candidate.block().stages[s].groups
    counts = [g.count for g in groups]
    if candidate.even:
        return [total // sum(counts)] * sum(counts)
    times = [_unit_time(estimator, candidate, s, g) for g in groups]
    found = allocate(times, counts, total)
    if found is None:
        raise PlannerError("plan", f"stages[{s}].replicas", sum(counts),
                           f"more than the {total} microbatches that they divide: some would have none",
                           "Use fewer replicas or a smaller micro batch")
    share = [k for k, n in zip(found[1], counts) for _ in range(n)]
    slowness = [t for t, n in zip(times, counts) for _ in range(n)]
    while sum(share) > total:
        i = max((i for i in range(len(share)) if share[i] > 1), key=lambda i: (share[i] * slowness[i], i))
        share[i] -= 1
    return share


def _stage_routes(estimator: Estimator, candidate: Candidate, s: int, total: int) -> list[list[int]]:
    """Microbatch ids per replica of one stage, in the order of its groups, dealt into blocks."""
    blocks = candidate.blocks
    per_block: list[list[list[int]]] = []
    for j in range(blocks):
        ids = range(j, total, blocks)
        if candidate.schedule == "ministage":
            routes = _zorse_route(estimator, candidate, s, len(ids))
        else:
            routes = _route(_block_counts(estimator, candidate, s, len(ids)), len(ids))
        per_block.append([[ids[m] for m in route] for route in routes])
    out: list[list[int]] = []
    first = 0
    for g in candidate.block().stages[s].groups:
        for j in range(blocks):
            out += per_block[j][first : first + g.count]
        first += g.count
    return out


def _zorse_route(estimator: Estimator, candidate: Candidate, s: int, total: int) -> list[list[int]]:
    """The i-th microbatch that a stage completes goes where the i-th most work is left (Zorse, section 4.2)."""
    stages = candidate.block().stages[: s + 1]
    seconds = [[_unit_time(estimator, candidate, t, g) for g in stage.groups for _ in range(g.count)]
               for t, stage in enumerate(stages)]
    counts = [_block_counts(estimator, candidate, t, total) for t in range(len(stages))]
    return [list(ids) for ids in route(seconds, total, counts)[s]]


def _route(counts: list[int], total: int) -> list[list[int]]:
    """Microbatch ids per replica: each id goes to the replica that is least far through its share."""
    out: list[list[int]] = [[] for _ in counts]
    for m in range(total):
        q = min((i for i in range(len(counts)) if len(out[i]) < counts[i]),
                key=lambda i: ((len(out[i]) + 0.5) / counts[i], i))
        out[q].append(m)
    return out


def chunk_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk of a stage, as even as possible."""
    return tuple(layers // chunks + (1 if c < layers % chunks else 0) for c in range(chunks))


def build_plan(
    estimator: Estimator, candidate: Candidate, estimate: Estimate, notes: str = "", *, one_block: bool = False
) -> Plan:
    """The plan of a candidate.

    Args:
        one_block: Only the first of its equal, independent pipelines (for simulation).

    Raises:
        PlannerError: TP groups that do not fit into nodes, or a plan that contradicts itself.
    """
    cluster, model = estimator.cluster, estimator.model
    seated = seats(cluster, candidate.stages)
    if seated is None:
        raise PlannerError("cluster", "nodes", candidate.stages, "these TP groups do not fit into the nodes")
    total = model.global_batch_size // candidate.micro_batch_size
    batch = model.global_batch_size
    if one_block:
        total = -(-total // candidate.blocks)
        batch = total * candidate.micro_batch_size
        candidate = candidate.block()
    stages, rank, per_rank, all_routes = [], 0, [], []
    fastest = max(layers / _unit_time(estimator, candidate, s, g)
                  for s, (layers, groups) in enumerate(candidate.stages) for g in groups)
    for s, (layers, groups) in enumerate(candidate.stages):
        routes = _stage_routes(estimator, candidate, s, total)
        all_routes.append(routes)
        counts = [len(r) for r in routes]
        times = [_unit_time(estimator, candidate, s, g) for g in groups for _ in range(g.count)]
        speeds = [layers / t / fastest for t in times]
        memory = [m for m in estimate.memory if m.stage == s]
        by_replica = [m for m, g in zip(memory, groups) for _ in range(g.count)]
        replicas = []
        for q, g in enumerate(_single(groups)):
            ranks = tuple(range(rank, rank + g.tp))
            rank += g.tp
            m = by_replica[q]
            share = 1.0 if m.state_share is None else round(m.state_share, 4)
            replicas.append(Replica(ranks, tuple(routes[q]), cluster.nodes[g.pool].gpu,
                                    max(1e-4, round(speeds[q], 4)), state_share=share))
            per_rank += [RankPrediction(r, counts[q] * times[q], int(m.parameter_bytes), int(m.gradient_bytes),
                                        int(m.optimizer_bytes), int(m.activation_bytes)) for r in ranks]
        stages.append(PlanStage(chunk_layers(layers, candidate.chunks), tuple(replicas)))
    parameters: dict[str, object] = {}
    if candidate.schedule == "slimpipe":
        parameters["slices"] = candidate.slices
    if candidate.schedule == "ministage":
        parameters |= {"window": True, "offload": candidate.offload}
        if candidate.offload:  # as memory.py prices it
            parameters |= {"offload_optimizer": True, "offload_activations": 1.0}
    elif candidate.zero_stage >= 2:
        parameters["zero_stage"] = candidate.zero_stage
    elif candidate.schedule == "1f1b" and any(r != all_routes[0] for r in all_routes):
        parameters["slack"] = 0.0 if divided_alike(candidate, estimate.microbatches) else candidate.slack
    plan = Plan(
        model=model_shape(model),
        training=TrainingShape(
            micro_batch_size=candidate.micro_batch_size, global_batch_size=batch,
            precision="fp32" if model.precision == "tf32" else model.precision,
            sequence_parallel=model.sequence_parallel, recompute=candidate.recompute,
            distributed_optimizer=candidate.zero_stage >= 1,
        ),
        stages=tuple(stages),
        schedule=ScheduleSpec(candidate.schedule, parameters),
        predicted=Prediction(estimate.iteration_s, _bubble(estimate), tuple(per_rank)),
        notes=notes,
    )
    try:
        check_plan(plan)
        if "zero_stage" not in parameters:  # ZeRO-2 and 3 without a window are only compared with
            check_plan_alone(plan)
    except PlanError as error:
        raise PlannerError("plan", error.where, error.value, error.problem, error.hint) from None
    return plan


def _bubble(estimate: Estimate) -> float:
    return estimate.fill_s / estimate.busy_s if estimate.busy_s else 0.0


def _unit_time(estimator: Estimator, candidate: Candidate, s: int, g: Group) -> float:
    u = estimator.unit(g.pool, g.tp, candidate.micro_batch_size, candidate.recompute)
    assert u is not None
    layers = candidate.stages[s].layers
    seconds = layers * (u.layer_f + u.layer_b)
    if s == 0:
        seconds += u.embedding_f + u.embedding_b
    if s == len(candidate.stages) - 1:
        seconds += u.head_f + u.head_b
    return seconds


def candidate_of(
    plan: Plan, cluster: Cluster, file: str = "plan.json"
) -> tuple[Candidate, list[list[list[Seat]]]]:
    """A plan as a candidate on a cluster, and where its ranks sit (``packing.seat_replicas``).

    The candidate's groups are in an order of their own; the seats are in the plan's.

    Raises:
        PlannerError: a plan that cannot be put on the cluster, or that is not priced.
    """
    seated = seat_replicas(plan, rooms_of(cluster), file)
    if plan.context_parallel > 1:
        raise PlannerError(file, "stages[*].replicas[*].cp", plan.context_parallel,
                           "there are no figures for context parallelism", "Only emit takes such plans")
    stages: list[tuple[int, dict[tuple[int, int], int]]] = []
    shares: list[tuple[float, ...]] = []
    for s, stage in enumerate(plan.stages):
        groups: dict[tuple[int, int], int] = {}
        most: dict[tuple[int, int], float] = {}
        parts = state_shares(stage) or (1 / len(stage.replicas),) * len(stage.replicas)
        for q, replica in enumerate(stage.replicas):
            key = seated[s][q][0].pool, replica.tp
            groups[key] = groups.get(key, 0) + 1
            most[key] = max(most.get(key, 0.0), parts[q])
        stages.append((sum(stage.layers), groups))
        shares.append(tuple(share for _, share in sorted(most.items())))
    training, parameters = plan.training, plan.schedule.parameters
    zero = _number(parameters, "zero_stage", 1 if training.distributed_optimizer else 0, file)
    return Candidate(
        normalised(stages), training.micro_batch_size, training.recompute, plan.schedule.name,
        max(len(s.layers) for s in plan.stages), int(_number(parameters, "slices", 1, file, least=1)), int(zero),
        bool(parameters.get("offload", False)), slack=_number(parameters, "slack", SLACK, file),
        shares=tuple(shares) if plan.schedule.name == "ministage" else None,
    ), seated


def _number(parameters: dict[str, Any], name: str, default: float, file: str, least: int = 0) -> float:
    """A number among a schedule's parameters; whole where its default is."""
    value = parameters.get(name, default)
    wanted = int if isinstance(default, int) else int | float
    if not isinstance(value, wanted) or isinstance(value, bool) or not least <= value < inf:
        kind = "whole number" if isinstance(default, int) else "number"
        raise PlannerError(file, f"schedule.parameters.{name}", value, f"must be a {kind}, at least {least}")
    return value
