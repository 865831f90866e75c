"""Causal attention of one slice over itself and the cached slices before it (SlimPipe, section 4.1).

Forward: a causal call on the slice's own keys and a full call per run of earlier chunks, merged by
online softmax.  Backward: the kernel's backward per run, from the merged output and log-sum-exp,
is exact.  The gradients of earlier chunks are added up in the cache; those of this slice are
complete when its backward runs, because later slices went before.

With the context exchange (section 4.2) a part of the earlier chunks is attended to by other devices,
and merged like the local parts; see :class:`LayerExchange`.  With context parallelism (section 5) a slice
is shared by several ranks, whose queries all come here; see ``context_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from megatron_het.attention.context_parallel import ALONE, ContextParallel
from megatron_het.attention.kernels import Kernel
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.merge import merge_


class LayerExchange(Protocol):
    """What one layer exchanges with other devices in the pass that runs; nothing in most passes.

    Per direction: ``begin`` hands queries out, ``help`` attends for others, ``end`` waits for the
    results, in this order and with the layer's own attention in between.
    """

    def begin_forward(self, query: torch.Tensor) -> int:
        """Hand the query out; returns how many tokens at the start of the sequence are given away."""

    def help_forward(self, kernel: Kernel, scale: float) -> None:
        """Attend for other devices."""

    def end_forward(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Output and log-sum-exp of the parts given away."""

    def begin_backward(
        self, grad: torch.Tensor, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> int:
        """Hand the gradient of the output out; returns the tokens given away."""

    def help_backward(self, kernel: Kernel, scale: float) -> None:
        """Differentiate attention for other devices."""

    def end_backward(self) -> Iterable[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Parts given away: first token, end of tokens, gradients of query, keys and values."""


class NoExchange:
    """A layer that keeps all attention to itself."""

    def begin_forward(self, query: torch.Tensor) -> int:
        """See :class:`LayerExchange`."""
        return 0

    def help_forward(self, kernel: Kernel, scale: float) -> None:
        """See :class:`LayerExchange`."""

    def end_forward(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """See :class:`LayerExchange`."""
        return ()

    def begin_backward(
        self, grad: torch.Tensor, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> int:
        """See :class:`LayerExchange`."""
        return 0

    def help_backward(self, kernel: Kernel, scale: float) -> None:
        """See :class:`LayerExchange`."""

    def end_backward(self) -> Iterable[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """See :class:`LayerExchange`."""
        return ()


NO_EXCHANGE = NoExchange()


class _SliceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        kernel: Kernel,
        microbatch: int,
        index: int,
        scale: float,
        exchange: LayerExchange,
        parallel: ContextParallel,
    ) -> torch.Tensor:
        # A recomputed forward attends to everything itself: the slot of its helpers is over.
        now = exchange if cache.append(microbatch, index, key, value) else NO_EXCHANGE
        (queries,) = parallel.gather(query)
        given_tokens = now.begin_forward(queries)
        out, lse = parallel.causal(queries, key, value, kernel, scale)
        now.help_forward(kernel, scale)
        if index:
            out = out.to(torch.promote_types(query.dtype, torch.float32))
        for run in cache.prefix(microbatch, index, given_tokens):
            lse = merge_(out, lse, *kernel.forward(queries, run.keys, run.values, False, scale))
        for part in now.end_forward():
            lse = merge_(out, lse, *part)
        out, lse = parallel.merge(out.to(query.dtype), lse)
        # Contiguous, so that the output projection keeps this very storage and not a copy.
        out = out.to(query.dtype).contiguous()
        # A view would keep the fused projection of queries, keys and values alive.
        own = query if query.untyped_storage().nbytes() == query.nbytes else query.clone()
        ctx.save_for_backward(own, out, lse)
        ctx.place = cache, kernel, microbatch, index, scale, exchange, parallel
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        own_query, out, lse = ctx.saved_tensors
        cache, kernel, microbatch, index, scale, exchange, parallel = ctx.place
        cache.check_last(microbatch, index)
        grad, query, out, lse = parallel.gather(grad, own_query, out, lse)
        given_tokens = exchange.begin_backward(grad, query, out, lse)
        own = cache.own(microbatch, index)
        dq, dk, dv = parallel.causal_backward(
            grad, query, own.keys, own.values, out, lse, kernel, scale
        )
        exchange.help_backward(kernel, scale)
        if index:
            dq = dq.to(torch.promote_types(query.dtype, torch.float32))
        for run in cache.prefix(microbatch, index, given_tokens):
            part, *grads = kernel.backward(grad, query, run.keys, run.values, out, lse, False, scale)
            dq += part
            cache.add_gradient(microbatch, run, *grads)
        for start, stop, part, *grads in exchange.end_backward():
            dq += part
            cache.add_token_gradient(microbatch, start, stop, *grads)
        dq = parallel.total(dq)
        later = cache.release(microbatch, index)
        if later is not None:
            dk, dv = dk + later[0], dv + later[1]
        return dq.to(query.dtype), dk, dv, *[None] * 7


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
    parallel: ContextParallel = ALONE,
) -> torch.Tensor:
    """Attention of slice ``index`` of a microbatch.

    Args:
        query: ``[s, b, heads, d]`` of this slice.
        key: ``[s, b, groups, d]`` of this slice; ``groups`` divides ``heads``.
        value: The same of the values.
        cache: Holds the slices before this one; gets this one.
        kernel: Does the work.
        microbatch: Key in the cache.
        index: Index of the slice.
        scale: Factor of the scores.
        exchange: What this layer exchanges with other devices.
        parallel: The ranks that share the slice.

    Returns:
        ``[s, b, heads, d]``, contiguous.

    Raises:
        CacheError: Slices come out of order.
    """
    return _SliceAttention.apply(
        query, key, value, cache, kernel, microbatch, index, scale, exchange, parallel
    )
