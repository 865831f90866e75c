"""Which tokens of a slice the context-parallel ranks of a replica hold.  Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

Blocks = Sequence[tuple[int, int]]
"""Blocks ``[first, end)`` of tokens."""


def block_step(grain: int) -> int:
    """Tokens that blocks are a multiple of, so that the two blocks of a rank are a multiple of ``grain``."""
    return grain // math.gcd(grain, 2)


def least_tokens(parts: int, grain: int) -> int:
    """The fewest tokens of a slice of which each of ``parts`` ranks gets two blocks."""
    return 2 * block_step(grain) * parts if parts > 1 else grain


def token_blocks(shares: Sequence[int], tokens: int, grain: int = 1) -> list[tuple[tuple[int, int], ...]]:
    """The blocks of ``tokens`` tokens that each context-parallel rank holds, in order.

    The first half of the tokens is cut by the shares, and the second half is its mirror image: rank k has the k-th
    block from the start and the k-th from the end.  A token attends to the tokens before it, so the two blocks of a
    rank attend to ``tokens`` / 2 others in the mean, whatever the rank.  Work in attention is thus as the shares say,
    like all other work.

    Args:
        shares: How much each rank gets, relative to the others; positive.
        tokens: Tokens of a slice, or of a sequence that is not cut into slices.  A multiple of 2 and of ``grain``, and
            at least ``least_tokens``, where there are several ranks.
        grain: What the tokens of every rank are a multiple of.
    """
    if len(shares) == 1:
        return [((0, tokens),)]
    half, total, step = tokens // 2, sum(shares), block_step(grain)
    edges, given = [0], 0
    for k, share in enumerate(shares[:-1]):
        given += share
        wanted = (2 * half * given + total * step) // (2 * total * step) * step
        most = (half // step - (len(shares) - 1 - k)) * step
        edges.append(max(edges[-1] + step, min(wanted, most)))
    edges.append(half)
    return [((a, b), (tokens - b, tokens - a)) for a, b in zip(edges, edges[1:], strict=False)]


def part_tokens(blocks: Blocks) -> int:
    """Tokens of some blocks."""
    return sum(end - first for first, end in blocks)
