"""Megatron's arguments under a plan: checks of options that cannot be combined, and values that a plan sets.

Every refusal names the option, its value and the reason, and happens before any process group
exists.
"""

import importlib.util
import itertools
import math
import re
import sys
from typing import Any

from megatron_het.families import LATENT_SPEC, family_of
from megatron_het.features import FEATURES, features_of
from megatron_het.features.base import Refusal, flag_of, is_given, more_than_one
from megatron_het.features.registry import cuts_sequences, cutting_of
from megatron_het.plan import Placement, Plan, PlanError
from megatron_het.plan.placement import token_blocks
from megatron_het.plan.run_config import no_eval_interval
from megatron_het.plan.schema import KINDS, MODEL_SIZES, SPARSE_ATTENTION, TrainingShape
from megatron_het.plan.validate import PARTS
from megatron_het.schedule.ir import SLICED_SCHEDULES

_REFUSED = (
    Refusal("fp4", "gradients are rounded at random, pass by pass: another order of passes is another training"),
    Refusal("rampup_batch_size", "Megatron ignores it; give --step-batch-size-schedule and a plan for each size"),
    Refusal("hybrid_override_pattern", "it is an old name of --hybrid-layer-pattern; give that one"),
    Refusal("mtp_hybrid_override_pattern", "write these layers into --hybrid-layer-pattern, after /"),
    Refusal("num_distributed_optimizer_instances", "a class of replicas has one optimizer instance", more_than_one),
    Refusal("data_parallel_random_init", "replicas must start from the same weights"),
    *(
        Refusal(name, "Megatron's own evaluation fails with it, at the validation set or at the test set")
        for name in ("full_validation", "multiple_validation_sets")
    ),
    *(
        Refusal(name, "Megatron numbers microbatches by data-parallel rank, and a plan gives replicas other ones")
        for name in ("logits_save_dir", "logits_load_dir")
    ),
    Refusal("dist_ckpt_strictness", "Megatron takes no list of keys from loading", lambda v: "return_" in f"{v}"),
    Refusal("ckpt_convert_format", "it names files by ranks that other plans and Megatron do not have", is_given),
    Refusal("ddp_average_in_collective", "gradients are divided once, by the tokens of all replicas"),
    Refusal("perform_rl_step", "reinforcement learning is not supported with a plan"),
    Refusal("yaml_cfg", "give the options as flags"),
    Refusal("inprocess_restart", "in-process restart rebuilds groups that a plan owns"),
    Refusal("use_tp_pp_dp_mapping", "the plan says which rank goes where"),
    Refusal("decoder_first_pipeline_num_layers", "the plan says which layers go where"),
    Refusal("decoder_last_pipeline_num_layers", "the plan says which layers go where"),
    Refusal("num_layers_per_virtual_pipeline_stage", "the plan says which layers go where"),
    Refusal("num_virtual_stages_per_pipeline_rank", "the plan says which layers go where"),
    Refusal("pipeline_model_parallel_layout", "the plan says which layers go where"),
    Refusal("account_for_embedding_in_pipeline_split", "the plan says which layers go where"),
    Refusal("account_for_loss_in_pipeline_split", "the plan says which layers go where"),
    Refusal("microbatch_group_size_per_vp_stage", "the plan says in which order passes come", is_given),
    Refusal("tensor_parallel_num_weight_shards", "it makes groups that a plan does not have", is_given),
    *(
        Refusal(name, "a plan makes its groups itself, without it")
        for name in (
            *("create_all_gather_group", "distributed_timeout_seconds_after_init", "fake_process_group", "use_sharp"),
            *("high_priority_stream_groups", "nccl_communicator_config_path", "pipeline_model_parallel_comm_backend"),
        )
    ),
    Refusal("init_model_with_meta_device", "only FSDP fills the weights that such a model begins with"),
    Refusal("use_grouped_gemm_for_dense_mlp", "layers without TP are quantised then, and those with TP are not"),
    Refusal("gpu_sniff_test_interval", "groups of other sizes wait for other figures; use het-doctor", is_given),
    Refusal("optimizer_cuda_graph", "CUDA graphs capture groups that a plan rebuilds"),
    Refusal("enable_cuda_graph", "it is an old name of --cuda-graph-impl local; give that one"),
    Refusal("external_cuda_graph", "it is an old name of --cuda-graph-impl transformer_engine; give that one"),
    Refusal("defer_embedding_wgrad_compute", "the output layer would get no gradient from a plan's schedules"),
    Refusal("delay_wgrad_compute", "nothing makes the gradients that it puts off; schedules zb-* delay them"),
    Refusal("overlap_param_gather_with_optimizer_step", "it goes with --ckpt-format torch only, as no plan does"),
    Refusal("fine_grained_activation_offloading", "it is not told when an iteration ends; plans have an own offload"),
)
_FP8_RECIPES = ("tensorwise", "blockwise", "mxfp8", "delayed")
_FP8_ROWS, _MXFP8_ROWS = 16, 32
_REFUSED_WHERE_MIXED = (
    Refusal("qk_clip", "the largest attention logit is known to replicas of one TP size, and others clip by their own"),
    Refusal("experimental_attention_variant", "its parameters are cut into parts that the exchange does not know"),
    *(
        Refusal(f"save_{what}_interval", "replicas of other sizes write their parts into files of the same names")
        for what in ("wgrads", "dgrads", "params", "activations", "tokens_per_expert")
    ),
)
"""Refusals for stages whose replicas divide weights in different ways: weights would diverge, or files be damaged."""
_REFUSED_WITH_CHUNKS = (
    Refusal("iterations_to_skip", "Megatron reads their batches from one of several iterators"),
    Refusal("heterogeneous_layers_config_path", "Megatron takes the layers of a stage without asking for the chunk"),
)


