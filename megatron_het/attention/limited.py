"""A slice whose queries reach the start of their document only, or no further than a sliding window.

The calls are one per block (``reach.py``) and run of cached chunks.  A kernel that aligns a causal mask bottom-right
needs one per document: over the slice's own keys and all before them that are reached, in one piece.

The cache holds those of a slice's keys and values that later slices read.  The others are saved as an activation is:
recomputation drops them, and the offload of activations moves them.

With context parallelism a rank attends to its own keys for the queries of all ranks that share the slice
(``features/context_parallel/commuted.py``), as far as they reach them.  With the context exchange other devices
attend to some of the earlier keys (``layer_exchange.py``); they know what is reached as well (``helped.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_het.attention.blocks import held_before
from megatron_het.attention.calls import Call
from megatron_het.attention.kv_cache import Run
from megatron_het.attention.layer_exchange import Given
from megatron_het.attention.places import Keys, Own, Sharing, SliceContext
from megatron_het.attention.reach import Form, Span
from megatron_het.plan.parts import Blocks

_Spans = tuple[tuple[tuple[Span, ...], tuple[Span, ...]], tuple[tuple[Span, int], ...], int, Blocks, Span]


@dataclass(frozen=True, slots=True)
class LimitedPlace:
    """A slice, the keys that are there for it, and what its queries reach.

    Attributes:
        context: Of the slice.
        spans: Tokens of the sequence, this rank's first, then the others' in the order of their rows.
        held: Tokens whose keys this rank has, each with the first token as the cache counts.
        first: First own token of the slice, as the cache counts.
        unread: How many own tokens at the start no later slice reads.
    """

    context: SliceContext
    spans: tuple[tuple[Span, ...], tuple[Span, ...]]
    held: tuple[tuple[Span, int], ...]
    first: int
    unread: int

    @classmethod
    def of(cls, context: SliceContext, tokens: int) -> LimitedPlace:
        """The place of a slice with so many own tokens; it is cached already, or the next one to be."""
        cache, microbatch, index = context.cache, context.microbatch, context.index
        begins = (*cache.begins(microbatch)[:index], cache.begin_of(microbatch, index))
        spans, held, first, blocks, whole = _spans(begins, tokens, context.parallel)
        return cls(context, spans, held, first, held_before(blocks, context.reach.unread(*whole)))

    def without(self, given: Given) -> LimitedPlace:
        """See :class:`Place`."""
        if given[0] == given[1]:
            return self
        left: list[tuple[Span, int]] = []
        for (first, end), at in self.held:
            lo, hi = (min(max(token - at, 0), end - first) for token in given)
            if lo > 0:
                left.append(((first, first + lo), at))
            if first + hi < end:
                left.append(((first + hi, end), at + hi))
        return replace(self, held=tuple(left))

    def calls(self, keys: Keys, own: Own, batch: int, others: bool = False) -> Iterator[Call]:
        """See :class:`Place`."""
        if keys is Keys.ALL and (joined := self._per_document(own, batch)) is not None:
            yield from joined
            return
        for each in (Keys.OWN, Keys.EARLIER) if keys is Keys.ALL else (keys,):
            yield from self._per_block(own, batch, others, earlier=each is Keys.EARLIER)

    def _per_block(self, own: Own, batch: int, others: bool, earlier: bool) -> Iterator[Call]:
        """One call per block, and per run of cached chunks in it; own keys before those of earlier slices."""
        row, context = 0, self.context
        spans = tuple(span for span, _ in self.held)
        for first, end in self.spans[others]:
            for sequences, blocks in context.reach.blocks((first, end), spans, batch):
                for (lo, hi), form, start, stop in self._joined(blocks):
                    rows = slice(row + lo - first, row + hi - first)
                    if earlier and start < self.first:
                        for run in context.cache.runs(context.microbatch, start, min(stop, self.first)):
                            yield Call(form, run.keys[:, sequences], run.values[:, sequences], rows, sequences, run)
                    if not earlier and stop > self.first:
                        held = slice(max(start, self.first) - self.first, stop - self.first)
                        k, v = (t[held, sequences] for t in own)
                        opens = form is Form.CAUSAL and not others
                        yield Call(form, k, v, rows, sequences, own=held, opens=opens)
            row += end - first

    def _per_document(self, own: Own, batch: int) -> list[Call] | None:
        """One call per document; None where the kernel cannot, or the keys are not there as they are."""
        context, found = self.context, []
        cache, kernel, window = context.cache, context.kernel, context.reach.window_tokens
        if context.parallel is not None or cache.expands or (window is not None and not kernel.takes_window):
            return None
        tokens = own[0].shape[0]
        for sequences, documents in context.reach.documents((self.first, self.first + tokens), batch):
            for (lo, hi), start in documents:
                if hi - lo < hi - start and not kernel.takes_prefix(hi - lo, hi - start):
                    return None
                held = slice(max(start, self.first) - self.first, hi - self.first)
                k, v = (t[held, sequences] for t in own)
                run = None
                if start < self.first and not self.unread:  # all are held: mostly a view
                    whole, size = cache.in_order(context.microbatch, start, hi), hi - self.first
                    earlier = tuple(part for part in whole.parts if part[0] != context.index)
                    run = Run(whole.keys[:-size], whole.values[:-size], earlier)
                    k, v = whole.keys[:, sequences], whole.values[:, sequences]
                elif start < self.first:
                    run = cache.in_order(context.microbatch, start, self.first)
                    k, v = torch.cat((run.keys[:, sequences], k)), torch.cat((run.values[:, sequences], v))
                rows = slice(lo - self.first, hi - self.first)
                found.append(Call(Form.CAUSAL, k, v, rows, sequences, run, held, window, opens=True))
        return found

    def _joined(self, blocks: Sequence[Any]) -> list[tuple[Span, Form, int, int]]:
        """(queries, form, keys as the cache counts), in as few calls as neighbouring keys allow."""
        found: list[tuple[Span, Form, int, int]] = []
        for block in blocks:
            start, stop = self._counted(block.keys)
            if block.form is Form.FULL and found and found[-1][:2] == (block.rows, Form.FULL) and found[-1][3] == start:
                found[-1] = (block.rows, Form.FULL, found[-1][2], stop)
            else:
                found.append((block.rows, block.form, start, stop))
        return found

    def _counted(self, keys: Span) -> Span:
        """Tokens of one held span as the cache counts."""
        at, (first, _) = next((at, span) for span, at in self.held if span[0] <= keys[0] < span[1])
        return at + keys[0] - first, at + keys[1] - first


def _spans(begins: Sequence[int], tokens: int, sharing: Sharing | None) -> _Spans:
    """Queries of a slice, keys that are there, and the first own token, for a :class:`LimitedPlace`.

    Args:
        begins: First own token of every slice up to this one, as the cache counts.
        tokens: Own ones of this slice.
        sharing: Who shares it.

    Returns:
        The three; then own blocks of the slice, and its tokens in the sequence.
    """
    held: list[tuple[Span, int]] = []
    own: Blocks = ()
    others: Sequence[Blocks] = ()
    first = end = 0
    for at, until in zip(begins, (*begins[1:], begins[-1] + tokens), strict=True):
        own, others = (((0, until - at),), ()) if sharing is None else sharing.blocks(until - at)
        first, end = end, end + sum(b - a for blocks in (own, *others) for a, b in blocks)
        row = at
        for a, b in own:
            held.append(((first + a, first + b), row))
            row += b - a
    mine = tuple((first + a, first + b) for a, b in own)
    theirs = tuple((first + a, first + b) for blocks in others for a, b in blocks)
    return (mine, theirs), tuple(held), begins[-1], own, (first, end)
