"""Causal attention of one slice over itself and the cached slices before it (SlimPipe, section 4.1).

Forward: a causal call on the slice's own keys and a full call per run of earlier chunks, merged by
online softmax.  Backward: the kernel's backward per run, from the merged output and log-sum-exp,
is exact.  The gradients of earlier chunks are added up in the cache; those of this slice are
complete when its backward runs, because later slices went before.

With the context exchange (section 4.2) a part of the earlier chunks is attended to by other devices,
and merged like the local parts; see ``layer_exchange.py``.  With context parallelism (section 5) a slice
is shared by several ranks, whose queries all come here; see :class:`SharedSlices`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.kv_cache import KVCache, Run
from megatron_het.attention.layer_exchange import NO_EXCHANGE, LayerExchange
from megatron_het.attention.limited import LimitedAttention, Sharing, joined_rows
from megatron_het.attention.merge import in_type, merge_
from megatron_het.attention.reach import Reach
from megatron_het.attention.rotary import Rotation
from megatron_het.attention.sink import add_sink, sink_gradient

UNLIMITED = Reach()


class SharedSlices(Sharing, Protocol):
    """The ranks that share slices with this one (``context_parallel/commuted.py``).

    ``[S, ...]`` are rows of the other ranks, in one order; calls are collectives, waited for by what they return.
    """

    def causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Kernel, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the others' queries to this rank's part of their own slice, and its log-sum-exp."""

    def causal_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: Kernel,
        scale: float,
    ) -> Gradients:
        """Gradients of the others' queries and of this rank's keys and values."""


