"""Checks of a plan: in itself, and against the arguments of the run that wants to use it."""

from __future__ import annotations

import math

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import ModelShape, Plan, Replica, Stage, TrainingShape

PRECISIONS = ("fp32", "bf16", "fp16")
RECOMPUTE = ("none", "selective", "full")


def check_plan(plan: Plan) -> None:
    """Raise a PlanError if the plan contradicts itself."""
    _check_positive_numbers(plan)
    if not plan.stages:
        raise PlanError("stages", [], "a plan needs at least one stage")
    _check_ranks(plan)
    _check_layers(plan)
    for s, stage in enumerate(plan.stages):
        _check_microbatches(stage, s, plan.num_microbatches)
        _check_divisibility(stage, s, plan.model, plan.training)
        _check_state_shares(stage, s)


def _check_positive_numbers(plan: Plan) -> None:
    model, training = plan.model, plan.training
    for owner, name in [
        *((model, n) for n in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")),
        (model, "num_query_groups"),
        (training, "micro_batch_size"),
        (training, "global_batch_size"),
    ]:
        if getattr(owner, name) < 1:
            section = "model" if owner is model else "training"
            raise PlanError(f"{section}.{name}", getattr(owner, name), "must be at least 1")
    if model.num_attention_heads % model.num_query_groups:
        raise PlanError(
            "model.num_query_groups", model.num_query_groups,
            f"does not divide the {model.num_attention_heads} attention heads",
        )
    if training.global_batch_size % training.micro_batch_size:
        raise PlanError(
            "training.global_batch_size", training.global_batch_size,
            f"is not a multiple of micro_batch_size = {training.micro_batch_size}",
        )
    if training.precision not in PRECISIONS:
        raise PlanError("training.precision", training.precision, f"must be one of {PRECISIONS}")
    if training.recompute not in RECOMPUTE:
        raise PlanError("training.recompute", training.recompute, f"must be one of {RECOMPUTE}")


def _check_ranks(plan: Plan) -> None:
    seen: dict[int, str] = {}
    for s, stage in enumerate(plan.stages):
        if not stage.replicas:
            raise PlanError(f"stages[{s}].replicas", [], "a stage needs at least one replica")
        for q, replica in enumerate(stage.replicas):
            where = f"stages[{s}].replicas[{q}].ranks"
            if not replica.ranks:
                raise PlanError(where, [], "a replica needs at least one rank")
            _check_context_parallel(replica, f"stages[{s}].replicas[{q}].cp", plan.context_parallel)
            for rank in replica.ranks:
                if rank in seen:
                    raise PlanError(
                        where, list(replica.ranks), f"rank {rank} is already used by {seen[rank]}",
                        "Every rank belongs to exactly one replica",
                    )
                seen[rank] = where
            if list(replica.ranks) != sorted(replica.ranks):
                raise PlanError(where, list(replica.ranks), "must be ascending (TP order is rank order)")
            if replica.speed <= 0:
                raise PlanError(f"stages[{s}].replicas[{q}].speed", replica.speed, "must be positive")
    missing = sorted(set(range(len(seen))) - set(seen))
    if missing:
        raise PlanError(
            "stages[*].replicas[*].ranks", sorted(seen), f"rank {missing[0]} is missing",
            f"Ranks must be 0 to {len(seen) - 1} without gaps",
        )
    for s, stage in enumerate(plan.stages):
        _check_crossing_ranks(stage, s)
    _check_special_ranks(plan)


def _check_context_parallel(replica: Replica, where: str, expected: int) -> None:
    if replica.cp < 1 or len(replica.ranks) % replica.cp:
        raise PlanError(where, replica.cp, f"must divide the {len(replica.ranks)} ranks of the replica")
    if replica.cp != expected:
        raise PlanError(
            where, replica.cp, f"the first replica has {expected}: each context-parallel rank talks to the one "
            "with the same part of the sequence in the next stage", "Use one size in the whole plan",
        )


def _check_crossing_ranks(stage: Stage, s: int) -> None:
    """Replicas of equal TP must come in one order at every TP rank.

    Megatron's distributed optimizer gives the n-th replica of a data-parallel group the n-th shard,
    and sums norm gradients over TP groups shard by shard: both need one n for a whole replica.
    """
    for q, replica in enumerate(stage.replicas):
        for p, other in enumerate(stage.replicas[:q]):
            if other.tp != replica.tp:
                continue
            before = {a < b for a, b in zip(other.ranks, replica.ranks, strict=True)}
            if len(before) > 1:
                raise PlanError(
                    f"stages[{s}].replicas[{q}].ranks", list(replica.ranks),
                    f"crosses replica {p} with ranks {list(other.ranks)}: "
                    "one must come first at every position",
                    "Number the ranks replica by replica",
                )


def _check_special_ranks(plan: Plan) -> None:
    """Megatron reads data and decides about training on rank 0 and logs on the last rank."""
    if plan.stages[0].replicas[0].ranks[0] != 0:
        raise PlanError(
            "stages[0].replicas[0].ranks", list(plan.stages[0].replicas[0].ranks),
            "rank 0 must be the first rank of the first replica of the first stage (it reads the data)",
            "Number the ranks stage by stage",
        )
    last = plan.world_size - 1
    if all(last not in r.ranks for r in plan.stages[-1].replicas):
        raise PlanError(
            f"stages[{len(plan.stages) - 1}].replicas[*].ranks",
            [list(r.ranks) for r in plan.stages[-1].replicas],
            f"the last rank ({last}) must be in the last stage (it logs the loss)",
            "Number the ranks stage by stage",
        )


def _check_layers(plan: Plan) -> None:
    total = 0
    for s, stage in enumerate(plan.stages):
        if not stage.layers or any(n < 0 for n in stage.layers) or sum(stage.layers) < 1:
            raise PlanError(
                f"stages[{s}].layers", list(stage.layers), "a stage needs at least one layer, none negative"
            )
        total += sum(stage.layers)
    if total != plan.model.num_layers:
        raise PlanError(
            "stages[*].layers", [list(s.layers) for s in plan.stages],
            f"add up to {total}, but model.num_layers is {plan.model.num_layers}",
        )


def _check_microbatches(stage: Stage, s: int, num_microbatches: int) -> None:
    owner: dict[int, int] = {}
    for q, replica in enumerate(stage.replicas):
        where = f"stages[{s}].replicas[{q}].microbatches"
        if not replica.microbatches:
            raise PlanError(
                where, [], "a replica without microbatches", "Leave it out of the plan or give it work"
            )
        if list(replica.microbatches) != sorted(set(replica.microbatches)):
            raise PlanError(where, list(replica.microbatches), "must be ascending, each id once")
        for m in replica.microbatches:
            if not 0 <= m < num_microbatches:
                raise PlanError(
                    where, m, f"microbatch ids are 0 to {num_microbatches - 1} "
                    "(global_batch_size / micro_batch_size of them)",
                )
            if m in owner:
                raise PlanError(where, m, f"microbatch {m} already belongs to replica {owner[m]}")
            owner[m] = q
    if len(owner) != num_microbatches:  # counted, not listed: a wrong batch size may be huge
        missing = next(m for m in range(num_microbatches) if m not in owner)
        raise PlanError(
            f"stages[{s}].replicas[*].microbatches", sorted(owner),
            f"microbatch {missing} belongs to no replica (there are {num_microbatches})",
        )


def _check_state_shares(stage: Stage, s: int) -> None:
    for q, replica in enumerate(stage.replicas):
        if not (math.isfinite(replica.state_share) and replica.state_share >= 0):
            raise PlanError(
                f"stages[{s}].replicas[{q}].state_share", replica.state_share, "must be 0 or a positive number"
            )
    if not any(replica.state_share for replica in stage.replicas):
        raise PlanError(
            f"stages[{s}].replicas[*].state_share", [0.0] * len(stage.replicas),
            "nobody keeps the state of this stage", "Give at least one replica a share",
        )


def _check_divisibility(stage: Stage, s: int, model: ModelShape, training: TrainingShape) -> None:
    for q, replica in enumerate(stage.replicas):
        where, tp = f"stages[{s}].replicas[{q}].ranks", replica.tp
        for name in ("num_attention_heads", "num_query_groups", "hidden_size", "ffn_hidden_size"):
            size = getattr(model, name)
            if size is not None and size % tp:
                raise PlanError(
                    where, list(replica.ranks), f"TP size {tp} does not divide model.{name} = {size}"
                )
        if replica.cp > 1 and model.seq_length % (2 * replica.cp):
            raise PlanError(
                f"stages[{s}].replicas[{q}].cp", replica.cp,
                f"twice as many blocks must divide model.seq_length = {model.seq_length}",
            )
        if training.sequence_parallel and model.seq_length % tp:
            raise PlanError(
                where, list(replica.ranks),
                f"with sequence parallel, TP size {tp} must divide model.seq_length = {model.seq_length}",
            )
