"""One rank's training without the others: parse, join groups of absent ranks, start ``pretrain``."""

from __future__ import annotations

import time
from typing import Any

from megatron_het.dry_run.alone import join_alone
from megatron_het.dry_run.samples import samples_provider


def parse() -> Any:
    """Megatron's arguments, for a run that reads and writes nothing."""
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    args.save = args.load = args.pretrained_checkpoint = args.tensorboard_dir = None
    args.wandb_project = ""
    args.do_train = True  # Megatron reads it from a broadcast
    return args


def join(rank: int, world_size: int, backend: str) -> None:
    """Groups whose other members do not exist: what is gathered is this rank's part, over and over."""
    join_alone(rank, world_size, backend)


def train(args: Any) -> None:
    """``pretrain`` on samples of the right shapes."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_het import pretrain_gpt

    now_s = time.time()
    set_startup_timestamps(program_start=now_s, main_entry=now_s)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        samples_provider(args),
        ModelType.encoder_or_decoder,
        pretrain_gpt.forward_step,
        store=None,
        get_embedding_ranks=pretrain_gpt.embedding_ranks,
    )
