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
from megatron_het.plan import Plan, PlanError, Replica, ScheduleSpec, TrainingShape, check_plan
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


def with_shares(plan: Plan) -> Plan:
    """The last stage has two replicas, one of which keeps more."""
    *rest, last = plan.stages
    n = plan.world_size
    two = tuple(Replica((n - 1 + i,), tuple(range(i, 8, 2)), state_share=1.0 + i) for i in range(2))
    return replace(plan, stages=(*rest, replace(last, replicas=two)))


def with_joined_chunks(plan: Plan) -> Plan:
    """The last stage has all of its layers in one chunk."""
    *rest, last = plan.stages
    return replace(plan, stages=(*rest, replace(last, layers=(sum(last.layers),))))


def mixed(plan: Plan, shares: tuple[float, float] = (1.0, 1.0)) -> Plan:
    """The last stage has replicas of TP 1 and 2."""
    *rest, last = plan.stages
    n = plan.world_size
    one, other = shares
    two = (
        Replica((n - 1,), tuple(range(0, 8, 2)), state_share=one),
        Replica((n, n + 1), tuple(range(1, 8, 2)), state_share=other),
    )
    return replace(plan, stages=(*rest, replace(last, replicas=two)))


def tied(plan: Plan) -> Plan:
    return replace(plan, model=replace(plan.model, tied_embeddings=True))


def later(plan: Plan, layers: int = 1) -> Plan:
    return replace(plan, model=replace(plan.model, mtp_num_layers=layers))


WINDOW = {"window": True}
REFUSED = [
    (scheduled("zb-v"), r"layers = \[1\]: .*schedule zb-v has 2 in every stage"),
    (scheduled("zb-h1", chunks=2), r"layers = \[2\]: .*schedule zb-h1 has 1 in every stage"),
    (scheduled("waltz"), r"schedule\.name = 'waltz'.*no such schedule"),
    (scheduled("1f1b", zero_stage=3), r"parameters\.zero_stage = 3: schedule 1f1b has no such parameter"),
    (scheduled("slimpipe", slices=4, exchange_unit=2), "no such parameter. Did you mean exchange_units[?]"),
    (
        scheduled("1f1b", vocabulry=True),
        "Did you mean vocabulary[?] .* slack, order, depths, cp_documents, vocabulary, vocabulary_shares, offload",
    ),
    (scheduled("gpipe", update="undo"), "gpipe has no such parameter. Schedules that have it: ministage"),
    (scheduled("1f1b", slack=None), r"parameters\.slack = None: must be a number"),
    (scheduled("1f1b", slack=float("nan")), r"parameters\.slack = nan: must be a number"),
    (scheduled("1f1b", depths=[1, 2]), r"parameters\.depths = \[1, 2\]: must be a list of 1 whole numbers"),
    (scheduled("1f1b", depths=[0]), r"parameters\.depths = \[0\]: must be a list of 1 whole numbers"),
    (scheduled("1f1b", depths="2"), r"parameters\.depths = '2': must be a list of 1 whole numbers"),
    (scheduled("interleaved", depths=[1]), "interleaved has no such parameter"),
    (scheduled("interleaved", chunks=2, group="all"), r"parameters\.group = 'all': must be a whole number"),
    (with_shares(scheduled("1f1b")), "state_share.*need a parameter window"),
    (replace(scheduled("ministage", chunks=2, **WINDOW), training=TrainingShape(1, 8)), "distributed_optimizer"),
    (
        mixed(scheduled("ministage", chunks=2, **WINDOW), shares=(1.0, 0.0)),
        r"state_share = \[1.0, 0.0\]: nobody keeps the state of the replicas of TP 2",
    ),
    (
        tied(scheduled("ministage", chunks=2, **WINDOW, update="per-ministage")),
        "update = 'per-ministage': the copies of tied embeddings",
    ),
    (
        scheduled("ministage", chunks=2, **WINDOW, vocabulary=True, keep_at_turn=False),
        "keep_at_turn = False: parts of the output layer run between",
    ),
    (
        scheduled("ministage", chunks=2, **WINDOW, vocabulary=True, per_microbatch=True),
        "per_microbatch = True: parts of the output layer run between",
    ),
    (
        tied(scheduled("ministage", chunks=2, **WINDOW, vocabulary=True)),
        "tied_embeddings = True: with a parameter window and .* first ministage",
    ),
    (
        tied(scheduled("ministage", stages=1, chunks=2, **WINDOW, update="per-ministage")),
        "update = 'per-ministage': the copies of tied embeddings",
    ),
    (
        tied(scheduled("data-parallel", stages=1, chunks=2, **WINDOW, zero=3, vocabulary=True)),
        "tied_embeddings = True: with a parameter window and .* first ministage",
    ),
    (scheduled("slimpipe", slices=1), "fewer slices than the 2 stages"),
    (scheduled("slimpipe", slices="x"), "needs a number of slices"),
    (scheduled("1f1b", offload_activations=None), "a share above 0"),
    (with_joined_chunks(scheduled("slimpipe", chunks=2, slices=4, context_exchange=True)), "stages have .1, 2. chunks"),
    (scheduled("1f1b", vocabulary=True), None),
    (later(scheduled("1f1b", vocabulary=True)), "model.mtp_num_layers = 1: .*rows are spread over the stages"),
    # of layers for later tokens both copies of the embedding are clipped by one norm
    *((later(scheduled("ministage", chunks=2, **WINDOW, update=u)), None) for u in ("exact", "undo", "at-once")),
    (later(scheduled("ministage", chunks=2, **WINDOW, update="per-ministage")), "clipped by two norms"),
]


@pytest.mark.parametrize(("plan", "reason"), REFUSED)
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
