"""Attention of one slice where documents or a sliding window limit what its queries reach.

As in ``slice_attention``, but for the calls of the kernel: one per block (``reach.py``) and run of cached chunks.

The cache holds those of a slice's keys and values that later slices read.  The others are saved as an activation is:
recomputation drops them, and the offload of activations moves them.

With context parallelism a rank attends to its own keys for the queries of all ranks that share the slice
(``context_parallel/commuted.py``), as far as they reach them.  With the context exchange other devices attend to some
of the earlier keys (``layer_exchange.py``); they know what is reached as well (``helped.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from megatron_het.attention.blocks import held_before
from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.kv_cache import KVCache, Run
from megatron_het.attention.layer_exchange import NO_EXCHANGE, Given, LayerExchange
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

    def without(self, given: Given) -> _Place:
        """The place without keys that other devices attend to."""
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

    def calls(self, others: bool, batch: int, earlier: bool) -> Iterator[tuple[slice, slice, Form, Run | Span]]:
        """(rows, sequences, form, keys) of every call of the kernel; own keys by their rows.

        Args:
            others: Whether the rows are those of the other ranks.
            batch: Sequences of the microbatch.
            earlier: Whether the keys are those of earlier slices, or of this one.
        """
        row, keys = 0, tuple(span for span, _ in self.held)
        for first, end in self.spans[others]:
            for sequences, blocks in self.reach.blocks((first, end), keys, batch):
                for (lo, hi), form, start, stop in self._joined(blocks):
                    rows = slice(row + lo - first, row + hi - first)
                    if earlier and start < self.first:
                        for run in self.cache.runs(self.microbatch, start, min(stop, self.first)):
                            yield rows, sequences, form, run
                    if not earlier and stop > self.first:
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
        """Attention of rows to the slice's own keys, and log-sum-exp.

        Of queries that reach nothing here zero, and minus infinity.
        """
        out = query.new_empty(query.shape, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = out.new_empty((query.shape[1], query.shape[2], query.shape[0]))
        if others:
            out.zero_()
            lse.fill_(-torch.inf)
        for rows, batch, form, keys in self.calls(others, query.shape[1], earlier=False):
            k, v = (t[:, batch] for t in _taken(keys, own))
            part, part_lse = kernel_forward(self.kernel, query[rows, batch], k, v, form, self.scale)
            if form is Form.CAUSAL and not others:  # the first one of its rows
                out[rows, batch], lse[batch, :, rows] = part, part_lse
            else:
                lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], part, part_lse)
        return out, lse

    def attend_earlier(
        self, query: torch.Tensor, done: tuple[torch.Tensor, ...], others: bool
    ) -> tuple[torch.Tensor, ...]:
        """Add attention to the keys of earlier slices to the output and log-sum-exp of rows."""
        out, lse = done
        for rows, batch, form, keys in self.calls(others, query.shape[1], earlier=True):
            k, v = (t[:, batch] for t in _taken(keys, ()))
            part = kernel_forward(self.kernel, query[rows, batch], k, v, form, self.scale)
            lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], *part)
        return out, lse

    def differentiate(
        self,
        mine: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        totals: Sequence[torch.Tensor],
        others: bool,
        earlier: bool,
    ) -> None:
        """Add up gradients.

        Args:
            mine: Gradient of the output, query, output and log-sum-exp of rows.
            own: The slice's keys and values.
            totals: Gradients of the query and of own keys and values; those of cached ones go to the cache.
            others: Whether the rows are those of the other ranks.
            earlier: Whether attention is that to keys of earlier slices, or to this one's.
        """
        grad, query, out, lse = mine
        dq, dk, dv = totals
        for rows, batch, form, keys in self.calls(others, query.shape[1], earlier):
            given = grad[rows, batch], query[rows, batch], out[rows, batch], lse[batch, :, rows].contiguous()
            k, v = (t[:, batch] for t in _taken(keys, own))
            part, part_k, part_v = kernel_backward(self.kernel, *given, k, v, form, self.scale)
            dq[rows, batch] += part
            if isinstance(keys, Run):
                self.cache.add_gradient(self.microbatch, keys, part_k, part_v, batch)
            else:
                dk[keys[0] : keys[1], batch] += part_k
                dv[keys[0] : keys[1], batch] += part_v


class LimitedAttention(torch.autograd.Function):
    """Apply it to query, key, value, sink, cache, kernel, microbatch, index, scale, exchange, sharing, reach and
    rotation."""

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
        exchange: LayerExchange,
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
        # A recomputed forward attends to everything itself: the slot of its helpers is over.
        now = exchange if cache.append(microbatch, index, key, value, unread) else NO_EXCHANGE
        place = _Place(cache, kernel, microbatch, index, scale, reach, queries, held, first)
        own = cache.shown(key, value)
        if sharing is None:
            left = place.without(now.begin_forward(query))
            mine = place.attend(query, own, others=False)
            now.help_forward(kernel, scale)
            out, lse = left.attend_earlier(query, mine, others=False)
            for part in now.end_forward():
                lse = merge_(out, lse, *part)
        else:
            out, lse = _forward_shared(query, own, place, now, sharing)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        out = out.to(query.dtype)
        kept = (_alone(query), out, lse, _alone(key[:unread]), _alone(value[:unread]))
        ctx.save_for_backward(*kept, *(() if sink is None else (sink,)))
        ctx.place = place, exchange, sharing, rotation
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of query, key, value and sink; those of earlier slices' keys and values go to the cache."""
        query, out, lse, key, value, *sinks = ctx.saved_tensors
        place, exchange, sharing, rotation = ctx.place
        cache, microbatch, index = place.cache, place.microbatch, place.index
        cache.check_last(microbatch, index)
        mine = grad, query, out, lse
        key, value = cache.joined(microbatch, index, key, value)
        own = cache.shown(key, value)
        totals = tuple(torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in (query, *own))
        if sharing is None:
            left = place.without(exchange.begin_backward(*mine))
            place.differentiate(mine, own, totals, others=False, earlier=False)
            exchange.help_backward(place.kernel, place.scale)
            left.differentiate(mine, own, totals, others=False, earlier=True)
            for part, returned in exchange.end_backward():
                totals[0].add_(part)
                for gradient in returned:
                    cache.add_token_gradient(microbatch, *gradient)
        else:
            _backward_shared(mine, own, totals, place, exchange, sharing)
        dq, dk, dv = totals
        dk, dv = cache.of_appended(key, dk, dv)
        later = cache.release(microbatch, index)
        if later is not None:
            dk[-later[0].shape[0] :] += later[0]
            dv[-later[1].shape[0] :] += later[1]
        ds = sink_gradient(grad, out, lse, *sinks) if sinks and ctx.needs_input_grad[3] else None
        dq, dk, dv = (in_type(part, query.dtype) for part in (dq, dk, dv))
        if rotation is not None:
            dq, dk = rotation.turn_back(dq), rotation.turn_back(dk)
        return dq, dk, dv, ds, *[None] * 9


