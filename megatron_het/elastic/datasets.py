"""Datasets outlive sessions: their indexes are not built again when a plan changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

Kept = dict[tuple[tuple[int | None, ...], bool], Any]
"""What a provider returned, by the numbers of samples and whether this rank read them."""


def remembered(provider: Callable[..., Any], kept: Kept) -> Callable[..., Any]:
    """A datasets provider that builds nothing where every rank has its datasets from an earlier session.

    Building is collective, so either all ranks build or none does.

    Args:
        provider: The script's.
        kept: Of this process; filled.
    """

    @functools.wraps(provider)
    def provide(num_samples: Sequence[int | None], **keywords: Any) -> Any:
        from megatron.core import mpu
        from megatron.training.utils import is_first_or_last_pipeline_stage

        reads = mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(keywords.get("vp_stage"))
        key = tuple(num_samples), bool(reads)
        everybody_has = torch.tensor([int(key in kept)], device="cuda")
        dist.all_reduce(everybody_has, op=dist.ReduceOp.MIN)
        if not everybody_has.item():
            kept[key] = provider(num_samples, **keywords)
        return kept[key]

    return provide
