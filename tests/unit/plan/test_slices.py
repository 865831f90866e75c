"""Refusals of slices, and plans made from Megatron's flags."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.arguments.flags import split_arguments
from megatron_het.features import options_of
from megatron_het.features.context_exchange.spec import ExchangeOptions
from megatron_het.features.documents.spec import Documents
from megatron_het.plan import Cut, Location, Placement, Plan, PlanError, ScheduleSpec, check_plan
from megatron_het.plan.run_config import plan_from_flags
from tests.unit.plan.feature_checks import check_feature, refusal, refused
from tests.unit.plan.megatron_flags import flags

FLAGS = flags(
    "--num-attention-heads 8 --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"
)


def plan(more: str = "", world_size: int = 4, slices: Any = 4, schedule: str = "slimpipe") -> Plan:
    parameters = {} if slices is None else {"slices": slices}
    return plan_from_flags([*FLAGS, *more.split()], world_size, ScheduleSpec(schedule, parameters))[0]


def arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"attention_dropout": 0.0, "position_embedding_type": "rope", **changed})


def check_cut(made: Plan, args: Any) -> None:
    Documents().check_any_arguments(made, args)
    for name in ("slices", "context_parallel", "context_exchange"):
        check_feature(name, made, args)


PP4 = "--pipeline-model-parallel-size 4"
PP2V2 = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"


@pytest.mark.parametrize("schedule", ["slimpipe", "seq1f1b", "terapipe"])
def test_accepted(schedule: str) -> None:
    check_cut(plan(PP4, schedule=schedule), arguments(softmax_type="learnable", window_size=(64, 0)))
    check_cut(plan(PP4, schedule=schedule), arguments(reset_attention_mask=True, softmax_type="off-by-one"))
    packed = arguments(dataloader_inter_document_masking=True, window_size=(64, 0))
    check_cut(plan(PP4, schedule=schedule), packed)
    check_cut(plan(PP4, slices=None, schedule="1f1b"), arguments(attention_dropout=0.1))


@pytest.mark.parametrize(("changed", "reason"), refused("documents_without_slices"))
def test_documents_without_slices(changed: dict[str, Any], reason: str | None) -> None:
    made = plan(PP4, slices=None, schedule="1f1b")
    with refusal(reason):
        Documents().check_any_arguments(made, arguments(**changed))


def test_even_plan() -> None:
    flags = [*FLAGS, *["--tensor-model-parallel-size", "2", "--bf16", "--sequence-parallel"], *PP2V2.split()]
    made, rest = plan_from_flags([*flags, "--lr", "1"], 8, ScheduleSpec("slimpipe", {"slices": 4}))
    assert [stage.layers for stage in made.stages] == [(2, 2), (2, 2)]
    assert [[r.ranks for r in s.replicas] for s in made.stages] == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert [r.microbatches for r in made.stages[1].replicas] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert (made.training.precision, made.training.sequence_parallel) == ("bf16", True)
    assert (made.model.num_query_groups, made.model.tied_embeddings) == (2, False)
    assert "--num-layers-per-virtual-pipeline-stage" not in rest and rest[-2:] == ["--lr", "1"]
    assert len(rest) == len(flags)
    more = ["--use-tp-pp-dp-mapping", "--microbatch-group-size-per-virtual-pipeline-stage", "4", "--lr", "1"]
    by_pipeline, rest = plan_from_flags([*flags, *more], 8, ScheduleSpec("interleaved"))
    check_plan(by_pipeline)
    assert by_pipeline.schedule.parameters == {"group": 4} and len(rest) == len(flags)
    assert [[r.ranks for r in s.replicas] for s in by_pipeline.stages] == [[(0, 1), (4, 5)], [(2, 3), (6, 7)]]


def test_context_parallel_plan() -> None:
    flags = [*FLAGS, *["--tensor-model-parallel-size", "2", "--context-parallel-size", "2", "--sequence-parallel"]]
    made, _ = plan_from_flags(flags, 8, ScheduleSpec("1f1b"))
    check_plan(made)
    assert [r.ranks for r in made.stages[0].replicas] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert (made.world_size, made.most_cp) == (8, 2)
    replica = made.stages[0].replicas[1]
    assert (replica.tp, replica.tp_group(1), replica.cp_group(1)) == (2, (6, 7), (5, 7))
    placement = Placement(made)
    assert placement.locate(6) == Location(0, 1, tp_rank=0, cp_rank=1)
    assert placement.class_ranks(0, Cut(2), 1) == [1, 3, 5, 7]
    assert Plan.from_json(made.to_json()) == made
    assert "cp" not in plan(PP4).to_json()["stages"][0]["replicas"][0]
    check_cut(made, arguments())


def shared(more: str = "") -> Plan:
    return plan(f"--context-parallel-size 2 {more}", slices=None, schedule="1f1b")


@pytest.mark.parametrize(
    ("made", "changed", "reason"),
    [
        (plan(PP4), {"attention_dropout": 0.1}, "--attention-dropout.*dropout inside attention"),
        (plan(PP4), {"window_size": (64, 1)}, "--window-size = '64,1'.*none after"),
        (plan(PP4), {"window_size": (-1, 0)}, "--window-size.*before their own"),
        (
            plan(PP4),
            {"window_size": (64, 0), "reset_attention_mask": True},
            "--reset-attention-mask.*forgets documents",
        ),
        (plan(PP4), {"recompute_modules": ["mla_up_proj"], "multi_latent_attention": True}, "mla_up_proj"),
        (plan(PP4), {"position_embedding_type": "mrope"}, "positions of slices"),
        (shared("--seq-length 63"), {}, r"stages\[0\].replicas\[0\].cp = 2.*multiple of 2 tokens, at least 4, not 63"),
        (shared(), {"attention_dropout": 0.1}, "--attention-dropout.*context parallelism"),
        (shared(), {"window_size": (8, 1)}, "none after"),
        (shared(), {"cp_comm_type": ["a2a"]}, "--cp-comm-type.*a2a.*commuted context parallelism"),
    ],
)
def test_options_refused(made: Plan, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_cut(made, arguments(**changed))


def test_experts_are_divided_as_the_flags_say() -> None:
    flags = [*FLAGS, *["--tensor-model-parallel-size", "2", "--expert-model-parallel-size"]]
    assert {r.cut for r in plan_from_flags([*flags, "2"], 4, ScheduleSpec("1f1b"))[0].stages[0].replicas} == {Cut(2, 2)}
    over_replicas, _ = plan_from_flags([*flags, "4"], 4, ScheduleSpec("1f1b"))
    check_plan(over_replicas)
    assert {r.cut for r in over_replicas.stages[0].replicas} == {Cut(2, 4)}
    whole, _ = plan_from_flags([*flags, "1", "--expert-tensor-parallel-size", "1"], 4, ScheduleSpec("1f1b"))
    assert {r.cut for r in whole.stages[0].replicas} == {Cut(2, 1, 1)}
    with pytest.raises(PlanError, match="ep = 8.*the stage has 4 ranks"):
        check_plan(plan_from_flags([*flags, "8"], 4, ScheduleSpec("1f1b"))[0])


def test_context_parallel_sizes_must_fit() -> None:
    made, _ = plan_from_flags([*FLAGS, "--context-parallel-size", "2"], 4, ScheduleSpec("1f1b"))
    stage = made.stages[0]

    def changed(**fields: Any) -> Plan:
        replicas = (stage.replicas[0], replace(stage.replicas[1], **fields))
        return replace(made, stages=(replace(stage, replicas=replicas),))

    check_plan(changed(cp=1))
    check_plan(changed(cp_shares=(3, 1)))
    check_plan(changed(cp_devices=("H100", "A100")))
    for fields, reason in (
        ({"cp": 3}, "must divide the 2 ranks"),
        ({"cp_shares": (1, 2, 3)}, "must be 2 whole numbers"),
        ({"cp_shares": (0, 1)}, "must be 2 whole numbers of 1 to 1000000"),
        ({"cp": 1, "cp_shares": (1, 2)}, "must be 1 whole numbers"),
        ({"cp_devices": ("H100",)}, "must be 2 names of devices"),
        ({"cp_devices": ("H100", "A\n100")}, r"cp_devices\[1\].*all printable"),
    ):
        with pytest.raises(PlanError, match=reason):
            check_plan(changed(**fields))


@pytest.mark.parametrize(
    ("more", "world_size", "reason"),
    [
        ("--pipeline-model-parallel-size 3", 4, "not a multiple of tensor 1 x pipeline 3"),
        ("--pipeline-model-parallel-size 3", 3, "8 layers do not divide"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", 2, "do not divide"),
        ("--global-batch-size 6", 4, "not a multiple of micro batch size 1 x 4 replicas"),
        ("--decoder-first-pipeline-num-layers 1", 4, "divided evenly without a plan"),
    ],
)
def test_flags_refused(more: str, world_size: int, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan(more, world_size)


def test_missing_flag() -> None:
    with pytest.raises(PlanError, match="--num-layers.*required"):
        plan_from_flags(FLAGS[2:], 1, ScheduleSpec("slimpipe"))


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from megatron_het.plan import save_plan

    monkeypatch.setenv("WORLD_SIZE", "4")
    config, rest = split_arguments([*FLAGS, *PP4.split(), "--het-schedule", "slimpipe", "--het-slices", "8"])
    assert config.plan is not None and config.plan.schedule == ScheduleSpec("slimpipe", {"slices": 8})
    assert rest == [*FLAGS, *PP4.split()]
    words = ["--het-schedule", "slimpipe", "--het-slices", "8", "--het-context-exchange", "--het-exchange-units", "4"]
    exchange = split_arguments([*FLAGS, *PP4.split(), *words])[0].plan
    assert exchange is not None and options_of(exchange, "context_exchange") == ExchangeOptions(
        4, keep=False, idle=False
    )
    save_plan(replace(config.plan, schedule=ScheduleSpec("1f1b")), tmp_path / "plan.json")
    given = ["--het-plan", str(tmp_path / "plan.json")]
    for words, wanted in (
        ([], ScheduleSpec("1f1b")),
        (["--het-schedule", "slimpipe", "--het-slices", "4"], ScheduleSpec("slimpipe", {"slices": 4})),
    ):
        found = split_arguments([*given, *words])[0].plan
        assert found is not None and found.schedule == wanted


VOCABULARY = {"slices": 4, "vocabulary": True}


def vocabulary_arguments(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"make_vocab_size_divisible_by": 128, **changed})


@pytest.mark.parametrize(
    ("more", "changed", "reason"),
    [
        (PP4, {"fp16_lm_cross_entropy": True}, "--fp16-lm-cross-entropy.*computed in fp32"),
        (PP4, {"make_vocab_size_divisible_by": 3}, "3 equal parts .* for 4 stages.*Use a multiple of 4"),
        (f"{PP2V2} --tensor-model-parallel-size 2", {"padded_vocab_size": 131}, "0 equal parts that 2 TP ranks divide"),
    ],
)
def test_split_vocabulary_refused(more: str, changed: dict[str, Any], reason: str) -> None:
    made = replace(plan(more), schedule=ScheduleSpec("slimpipe", VOCABULARY))
    check_feature("vocabulary", made, vocabulary_arguments())
    with pytest.raises(PlanError, match=reason):
        check_feature("vocabulary", made, vocabulary_arguments(**changed))


def test_split_vocabulary_divides_over_the_largest_tp_size() -> None:
    made = plan("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2")
    first = replace(made.stages[0], replicas=(replace(made.stages[0].replicas[0], ranks=(0,)),))
    made = replace(made, stages=(first, made.stages[1]), schedule=ScheduleSpec("slimpipe", VOCABULARY))
    check_feature("vocabulary", made, vocabulary_arguments(padded_vocab_size=130))
    with pytest.raises(PlanError, match="0 equal parts that 2 TP ranks divide"):
        check_feature("vocabulary", made, vocabulary_arguments(padded_vocab_size=131))