def _forward_shared(
    query: torch.Tensor, own: Sequence[torch.Tensor], place: _Place, now: LayerExchange, sharing: Sharing
) -> tuple[torch.Tensor, ...]:
    """Output and log-sum-exp of a slice that other ranks share."""
    gathering = sharing.gather(query)
    out, lse = place.attend(query, own, others=False)
    (theirs,) = gathering()
    before = theirs.shape[0]
    left = place.without(now.begin_forward(torch.cat((theirs, query))))
    done = place.attend(theirs, own, others=True)
    now.help_forward(place.kernel, place.scale)
    part, part_lse = left.attend_earlier(theirs, done, others=True)
    for helped, helped_lse in now.end_forward():
        part_lse = merge_(part, part_lse, helped[:before], helped_lse[..., :before], both_empty=True)
        lse = merge_(out, lse, helped[before:], helped_lse[..., before:])
    returning = sharing.give_back(part.to(query.dtype), part_lse)
    out, lse = left.attend_earlier(query, (out, lse), others=False)
    for returned in returning():
        lse = merge_(out, lse, *returned)
    return out, lse


def _backward_shared(
    mine: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    totals: Sequence[torch.Tensor],
    place: _Place,
    exchange: LayerExchange,
    sharing: Sharing,
) -> None:
    """Add up the gradients of a slice that other ranks share."""
    gathering = sharing.gather(*mine)
    place.differentiate(mine, own, totals, others=False, earlier=False)
    theirs = gathering()
    before, dq = theirs[1].shape[0], torch.zeros_like(theirs[1], dtype=totals[0].dtype)
    left = place.without(exchange.begin_backward(*joined_rows(theirs, mine)))
    place.differentiate(theirs, own, (dq, *totals[1:]), others=True, earlier=False)
    exchange.help_backward(place.kernel, place.scale)
    left.differentiate(theirs, own, (dq, *totals[1:]), others=True, earlier=True)
    for part, returned in exchange.end_backward():
        totals[0].add_(part[before:])
        dq += part[:before]
        for gradient in returned:
            place.cache.add_token_gradient(place.microbatch, *gradient)
    returning = sharing.give_back(dq)
    left.differentiate(mine, own, totals, others=False, earlier=True)
    for (part,) in returning():
        totals[0].add_(part)


def joined_rows(others: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Rows of all ranks; log-sum-exps have theirs last."""
    return tuple(torch.cat(pair, dim=2 if pair[0].dim() == 3 else 0) for pair in zip(others, own, strict=True))


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


def kernel_forward(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, form: Form, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a block."""
    if form is not Form.REVERSED:
        return kernel.forward(q, k, v, form is Form.CAUSAL, scale)
    out, lse = kernel.forward(q.flip(0), k.flip(0), v.flip(0), True, scale)
    return out.flip(0), lse.flip(-1)


def kernel_backward(
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
    """Gradients of a block, from the output and log-sum-exp of the whole attention."""
    if form is not Form.REVERSED:
        return kernel.backward(grad, q, k, v, out, lse, form is Form.CAUSAL, scale)
    grad, q, out, k, v = (t.flip(0) for t in (grad, q, out, k, v))
    dq, dk, dv = kernel.backward(grad, q, k, v, out, lse.flip(-1), True, scale)
    return dq.flip(0), dk.flip(0), dv.flip(0)
