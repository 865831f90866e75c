"""Hybrid models in plans and flags: layers by symbol, cut anywhere."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_het.arguments.megatron_args import apply_after_validation, apply_plan, check_arguments
from megatron_het.families import GPT, HYBRID, LOCAL_SPEC, family_of
from megatron_het.features.context_exchange.runtime import windows_of
from megatron_het.features.experts.spec import Experts
from megatron_het.features.registry import check_plan_alone, cutting_of
from megatron_het.features.slices.spec import keys_per_token
from megatron_het.lowering.programs import schedule_shape
from megatron_het.plan import Placement, Plan, PlanError, Replica, ScheduleSpec, Stage, check_plan
from megatron_het.plan.run_config import plan_from_flags
from megatron_het.plan.schema import problem_of
from tests.unit.plan.feature_checks import refusal
from tests.unit.plan.megatron_flags import flags
from tests.unit.plan.test_refusals import Arguments, arguments, more_stages, two_replicas

_BASE = "--num-attention-heads 8 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"


def plan(pattern: str, schedule: str = "1f1b", more: str = "", ranks: int = 2, **parameters: Any) -> Plan:
    words = [*flags(f"{_BASE} {more}"), "--hybrid-layer-pattern", pattern]
    made, _ = plan_from_flags(words, ranks, ScheduleSpec(schedule, parameters))
    check_plan(made)
    return made


def given(pattern: str, **changed: Any) -> Arguments:
    named = {
        "num_layers": None,
        "hybrid_layer_pattern": pattern,
        "transformer_impl": "local",
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 32,
        "kv_channels": 8,
        "ffn_hidden_size": 256,
    }
    return arguments(**{**named, **changed})


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("*-x", "'x' is no kind of layer; known are M Mamba"),
        ("", "no layers"),
        ("/*-", "no layers before"),
        ("*-/*-/*", "made of the same layers"),
        ("*-/", "needs a layer"),
        ("*-+-", "either attention \\* or latent"),
    ],
)
def test_bad_patterns_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan(pattern)
    assert problem_of(pattern)
    with pytest.raises(PlanError, match="--hybrid-layer-pattern.*" + reason):
        check_arguments(plan("*-*-"), given(pattern), 2)


def test_flags_give_even_stages_or_those_of_the_pattern() -> None:
    even = plan("*-*-/*-")
    assert even.model.pattern == "*-*-/*-" and (even.model.num_layers, even.model.mtp_num_layers) == (4, 1)
    assert [stage.layers for stage in even.stages] == [(2,), (2,)]
    assert [stage.layers for stage in plan("*|-*-").stages] == [(1,), (3,)]
    assert [stage.layers for stage in plan("*|-*|-*|--", "interleaved").stages] == [(1, 2), (2, 2)]
    # In a V the path comes back: the third part of the pattern is of the second stage.
    assert [stage.layers for stage in plan("*|-*|-*-|--", "zb-v").stages] == [(1, 2), (2, 3)]
    with pytest.raises(PlanError, match="its 3 chunks do not divide over 2 stages"):
        plan("*|-|*-")


def test_attention_is_counted_in_the_order_of_the_path() -> None:
    found = plan("*|--|*-*|-", "zb-v")
    assert found.attention_layers == ((1, 0), (0, 2))
    assert schedule_shape(found).attention_layers == ((1, 0), (0, 2))
    assert schedule_shape(plan("*-*-")).attention == ((1,), (1,))
    dense, _ = plan_from_flags([*flags(f"--num-layers 4 {_BASE}")], 2, ScheduleSpec("1f1b"))
    assert dense.attention_layers == ((2,), (2,)) and schedule_shape(dense).attention == ()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"pattern": "*-*"}, "has 3 layers where model.num_layers is 4"),
        ({"pattern": "*-*-/*-"}, "has 1 layers where model.mtp_num_layers is 0"),
        ({"pattern": "*-|*-"}, r"chunks are in stages\[\*\].layers"),
        ({"pattern": "*-?-"}, "no kind of layer"),
    ],
)
def test_a_plan_is_one_model(changed: dict[str, Any], reason: str) -> None:
    made = plan("*-*-")
    with pytest.raises(PlanError, match=r"model.pattern.*" + reason):
        check_plan(replace(made, model=replace(made.model, **changed)))


def test_another_model_than_the_plans_is_refused() -> None:
    check_arguments(plan("*-*-"), given("*-*-"), 2)
    check_arguments(plan("*-*-"), given("*-|*-"), 2)  # the plan's own boundaries
    with pytest.raises(PlanError, match=r"chunks begin at other layers than in the plan, which has \*-\|\*-"):
        check_arguments(plan("*-*-"), given("*|-*-"), 2)
    with pytest.raises(PlanError, match="model.pattern.*for another model; the arguments say '\\*--\\*'"):
        check_arguments(plan("*-*-"), given("*--*"), 2)
    with pytest.raises(PlanError, match="model.pattern.*the arguments say ''"):
        check_arguments(plan("*-*-"), given("", hybrid_layer_pattern=None, num_layers=4), 2)
    with pytest.raises(PlanError, match="--hybrid-override-pattern.*old name"):
        check_arguments(plan("*-*-"), given("*-*-", hybrid_override_pattern="*-*-"), 2)


def test_what_megatron_would_derive_is_derived_before_the_checks() -> None:
    args = given("+-+-/+-")
    check_arguments(plan("+-+-/+-"), args, 2)
    assert (args.num_layers, args.mtp_num_layers, args.multi_latent_attention) == (4, 1, True)


def test_the_layout_is_written_into_the_pattern() -> None:
    made = plan("*|-*-/*-")
    args = given("*|-*-/*-")
    check_arguments(made, args, 2)
    apply_plan(made, Placement(made), args, 0)
    assert args.hybrid_layer_pattern == "*|-*-/*-" and args.spec == list(LOCAL_SPEC) and args.het_stand_in
    assert args.pipeline_model_parallel_layout is None
    alone = replace(
        made, stages=(replace(made.stages[0], layers=(1, 3)),), schedule=ScheduleSpec("ministage"), model=made.model
    )
    args = given("*-*-/*-", pipeline_model_parallel_size=1)
    check_arguments(alone, args, 1)
    apply_plan(alone, Placement(alone), args, 0)
    assert args.hybrid_layer_pattern == "*-*-/*-"  # Megatron's validation refuses chunks of one stage
    apply_after_validation(alone, args)
    assert args.hybrid_layer_pattern == "*|-*-/*-" and args.virtual_pipeline_model_parallel_size == 2


def test_sparse_attention_needs_whole_sequences() -> None:
    pattern = "D-+-"
    check_plan_alone(plan(pattern))
    check_arguments(plan(pattern), given(pattern, transformer_impl="transformer_engine"), 2)
    with pytest.raises(PlanError, match="layers D .*keys of a whole sequence"):
        check_plan_alone(plan(pattern, "slimpipe", slices=4))
    with pytest.raises(PlanError, match="layers D .*keys of a whole sequence"):
        check_plan_alone(plan(pattern, more="--context-parallel-size 2", ranks=4))
    with pytest.raises(PlanError, match="layers D .*of Transformer Engine only"):
        check_arguments(plan(pattern), given(pattern), 2)
    made = plan(pattern, ranks=8)
    replicas = made.stages[0].replicas
    mixed = (replace(replicas[0], ranks=(0, 1)), *replicas[2:])
    stages = (replace(made.stages[0], replicas=mixed), made.stages[1])
    with pytest.raises(PlanError, match="different TP or EP.*layers D "):
        check_arguments(
            replace(made, stages=stages), given(pattern, transformer_impl="transformer_engine"), made.world_size
        )


RECURRENT: dict[str, Any] = {
    "transformer_impl": "transformer_engine",
    "mamba_num_heads": None,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.mark.parametrize("symbol", ["M", "G"])
def test_recurrent_layers(symbol: str) -> None:
    """They run over slices, and what they cannot do is said before anything starts."""
    pattern = f"{symbol}-*-"
    for made in (plan(pattern), plan(pattern, "slimpipe", slices=4)):
        check_plan_alone(made)
        check_arguments(made, given(pattern, **RECURRENT), 2)
    shared = plan(pattern, more="--context-parallel-size 2", ranks=4)
    check_plan_alone(shared)
    check_arguments(shared, given(pattern, **RECURRENT, context_parallel_size=2), 4)
    heads = {"mamba_num_heads": 2, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
    with pytest.raises(PlanError, match=r"heads = 2.*one of 4 ranks"):
        wide = plan(pattern, more="--context-parallel-size 4", ranks=8)
        check_arguments(wide, given(pattern, **RECURRENT | heads, context_parallel_size=4), 8)
    with pytest.raises(PlanError, match=f"layers {symbol} .*of Transformer Engine only"):
        check_arguments(plan(pattern), given(pattern), 2)
    check_arguments(plan(pattern), given(pattern, **RECURRENT, dataloader_inter_document_masking=True), 2)


def test_tp_divides_the_heads_of_recurrent_layers() -> None:
    more, named = "--tensor-model-parallel-size 2 --sequence-parallel", {"sequence_parallel": True, **RECURRENT}
    for pattern in ("M-*-", "G-*-"):
        check_arguments(plan(pattern, more=more, ranks=4), given(pattern, **named, tensor_model_parallel_size=2), 4)
    for pattern, changed, flag in (
        ("M-*-", {"mamba_num_groups": 1}, "--mamba-num-groups = 1"),
        ("M-*-", {"mamba_num_heads": 3}, "--mamba-num-heads = 3"),
        ("G-*-", {"linear_num_key_heads": 1}, "--linear-num-key-heads = 1"),
    ):
        with pytest.raises(PlanError, match=f"{flag}.*the plan has TP 2"):
            check_arguments(
                plan(pattern, more=more, ranks=4), given(pattern, **named | changed, tensor_model_parallel_size=2), 4
            )
    with pytest.raises(PlanError, match="layers G .*only under sequence parallelism"):
        cut = plan("G-*-", more="--tensor-model-parallel-size 2", ranks=4)
        check_arguments(cut, given("G-*-", **RECURRENT, tensor_model_parallel_size=2), 4)


def test_the_exchange_needs_attention_in_every_chunk() -> None:
    check_plan_alone(plan("*-|*-", "slimpipe", slices=4, context_exchange=True))
    with pytest.raises(PlanError, match="a chunk has no attention"):
        check_plan_alone(plan("*-*|-", "slimpipe", slices=4, context_exchange=True))


def test_windows_count_layers_with_attention() -> None:
    pytest.importorskip("megatron.core")
    args = given("*-*-*-", num_layers=6, window_size=(8, 0), window_attn_skip_freq=[1, 0, 0, 0, 1, 0])
    assert HYBRID.attention_numbers(args) == (1, 3, 5) and family_of(args) is HYBRID
    assert windows_of(args) == [8, None, 8]
    assert GPT.attention_numbers(Arguments(num_layers=2)) == (1, 2)
    made = plan("*-*-*-", "slimpipe", slices=4)
    assert cutting_of(made, args).window_share == pytest.approx(2 / 3)


def test_equal_work_counts_the_layers_between_attention() -> None:
    def figure(pattern: str | None) -> float:
        args = given(pattern or "", num_query_groups=8, hidden_size=64, swiglu=True, kv_channels=8)
        args.hybrid_layer_pattern = pattern
        return keys_per_token(args)

    assert figure("*-*-") == figure(None)
    assert figure("*---") == pytest.approx(3 * figure("*-") - 2 * figure("*"))


# What a plan decides about experts by its replicas: EP sizes, and balancing over the whole batch.


def spanning(*counts: int, ep: int, **more: Any) -> Plan:
    """One stage of replicas of one rank with these numbers of microbatches."""
    first = [sum(counts[:q]) for q in range(len(counts))]
    replicas = [Replica((q,), tuple(range(first[q], first[q] + n)), **{"ep": ep, **more}) for q, n in enumerate(counts)]
    plan = more_stages(1)
    training = replace(plan.training, global_batch_size=sum(counts), micro_batch_size=1)
    return replace(plan, training=training, stages=(Stage((4,), tuple(replicas)),))


def again_in_one(plan: Plan, *counts: int) -> Plan:
    """The first replica runs some layers of its chunks again only, by default one."""
    first, *rest = plan.stages[0].replicas
    stage = replace(plan.stages[0], replicas=(replace(first, recompute_layers=counts or (1,)), *rest))
    return replace(plan, stages=(stage,), training=replace(plan.training, recompute="full"))


@pytest.mark.parametrize("counts", [(1,), (0,), (5,), (1, 1)])
def test_layers_that_run_again(counts: tuple[int, ...]) -> None:
    plan = again_in_one(two_replicas(), *counts)
    with refusal(None if counts in ((1,), (0,)) else r"replicas\[0\].recompute_layers = .*0 to \[4\]"):
        check_plan(plan)
    given = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
    if counts == (1,):
        with refusal("--recompute-num-layers = 2.*which layers of each chunk run again"):
            check_arguments(plan, arguments(**given, pipeline_model_parallel_size=1), 2)


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        (spanning(2, 2, ep=2), {}, None),
        (spanning(3, 3, 1, 1, ep=2), {}, None),
        (
            spanning(3, 1, 3, 1, ep=2),
            {},
            "replicas 1 and 0 share experts.*replica 1 has 1 microbatches.*next to each other",
        ),
        (
            again_in_one(spanning(2, 2, ep=2)),
            {},
            "recompute_layers.*share experts, and do not run the same layers again",
        ),
        (spanning(2, 2, 2, ep=2), {}, r"replicas\[0\].ep = 2.*3 ranks that cut weights so"),
        (spanning(2, 2, ep=1, etp=-1), {}, r"etp = -1.*at least 0"),
        (spanning(2, 2, ep=4), {}, r"divides experts over 4 ranks, and the stage has 2"),
        (spanning(2, 2, ep=2), {"optimizer": "muon"}, "--optimizer = 'muon'.*not known to update"),
    ],
)
def test_experts_over_replicas(plan: Plan, changed: dict[str, Any], reason: str | None) -> None:
    given = arguments(**{"num_experts": 4, **changed})

    def check() -> None:
        check_plan(plan)
        Experts().check(plan)
        Experts().check_any_arguments(plan, given)

    with refusal(reason):
        check()


def test_replicas_of_another_cut_do_not_share_experts() -> None:
    plan = spanning(2, 2, 2, ep=2)
    mixed = (*plan.stages[0].replicas[:2], replace(plan.stages[0].replicas[2], ep=1))
    with pytest.raises(PlanError, match="replicas of stage 0 cut weights in other ways too"):
        check_plan(replace(plan, stages=(replace(plan.stages[0], replicas=mixed),)))
