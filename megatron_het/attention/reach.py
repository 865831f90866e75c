"""Which keys the queries of a slice reach: to the start of their document, and no further than a sliding window.

What is reached is cut into squares and rectangles that any attention kernel can do: full attention, causal attention
of a square, and causal attention of a square whose queries and keys are both in reverse order.  The last one is the
far end of a sliding window: there a query sees the later keys, and the earlier ones are out of its window.
"""

from __future__ import annotations

import bisect
import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass

Span = tuple[int, int]
"""Tokens ``[first, end)`` of a sequence."""
Starts = tuple[int, ...]
"""Where the documents of a sequence begin, ascending; the first one at token 0."""


class Form(enum.Enum):
    """Which keys of a block a query of it sees."""

    FULL = enum.auto()
    CAUSAL = enum.auto()
    """A square: the i-th query sees the keys 0 to i."""
    REVERSED = enum.auto()
    """A square: the i-th query sees the keys i to the last."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys, by their place in the sequence."""

    rows: Span
    keys: Span
    form: Form


@dataclass(frozen=True, slots=True)
class Reach:
    """What limits the attention of a layer in a microbatch.

    Attributes:
        starts: Of the documents of each sequence; None if a sequence is one document.
        window_tokens: How many earlier tokens a query sees at most; None for all.
    """

    starts: tuple[Starts, ...] | None = None
    window_tokens: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether queries see less than everything before them."""
        return self.starts is not None or self.window_tokens is not None

    def blocks(self, first: int, tokens: int, batch: int) -> Iterator[tuple[slice, tuple[Block, ...]]]:
        """The blocks of a slice, for sequences ``[batch]`` that have the same ones.

        Args:
            first: First token of the slice.
            tokens: Tokens of a slice; keys of a square are of one slice.
            batch: Sequences in the microbatch.
        """
        starts = self.starts or ((0,),)
        if len(set(starts)) == 1:
            yield slice(0, batch), blocks_of(first, tokens, starts[0], self.window_tokens)
            return
        for i, own in enumerate(starts):
            yield slice(i, i + 1), blocks_of(first, tokens, own, self.window_tokens)


@functools.lru_cache(maxsize=1024)
def blocks_of(first: int, tokens: int, starts: Starts, window_tokens: int | None = None) -> tuple[Block, ...]:
    """What the queries of one slice of one sequence reach.

    Every query is in one causal block, which comes before its other blocks.

    Args:
        first: First token of the slice.
        tokens: Tokens of a slice.
        starts: Where the documents of the sequence begin.
        window_tokens: How many earlier tokens a query sees at most; None for all.
    """
    found: list[Block] = []
    end = first + tokens
    begin = starts[bisect.bisect_right(starts, first) - 1]
    bounds = [*starts[bisect.bisect_right(starts, first) : bisect.bisect_left(starts, end)], end]
    row = first
    for bound in bounds:
        most = bound - row if window_tokens is None else window_tokens + 1
        while row < bound:
            until = min(row + most, bound)
            found += _tile((row, until), begin, window_tokens, tokens)
            row = until
        begin = bound
    return tuple(found)


def _tile(rows: Span, begin: int, window_tokens: int | None, tokens: int) -> Iterator[Block]:
    """The blocks of queries of one document, which begins at ``begin``; no more of them than a window and one."""
    first, end = rows
    yield Block(rows, rows, Form.CAUSAL)
    if window_tokens is None:
        if begin < first:
            yield Block(rows, (begin, first), Form.FULL)
        return
    near = max(begin, min(end - 1 - window_tokens, first))  # from here on all of the queries see all keys
    if near < first:
        yield Block(rows, (near, first), Form.FULL)
    # Further back the i-th query sees the keys from far + i on.
    far = first - window_tokens
    cut = max(begin - far, 0)
    if far + cut >= near:
        return
    if cut:
        yield Block((first, first + cut), (far + cut, near), Form.FULL)
    yield from _reversed(first + cut, far + cut, near - far - cut, tokens)


def _reversed(row: int, key: int, size: int, tokens: int) -> Iterator[Block]:
    """A reversed square, cut where its keys go from one slice into the next."""
    while size:
        part = min(size, tokens - key % tokens)
        yield Block((row, row + part), (key, key + part), Form.REVERSED)
        if part < size:
            yield Block((row, row + part), (key + part, key + size), Form.FULL)
        row, key, size = row + part, key + part, size - part
