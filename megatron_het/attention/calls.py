"""Calls of attention kernels: which queries attend to which keys, and how partial results are combined.

All attention over parts of the keys is here: of slices, of ranks that share a slice, and of context-exchange helpers.
Outputs are merged by online softmax.  The first result for all rows is kept without a copy.
"""

import bisect
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_het.attention.kernels import Gradients, Kernel, Scores
from megatron_het.attention.kv_cache import Run
from megatron_het.plan.placement import Placed
from megatron_het.schedule.cutting import Span, Starts, documents_in

# Which keys the queries of a slice reach: back to the start of their document, and no further than a sliding window.
#
# The reached area is divided into squares and rectangles that any attention kernel can compute: full attention, causal
# attention of a square, and causal attention of a square whose queries and keys are both in reverse order.  The last
# one is the far end of a sliding window: a query sees the later keys, and the earlier ones are outside its window.


class Form(enum.Enum):
    """Mask of a block: which of its keys each of its queries sees."""

    FULL = enum.auto()
    CAUSAL = enum.auto()  # queries are the last tokens of the keys: in a square, the i-th query sees the keys 0 to i
    REVERSED = enum.auto()  # a square: the i-th query sees the keys i to the last


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys, by token position in the sequence, and their mask."""

    rows: Span
    keys: Span
    form: Form


@dataclass(frozen=True, slots=True)
class Reach:
    """Limits on the attention of a layer in a microbatch: documents and a sliding window."""

    starts: tuple[Starts, ...] | None = None  # document starts of each sequence; None if a sequence is one document
    window_tokens: int | None = None  # how many earlier tokens a query sees at most; None for all
    length: int | None = None  # tokens of a sequence; None if unknown
    placed: Placed | None = None  # tokens of each slice on each context-parallel rank, if placed by documents

    @property
    def is_limited(self) -> bool:
        """Whether documents or a window hide earlier tokens from queries."""
        return self.starts is not None or self.window_tokens is not None

    def blocks(self, rows: Span, keys: tuple[Span, ...], batch: int) -> Iterator[tuple[slice, tuple[Block, ...]]]:
        """Yields (sequences of the batch, blocks that the queries ``rows`` reach), grouped by equal documents.

        Args:
            keys: Spans of available keys; each lies before the queries, after them, or is the queries' own.
        """
        starts = self.starts or ((0,),)
        if len(set(starts)) == 1:
            yield slice(0, batch), blocks_of(rows, keys, starts[0], self.window_tokens)
            return
        for i, own in enumerate(starts):
            yield slice(i, i + 1), blocks_of(rows, keys, own, self.window_tokens)

    def documents(self, rows: Span, batch: int) -> Iterator[tuple[slice, tuple[tuple[Span, int], ...]]]:
        """Yields (sequences of the batch, per document its queries in ``rows`` and the first key that they see)."""
        window = rows[1] if self.window_tokens is None else self.window_tokens
        starts = self.starts or ((0,),)
        each = starts if len(set(starts)) > 1 else starts[:1]
        for i, own in enumerate(each):
            found = (
                (span, max(own[bisect.bisect_right(own, span[0]) - 1], span[0] - window))
                for span in documents_in(rows, own)
            )
            yield slice(i, i + 1) if len(each) > 1 else slice(0, batch), tuple(found)

    def unread(self, first: int, end: int) -> int:
        """Number of tokens at the start of a slice ``[first, end)`` that no later slice reads, in any sequence."""
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
    """Returns the blocks that queries of one sequence reach; the keys of a block are all in one of the spans.

    If the queries' own keys are among them, every query is in one causal block, which comes before its other blocks.

    Args:
        keys: Spans of tokens; each lies before the queries, after them, or is the queries' own.
        starts: Where the documents of the sequence begin.
        window_tokens: How many earlier tokens a query sees at most; None for all.
    """
    found = [block for span in keys if span == rows for block in _own(span, starts, window_tokens)]
    for document in documents_in(rows, starts):
        begin = starts[bisect.bisect_right(starts, document[0]) - 1]
        for first, end in keys:
            if end <= rows[0] and end > begin:
                found += _before(document, (max(first, begin), end), window_tokens)
    return tuple(found)


def _own(rows: Span, starts: Starts, window_tokens: int | None) -> Iterator[Block]:
    for first, end in documents_in(rows, starts):
        size = end - first if window_tokens is None else window_tokens + 1
        tiles = [(row, min(row + size, end)) for row in range(first, end, size)]
        yield from (Block(tile, tile, Form.CAUSAL) for tile in tiles)
        for tile, before in zip(tiles[1:], tiles, strict=False):
            yield from _before(tile, before, window_tokens)


def _before(rows: Span, keys: Span, window_tokens: int | None) -> Iterator[Block]:
    """Yields the blocks that the queries ``rows`` reach of earlier keys of the same document."""
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


# Online-softmax merge of two partial attention results.


def in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor converted to ``dtype``; itself, without a call, if it has the type: this runs many times a slice."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor, *, both_empty: bool = False) -> Tensor:
    """Merge attention over other keys into ``out``, in place.

    ``out * exp(lse - n) + other * exp(other_lse - n)`` with ``n = logaddexp(lse, other_lse)`` is a
    linear interpolation with weight ``sigmoid(other_lse - lse)``.

    Args:
        out: ``[s, b, heads, d]``, fp32 or fp64; changed.
        lse: ``[b, heads, s]``.
        other: ``[s, b, heads, d]``, any type.
        other_lse: ``[b, heads, s]``.
        both_empty: Whether a query may have no keys in either part, so that both log-sum-exps are minus infinity.

    Returns:
        The merged log-sum-exp; ``lse`` is not changed.
    """
    weight = torch.sigmoid(other_lse - lse)
    if both_empty:
        weight = weight.masked_fill(other_lse == -torch.inf, 0.0)
    out.lerp_(in_type(other, out.dtype), in_type(weight.permute(2, 0, 1).unsqueeze(-1), out.dtype))
    return torch.logaddexp(lse, other_lse)


EVERY = slice(None)


@dataclass(slots=True)  # not frozen, because frozen instances are slower to create, and every call needs one
class Call:
    """One call of a kernel."""

    form: Form  # which keys a query sees
    keys: Tensor  # ``[n, b, groups, d]``, of the call's sequences
    values: Tensor
    rows: slice = EVERY  # which queries; ``EVERY`` for all of them
    sequences: slice = EVERY  # which sequences of the microbatch
    run: Run | None = None  # cached chunks that hold the first keys; None if all are the slice's own
    own: slice | None = None  # which of the slice's own keys the remaining keys are; None if all are cached
    window: int | None = None  # how many keys before its own a query sees at most; None for all
    opens: bool = False  # whether it is the first call for its rows

    @property
    def is_whole(self) -> bool:
        """Whether the call has all queries."""
        return self.rows is EVERY and self.sequences is EVERY


@dataclass(slots=True)
class Attended:
    """Queries ``[s, b, heads, d]`` and their attention so far."""

    query: Tensor
    has_blanks: bool = False  # whether queries may see no keys: output zero and log-sum-exp minus infinity
    _out: Tensor | None = None
    _lse: Tensor | None = None

    @property
    def out(self) -> Tensor:
        """Output ``[s, b, heads, d]``, in the query's type or a wider one."""
        return self._room()[0] if self._out is None else self._out

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp ``[b, heads, s]``."""
        return self._room()[1] if self._lse is None else self._lse

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Add attention of all queries to other keys."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        self._out = in_type(self._out, _wide(self.query))
        self._lse = merge_(self._out, self._lse, out, lse, both_empty=self.has_blanks)

    def merge_rows(self, rows: Sequence[slice], out: Tensor, lse: Tensor) -> None:
        """Add attention of some queries to other keys."""
        whole, total = self._room()
        at = 0
        for part in rows:
            end = at + part.stop - part.start
            total[..., part] = merge_(whole[part], total[..., part], out[at:end], lse[..., at:end])
            at = end

    def attend(self, calls: Iterable[Call], kernel: Kernel, scale: float) -> None:
        """Run the calls and merge their results."""
        for call in calls:
            if call.is_whole:
                self.merge(*_forward(kernel, call, self.query, scale))
                continue
            rows, batch = call.rows, call.sequences
            part, part_lse = _forward(kernel, call, self.query[rows, batch], scale)
            out, lse = self._room()
            if call.opens:
                out[rows, batch], lse[batch, :, rows] = part, part_lse
            else:
                lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], part, part_lse)

    def _room(self) -> tuple[Tensor, Tensor]:
        """Output, in at least fp32, and log-sum-exp, into which results of some queries can be merged."""
        query = self.query
        if self._out is None or self._lse is None:
            self._out = query.new_zeros(query.shape, dtype=_wide(query))
            self._lse = self._out.new_full((query.shape[1], query.shape[2], query.shape[0]), -torch.inf)
        self._out = in_type(self._out, _wide(query))
        return self._out, self._lse


class Sum:
    """Sum of gradients of one tensor; accumulated in at least fp32 if there are more than one."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None
        self._second: Tensor | None = None  # not added yet: if it is the last one, one addition rounds only once, too

    @property
    def total(self) -> Tensor:
        """The sum; may be changed."""
        like = self._like
        if self._second is not None and self._total is not None:
            self._total, self._second = self._total.to(_wide(like)).add_(self._second), None
        return torch.zeros_like(like, dtype=_wide(like)) if self._total is None else self._total

    @property
    def rounded(self) -> Tensor:
        """The sum, in the type of the tensor whose gradient it is."""
        if self._second is not None and self._total is not None:
            return self._total + self._second
        return in_type(self.total, self._like.dtype)

    def add_rows(self, rows: Sequence[slice], part: Tensor) -> None:
        """Add a gradient of some rows."""
        at = 0
        for own in rows:
            end = at + own.stop - own.start
            self.add(part[at:end], own)
            at = end

    def add(self, part: Tensor, rows: slice = EVERY, sequences: slice = EVERY) -> None:
        """Add a gradient of some rows of some sequences."""
        is_whole = part.shape == self._like.shape
        if self._total is None and is_whole:
            self._total = part
            return
        if is_whole and self._second is None and self._total is not None and self._total.dtype is not _wide(part):
            self._second = part
            return
        self._total = in_type(self.total, _wide(self._like))
        (self._total if is_whole else self._total[rows, sequences]).add_(part)


