"""Causal attention of one slice over itself and the cached slices before it (SlimPipe, section 4.1).

Forward: a causal call on the slice's own keys and a full call per run of earlier chunks, merged by
online softmax.  Backward: the kernel's backward per run, from the merged output and log-sum-exp,
is exact.  The gradients of earlier chunks are added up in the cache; those of this slice are
complete when its backward runs, because later slices went before.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_het.attention.kernels import Kernel
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.merge import merge_


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
    ) -> torch.Tensor:
        cache.append(microbatch, index, key, value)
        prefix = cache.prefix(microbatch, index)
        out, lse = kernel.forward(query, key, value, True, scale)
        if prefix:
            out = out.to(torch.promote_types(query.dtype, torch.float32))
            for run in prefix:
                lse = merge_(out, lse, *kernel.forward(query, run.keys, run.values, False, scale))
        # Contiguous, so that the output projection keeps this very storage and not a copy.
        out = out.to(query.dtype).contiguous()
        # A view would keep the fused projection of queries, keys and values alive.
        own = query if query.untyped_storage().nbytes() == query.nbytes else query.clone()
        ctx.save_for_backward(own, out, lse)
        ctx.place = cache, kernel, microbatch, index, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        query, out, lse = ctx.saved_tensors
        cache, kernel, microbatch, index, scale = ctx.place
        cache.check_last(microbatch, index)
        own = cache.own(microbatch, index)
        dq, dk, dv = kernel.backward(grad, query, own.keys, own.values, out, lse, True, scale)
        prefix = cache.prefix(microbatch, index)
        if prefix:
            dq = dq.to(torch.promote_types(query.dtype, torch.float32))
        for run in prefix:
            part, *grads = kernel.backward(grad, query, run.keys, run.values, out, lse, False, scale)
            dq += part
            cache.add_gradient(microbatch, run, *grads)
        later = cache.release(microbatch, index)
        if later is not None:
            dk, dv = dk + later[0], dv + later[1]
        return dq.to(query.dtype), dk, dv, None, None, None, None, None


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

    Returns:
        ``[s, b, heads, d]``, contiguous.

    Raises:
        CacheError: Slices come out of order.
    """
    return _SliceAttention.apply(query, key, value, cache, kernel, microbatch, index, scale)
