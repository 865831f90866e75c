"""A tiny model under the topology of a plan, and the same model in one process: what three iterations are run of.

Stages, replicas, ranks, schedule and its parameters are the plan's; sizes are small.  Weights are drawn by name,
so that both start from the same ones whatever the plan is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_het.features.plan_checks import check_plan_alone
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.plan.validate import check_plan

ITERATIONS = 3
_HEAD_DIM, _VOCABULARY = 8, 250
_MOST_LAYERS = 2  # of a chunk
_TOKENS = 8  # of a slice of a rank, at least


def tiny_plan(plan: Plan) -> Plan:
    """The plan with a tiny dense model, and with as few microbatches as its schedule and its routes allow."""
    sizes = math.lcm(*(r.tp for s in plan.stages for r in s.replicas))
    slices = build(plan)[False].shape.slices
    parts = math.lcm(*(r.cp for s in plan.stages for r in s.replicas))
    stages = tuple(
        replace(
            s,
            layers=tuple(min(n, _MOST_LAYERS) for n in s.layers),
            replicas=tuple(replace(r, ep=1) for r in s.replicas),
        )
        for s in plan.stages
    )
    heads = sizes * parts * (2 if sizes * parts < 4 else 1)
    length = slices * parts * sizes * _TOKENS
    model = ModelShape(
        num_layers=sum(n for s in stages for n in s.layers),
        hidden_size=heads * _HEAD_DIM,
        num_attention_heads=heads,
        num_query_groups=heads,
        seq_length=length,
        ffn_hidden_size=heads * _HEAD_DIM * 2,
        tied_embeddings=plan.model.tied_embeddings,
        mtp_num_layers=min(plan.model.mtp_num_layers, 1),
    )
    whole = replace(plan, model=model, stages=stages, predicted=None, notes="")
    if plan.training.micro_batch_sizes:
        return whole
    whole = _with_microbatches(whole, range(plan.num_microbatches))
    most, kept = plan.num_microbatches, _least(plan)
    while kept < most:
        try:
            found = _with_microbatches(whole, range(kept))
            check_plan(found)
            check_plan_alone(found)
            build(found)
            return found
        except PlanError:
            kept *= 2
    return whole


def _least(plan: Plan) -> int:
    """The shortest prefix of the microbatches in which every replica has one."""
    return max(max(min(r.microbatches, default=0) for r in s.replicas) for s in plan.stages) + 1


def _with_microbatches(plan: Plan, kept: Sequence[int]) -> Plan:
    """The plan with the first microbatches only, of one sequence each."""
    stages = tuple(
        replace(
            s,
            replicas=tuple(replace(r, microbatches=tuple(m for m in r.microbatches if m in kept)) for r in s.replicas),
        )
        for s in plan.stages
    )
    training = replace(plan.training, micro_batch_size=1, global_batch_size=len(kept))
    return replace(plan, stages=stages, training=training)


def one_process(plan: Plan) -> Plan:
    """The tiny model of a tiny plan on one rank, without anything that a plan may do."""
    training = plan.training
    alone = TrainingShape(
        1 if not training.micro_batch_sizes else training.micro_batch_size,
        training.global_batch_size,
        precision=training.precision,
        micro_batch_sizes=training.micro_batch_sizes,
    )
    replica = Replica((0,), tuple(range(plan.num_microbatches)))
    return Plan(plan.model, alone, (Stage((plan.model.num_layers,), (replica,)),), ScheduleSpec("1f1b"))


def flags_of(plan: Plan, machine: Sequence[str]) -> list[str]:
    """Megatron's flags for a tiny plan on synthetic data.

    Args:
        plan: Tiny.
        machine: The flags that the machines of the job ask for.
    """
    model = plan.model
    text = f"""
        --num-layers {model.num_layers} --hidden-size {model.hidden_size} --ffn-hidden-size {model.ffn_hidden_size}
        --num-attention-heads {model.num_attention_heads} --seq-length {model.seq_length}
        --max-position-embeddings {model.seq_length} --position-embedding-type rope --normalization RMSNorm --swiglu
        --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
        --tokenizer-type NullTokenizer --vocab-size {_VOCABULARY} --make-vocab-size-divisible-by 32 --mock-data
        --split 90,10,0 --calculate-per-token-loss --lr 1e-3 --lr-decay-style constant --clip-grad 1.0
        --train-iters {ITERATIONS} --eval-iters 0 --eval-interval 1000 --log-interval 1 --seed 1234
        --distributed-timeout-minutes 1 --dist-ckpt-optim-fully-reshardable
        """
    words = text.split()
    if not model.tied_embeddings:
        words.append("--untie-embeddings-and-output-weights")
    if model.mtp_num_layers:
        words += ["--mtp-num-layers", str(model.mtp_num_layers)]
    if plan.training.precision in ("bf16", "fp16"):
        words.append(f"--{plan.training.precision}")
    return [*words, *machine]