Sums = tuple[Sum, Sum, Sum]  # of queries, keys and values


def differentiate(
    calls: Iterable[Call],
    mine: Sequence[Tensor],
    sums: Sums,
    kernel: Kernel,
    scale: float,
    cached: Callable[[Run, Tensor, Tensor, slice | None], None] | None = None,
) -> None:
    """Run the backward of calls and add up their gradients.

    Args:
        calls: The calls of the forward.
        mine: Gradient of the output, query, merged output and merged log-sum-exp.
        sums: Sums to which the gradients of the query, own keys and own values are added.
        cached: Called with a run of cached chunks, the gradients of its keys and values, and their sequences.
    """
    grad, query, out, lse = mine
    for call in calls:
        rows, batch, given = call.rows, call.sequences, (grad, query, out, lse)
        if not call.is_whole:
            given = grad[rows, batch], query[rows, batch], out[rows, batch], lse[batch, :, rows].contiguous()
        dq, dk, dv = _backward(kernel, call, *given, scale)
        sums[0].add(dq, rows, batch)
        earlier, own = (dk, dv), (dk, dv)
        if call.run is not None and call.own is not None:
            sizes = [call.run.keys.shape[0], dk.shape[0] - call.run.keys.shape[0]]
            earlier, own = zip(dk.split(sizes), dv.split(sizes), strict=True)
        if call.own is not None:
            for total, part in zip(sums[1:], own, strict=True):
                total.add(part, call.own, batch)
        if call.run is not None:
            assert cached is not None
            cached(call.run, *earlier, None if batch is EVERY else batch)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _forward(kernel: Kernel, call: Call, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if call.form is not Form.REVERSED:
        return kernel.forward(q, call.keys, call.values, Scores(call.form is Form.CAUSAL, scale, call.window))
    out, lse = kernel.forward(q.flip(0), call.keys.flip(0), call.values.flip(0), Scores(True, scale))
    return out.flip(0), lse.flip(-1)


def _backward(kernel: Kernel, call: Call, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float) -> Gradients:
    """Gradients of a call, from the output and log-sum-exp of the whole attention."""
    k, v = call.keys, call.values
    if call.form is not Form.REVERSED:
        return kernel.backward(grad, (q, k, v, out, lse), Scores(call.form is Form.CAUSAL, scale, call.window))
    grad, q, out, k, v = (t.flip(0) for t in (grad, q, out, k, v))
    dq, dk, dv = kernel.backward(grad, (q, k, v, out, lse.flip(-1)), Scores(True, scale))
    return dq.flip(0), dk.flip(0), dv.flip(0)
