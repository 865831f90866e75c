"""Training of GPT and hybrid models by Megatron's flags: batches, loss, datasets and the call of ``pretrain``.

``python -m megatron_het.gpt_training`` trains with a plan or without, and imports no optional package;
:mod:`megatron_het.pretrain_gpt` is the program for users.
"""

import time

_PROGRAM_START_S = time.time()

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megatron_het.arguments import hooks
from megatron_het.features.registry import reads_tokens

# What a batch may hold; the loader fills a subset of it.
_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)

_SPIKE_FACTOR = 10.0  # a loss this many times the largest one seen counts as a spike


def read_batch(data_iterator: Iterator[Any], vp_stage: int | None) -> dict[str, Any]:
    """The next microbatch of this rank, broadcast over its TP group.

    Returns:
        ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` as ``[b, s]`` and the rest of the
        fields; all None on a stage between the first and the last, which needs no data.
    """
    from megatron.core import mpu
    from megatron.core.utils import (
        flatten_batch_for_packed_sequences,
        get_batch_on_this_cp_rank,
        get_batch_on_this_tp_rank,
    )
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    args = get_args()
    needs_data = is_first_or_last_pipeline_stage(vp_stage) or reads_tokens(args, vp_stage)
    is_packed = bool(args.sft or args.dataloader_inter_document_masking)
    if not needs_data and not is_packed:
        return dict.fromkeys(_FIELDS)
    batch: dict[str, Any] = {}
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        loaded = next(data_iterator)
        batch = {
            name: loaded[name].cuda(non_blocking=True) if loaded.get(name) is not None else None for name in _FIELDS
        }
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=is_packed,
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=reads_tokens(args, vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if needs_data:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft,
        )
    else:  # packed sequences: a middle stage needs the boundaries only
        boundaries = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
        batch = {name: value for name, value in batch.items() if name in boundaries}
    return {name: batch.get(name) for name in _FIELDS}


def packed_sequence_params(batch: dict[str, Any]) -> Any:
    """Boundaries of packed sequences for the attention, or None for one sequence per sample."""
    if batch["cu_seqlens"] is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training import get_args
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    real = batch["cu_seqlens"].squeeze(0)
    padded = batch["cu_seqlens_padded"]
    padded = padded.squeeze(0) if padded is not None else None
    update_seqlen_stats_from_cu_seqlens(real)
    longest = int(batch["max_seqlen"].item())
    bounds = real if padded is None else padded
    local_cp_size = batch["local_cp_size"]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=int(local_cp_size.item()) if local_cp_size is not None else None,
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )


