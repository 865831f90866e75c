"""What is refused of fp8, and what is not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.arguments.megatron_args import _check_fp8
from megatron_het.features.base import ATTENTION_REFUSED
from megatron_het.lowering.programs import build
from megatron_het.plan import Plan, PlanError, ScheduleSpec
from megatron_het.plan.run_config import plan_from_flags
from megatron_het.schedule.ir import SLICED_SCHEDULES, Kind
from testing.slimpipe_cases import with_context_parallel
from tests.unit.plan.feature_checks import refusal
from tests.unit.plan.megatron_flags import flags

CHUNKS = {"interleaved": 2, "ministage": 2, "zb-v": 2, "v-half": 2}
SLICES = {"slimpipe": {"slices": 4}, "seq1f1b": {"slices": 4}, "terapipe": {"slices": 4}}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-half", "ministage", *SLICES, "data-parallel")


def made(schedule: str = "1f1b", length: int = 64, **parameters: Any) -> Plan:
    stages = 1 if schedule == "data-parallel" else 2
    words = f"--num-layers 4 --num-attention-heads 8 --pipeline-model-parallel-size {stages} --seq-length {length}"
    if schedule in CHUNKS:
        words += f" --num-virtual-stages-per-pipeline-rank {CHUNKS[schedule]}"
    return plan_from_flags(flags(words), stages, ScheduleSpec(schedule, {**SLICES.get(schedule, {}), **parameters}))[0]


def arguments(recipe: str = "tensorwise", **changed: Any) -> SimpleNamespace:
    given = {
        "fp8": "hybrid",
        "fp8_recipe": recipe,
        "transformer_impl": "transformer_engine",
        "recompute_granularity": None,
        "recompute_activations": False,
        "first_last_layers_bf16": False,
        "cuda_graph_impl": "none",
    }
    return SimpleNamespace(**{**given, **changed})


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "delayed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_fp8(schedule: str, recipe: str) -> None:
    _check_fp8(made(schedule), arguments(recipe))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backwards_are_in_the_order_of_forwards_or_not(schedule: str) -> None:
    """Delayed scaling with recomputation is refused where a chunk's passes do not come back in their order."""
    plan = made(schedule)
    program = build(plan)[False]
    in_order = True
    for ops in program.ops:
        for chunk in {op.chunk for op in ops}:
            passes = [op for op in ops if op.chunk == chunk]
            order = [(op.microbatch, op.slice) for op in passes if op.kind is Kind.FORWARD]
            back = [(op.microbatch, op.slice) for op in passes if op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)]
            in_order = in_order and order == back
    assert in_order is (schedule not in SLICED_SCHEDULES)
    if not in_order:
        with pytest.raises(PlanError, match="goes back in another order"):
            _check_fp8(plan, arguments("delayed", recompute_granularity="full"))


SHARED = replace(made(), stages=with_context_parallel(made().stages, 2))


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        (made(), {}, None),
        (made(), {"transformer_impl": "local"}, "compute nothing in fp8"),
        (made(), {"recipe": "custom"}, "is not known"),
        (made(), {"recipe": "mxfp8", "fp8_param_gather": True}, "--fp8-param-gather = True.*--fp8-recipe mxfp8"),
        (made(), {"recipe": "delayed", "first_last_layers_bf16": True}, "all layers at once"),
        (made(), {"cuda_graph_impl": "local"}, "when it was captured"),
        (SHARED, {}, None),
        (SHARED, {"recipe": "delayed"}, "--fp8-recipe = 'delayed'.*values of their own.*tensorwise"),
        # slices have as many tokens as products want
        (made("slimpipe", 64), {}, None),
        (made("slimpipe", 32), {}, "passes of 8 tokens .* multiple of 16"),
        (made("slimpipe", 128), {"recipe": "mxfp8"}, None),
        (made("slimpipe", 64), {"recipe": "mxfp8"}, "passes of 16 tokens .* multiple of 32"),
    ],
)
def test_refused(plan: Plan, changed: dict[str, Any], reason: str | None) -> None:
    with refusal(reason):
        _check_fp8(plan, arguments(**changed))
    _check_fp8(plan, arguments(**{**changed, "fp8": None}))


def test_attention_of_slices_stays_as_it_is() -> None:
    assert {"fp8_dot_product_attention", "fp8_multi_head_attention"} <= {r.attribute for r in ATTENTION_REFUSED}
