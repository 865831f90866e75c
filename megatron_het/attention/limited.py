"""Attention of one slice where documents or a sliding window limit what its queries reach.

As in ``slice_attention``, but for the calls of the kernel: one per block (``reach.py``) and run of cached chunks.

The cache holds those of a slice's keys and values that later slices read.  The others are saved as an activation is:
recomputation drops them, and the offload of activations moves them.

With context parallelism a rank attends to its own keys for the queries of all ranks that share the slice
(``context_parallel/commuted.py``), as far as they reach them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_het.attention.blocks import held_before
from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.kv_cache import KVCache, Run
from megatron_het.attention.merge import in_type, merge_
from megatron_het.attention.reach import Form, Reach, Span
from megatron_het.attention.rotary import Rotation
from megatron_het.attention.sink import add_sink, sink_gradient
from megatron_het.plan.parts import Blocks


class Sharing(Protocol):
    """The ranks that share slices with this one (``context_parallel/commuted.py``).

    ``[S, ...]`` are rows of the other ranks, in one order; calls are collectives, waited for by what they return.
    """

    def blocks(self, own: int) -> tuple[Blocks, Sequence[Blocks]]:
        """Tokens of a slice that this rank has, and those of the others in the order of their rows.

        Args:
            own: How many this rank has.
        """

    def gather(self, *tensors: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Start to collect the others' rows ``[S, ...]`` of tensors ``[s, ...]``."""

    def give_back(self, *tensors: torch.Tensor) -> Callable[[], Sequence[tuple[torch.Tensor, ...]]]:
        """Start to send each of the others its rows; what it returns gives this rank's rows, by sender."""


_Spans = tuple[tuple[tuple[Span, ...], tuple[Span, ...]], tuple[tuple[Span, int], ...], int, Blocks, Span]


@dataclass(frozen=True, slots=True)
class _Place:
    """A slice, the keys that are there for it, and what its queries reach.

    Attributes:
        spans: Tokens of the sequence, this rank's first, then the others' in the order of their rows.
        held: Tokens whose keys this rank has, each with the first token as the cache counts.
        first: First own token of the slice, as the cache counts.
    """

    cache: KVCache
    kernel: Kernel
    microbatch: int
    index: int
    scale: float
    reach: Reach
    spans: tuple[tuple[Span, ...], tuple[Span, ...]]
    held: tuple[tuple[Span, int], ...]
    first: int

    def calls(self, others: bool, batch: int) -> Iterator[tuple[slice, slice, Form, Run | Span]]:
        """(rows, sequences, form, keys) of every call of the kernel; own keys by their rows.

        Args:
            others: Whether the rows are those of the other ranks.
            batch: Sequences of the microbatch.
        """
        row, keys = 0, tuple(span for span, _ in self.held)
        for first, end in self.spans[others]:
            for sequences, blocks in self.reach.blocks((first, end), keys, batch):
                for (lo, hi), form, start, stop in self._joined(blocks):
                    rows = slice(row + lo - first, row + hi - first)
                    if start < self.first:
                        for run in self.cache.runs(self.microbatch, start, min(stop, self.first)):
                            yield rows, sequences, form, run
                    if stop > self.first:
                        yield rows, sequences, form, (max(start, self.first) - self.first, stop - self.first)
            row += end - first

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

    def attend(self, query: torch.Tensor, own: Sequence[torch.Tensor], others: bool) -> tuple[torch.Tensor, ...]:
        """Output and log-sum-exp of rows; of queries that reach nothing here zero, and minus infinity."""
        out = query.new_empty(query.shape, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = out.new_empty((query.shape[1], query.shape[2], query.shape[0]))
        if others:
            out.zero_()
            lse.fill_(-torch.inf)
        for rows, batch, form, keys in self.calls(others, query.shape[1]):
            k, v = (t[:, batch] for t in _taken(keys, own))
            part, part_lse = _forward(self.kernel, query[rows, batch], k, v, form, self.scale)
            if form is Form.CAUSAL and not others:  # the first one of its rows
                out[rows, batch], lse[batch, :, rows] = part, part_lse
            else:
                lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], part, part_lse)
        return out, lse

    def differentiate(
        self, mine: Sequence[torch.Tensor], own: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], others: bool
    ) -> None:
        """Add up gradients.

        Args:
            mine: Gradient of the output, query, output and log-sum-exp of rows.
            own: The slice's keys and values.
            totals: Gradients of the query and of own keys and values; those of cached ones go to the cache.
            others: Whether the rows are those of the other ranks.
        """
        grad, query, out, lse = mine
        dq, dk, dv = totals
        for rows, batch, form, keys in self.calls(others, query.shape[1]):
            given = grad[rows, batch], query[rows, batch], out[rows, batch], lse[batch, :, rows].contiguous()
            k, v = (t[:, batch] for t in _taken(keys, own))
            part, part_k, part_v = _backward(self.kernel, *given, k, v, form, self.scale)
            dq[rows, batch] += part
            if isinstance(keys, Run):
                self.cache.add_gradient(self.microbatch, keys, part_k, part_v, batch)
            else:
                dk[keys[0] : keys[1], batch] += part_k
                dv[keys[0] : keys[1], batch] += part_v


