"""Ranks that share every slice: their half of the slice attention (SlimPipe, section 5)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_het.attention.core import SliceCoreAttention
from megatron_het.features.context_parallel.commuted import CommutedContextParallel
from megatron_het.runtime.feature import OpenContext, RuntimeFeature


class ContextParallelFeature(RuntimeFeature):
    """Tells every slice attention which ranks share its slice.

    Args:
        group: The ranks of this replica that have this rank's TP rank.
    """

    roles = ("cp",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Slices of a sequence may differ in length, but most do not.
        self._sharing = functools.lru_cache(maxsize=64)(functools.partial(CommutedContextParallel, group))

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`; slice attention is in the models already."""
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, SliceCoreAttention):
                module.sharing = self._sharing


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature; nothing where its replica has whole sequences."""
    group = context.groups.get("cp")
    return RuntimeFeature() if group is None else ContextParallelFeature(group)
