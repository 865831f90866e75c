"""Which tokens of a sequence a rank works on, as blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Blocks = Sequence[tuple[int, int]]
"""Blocks ``[first, end)`` of tokens."""


def token_blocks(rank: int, size: int, tokens: int) -> tuple[tuple[int, int], ...]:
    """The blocks of ``tokens`` tokens that a context-parallel rank holds, in order.

    Blocks k and ``2 * size - 1 - k`` of ``2 * size`` equal ones: causal attention is the same work on
    every rank.

    Args:
        rank: Rank in the context-parallel group.
        size: Ranks in it; ``2 * size`` divides ``tokens`` unless it is 1.
        tokens: Tokens of a slice, or of a sequence that is not cut into slices.
    """
    if size == 1:
        return ((0, tokens),)
    block = tokens // (2 * size)
    return tuple((b * block, (b + 1) * block) for b in (rank, 2 * size - 1 - rank))


def take_blocks(tensor: torch.Tensor, blocks: Blocks, dim: int) -> torch.Tensor:
    """The tokens of some blocks; a view if there is only one."""
    parts = [tensor.narrow(dim, first, end - first) for first, end in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def held_before(blocks: Blocks, token: int) -> int:
    """How many tokens of some blocks come before a token."""
    return sum(min(max(token - first, 0), end - first) for first, end in blocks)
