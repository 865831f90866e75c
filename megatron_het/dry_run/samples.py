"""Samples of the right shapes: a dry run needs no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of zeros.

    Args:
        seq_length: Tokens of a sequence.
        count: Number of them.
        has_mask: Whether they bring an attention mask, for which TP ranks wait.
    """

    def __init__(self, seq_length: int, count: int, has_mask: bool) -> None:
        self._seq_length, self._count, self._has_mask = seq_length, count, has_mask

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self._seq_length
        sample = {
            "tokens": torch.zeros(length, dtype=torch.int64),
            "labels": torch.zeros(length, dtype=torch.int64),
            "loss_mask": torch.ones(length, dtype=torch.float32),
            "position_ids": torch.arange(length, dtype=torch.int64),
        }
        if self._has_mask:
            sample["attention_mask"] = torch.zeros((1, length, length), dtype=torch.bool)
        return sample


def samples_provider(args: Any) -> Callable[..., tuple[Any, ...]]:
    """A datasets provider for ``pretrain``.

    Args:
        args: Megatron's validated arguments.
    """

    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[Any, ...]:
        from megatron.training.utils import is_first_or_last_pipeline_stage

        has_mask = args.create_attention_mask_in_dataloader
        if not is_first_or_last_pipeline_stage(vp_stage):
            return (None, None, None)
        return tuple(_Samples(args.seq_length, count, has_mask) if count else None for count in num_samples)

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank calls it
    return provide
