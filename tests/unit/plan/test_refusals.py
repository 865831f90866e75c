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
from tests.unit.plan.feature_checks import refusal
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


SINKHORN: dict[str, Any] = {"num_experts": 2, "moe_router_load_balancing_type": "sinkhorn"}
TWO_LOSSES: dict[str, Any] = {"num_experts": 2, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
KINDS_OF_LAYERS = {"heterogeneous_layers_config_path": "f"}
SAVING = {"save": "folder", "ckpt_format": "torch_dist"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size = 2"),
        ({"context_parallel_size": 2}, "--context-parallel-size = 2"),
        ({"tensor_model_parallel_size": 4}, "--tensor-model-parallel-size = 4"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 = True"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp = True"),
        ({"fp4": "e2m1"}, "--fp4 = 'e2m1'"),
        ({"bf16": True}, "--bf16 = True"),
        ({"decoder_first_pipeline_num_layers": 1}, "--decoder-first-pipeline-num-layers = 1"),
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss = False"),
        ({"eval_global_batch_size": 3, "eval_iters": 2}, "--eval-global-batch-size = 3: 2 times.*batches of 8"),
        ({"eval_global_batch_size": 16, "sft": True}, "--eval-global-batch-size = 16: with --sft"),
        ({"gpu_sniff_test_interval": 2}, "--gpu-sniff-test-interval.*use het-doctor"),
        ({"full_validation": True}, "--full-validation.*Megatron's own evaluation fails"),
        ({"train_iters": 4}, "--eval-interval = None: Megatron divides by it"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel.*the plan's own context parallelism"),
        ({"hierarchical_context_parallel_sizes": [1, 2]}, "--hierarchical-context-parallel-sizes.*the plan's own"),
        ({"logits_save_dir": "x"}, "--logits-save-dir = 'x'.*numbers microbatches by data-parallel rank"),
        ({"logits_load_dir": "x"}, "--logits-load-dir = 'x'.*numbers microbatches by data-parallel rank"),
        ({"dist_ckpt_strictness": "return_all"}, "--dist-ckpt-strictness = 'return_all'.*no list of keys"),
        ({"ckpt_convert_format": "torch"}, "--ckpt-convert-format = .torch.*names files by ranks"),
        ({"rampup_batch_size": [2, 2, 8]}, "--rampup-batch-size.*Megatron ignores it.*--step-batch-size-schedule"),
        ({"defer_embedding_wgrad_compute": True}, "--defer-embedding-wgrad-compute.*output layer would get no"),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute.*nothing makes the gradients"),
        ({"fine_grained_activation_offloading": True}, "--fine-grained-activation-offloading.*when an iteration ends"),
        ({"overlap_param_gather_with_optimizer_step": True}, "-gather-with-optimizer-step.*--ckpt-format torch only"),
        ({"overlap_param_gather": True}, "--overlap-param-gather.*with training.distributed_optimizer"),
        ({"enable_cuda_graph": True}, "--enable-cuda-graph.*old name of --cuda-graph-impl"),
        ({"external_cuda_graph": True}, "--external-cuda-graph.*old name"),
        ({"decoder_seq_length": 32}, "--decoder-seq-length = 32.*length of --seq-length = 64"),
        ({"num_experts": 2, "expert_model_parallel_size": 2}, "--expert-model-parallel-size = 2.*the plan says"),
        ({"num_experts": 2, "moe_router_load_balancing_type": "quantile_balancing"}, "mean of replicas"),
        ({"num_experts": 2, "moe_router_load_balancing_type": ["new"]}, "'new'.*not known"),
        (TWO_LOSSES | {"moe_aux_loss_coeff": [0.1]}, "--moe-aux-loss-coeff = '0.1'.*1 coefficients for 2 losses"),
        ({"num_experts": 2, "expert_tensor_parallel_num_weight_shards": 2}, "--expert-tensor-parallel-num-weight-sh"),
        ({"tensor_parallel_num_weight_shards": 2}, "--tensor-parallel-num-weight-shards = 2.*makes groups"),
        ({"ddp_average_in_collective": True}, "--ddp-average-in-collective.*divided once"),
        ({"num_experts": 2, "moe_mlp_glu_interleave_size": 32}, "gated MLPs as halves"),
        ({"num_experts": 2, "moe_shared_expert_glu_interleave_size": 32}, "gated MLPs as halves"),
        ({"microbatch_group_size_per_vp_stage": 4}, "-per-virtual-pipeline-stage = 4.*in which order passes"),
        ({"distributed_timeout_seconds_after_init": 9}, "-timeout-seconds-after-init = 9.*makes its groups"),
        ({"init_model_with_meta_device": True}, "--init-model-with-meta-device.*only FSDP fills the weights"),
        ({"use_grouped_gemm_for_dense_mlp": True}, "--use-grouped-gemm-for-dense-mlp.*with TP are not"),
        ({"num_experts": 2, "moe_use_upcycling": True}, "--moe-use-upcycling.*convert it before"),
        ({"num_experts": 2, "expert_tensor_parallel_size": 2}, "--expert-tensor-parallel-size = 2.*has TP 1"),
        (SAVING | {"non_persistent_ckpt_type": "local"}, "--non-persistent-ckpt-type = 'local'.*Use global"),
    ],
)
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


OF_ALL: dict[str, Any] = {"num_experts": 2, "moe_router_load_balancing_type": ["global_aux_loss"]}
GRAPHS: dict[str, Any] = {"cuda_graph_impl": "transformer_engine", "transformer_impl": "transformer_engine"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl = 'full_iteration'.*posts transfers"),
        ({"cuda_graph_modules": ["full_iteration"]}, "--cuda-graph-impl.*posts transfers"),
        ({"transformer_impl": "local"}, "captures its own layers.*--cuda-graph-impl local"),
        ({"recompute_granularity": "full"}, "--cuda-graph-impl.*full recomputation"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, "--cuda-graph-modules = 'attn'.*whole layers"),
        ({"reset_attention_mask": True}, "--reset-attention-mask.*different in every iteration"),
        ({"position_embedding_type": "yarn"}, "--position-embedding-type = 'yarn'.*Megatron captures"),
        ({"num_experts": 2}, "number of tokens of every expert.*attn moe_router"),
        ({"cuda_graph_modules": ["attn"]}, "--cuda-graph-modules = 'attn'.*failed on a GPU.*HET_TRY_GRAPHS=1"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl = 'local'.*outputs were views.*HET_TRY_GRAPHS=1"),
        ({"overlap_grad_reduce": True}, "--overlap-grad-reduce = True.*illegal access to memory.*HET_TRY_GRAPHS=1"),
        (OF_ALL | {"cuda_graph_modules": ["moe_router"]}, "--cuda-graph-modules = 'moe_router'.*balancing losses"),
    ],
)
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


@pytest.mark.parametrize(
    ("sizes", "changed", "reason"),
    [
        ((8,), {}, None),
        ((4, 8), {"step_batch_size_schedule": "0:4 1K:8", "train_samples": 100}, None),
        ((8,), {"step_batch_size_schedule": "0:4 9:8", "train_samples": 9}, "batch size of 4; there are plans for 8"),
        ((4, 8), {"step_batch_size_schedule": "0:4 9:x", "train_samples": 9}, "batch size of x"),
        ((4, 8), {"step_batch_size_schedule": "0:4 9:8"}, "--train-samples.*learning rates by samples"),
        ((4, 8), {"step_batch_size_schedule": "0:4 9:8", "use_precision_aware_optimizer": True}, "cannot move them"),
        ((4, 8), {"step_batch_size_schedule": "0:4 9:8", "fp8_param_gather": True}, "-param-gather.*cannot move them"),
        ((4, 8), {}, "2 plans.*take turns.*Give --step-batch-size-schedule"),
    ],
)
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


BALANCED = {"num_experts": 2, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}

REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
CHUNKED = {"mlp_chunks_for_training": 2}
DETACHED = {"mtp_num_layers": 1, "mtp_detach_heads": True, "untie_embeddings_and_output_weights": True}
WIDE = more_stages(2, tp=2, sequence_parallel=True)
SELECTIVE = {"recompute_granularity": "selective"}
THRIFTY = replace(more_stages(4), schedule=ScheduleSpec("1f1b", {"thrifty_layers": True}))
CLAMPED = {"swiglu": True, "activation_func_clamp_value": 7.0}
SPLIT = replace(made(), schedule=ScheduleSpec("1f1b", {"vocabulary": True}))
FUSED = {"cross_entropy_loss_fusion": True, "make_vocab_size_divisible_by": 128}
ALIKE = ("qk_clip", "experimental_attention_variant", "save_wgrads_interval", "save_tokens_per_expert_interval")
"""What replicas of different TP would train in different ways."""
LATER = replace(made(), model=replace(made().model, mtp_num_layers=1, tied_embeddings=False))


def in_slices() -> Plan:
    return replace(more_stages(2), schedule=ScheduleSpec("slimpipe", {"slices": 4}))


def of_different_sizes() -> Plan:
    return more_stages(2, micro_batch_size=3, micro_batch_sizes=(3, 1, 3, 1))


def sharing_sequences() -> Plan:
    stages = tuple(Stage((2,), (Replica((2 * s, 2 * s + 1), tuple(range(8)), cp=2),)) for s in range(2))
    return replace(more_stages(2), stages=stages)


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        (more_stages(2), BALANCED, None),
        (in_slices(), BALANCED, None),
        (sharing_sequences(), BALANCED, None),
        (in_slices(), {**BALANCED, "moe_aux_loss_coeff": 0.0}, None),
        (of_different_sizes(), BALANCED, r"aux_loss.*product of two sums.*\[1, 3\] sequences"),
        (of_different_sizes(), {**BALANCED, "moe_router_load_balancing_type": "seq_aux_loss"}, None),
        (more_stages(2), {**BALANCED, **REPEATED}, None),
        (in_slices(), {**BALANCED, **REPEATED}, "--mtp-use-repeated-layer.*2 times .* one slice of it"),
        (in_slices(), {**BALANCED, **REPEATED, "moe_aux_loss_coeff": 0.0}, None),
        (more_stages(2), {**BALANCED, **CHUNKED}, None),
        (in_slices(), {**BALANCED, **CHUNKED}, "--mlp-chunks-for-training = 2.*one slice of it"),
        (WIDE, {**BALANCED, **CHUNKED}, "-for-training = 2.*a TP rank has a part"),
        (in_slices(), SINKHORN, "'sinkhorn'.*whole sequence.*slice"),
        (of_different_sizes(), SINKHORN, "'sinkhorn'.*whole microbatch.*sequences"),
        (WIDE, SINKHORN | CHUNKED, "--mlp-chunks.*a TP rank has a part"),
        (in_slices(), {"num_experts": 2, "moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor.*slice"),
        (more_stages(2), {"num_experts": 2, "moe_expert_capacity_factor": 1.0}, None),
        (more_stages(2, tp=2), {"num_experts": 2, "moe_expert_capacity_factor": 1.0}, "TP 2.*tokens of one TP rank"),
        (WIDE, {"num_experts": 2, "add_bias_linear": True}, "--disable-bias-linear.*TP 2.*each TP rank"),
        (more_stages(2), {"num_experts": 2, "add_bias_linear": True}, None),
        (more_stages(2, tp=2), {"num_experts": 2}, "sequence_parallel.*Add --sequence-parallel"),
        (WIDE, {"num_experts": 2}, None),
        (more_stages(2, tp=2), {}, None),
    ],
)
def test_experts(plan: Plan, changed: dict[str, Any], reason: str | None) -> None:
    """What is refused with layers of experts; dense models are not asked."""
    given = arguments(**changed)
    with refusal(reason):
        Experts().check_any_arguments(plan, given)


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        (more_stages(4), {"reset_position_ids": True}, None),
        (more_stages(2, chunks=2), {"iterations_to_skip": [3, 4]}, r"--iterations-to-skip = \[3, 4\].*2 chunks"),
        (more_stages(2, chunks=2), KINDS_OF_LAYERS, "--heterogeneous-layers-config-path = 'f': .*2 chunks per stage"),
        (more_stages(4), KINDS_OF_LAYERS, None),
        (more_stages(4), {"iterations_to_skip": [3, 4]}, None),
        (more_stages(2, distributed_optimizer=True), {"optimizer": "sgd"}, "--optimizer = 'sgd'.*shards"),
        (LATER, {**DETACHED, "overlap_grad_reduce": True}, "--mtp-detach-heads = True.*gets no gradient"),
        (more_stages(2), {"optimizer": "sgd"}, None),
        (THRIFTY, CLAMPED, "--activation-func-clamp-value = 7.0: cannot be used with thrifty layers.*fused one"),
        (THRIFTY, CLAMPED | {"bias_swiglu_fusion": True}, None),
        (THRIFTY, {"swiglu": True, "glu_linear_offset": 1.0}, "--glu-linear-offset = 1.0.*fused one"),
        (THRIFTY, {"glu_linear_offset": 1.0}, None),
        (more_stages(2, recompute="mlp"), {}, None),
        (more_stages(2, recompute="mlp"), {**SELECTIVE, "recompute_modules": ["mlp"]}, None),
        (more_stages(2, recompute="selective"), {**SELECTIVE, "recompute_modules": ["mlp"]}, None),
        (more_stages(2, recompute="mlp"), SELECTIVE, "--recompute-modules = None.*the plan was made for 'mlp'"),
        (more_stages(2, recompute="mlp"), {"recompute_modules": ["layernorm"]}, "--recompute-modules.*for 'mlp'"),
        (more_stages(2, recompute="mlp"), {"recompute_granularity": "full"}, "--recompute-granularity.*for 'mlp'"),
        (more_stages(2, recompute="moe_act"), {}, "--recompute-modules = 'moe_act'.*Give --moe-grouped-gemm"),
        # without TP sequence parallelism is left out, as stock Megatron does
        (more_stages(2), {"sequence_parallel": True}, None),
        (more_stages(2, tp=2), {"sequence_parallel": True}, "--sequence-parallel = True: the plan was made without it"),
        (SPLIT, FUSED | {"cross_entropy_fusion_impl": "native"}, None),
        (SPLIT, FUSED | {"cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-impl = 'te'.*whole logits"),
        *((made(), {flag: "given"}, None) for flag in ALIKE),
        *(
            (of_mixed_tp(), {flag: "given"}, f"--{flag.replace('_', '-')} = 'given'.*TP or EP, as stage 1 has")
            for flag in ALIKE
        ),
    ],
)
def test_flags_that_depend_on_the_plan(plan: Plan, changed: dict[str, Any], reason: str | None) -> None:
    given = arguments(**changed, pipeline_model_parallel_size=len(plan.stages))
    with refusal(reason):
        check_arguments(plan, given, plan.world_size)


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