def token_loss(
    loss_mask: torch.Tensor, output: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of a microbatch's token losses, number of counted tokens, and the pair of both for logging.

    Args:
        loss_mask: 1 for tokens that count, ``[b, s]``.
        output: Token losses, ``[b, s]``.
        model: The model, for losses that read its internals.
    """
    from megatron.training import get_args

    args = get_args()
    if args.logits_load_dir is not None:
        return _distillation_loss(args, loss_mask, output, model)
    mask = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), num_tokens.view(1)])
    _watch_loss(args, total)
    return total, num_tokens, {"lm loss": report}


def _distillation_loss(args: Any, loss_mask: torch.Tensor, output: torch.Tensor, model: Any) -> Any:
    """Offline distillation from saved logits; the reader lives as long as the arguments."""
    from megatron.training.distillation import LossFuncCallable

    if not hasattr(args, "_het_distillation_loss"):
        args._het_distillation_loss = LossFuncCallable(
            logprobs_dir=args.logits_load_dir,
            decode_threads=args.logits_load_decode_threads,
            prefetch_factor=args.logits_load_prefetch_factor,
            msc_prefetch_depth=args.logits_load_msc_prefetch_depth,
            kd_loss_alpha=args.logits_load_kd_loss_alpha,
            ignore_errors=args.logits_load_ignore_errors,
        )
    total, num_tokens, report = args._het_distillation_loss(loss_mask, output, model=model)
    _watch_loss(args, total)
    return total, num_tokens, report


def _watch_loss(args: Any, loss: torch.Tensor) -> None:
    """Have Megatron's rerun machine check for NaN, Inf and spikes, as set by the flags."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, test in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {name} in local forward loss calculation"
            machine.validate_result(result=loss, rejection_func=test, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        is_large = partial(machine.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss")
        machine.validate_result(result=loss, rejection_func=is_large, message="Spiky loss", tolerance=0.0, fatal=False)


def forward_step(data_iterator: Iterator[Any], model: Any, return_schedule_plan: bool = False) -> Any:
    """Runs one forward of a microbatch for Megatron's schedules; returns its output and the function of its loss."""
    from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
    from megatron.training import get_args, get_timers

    args, timers, straggler = get_args(), get_timers(), StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = read_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = packed_sequence_params(batch)
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    labels = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    with straggler:
        if return_schedule_plan:
            if not args.overlap_moe_expert_parallel_comm:
                raise ValueError("a schedule plan needs --overlap-moe-expert-parallel-comm")
            output = model.build_schedule_plan(*inputs, **labels)
        else:
            output = model(*inputs, **labels, packed_seq_params=packed)
    return output, partial(token_loss, batch["loss_mask"], model=model)


def _dataset_config(args: Any) -> Any:
    """The dataset configuration that the flags describe."""
    import json

    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.datasets.fim_dataset import GPTFIMDatasetConfig
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences = json.load(file)
    # Fields whose flag has the same name
    same = (
        "split multiple_validation_sets full_validation num_dataset_builder_threads mmap_bin_files "
        "reset_position_ids reset_attention_mask eod_mask_loss object_storage_cache_path "
        "mid_level_dataset_surplus allow_ambiguous_pad_tokens context_parallel_size data_parallel_size "
        "hybrid_context_parallel"
    )
    options = {name: getattr(args, name) for name in same.split()}
    options.update(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        inter_document_masking=args.dataloader_inter_document_masking,
        sequences_per_dataset=sequences,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    if not args.fim_data:
        return GPTDatasetConfig(**options)
    kinds = ("prefix", "middle", "suffix", "pad", "eod")
    return GPTFIMDatasetConfig(
        **options,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_extra_tokens={kind: getattr(args, f"fim_{kind}_token") for kind in kinds},
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
    )


def datasets_provider(train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Train, validation and test datasets on the ranks that read data.

    Args:
        train_val_test_num_samples: Number of samples for each split.
        vp_stage: Model chunk of this rank, with several of them.
    """
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
    from megatron.training import get_args, print_rank_0
    from megatron.training.datasets.fim_dataset import GPTFIMDataset
    from megatron.training.datasets.sft_dataset import SFTDataset
    from megatron.training.utils import is_first_or_last_pipeline_stage

    args = get_args()

    def reads_data() -> bool:
        if mpu.get_tensor_model_parallel_rank() != 0:
            return False
        return args.sft or is_first_or_last_pipeline_stage(vp_stage) or reads_tokens(args, vp_stage)

    choices = ((args.sft, SFTDataset), (args.mock_data, MockGPTDataset), (args.fim_data, GPTFIMDataset))
    kind = next((dataset for chosen, dataset in choices if chosen), GPTDataset)
    print_rank_0(f"> building {kind.__name__} for training, validation and test ...")
    return BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, reads_data, _dataset_config(args)).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank may call it


def embedding_ranks(pipeline_ranks: Sequence[int]) -> list[int]:
    """Ranks of a pipeline group that hold (a copy of) the word embeddings."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    if len(pipeline_ranks) == 1:
        return [pipeline_ranks[0]]
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pipeline_ranks[-1])
    ranks.update(get_mtp_ranks(list(pipeline_ranks), core_transformer_config_from_args(args)))
    return sorted(ranks)


def main(boundary: Any = None, install: Callable[..., Any] = hooks.install) -> None:
    """Parse the command line and train.

    Args:
        boundary: Hooks between iterations of a run with a plan (``runtime/training.py``).
        install: Reads the ``--het-*`` flags and prepares the process.
    """
    from megatron_het import device as platform
    from megatron_het.families import family_of
    from megatron_het.runtime.training import leaving_together

    install(boundary=boundary)
    main_entry_s = time.time()
    from megatron.core.enums import ModelType
    from megatron.training import inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    set_startup_timestamps(program_start=_PROGRAM_START_S, main_entry=main_entry_s)
    wrapped_pretrain, store = pretrain, None
    if boundary is None:  # else the caller decides how the process ends
        wrapped_pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    container = pretrain_cfg_container_from_args(args, family_of(args).model_config(args))
    with leaving_together(over_gloo=boundary is None and not platform.activate().is_cuda):
        wrapped_pretrain(
            container,
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            store=store,
            get_embedding_ranks=embedding_ranks,
        )


if __name__ == "__main__":
    main()