class LimitedAttention(torch.autograd.Function):
    """Apply it to query, key, value, sink, cache, kernel, microbatch, index, scale, sharing, reach and rotation."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor | None,
        cache: KVCache,
        kernel: Kernel,
        microbatch: int,
        index: int,
        scale: float,
        sharing: Sharing | None,
        reach: Reach,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        """See ``slice_attention``."""
        if rotation is not None:
            query, key = rotation.turn(query), rotation.turn(key)
        begins = (*cache.begins(microbatch)[:index], cache.begin_of(microbatch, index))
        queries, held, first, blocks, whole = _spans(begins, query.shape[0], sharing)
        unread = held_before(blocks, reach.unread(*whole))
        cache.append(microbatch, index, key, value, unread)
        place = _Place(cache, kernel, microbatch, index, scale, reach, queries, held, first)
        own = cache.shown(key, value)
        gathering = None if sharing is None else sharing.gather(query)
        out, lse = place.attend(query, own, others=False)
        if sharing is not None and gathering is not None:
            (theirs,) = gathering()
            part, part_lse = place.attend(theirs, own, others=True)
            for returned in sharing.give_back(part.to(query.dtype), part_lse)():
                lse = merge_(out, lse, *returned)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        out = out.to(query.dtype)
        kept = (_alone(query), out, lse, _alone(key[:unread]), _alone(value[:unread]))
        ctx.save_for_backward(*kept, *(() if sink is None else (sink,)))
        ctx.place = place, sharing, rotation
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of query, key, value and sink; those of earlier slices' keys and values go to the cache."""
        query, out, lse, key, value, *sinks = ctx.saved_tensors
        place, sharing, rotation = ctx.place
        cache, microbatch, index = place.cache, place.microbatch, place.index
        cache.check_last(microbatch, index)
        gathering = None if sharing is None else sharing.gather(grad, query, out, lse)
        key, value = cache.joined(microbatch, index, key, value)
        own = cache.shown(key, value)
        wide = torch.promote_types(query.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (query, *own))
        place.differentiate((grad, query, out, lse), own, (dq, dk, dv), others=False)
        if gathering is not None:
            theirs = gathering()
            others = torch.zeros_like(theirs[1], dtype=wide)
            place.differentiate(theirs, own, (others, dk, dv), others=True)
            for (part,) in sharing.give_back(others)():
                dq += part
        dk, dv = cache.of_appended(key, dk, dv)
        later = cache.release(microbatch, index)
        if later is not None:
            dk[-later[0].shape[0] :] += later[0]
            dv[-later[1].shape[0] :] += later[1]
        ds = sink_gradient(grad, out, lse, *sinks) if sinks and ctx.needs_input_grad[3] else None
        dq, dk, dv = (in_type(part, query.dtype) for part in (dq, dk, dv))
        if rotation is not None:
            dq, dk = rotation.turn_back(dq), rotation.turn_back(dk)
        return dq, dk, dv, ds, *[None] * 8


def _spans(begins: Sequence[int], tokens: int, sharing: Sharing | None) -> _Spans:
    """Queries of a slice, keys that are there, and the first own token, for a :class:`_Place`.

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


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without others in its memory: a view would keep the fused projection of queries, keys and values."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _taken(keys: Run | Span, own: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Keys and values of cached chunks, or rows of the slice's own."""
    return (keys.keys, keys.values) if isinstance(keys, Run) else [t[keys[0] : keys[1]] for t in own]


def _forward(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if form is not Form.REVERSED:
        return kernel.forward(q, k, v, form is Form.CAUSAL, scale)
    out, lse = kernel.forward(q.flip(0), k.flip(0), v.flip(0), True, scale)
    return out.flip(0), lse.flip(-1)


def _backward(
    kernel: Kernel,
    grad: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    form: Form,
    scale: float,
) -> Gradients:
    if form is not Form.REVERSED:
        return kernel.backward(grad, q, k, v, out, lse, form is Form.CAUSAL, scale)
    grad, q, out, k, v = (t.flip(0) for t in (grad, q, out, k, v))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse.flip(-1), True, scale)
    return dq.flip(0), dk.flip(0), dv.flip(0)
