"""Refusals for the plan alone, before Megatron's flags are looked at."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.families import pipeline_layout
from megatron_het.features.registry import check_plan_alone, runnable_schedules
from megatron_het.features.zero_bubble.spec import ZeroBubble
from megatron_het.plan import Plan, PlanError, ScheduleSpec, check_plan
from megatron_het.plan.run_config import plan_from_flags
from tests.unit.plan.feature_checks import check_feature, refusal
from tests.unit.plan.megatron_flags import flags

FLAGS = flags("--num-layers 4 --num-attention-heads 8 --pipeline-model-parallel-size 2")


def scheduled(name: str, stages: int = 2, chunks: int = 1, **parameters: Any) -> Plan:
    plan = plan_from_flags(
        [*FLAGS[:-1], str(stages), "--use-distributed-optimizer"], stages, ScheduleSpec(name, parameters)
    )[0]
    layers = (4 // stages // chunks,) * chunks
    cut = tuple(replace(stage, layers=layers) for stage in plan.stages)
    plan = replace(plan, stages=cut, model=replace(plan.model, tied_embeddings=False))
    check_plan(plan)
    return plan


def later(plan: Plan, layers: int = 1) -> Plan:
    return replace(plan, model=replace(plan.model, mtp_num_layers=layers))


WINDOW = {"window": True}
# The records of refusals (``tests/golden``) have the plans of files that are refused.
CHECKED = [
    (scheduled("1f1b", slack=float("nan")), r"parameters\.slack = nan: must be a number"),
    (scheduled("1f1b", vocabulary=True), None),
    # of layers for later tokens both copies of the embedding are clipped by one norm
    *((later(scheduled("ministage", chunks=2, **WINDOW, update=u)), None) for u in ("exact", "undo", "at-once")),
]


@pytest.mark.parametrize(("plan", "reason"), CHECKED)
def test_refused_for_the_plan_alone(plan: Plan, reason: str | None) -> None:
    with refusal(reason):
        check_plan_alone(plan)


def test_a_schedule_that_nobody_executes_is_called_simulated_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ZeroBubble, "runs", ())
    runnable_schedules.cache_clear()
    try:
        with pytest.raises(PlanError, match="'zb-v'.*simulated but not executed"):
            check_plan_alone(scheduled("zb-v", chunks=2))
    finally:
        runnable_schedules.cache_clear()


def test_the_plan_is_checked_without_torch() -> None:
    code = "import sys, megatron_het.features.registry; assert not {'torch', 'megatron.core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("made", [scheduled("1f1b"), scheduled("gpipe", 1), scheduled("slimpipe", slices=4)])
def test_positions_that_layers_for_later_tokens_know(made: Plan) -> None:
    """Megatron fails on others in an assertion, on one chunk too."""
    for positions in ("rope", "none"):
        args = SimpleNamespace(position_embedding_type=positions, multi_latent_attention=False)
        check_feature("mtp", later(made), args)
    for positions in ("learned_absolute", "yarn"):
        with pytest.raises(PlanError, match=rf"--position-embedding-type = '{positions}': .*know rope and none only"):
            check_feature("mtp", later(made), SimpleNamespace(position_embedding_type=positions))


@pytest.mark.parametrize(
    "plan", [scheduled("1f1b"), scheduled("interleaved", chunks=2), scheduled("zb-v", chunks=2), scheduled("gpipe", 1)]
)
def test_later_tokens_are_predicted_after_the_last_layer(plan: Plan) -> None:
    check_plan_alone(later(plan, 2))
    assert pipeline_layout(later(plan, 2)) == pipeline_layout(plan).removesuffix("L") + "mmL"
    with pytest.raises(PlanError, match=r"model.mtp_num_layers = 5: must be 0 to 4"):
        check_plan(later(plan, 5))
