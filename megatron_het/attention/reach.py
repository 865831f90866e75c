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

from megatron_het.schedule.cutting import Starts

Span = tuple[int, int]
"""Tokens ``[first, end)`` of a sequence."""


class Form(enum.Enum):
    """Which keys of a block a query of it sees."""

    FULL = enum.auto()
    CAUSAL = enum.auto()
    """Queries are the last tokens of the keys: of a square, the i-th query sees the keys 0 to i."""
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
    """Holds what limits the attention of a layer in a microbatch.

    Attributes:
        starts: Of the documents of each sequence; None if a sequence is one document.
        window_tokens: How many earlier tokens a query sees at most; None for all.
        length: Tokens of a sequence; None if it is not known where it ends.
    """

    starts: tuple[Starts, ...] | None = None
    window_tokens: int | None = None
    length: int | None = None

    @property
    def is_limited(self) -> bool:
        """Whether queries see less than everything before them."""
        return self.starts is not None or self.window_tokens is not None

    def blocks(self, rows: Span, keys: tuple[Span, ...], batch: int) -> Iterator[tuple[slice, tuple[Block, ...]]]:
        """Yields what some queries reach of some keys, for sequences ``[batch]`` that have the same blocks.

        Args:
            rows: The queries.
            keys: Tokens whose keys are there; each lies before the queries, after them, or is the queries' own.
            batch: Sequences in the microbatch.
        """
        starts = self.starts or ((0,),)
        if len(set(starts)) == 1:
            yield slice(0, batch), blocks_of(rows, keys, starts[0], self.window_tokens)
            return
        for i, own in enumerate(starts):
            yield slice(i, i + 1), blocks_of(rows, keys, own, self.window_tokens)

    def documents(self, rows: Span, batch: int) -> Iterator[tuple[slice, tuple[tuple[Span, int], ...]]]:
        """Queries of one document each, and the first key that the first of them sees, as :meth:`blocks` has them.

        Args:
            rows: The queries.
            batch: Sequences in the microbatch.
        """
        window = rows[1] if self.window_tokens is None else self.window_tokens
        starts = self.starts or ((0,),)
        each = starts if len(set(starts)) > 1 else starts[:1]
        for i, own in enumerate(each):
            found = (
                (span, max(own[bisect.bisect_right(own, span[0]) - 1], span[0] - window))
                for span in _documents(rows, own)
            )
            yield slice(i, i + 1) if len(each) > 1 else slice(0, batch), tuple(found)

    def unread(self, first: int, end: int) -> int:
        """How many tokens at the start of a slice ``[first, end)`` no later slice reads, in any sequence."""
        if end == self.length:
            return end - first
        starts = self.starts or ((0,),)
        reached = min(own[bisect.bisect_right(own, end) - 1] for own in starts)
        if self.window_tokens is not None:
            reached = max(reached, end - self.window_tokens)
        return min(max(reached - first, 0), end - first)


@functools.lru_cache(maxsize=4096)
def blocks_of(
    rows: Span, keys: tuple[Span, ...], starts: Starts, window_tokens: int | None = None
) -> tuple[Block, ...]:
    """Returns what some queries of one sequence reach of some keys; every block has keys of one of the spans.

    Where the queries' own keys are among them, every query is in one causal block, which comes before the others.

    Args:
        rows: The queries.
        keys: Spans of tokens; each lies before the queries, after them, or is the queries' own.
        starts: Where the documents of the sequence begin.
        window_tokens: How many earlier tokens a query sees at most; None for all.
    """
    found = [block for span in keys if span == rows for block in _own(span, starts, window_tokens)]
    for document in _documents(rows, starts):
        begin = starts[bisect.bisect_right(starts, document[0]) - 1]
        for first, end in keys:
            if end <= rows[0] and end > begin:
                found += _before(document, (max(first, begin), end), window_tokens)
    return tuple(found)


def _documents(rows: Span, starts: Starts) -> Iterator[Span]:
    """The parts of some tokens that belong to one document each."""
    first, end = rows
    bounds = [first, *starts[bisect.bisect_right(starts, first) : bisect.bisect_left(starts, end)], end]
    return zip(bounds, bounds[1:], strict=False)


def _own(rows: Span, starts: Starts, window_tokens: int | None) -> Iterator[Block]:
    """Yields what queries reach of their own keys."""
    for first, end in _documents(rows, starts):
        size = end - first if window_tokens is None else window_tokens + 1
        tiles = [(row, min(row + size, end)) for row in range(first, end, size)]
        yield from (Block(tile, tile, Form.CAUSAL) for tile in tiles)
        for tile, before in zip(tiles[1:], tiles, strict=False):
            yield from _before(tile, before, window_tokens)


def _before(rows: Span, keys: Span, window_tokens: int | None) -> Iterator[Block]:
    """Yields what the queries of one document reach of keys of it that all come before them."""
    if window_tokens is None:
        yield Block(rows, keys, Form.FULL)
        return
    # Query t sees the keys from t - window on: the first queries see all keys, and then one less each.
    full = min(rows[1], keys[0] + window_tokens + 1)
    if rows[0] < full:
        yield Block((rows[0], full), keys, Form.FULL)
    first, end = max(rows[0], full), min(rows[1], keys[1] + window_tokens)
    if first >= end:
        return
    square = first - window_tokens, end - window_tokens
    yield Block((first, end), square, Form.REVERSED)
    if square[1] < keys[1]:
        yield Block((first, end), (square[1], keys[1]), Form.FULL)