@dataclass(slots=True)
class _Rows:
    """Queries ``[s, b, heads, d]`` and their attention so far, merged from parts."""

    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add attention to other keys."""
        self.out = in_type(self.out, torch.promote_types(self.query.dtype, torch.float32))
        self.lse = merge_(self.out, self.lse, out, lse)

    def attend(self, runs: Iterable[Run], kernel: Kernel, scale: float) -> None:
        """Add full attention to cached chunks."""
        for run in runs:
            self.merge(*kernel.forward(self.query, run.keys, run.values, False, scale))


@dataclass(slots=True)
class _RowGradients:
    """What the backward of some rows needs, and their gradient so far, in a wide type."""

    grad: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor

    def differentiate(self, runs: Iterable[Run], kernel: Kernel, scale: float, cache: KVCache, microbatch: int) -> None:
        """Differentiate full attention to cached chunks; their gradients go to the cache."""
        for run in runs:
            part, dk, dv = kernel.backward(
                self.grad, self.query, run.keys, run.values, self.out, self.lse, False, scale
            )
            self.dq += part
            cache.add_gradient(microbatch, run, dk, dv)


class _SliceAttention(torch.autograd.Function):
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
        parallel: SharedSlices | None,
        rotation: Rotation | None,
    ) -> torch.Tensor:
        if rotation is not None:
            query, key = rotation.turn(query), rotation.turn(key)
        # A recomputed forward attends to everything itself: the slot of its helpers is over.
        now = exchange if cache.append(microbatch, index, key, value) else NO_EXCHANGE
        key, value = cache.shown(key, value)
        if parallel is None:
            _, given_tokens = now.begin_forward(query)
            rows = own = _Rows(query, *kernel.forward(query, key, value, True, scale))
        else:  # the others' rows before the rest of its own: that is due while those travel back
            gathering = parallel.gather(query)
            own = _Rows(query, *kernel.forward(query, key, value, True, scale))
            (theirs,) = gathering()
            _, given_tokens = now.begin_forward(torch.cat((theirs, query)))
            rows = _Rows(theirs, *parallel.causal(theirs, key, value, kernel, scale))
        now.help_forward(kernel, scale)
        runs = cache.prefix(microbatch, index, given_tokens)
        rows.attend(runs, kernel, scale)
        before = 0 if parallel is None else rows.query.shape[0]
        for out, lse in now.end_forward():
            own.merge(out[before:], lse[..., before:])
            if parallel is not None:
                rows.merge(out[:before], lse[..., :before])
        if parallel is not None:
            returning = parallel.give_back(rows.out.to(query.dtype), rows.lse)
            own.attend(runs, kernel, scale)
            for part in returning():
                own.merge(*part)
        if sink is not None:
            own.out, own.lse = add_sink(own.out, own.lse, sink)
        # Contiguous, so that the output projection keeps this very storage and not a copy.
        out = in_type(own.out, query.dtype).contiguous()
        # A view would keep the fused projection of queries, keys and values alive.
        kept = query if query.untyped_storage().nbytes() == query.nbytes else query.clone()
        ctx.save_for_backward(kept, out, own.lse, *(() if sink is None else (sink,)))
        ctx.place = cache, kernel, microbatch, index, scale, exchange, parallel, rotation
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, out, lse, *sinks = ctx.saved_tensors
        cache, kernel, microbatch, index, scale, exchange, parallel, rotation = ctx.place
        cache.check_last(microbatch, index)
        wide = torch.promote_types(query.dtype, torch.float32)
        chunk = cache.own(microbatch, index)
        mine = grad, query, out, lse
        if parallel is None:
            _, given_tokens = exchange.begin_backward(*mine)
            dq, dk, dv = kernel.backward(grad, query, chunk.keys, chunk.values, out, lse, True, scale)
            rows = own = _RowGradients(*mine, in_type(dq, wide))
        else:  # in the order of the forward
            gathering = parallel.gather(*mine)
            dq, *grads = kernel.backward(grad, query, chunk.keys, chunk.values, out, lse, True, scale)
            own = _RowGradients(*mine, in_type(dq, wide))
            theirs = gathering()
            _, given_tokens = exchange.begin_backward(*joined_rows(theirs, mine))
            dq, *parts = parallel.causal_backward(*theirs, chunk.keys, chunk.values, kernel, scale)
            all_grad, all_query, all_out, all_lse = theirs
            rows = _RowGradients(all_grad, all_query, all_out, all_lse, dq)
            dk, dv = (part + more for part, more in zip(grads, parts, strict=True))
        exchange.help_backward(kernel, scale)
        runs = cache.prefix(microbatch, index, given_tokens)
        rows.differentiate(runs, kernel, scale, cache, microbatch)
        before = 0 if parallel is None else rows.query.shape[0]
        for part, returned in exchange.end_backward():
            own.dq += part[before:]
            if parallel is not None:
                rows.dq += part[:before]
            for gradient in returned:
                cache.add_token_gradient(microbatch, *gradient)
        if parallel is not None:
            returning = parallel.give_back(rows.dq)
            own.differentiate(runs, kernel, scale, cache, microbatch)
            for (part,) in returning():
                own.dq += part
        dk, dv = cache.settle(microbatch, chunk, dk, dv)
        ds = sink_gradient(grad, out, lse, *sinks) if sinks and ctx.needs_input_grad[3] else None
        dq, dk, dv = (in_type(part, query.dtype) for part in (own.dq, dk, dv))
        if rotation is not None:
            dq, dk = rotation.turn_back(dq), rotation.turn_back(dk)
        return dq, dk, dv, ds, *[None] * 8


def slice_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cache: KVCache,
    kernel: Kernel,
    microbatch: int,
    index: int,
    scale: float,
    exchange: LayerExchange = NO_EXCHANGE,
    parallel: SharedSlices | None = None,
    reach: Reach = UNLIMITED,
    sink: torch.Tensor | None = None,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Attention of slice ``index`` of a microbatch.

    Args:
        query: ``[s, b, heads, d]`` of this slice.
        key: ``[s, b, groups, d]`` of this slice; ``groups`` divides ``heads``.  What a :class:`LatentCache` holds has
            another shape.
        value: The same of the values.
        cache: Holds the slices before this one; gets this one.
        kernel: Does the work.
        microbatch: Key in the cache.
        index: Index of the slice.
        scale: Factor of the scores.
        exchange: What this layer exchanges with other devices.
        parallel: The ranks that share the slice, None for this one alone.
        reach: Documents and window that limit what queries see.
        sink: Score of a further key of value zero, for each of ``heads``; None without.
        rotation: What queries and keys are rotated by first; None if they are.

    Returns:
        ``[s, b, heads, d]``, contiguous.

    Raises:
        CacheError: Slices come out of order.
    """
    place = cache, kernel, microbatch, index, scale
    if reach.is_limited:
        return LimitedAttention.apply(query, key, value, sink, *place, exchange, parallel, reach, rotation)
    return _SliceAttention.apply(query, key, value, sink, *place, exchange, parallel, rotation)
