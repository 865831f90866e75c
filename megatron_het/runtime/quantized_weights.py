"""Quantised copies of weights (fp8) that the layers of Transformer Engine keep from pass to pass.

A layer quantises its weights once, and takes the copy for all microbatches and slices.  When it has to quantise anew,
Megatron says with ``is_first_microbatch``, which to the layer means more: with fused accumulation the backward of that
pass writes to ``main_grad`` what others add there.  That is right where the backward of the first pass comes first.
With slices, in a ministage or in a V it does not, and what came before it would be lost.  So here no pass is the first
one.  The copies are dropped instead: before the first pass of an iteration, and when weights are freed.  A layer that
has none makes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_COPIES = "_fp8_workspaces"
_FLAG = "is_first_microbatch"


def add_all_gradients(models: Iterable[torch.nn.Module]) -> None:
    """Let the backward of every pass add to the gradients, whichever comes first.

    Args:
        models: Chunks; what Megatron's own schedules say of first microbatches is not said to them.
    """
    for model in models:
        for module in model.modules():
            if hasattr(module, _FLAG):
                setattr(module, _FLAG, False)


def copies_of(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the tensors that quantised copies consist of: values, their transposes, scales."""
    for module in model.modules():
        for copy in (getattr(module, _COPIES, None) or {}).values():
            yield from (part for part in vars(copy).values() if isinstance(part, torch.Tensor))


def drop_copies(model: torch.nn.Module) -> None:
    """Let the layers of a chunk quantise their weights in the next pass."""
    for module in model.modules():
        copies: Any = getattr(module, _COPIES, None)
        if copies:
            copies.clear()
