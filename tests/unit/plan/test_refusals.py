"""Refusals of Megatron's flags under any plan."""

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_het import device as platform
from megatron_het import megatron_patches as upstream
from megatron_het.arguments import hooks
from megatron_het.arguments.flags import split_arguments
from megatron_het.arguments.megatron_args import apply_plan, check_arguments
from megatron_het.features import FEATURES
from megatron_het.features.experts.spec import Experts
from megatron_het.plan import Placement, Plan, PlanError, Replica, ScheduleSpec, Stage, save_plan
from megatron_het.plan.run_config import HetConfig, check_batch_schedule, check_turns, plan_from_flags
from tests.unit.plan.feature_checks import refusal, refused
from tests.unit.plan.megatron_flags import flags

FLAGS = flags("--num-layers 4 --num-attention-heads 8 --pipeline-model-parallel-size 2")


class Arguments(SimpleNamespace):
    """Megatron's arguments; what is not set is None, as if not given."""

    def __getattr__(self, name: str) -> None:
        return None


def made() -> Plan:
    return plan_from_flags(FLAGS, 2, ScheduleSpec("1f1b"))[0]


def arguments(**changed: Any) -> Arguments:
    given = {
        "cuda_graph_impl": "none",
        "dataloader_type": "single",
        "calculate_per_token_loss": True,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 64,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "position_embedding_type": "rope",
    }
    return Arguments(**{**given, **changed})


def test_accepted() -> None:
    check_arguments(made(), arguments(recompute_modules=["core_attn", "mlp"], decoder_seq_length=64), 2)


@pytest.mark.parametrize(("changed", "reason"), refused("any_plan"))
def test_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        check_arguments(made(), arguments(**changed), 2)


def test_tensor_parallel_layers_of_transformer_engine() -> None:
    """Transformer Engine takes neighbouring ranks for a TP group, and their passes for whole sequences."""
    usual, given = made(), arguments(tp_comm_overlap=True)
    check_arguments(usual, given, 2)
    first = replace(usual.stages[0], replicas=(replace(usual.stages[0].replicas[0], ranks=(0,)),))
    last = replace(usual.stages[1], replicas=(replace(usual.stages[1].replicas[0], ranks=(1, 2)),))
    for plan in (plan_from_flags(FLAGS, 2, ScheduleSpec("slimpipe"))[0], replace(usual, stages=(first, last))):
        with pytest.raises(PlanError, match="--tp-comm-overlap = True.*this plan has others"):
            check_arguments(plan, given, plan.world_size)
    latent = arguments(multi_latent_attention=True, transformer_impl="transformer_engine")
    with pytest.raises(PlanError, match="sequence_parallel = False.*gradients of what comes before latent attention"):
        check_arguments(plan, latent, plan.world_size)
    check_arguments(replace(plan, training=replace(plan.training, sequence_parallel=True)), latent, plan.world_size)


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_another_world_size_is_refused(world_size: int) -> None:
    with pytest.raises(PlanError, match=f"WORLD_SIZE = {world_size}: the plan has 2 ranks"):
        check_arguments(made(), arguments(), world_size)


def test_unknown_flags_and_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--het-schedule", "1f1b", "--het-transport", "pigeon"], "--het-transport: invalid choice: 'pigeon'"),
        (["--het-plna", "p.json"], "--het-plna is no flag, --het-plan is;"),
    ):
        with pytest.raises(SystemExit):
            split_arguments(words)
        assert said in (error := capsys.readouterr().err) and error.count("\n") == 1