def check_arguments(plan: Plan, args: Any, world_size: int) -> None:
    """Compare a plan, checked by itself, with Megatron's parsed (not yet validated) arguments; raises PlanError."""
    if world_size != plan.world_size:
        hint = "Start as many processes as the plan has ranks, or make a plan for this world size"
        raise PlanError("WORLD_SIZE", world_size, f"the plan has {plan.world_size} ranks", hint)
    for refusal in _REFUSED:
        refusal.check(args, "--het-plan")
    family_of(args).complete(plan, args)
    _check_mixed(plan, args)
    for known in FEATURES:
        known.check_any_arguments(plan, args)
    if args.dataloader_type == "external":
        raise PlanError("--dataloader-type", "external", "a plan routes samples itself; use single or cyclic")
    if not args.calculate_per_token_loss:
        hint = "Add the flag: gradients are divided once, by all tokens, so that any routing gives the same training"
        raise PlanError("--calculate-per-token-loss", False, "required with a plan", hint)
    if (args.train_iters or args.train_samples) and not args.skip_train and not args.eval_interval:
        raise no_eval_interval(args.eval_interval)
    _check_model(plan, args)
    for name in ("micro_batch_size", "global_batch_size"):
        value, expected = getattr(args, name), getattr(plan.training, name)
        if value is not None and value != expected:
            raise PlanError(flag_of(name), value, f"the plan was made for {expected}")
    _check_evaluation(plan.training, args)
    _check_parallelism(plan, args)
    _check_recompute(plan, args)
    _check_fp8(plan, args)
    check_chunks(plan, args)
    _check_checkpoint(plan, args)
    check_async_save(args)
    for feature, options in features_of(plan):
        feature.check_arguments(plan, options, args)


def check_device_kind(plan: Plan, rank: int, name: str) -> None:
    """Compare the device of a rank with its kind in the plan.

    Only a certain mismatch is an error: the driver's name has the model word of another kind of the plan (``v100`` of
    ``V100-16``), and not that of the rank's own kind.

    Args:
        name: The driver's name of the device.

    Raises:
        PlanError: The process is on a node of another kind.
    """
    kinds = {
        rank: kind
        for stage in plan.stages
        for replica in stage.replicas
        for part, kind in enumerate(replica.devices)
        for rank in replica.tp_group(part)
    }
    own, words = _model_word(kinds[rank]), set(re.split(r"[^a-z0-9]+", name.lower()))
    others = sorted({kind for kind in kinds.values() if (word := _model_word(kind)) in words and word != own})
    if own and own not in words and others:
        raise PlanError(
            f"rank {rank}",
            name,
            f"the plan has {kinds[rank]} there, not {others[0]}: processes are on other nodes than planned",
            "With Slurm every kind needs a gres type, constraint or partition of its own; in nodes "
            "with several, the cluster file lists 'gpus' in the order of nvidia-smi",
        )


def _model_word(kind: str) -> str:
    """The word of a kind's name that identifies the GPU model; empty if there is none."""
    found = [
        word for word in re.split(r"[^a-z0-9]+", kind.lower()) if re.fullmatch(r"[a-z]+[0-9]+[a-z]*|[0-9]{4}", word)
    ]
    return found[0] if found else ""


