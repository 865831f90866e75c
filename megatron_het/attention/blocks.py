"""The tokens of some blocks of a sequence."""

from __future__ import annotations

import torch

from megatron_het.plan.parts import Blocks


def take_blocks(tensor: torch.Tensor, blocks: Blocks, dim: int) -> torch.Tensor:
    """The tokens of some blocks; a view if there is only one."""
    parts = [tensor.narrow(dim, first, end - first) for first, end in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def held_before(blocks: Blocks, token: int) -> int:
    """How many tokens of some blocks come before a token."""
    return sum(min(max(token - first, 0), end - first) for first, end in blocks)