GRAPHS: dict[str, Any] = {"cuda_graph_impl": "transformer_engine", "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(("changed", "reason"), refused("graphs_of_layers"))
def test_graphs_of_layers_refused(changed: dict[str, Any], reason: str) -> None:
    check_arguments(made(), arguments(**GRAPHS), 2)
    with pytest.raises(PlanError, match=reason):
        check_arguments(made(), arguments(**GRAPHS | changed), 2)


def test_graphs_of_layers_leave_the_attention_of_slices_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HET_TRY_GRAPHS", "1")
    plan = plan_from_flags([*FLAGS, "--het-slices", "2"], 2, ScheduleSpec("slimpipe", {"slices": 2}))[0]
    check_arguments(plan, arguments(**GRAPHS, cuda_graph_modules=["mlp"]), 2)
    for parts in ([], ["attn"], ["attn", "mlp"]):
        with pytest.raises(PlanError, match=r"as have been computed.*--cuda-graph-modules mlp.*HET_TRY_GRAPHS=1"):
            check_arguments(plan, arguments(**GRAPHS, cuda_graph_modules=parts), 2)
    with pytest.raises(PlanError, match="as many as have been computed"):
        check_arguments(plan, arguments(**GRAPHS | {"cuda_graph_impl": "local"}), 2)


def with_batch(size: int) -> Plan:
    return replace(made(), training=replace(made().training, global_batch_size=size))


@pytest.mark.parametrize(("sizes", "changed", "reason"), refused("turns"))
def test_plans_take_turns_by_the_schedule(sizes: tuple[int, ...], changed: dict[str, Any], reason: str | None) -> None:
    plans = [with_batch(size) for size in sizes]
    with refusal(reason):
        check_batch_schedule(plans, arguments(**changed))


def test_plans_that_take_turns_are_for_one_training() -> None:
    four, eight = with_batch(4), with_batch(8)
    check_turns([four, eight], ["a", "b"])
    other = replace(eight, model=replace(eight.model, hidden_size=128))
    for plan, reason in ((other, "its model is"), (replace(four, notes="again"), "batch size 4, as a has")):
        with pytest.raises(PlanError, match=f"--het-plan = 'b'.*{reason}"):
            check_turns([four, plan], ["a", "b"])


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (None, "plan file = .*second.json.*no such file"),
        ("{", "plan file = .*second.json"),
        ("{}", "second.json: format"),
        (replace(made(), model=replace(made().model, hidden_size=128)), "--het-plan = .*second.json.*its model is"),
        (replace(made(), schedule=ScheduleSpec("1f1b", {"slack": -1})), "second.json: .*slack.*at least 0"),
    ],
)
def test_a_wrong_second_plan_is_one_error_before_anything_starts(
    second: Plan | str | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(platform, "activate", lambda: pytest.fail("the platform was activated"))
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_: pytest.fail("ranks were to meet"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    save_plan(made(), files[0])
    if isinstance(second, str):
        files[1].write_text(second, encoding="utf-8")
    elif second is not None:
        save_plan(second, files[1])
    with pytest.raises(SystemExit) as stopped:
        hooks.install(["program", "--het-plan", *map(str, files)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert re.search(reason, said), said


def test_the_arguments_are_compared_with_the_programs_of_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the second plan's when its turn comes."""
    four, eight = with_batch(4), with_batch(8)
    changed = arguments(world_size=2, step_batch_size_schedule="0:4 9:8", train_samples=9, eval_interval=1)

    def refuse(plan: Plan, args: Any) -> None:
        raise PlanError("--flag", plan.training.global_batch_size, "does not fit the program")

    monkeypatch.setattr("megatron_het.runtime.session.check_programs", refuse)
    session: Any = SimpleNamespace(check=lambda args: None)
    device: Any = SimpleNamespace(has_nccl=False)
    found = [str(e) for e in hooks.argument_problems(HetConfig(four, turns=(four, eight)), device, session, changed)]
    assert found == ["the plan for a global batch size of 8: --flag = 8: does not fit the program"]


@pytest.mark.parametrize(("rank", "local", "says"), [(0, 0, True), (1, 1, True), (2, 2, False), (3, 0, True)])
def test_megatron_refuses_too(
    rank: int, local: int, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An elastic job goes back to the plan before.  Ranks of another TP or node than the first said nothing."""
    monkeypatch.setattr(hooks, "argument_problems", lambda *_: [])
    monkeypatch.setattr(hooks.megatron_args, "apply_plan", lambda *_: 2)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local))
    nothing: Any = SimpleNamespace(is_cuda=False, unmet_flags=lambda _: [])
    refuse = Mock(side_effect=AssertionError("--one goes with --other"))
    validate = hooks._validate_args_hook(HetConfig(of_mixed_tp()), nothing, nothing, lambda _: None)(refuse)
    with pytest.raises(SystemExit):
        validate(arguments(rank=rank))
    refusal = "Megatron refuses the flags under this plan: --one goes with --other\n"
    assert (refusal in capsys.readouterr().err) is says


@pytest.mark.parametrize("transport", ["auto", "staged"])
def test_gloo_does_not_train_on_gpus(transport: str) -> None:
    """Its groups cannot sum gradients of CUDA tensors; host memory between stages is another matter."""
    session: Any = SimpleNamespace(check=lambda args: None)

    def problems(backend: str, device: platform.Platform) -> list[str]:
        found = arguments(world_size=2, distributed_backend=backend)
        return [str(e) for e in hooks.argument_problems(HetConfig(made(), transport=transport), device, session, found)]

    (refused,) = problems("gloo", platform.Platform("cuda"))
    assert refused.startswith("--distributed-backend = 'gloo': groups of gloo cannot train with CUDA tensors")
    assert "--het-transport staged" in refused
    assert problems("gloo", platform.Platform("cpu", plays_cuda=True)) == [refused]
    assert problems("nccl", platform.Platform("cuda")) == problems("gloo", platform.Platform("cpu")) == []


def more_stages(stages: int, *, tp: int = 1, ep: int = 1, chunks: int = 1, **training: Any) -> Plan:
    """A plan of four layers over stages of one replica each."""
    replicas = [Replica(tuple(range(s * tp, s * tp + tp)), tuple(range(8)), ep=ep) for s in range(stages)]
    layers = 4 // stages // chunks
    stages_of_all = tuple(Stage((layers,) * chunks, (replica,)) for replica in replicas)
    return replace(made(), stages=stages_of_all, training=replace(made().training, **training))


def of_mixed_tp() -> Plan:
    first = more_stages(2).stages[0]
    mixed = Stage((2,), (Replica((1, 2), tuple(range(4))), Replica((3,), tuple(range(4, 8)))))
    return replace(more_stages(2), stages=(first, mixed))


SELECTIVE = {"recompute_granularity": "selective"}
THRIFTY = replace(more_stages(4), schedule=ScheduleSpec("1f1b", {"thrifty_layers": True}))
SPLIT = replace(made(), schedule=ScheduleSpec("1f1b", {"vocabulary": True}))
ALIKE = ("qk_clip", "experimental_attention_variant", "save_wgrads_interval", "save_tokens_per_expert_interval")
"""What replicas of different TP would train in different ways."""
LATER = replace(made(), model=replace(made().model, mtp_num_layers=1, tied_embeddings=False))


def two_replicas() -> Plan:
    stage = Stage((4,), (Replica((0,), (0, 1, 2, 3)), Replica((1,), (4, 5, 6, 7))))
    return replace(more_stages(1), stages=(stage,))


def plan_of(given: str | dict[str, Any]) -> Plan:
    """The plan of a row of the refused flags: a name, or what :func:`more_stages` is given."""
    if isinstance(given, dict):
        return more_stages(**given)
    named = {"made": made(), "later": LATER, "thrifty": THRIFTY, "split": SPLIT, "mixed": of_mixed_tp()}
    named |= {"slices": in_slices(), "sharing": sharing_sequences(), "sizes": of_different_sizes()}
    return (named | {"replicas": two_replicas()})[given]


def in_slices() -> Plan:
    return replace(more_stages(2), schedule=ScheduleSpec("slimpipe", {"slices": 4}))


def of_different_sizes() -> Plan:
    return more_stages(2, micro_batch_size=3, micro_batch_sizes=(3, 1, 3, 1))


def sharing_sequences() -> Plan:
    stages = tuple(Stage((2,), (Replica((2 * s, 2 * s + 1), tuple(range(8)), cp=2),)) for s in range(2))
    return replace(more_stages(2), stages=stages)


@pytest.mark.parametrize(("plan", "changed", "reason"), refused("experts"))
def test_experts(plan: Any, changed: dict[str, Any], reason: str | None) -> None:
    """What is refused with layers of experts; dense models are not asked."""
    given = arguments(**changed)
    with refusal(reason):
        Experts().check_any_arguments(plan_of(plan), given)


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        *refused("of_the_plan"),
        *(("made", {flag: "given"}, None) for flag in ALIKE),
        *(
            ("mixed", {flag: "given"}, f"--{flag.replace('_', '-')} = 'given'.*TP or EP, as stage 1 has")
            for flag in ALIKE
        ),
    ],
)
def test_flags_that_depend_on_the_plan(plan: Any, changed: dict[str, Any], reason: str | None) -> None:
    made_for = plan_of(plan)
    given = arguments(**changed, pipeline_model_parallel_size=len(made_for.stages))
    with refusal(reason):
        check_arguments(made_for, given, made_for.world_size)


def test_parts_that_the_plan_does_not_reckon_with_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    plan = more_stages(2, recompute="selective")
    for modules, said in (("core_attn", ""), ("mlp", "mlp is recomputed; the plan's figures are of core_attn\n")):
        apply_plan(plan, Placement(plan), arguments(**SELECTIVE, recompute_modules=[modules], padded_vocab_size=64), 0)
        assert capsys.readouterr().err.removeprefix("megatron_het: ") == said


@pytest.mark.parametrize("installed", [False, True])
def test_recomputed_norms_need_transformer_engine(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: installed or None if n == "transformer_engine" else found(n)
    )
    given = arguments(recompute_modules=["layernorm", "mlp"])
    if installed:
        check_arguments(made(), given, 2)
        return
    with pytest.raises(PlanError, match="--recompute-modules = 'layernorm'.*Transformer Engine"):
        check_arguments(made(), given, 2)


@pytest.mark.parametrize(("tp", "given", "value"), [(1, None, None), (2, None, "1"), (2, "8", "8")])
def test_a_plan_with_tp_sets_what_megatron_insists_on_before_cuda_starts(
    tp: int, given: str | None, value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, seen = "CUDA_DEVICE_MAX_CONNECTIONS", []
    monkeypatch.setattr(platform, "activate", lambda: seen.append(os.environ.get(name)))
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    monkeypatch.setattr(hooks, "_install_plan", lambda *_: None)
    monkeypatch.setenv(name, given or "0")  # so that it is put back afterwards
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", str(2 * tp))
    words = [*FLAGS, "--tensor-model-parallel-size", str(tp)]
    save_plan(plan_from_flags(words, 2 * tp, ScheduleSpec("1f1b"))[0], tmp_path / "plan.json")
    hooks.install(["program", "--het-plan", str(tmp_path / "plan.json")])
    assert seen == [value]


@pytest.mark.parametrize("flag", ["--het-report", "--het-trace"])
def test_a_folder_that_cannot_hold_a_report_is_refused_before_anything_starts(
    flag: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "activate", lambda: pytest.fail("the platform was activated"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    save_plan(made(), tmp_path / "plan.json")
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", Path("/proc/reports"), tmp_path / ("x" * 300)):
        with pytest.raises(SystemExit):
            hooks.install(["program", "--het-plan", str(tmp_path / "plan.json"), flag, str(folder)])
        assert "rank 1" in (said := capsys.readouterr().err) and str(folder) in said


def test_a_start_checks_the_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each feature is asked once about the plan and once about Megatron's arguments."""
    asked: list[str] = []
    for feature in FEATURES:
        check = feature.check
        monkeypatch.setattr(feature, "check", lambda plan, c=check, n=feature.name: (asked.append(n), c(plan)))
    monkeypatch.setattr(platform, "activate", lambda: None)
    monkeypatch.setattr(upstream, "install", lambda *_, **__: None)
    monkeypatch.setattr(hooks, "_install_plan", lambda *_: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = hooks.install(["program", *FLAGS, "--het-schedule", "1f1b"])
    assert config.plan is not None
    check_arguments(config.plan, arguments(tied_embeddings=True), 2)
    assert asked == [feature.name for feature in FEATURES]


def test_wandb_is_looked_for_where_it_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hooks.importlib.util, "find_spec", lambda name: None)
    hooks._check_wandb(arguments(wandb_project="run", rank=0, world_size=2))
    hooks._check_wandb(arguments(rank=1, world_size=2))
    with pytest.raises(SystemExit) as stopped:
        hooks._check_wandb(arguments(wandb_project="run", rank=1, world_size=2))
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "rank 1: --wandb-project = 'run': wandb is not installed" in said
