"""Attention of one slice where documents or a sliding window limit what its queries reach.

As in ``slice_attention``, but for the calls of the kernel: one per block (``reach.py``) and run of cached chunks.
All keys come from the cache, the slice's own too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.attention.kv_cache import KVCache, Run
from megatron_het.attention.merge import merge_
from megatron_het.attention.reach import Form, Reach
from megatron_het.attention.sink import add_sink, sink_gradient


class LimitedAttention(torch.autograd.Function):
    """Apply it to query, key, value, sink, cache, kernel, microbatch, index, scale and reach."""

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
        reach: Reach,
    ) -> torch.Tensor:
        """See ``slice_attention``."""
        cache.append(microbatch, index, key, value)
        out = query.new_empty(query.shape, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = out.new_empty((query.shape[1], query.shape[2], query.shape[0]))
        for rows, batch, form, run in _calls(cache, microbatch, index, query, reach):
            part, part_lse = _forward(kernel, query[rows, batch], run.keys[:, batch], run.values[:, batch], form, scale)
            if form is Form.CAUSAL:  # the first one of its rows
                out[rows, batch], lse[batch, :, rows] = part, part_lse
            else:
                lse[batch, :, rows] = merge_(out[rows, batch], lse[batch, :, rows], part, part_lse)
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        out = out.to(query.dtype)
        # A view would keep the fused projection of queries, keys and values alive.
        kept = query if query.untyped_storage().nbytes() == query.nbytes else query.clone()
        ctx.save_for_backward(kept, out, lse, *(() if sink is None else (sink,)))
        ctx.place = cache, kernel, microbatch, index, scale, reach
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of query, key, value and sink; those of earlier slices' keys and values go to the cache."""
        query, out, lse, *sinks = ctx.saved_tensors
        cache, kernel, microbatch, index, scale, reach = ctx.place
        cache.check_last(microbatch, index)
        dq = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, batch, form, run in _calls(cache, microbatch, index, query, reach):
            mine = grad[rows, batch], query[rows, batch], out[rows, batch], lse[batch, :, rows].contiguous()
            keys = run.keys[:, batch], run.values[:, batch]
            part, dk, dv = _backward(kernel, *mine, *keys, form, scale)
            dq[rows, batch] += part
            cache.add_gradient(microbatch, run, dk, dv, batch)
        gradients = cache.release(microbatch, index)
        assert gradients is not None, "every query sees its own key"
        ds = sink_gradient(grad, out, lse, *sinks) if sinks and ctx.needs_input_grad[3] else None
        return dq.to(query.dtype), gradients[0].to(query.dtype), gradients[1].to(query.dtype), ds, *[None] * 6


def _calls(
    cache: KVCache, microbatch: int, index: int, query: torch.Tensor, reach: Reach
) -> Iterator[tuple[slice, slice, Form, Run]]:
    """(rows of the slice, sequences, form, keys) of every call of the kernel."""
    tokens = query.shape[0]
    first = index * tokens
    for batch, blocks in reach.blocks(first, tokens, query.shape[1]):
        for block in blocks:
            rows = slice(block.rows[0] - first, block.rows[1] - first)
            for run in cache.runs(microbatch, *block.keys):
                yield rows, batch, block.form, run


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