def _check_mixed(plan: Plan, args: Any) -> None:
    for number, stage in enumerate(plan.stages):
        if len({replica.cut for replica in stage.replicas}) > 1:
            for refusal in _REFUSED_WHERE_MIXED:
                refusal.check(args, f"replicas of different TP or EP, as stage {number} has")
            if SPARSE_ATTENTION in plan.model.pattern:
                raise PlanError(
                    "model.pattern",
                    plan.model.pattern,
                    f"stage {number} has replicas of different TP or EP, and the parameters of layers "
                    f"{SPARSE_ATTENTION} ({KINDS[SPARSE_ATTENTION]}) are cut into parts that the exchange between them "
                    "does not know",
                    "Give all replicas of a stage one TP size",
                )


def _check_model(plan: Plan, args: Any) -> None:
    found = {name: getattr(args, name, None) or 0 for name in MODEL_SIZES} | {
        "num_query_groups": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "tied_embeddings": not args.untie_embeddings_and_output_weights,
        "pattern": family_of(args).pattern(args),
    }
    if plan.model.ffn_hidden_size is not None and args.ffn_hidden_size is not None:
        found["ffn_hidden_size"] = args.ffn_hidden_size
    if plan.model.head_size is not None and not getattr(args, "multi_latent_attention", False):
        found["head_size"] = args.kv_channels
    for name, value in found.items():
        expected = getattr(plan.model, name)
        if value != expected:
            problem = f"the plan is for another model; the arguments say {value!r}"
            raise PlanError(f"model.{name}", expected, problem, "Make a plan for this model, or correct the arguments")
    length = getattr(args, "decoder_seq_length", None)
    if length not in (None, plan.model.seq_length):
        problem = f"a decoder's sequences have the length of --seq-length = {plan.model.seq_length}"
        raise PlanError("--decoder-seq-length", length, problem, "Leave the flag out")


def _check_evaluation(training: TrainingShape, args: Any) -> None:
    """Refuse an evaluation batch that is not made of whole batches of the plan."""
    sizes = {name: getattr(args, f"eval_{name}", None) for name in ("micro_batch_size", "global_batch_size")}
    size, iterations = sizes["global_batch_size"], getattr(args, "eval_iters", None) or 0
    if size is not None and iterations * size % training.global_batch_size:
        problem = f"{iterations} times that are no whole number of the plan's batches of {training.global_batch_size}"
        raise PlanError("--eval-global-batch-size", size, problem, "Give another --eval-iters")
    counts = [f for f in ("sft", "moe_expert_capacity_factor") if getattr(args, f, None)]
    for name, value in sizes.items() if counts else ():
        if value is not None and value != getattr(training, name):
            problem = f"with {flag_of(counts[0])} an evaluation depends on the sizes of microbatches and batches"
            raise PlanError(flag_of(f"eval_{name}"), value, problem, "Leave it out: then they are those of training")


def _check_parallelism(plan: Plan, args: Any) -> None:
    sizes = sorted({r.tp for s in plan.stages for r in s.replicas})
    experts = sorted({r.ep for s in plan.stages for r in s.replicas})
    groups = sorted(r.tp_group(c) for s in plan.stages for r in s.replicas for c in range(r.cp))
    is_usual = groups == list(itertools.batched(range(plan.world_size), sizes[0])) and not cuts_sequences(plan)
    if getattr(args, "tp_comm_overlap", False) and (not is_usual or plan.training.micro_batch_sizes):
        problem = "Transformer Engine knows TP groups of one size, one after the other, and passes of whole sequences"
        raise PlanError("--tp-comm-overlap", True, f"{problem}, all equal; this plan has others", "Leave it out")
    is_latent = getattr(args, "multi_latent_attention", False) and args.transformer_impl == "transformer_engine"
    if is_latent and sizes != [1] and not plan.training.sequence_parallel:
        problem = "TP ranks would have different gradients of what comes before latent attention of Transformer Engine"
        hint = "Make the plan with it: then the gradient of the keys' rotary part is summed over their heads"
        raise PlanError("training.sequence_parallel", False, problem, hint)
    for name, fits in (
        ("tensor_model_parallel_size", sizes),
        ("pipeline_model_parallel_size", [len(plan.stages)]),
        ("expert_model_parallel_size", experts),
    ):
        value = getattr(args, name)
        if value not in (1, *fits):
            raise PlanError(flag_of(name), value, f"the plan says {fits}", "Leave the flag out")
    wanted = {
        # With TP 1 everywhere there is nothing to divide: left out, as stock does.
        "sequence_parallel": plan.training.sequence_parallel or sizes == [1],
        "use_distributed_optimizer": plan.training.distributed_optimizer,
        "bf16": plan.training.precision == "bf16",
        "fp16": plan.training.precision == "fp16",
    }
    for name, value in wanted.items():
        if getattr(args, name) and not value:
            raise PlanError(flag_of(name), True, "the plan was made without it", "Make the plan again with it")
    how = args.recompute_method, args.recompute_num_layers
    if how not in (("uniform", 1), (None, None)) and any(r.recompute_layers for s in plan.stages for r in s.replicas):
        problem = "the plan says which layers of each chunk run again (recompute_layers)"
        raise PlanError("--recompute-num-layers", how[1], problem, "Leave it and --recompute-method out")


def _check_recompute(plan: Plan, args: Any) -> None:
    """Refuse recomputation flags that contradict the plan or lack another flag, on which Megatron fails late."""
    granularity = args.recompute_granularity or ("selective" if args.recompute_activations else None)
    recompute, given = plan.training.recompute, getattr(args, "recompute_modules", None)
    if granularity not in (None, "selective" if recompute in PARTS else recompute):
        raise PlanError("--recompute-granularity", granularity, f"the plan was made for {recompute!r}")
    modules = given or ([recompute] if granularity is None else ())
    if recompute in PARTS and modules != [recompute]:
        raise PlanError("--recompute-modules", given, f"the plan was made for {recompute!r}")
    if "moe_act" in modules and not args.moe_grouped_gemm:
        problem = "Megatron runs it again in experts of Transformer Engine only"
        raise PlanError("--recompute-modules", "moe_act", problem, "Give --moe-grouped-gemm")
    if "layernorm" in modules and importlib.util.find_spec("transformer_engine") is None:
        problem = "Megatron needs Transformer Engine for it, which is not installed"
        hint = "Leave it out; --het-thrifty-layers saves as much of norms"
        raise PlanError("--recompute-modules", "layernorm", problem, hint)


def _check_fp8(plan: Plan, args: Any) -> None:
    """Refuse fp8 options that would have no effect, or whose scales would depend on other ranks or passes."""
    if not getattr(args, "fp8", None):
        return
    if args.transformer_impl != "transformer_engine":
        problem = f"the layers of --transformer-impl {args.transformer_impl} compute nothing in fp8, and do not say so"
        raise PlanError("--fp8-format", args.fp8, problem, "Use --transformer-impl transformer_engine")
    if (getattr(args, "cuda_graph_impl", None) or "none") != "none":
        problem = "a captured layer reads the quantised weights that were there when it was captured"
        raise PlanError("--cuda-graph-impl", args.cuda_graph_impl, problem, "Leave it out, or --fp8-format")
    recipe = getattr(args.fp8_recipe, "value", args.fp8_recipe)
    if recipe == "custom":
        problem = "over which ranks, and when, quantizers of your own reduce is not known"
        raise PlanError("--fp8-recipe", recipe, problem, f"Use one of {', '.join(_FP8_RECIPES)}")
    if recipe == "mxfp8":
        no_weights = "with mxfp8 gathered weights take the memory of gradients, which other passes add to by then"
        Refusal("fp8_param_gather", no_weights).check(args, f"--fp8-recipe {recipe}")
    if recipe == "delayed":
        _check_delayed_scaling(plan, args)
    _check_fp8_rows(plan, args, _MXFP8_ROWS if recipe == "mxfp8" else _FP8_ROWS)


def _check_delayed_scaling(plan: Plan, args: Any) -> None:
    """Refuse options that delayed scaling does not support; its maxima are reduced over a replica's TP ranks."""
    if getattr(args, "first_last_layers_bf16", False):
        raise PlanError(
            "--first-last-layers-bf16", True, "delayed scaling is of all layers at once", "Use --fp8-recipe tensorwise"
        )
    if any(replica.cp > 1 for stage in plan.stages for replica in stage.replicas):
        problem = "ranks that share a sequence would scale their parts by largest values of their own"
        raise PlanError("--fp8-recipe", "delayed", problem, "Use --fp8-recipe tensorwise")
    given = (getattr(args, f"recompute_{name}", None) for name in ("granularity", "activations"))
    recomputes = plan.training.recompute != "none" or any(given)
    if recomputes and plan.schedule.name in SLICED_SCHEDULES:
        raise PlanError(
            "--fp8-recipe",
            "delayed",
            "Transformer Engine keeps the scales of passes that are computed again in the order of the forwards, and "
            f"schedule {plan.schedule.name} goes back in another order",
            "Use --fp8-recipe tensorwise, or no recomputation",
        )


def _check_fp8_rows(plan: Plan, args: Any, unit: int) -> None:
    """Refuse numbers of tokens per rank that are no multiple of ``unit``, which matrix products in fp8 need."""
    cutting, training = cutting_of(plan), plan.training
    tokens = cutting.nominal if cutting.is_even else cutting.unit
    for number, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            parts = replica.tp if training.sequence_parallel else 1
            blocks = token_blocks(replica.shares, tokens, parts) if replica.cp > 1 else [((0, tokens),)]
            sizes = {training.sequences(microbatch) for microbatch in replica.microbatches} or {1}
            for rows in {size * sum(length for _, length in own) for own in blocks for size in sizes}:
                if rows % (parts * unit):
                    raise PlanError(
                        "--fp8-format",
                        args.fp8,
                        f"stage {number} has passes of {rows} tokens over {parts} rank(s), and fp8 products need a "
                        f"multiple of {unit} on each",
                        "Use fewer or equal slices, another micro batch size, or leave fp8 out",
                    )


def check_chunks(plan: Plan, args: Any) -> None:
    """Refuse what Megatron cannot do with several chunks per stage; raises PlanError."""
    for refusal in _REFUSED_WITH_CHUNKS if plan.most_chunks > 1 else ():
        refusal.check(args, f"{plan.most_chunks} chunks per stage")


def _check_checkpoint(plan: Plan, args: Any) -> None:
    if not (args.save or args.load):
        return
    if args.ckpt_format != "torch_dist":
        raise PlanError("--ckpt-format", args.ckpt_format, "only torch_dist can be saved and loaded across plans")
    if args.non_persistent_ckpt_type not in (None, "global"):
        problem = "of unequal replicas and tied embeddings one copy is saved, which others cannot read there"
        raise PlanError("--non-persistent-ckpt-type", args.non_persistent_ckpt_type, problem, "Use global")
    keeps_optimizer = not (args.no_save_optim and args.no_load_optim)
    if plan.training.distributed_optimizer and keeps_optimizer and not args.dist_ckpt_optim_fully_reshardable:
        problem = "required with the distributed optimizer and a plan: other formats depend on the layout"
        raise PlanError("--dist-ckpt-optim-fully-reshardable", False, problem, "Add the flag")


def check_async_save(args: Any) -> None:
    """Refuse Megatron's parsed arguments with which asynchronous saving cannot work.

    Raises:
        PlanError: Megatron would switch it off without an error, or fail at the first save.
    """
    if not getattr(args, "async_save", False):
        return
    if not args.use_persistent_ckpt_worker:
        raise PlanError(
            "--async-save", True, "Megatron switches it off without this flag", "Add --use-persistent-ckpt-worker"
        )
    if args.async_strategy == "nvrx" and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise PlanError(
            "--async-strategy", "nvrx", "nvidia-resiliency-ext is not installed", "Give --async-strategy mcore"
        )


def environment_of(plan: Plan) -> dict[str, str]:
    """Environment variables that every rank of the plan needs before CUDA starts, unless they are set already.

    With tensor parallelism Megatron refuses to start on GPUs before Blackwell unless there is one hardware
    queue, which keeps communication kernels in the order in which they were launched.
    """
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if Placement(plan).max_tp() > 1 else {}


def apply_plan(plan: Plan, placement: Placement, args: Any, rank: int) -> int:
    """Set Megatron's arguments from the plan, before they are validated.

    Args:
        plan: The checked plan.
        placement: The plan's lookup tables.
        rank: This world rank.

    Returns:
        The world size for Megatron's validation: one replica of every stage at this rank's
        TP size, so that the data-parallel size, by which microbatches are counted, becomes 1.
    """
    where = placement.locate(rank)
    cut = placement.replica(where.stage, where.replica).cut
    tp = args.tensor_model_parallel_size = cut.tp
    # Megatron's memory estimate divides the world by these sizes, with experts or without, and by TP if the second is
    # left open, which may exceed the ranks per stage. Layers of experts read the model's configuration
    # (features/experts/runtime.py).
    args.expert_model_parallel_size = args.expert_tensor_parallel_size = 1
    args.pipeline_model_parallel_size = placement.num_stages
    if placement.num_stages > 1:
        family_of(args).write_layout(plan, args)
    args.micro_batch_size, args.eval_micro_batch_size = plan.training.reading_unit, 1  # evaluations count sequences
    args.global_batch_size = plan.training.global_batch_size
    args.sequence_parallel = plan.training.sequence_parallel
    args.use_distributed_optimizer = plan.training.distributed_optimizer
    args.bf16 = plan.training.precision == "bf16"
    args.fp16 = plan.training.precision == "fp16"
    if plan.most_chunks > 1:
        # True of the executor: it posts every transfer asynchronously.  Megatron's check of it is
        # about its own interleaved schedule, which does not run.
        args.overlap_p2p_comm = True
    for feature, options in features_of(plan):
        feature.apply(plan, options, args)
    _apply_recompute(plan, args, rank)
    spec = family_of(args).default_spec(args)
    if args.spec is None and spec is not None:
        args.spec = list(spec)
        # A checkpoint may be read with Transformer Engine, which lacks only queries that are not compressed.
        args.het_stand_in = spec != LATENT_SPEC or args.q_lora_rank is not None
    cuts = {r.cut for s in plan.stages for r in s.replicas}
    sizes = {found.tp for found in cuts}
    if args.padded_vocab_size is None:
        # Padding of the vocabulary depends on TP; one multiple for all ranks gives all the same size.
        args.het_given_multiple = args.make_vocab_size_divisible_by
        args.make_vocab_size_divisible_by *= math.lcm(*sizes) // tp
    is_unequal = _has_unequal_classes(placement)
    reads_by = getattr(args, "ckpt_fully_parallel_load_process_group", "dp")
    if is_unequal or reads_by != "dp" or any(len(placement.classes(s)) > 1 for s in range(placement.num_stages)):
        # Ranks in a group of one read in one step, others in two, but all ranks begin each step together.  And each
        # object may be read only once by all ranks together.
        args.ckpt_fully_parallel_load = False
    if getattr(args, "ckpt_assume_constant_structure", False) and is_unequal:
        # Megatron's cache of who saves what is empty on ranks without replicas; from the second save on these
        # would wait for a collective that the others skip.
        args.ckpt_fully_parallel_save = False
    if len(cuts) > 1 or plan.model.embeds_twice:
        # Several local shapes or copies per key are correct under a plan, but this check refuses them.
        args.ckpt_load_validate_sharding_integrity = False
    return tp * placement.num_stages


def _has_unequal_classes(placement: Placement) -> bool:
    """Whether some ranks share their weights with replicas and others do not."""
    counts = {
        len(placement.class_ranks(stage, cut, 0)) > 1
        for stage in range(placement.num_stages)
        for cut in placement.classes(stage)
    }
    return len(counts) > 1


def apply_after_validation(plan: Plan, args: Any) -> None:
    """Set those of Megatron's arguments for the executor that its validation would refuse or change.

    Validation refuses several chunks in a pipeline of one stage, because its own interleaved
    schedule needs a second stage; the rest of Megatron takes any layout.  It also switches the common start of
    parameter gathers off where there is one chunk, because its own schedule has none
    (``runtime/executor.py``).
    """
    if getattr(args, "overlap_param_gather", False):
        args.align_param_gather = True
    chunks = plan.most_chunks
    if len(plan.stages) == 1 and chunks > 1:
        family_of(args).write_layout(plan, args)
        args.virtual_pipeline_model_parallel_size = chunks


def _apply_recompute(plan: Plan, args: Any, rank: int) -> None:
    modules = getattr(args, "recompute_modules", None) or ["core_attn"]
    if plan.training.recompute == "selective" and modules != ["core_attn"] and rank == 0:
        sys.stderr.write(f"megatron_het: {', '.join(modules)} is recomputed; the plan's figures are of core_attn\n")
    if plan.training.recompute == "none" or args.recompute_granularity or args.recompute_activations:
        return
    args.recompute_granularity = plan.training.recompute
    if plan.training.recompute in PARTS:
        args.recompute_granularity, args.recompute_modules = "selective", [plan.training.recompute]
    if plan.training.recompute == "full":
        args.recompute_method = args.recompute_method or "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
