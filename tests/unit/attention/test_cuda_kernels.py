"""The CUDA kernels' calls, without a GPU: their operators are stood in for by plain arithmetic.

The stand-ins get what PyTorch's dispatcher made of the call, so wrong names, places and numbers of arguments
fail; and they insist on the layouts, shapes and types that the real operators want.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_helpers import SCALE, full_attention, inputs, relative
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_het.attention.kernels import KERNELS, Kernel, kernel_of_backend
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.slice_attention import slice_attention

Arguments = dict[str, Any]


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """``[b, h, s, d]`` and log-sum-exp ``[b, h, s]``."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * scale
    if causal:
        assert q.shape[2] == k.shape[2], "a causal call is square"
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """From the whole softmax's output and log-sum-exp, as the kernels do it; ``[b, h, s, d]``."""
    groups, times = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(times, dim=1) for t in (k, v))
    weights = (q @ k.mT * scale - lse.unsqueeze(-1)).exp()
    weights = weights.tril() if causal else weights
    inner = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    folded = [t.unflatten(1, (groups, times)).sum(2) for t in (inner.mT @ q, weights.mT @ grad)]
    return inner @ k, *folded


def _swapped(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def flash_forward(given: Arguments) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert given["cum_seq_q"] is None and given["cum_seq_k"] is None and not given["return_debug_mask"]
    assert (given["max_q"], given["max_k"], given["dropout_p"]) == (q.shape[1], k.shape[1], 0.0)
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    out, lse = _forward(*_swapped(q, k, v), given["is_causal"], given["scale"])
    return out.transpose(1, 2), lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def flash_backward(given: Arguments) -> tuple[Any, ...]:
    grad, q, k, v, out = (given[name] for name in ("grad_out", "query", "key", "value", "out"))
    assert (given["max_q"], given["max_k"], given["dropout_p"]) == (q.shape[1], k.shape[1], 0.0)
    assert given["rng_state"].dtype == torch.uint64 and out.is_contiguous() and grad.is_contiguous()
    found = _backward(*_swapped(grad, q, k, v, out), given["logsumexp"], given["is_causal"], given["scale"])
    return tuple(_swapped(*found))


def efficient_forward(given: Arguments) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert q.shape[2] == k.shape[2] == v.shape[2], "has no grouped queries"
    assert given["bias"] is None and given["custom_mask_type"] in (0, 1) and given["compute_log_sumexp"]
    out, lse = _forward(*_swapped(q, k, v), given["custom_mask_type"] == 1, given["scale"])
    lse = torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=math.inf)
    return out.transpose(1, 2), lse, torch.empty(()), torch.empty(()), q.shape[1], k.shape[1]


def efficient_backward(given: Arguments) -> tuple[Any, ...]:
    grad, q, k, v, out = (given[name] for name in ("grad_out_", "query", "key", "value", "out"))
    lse = given["logsumexp"]
    assert q.shape[2] == k.shape[2] and given["bias"] is None and not given["bias_requires_grad"]
    assert lse.shape[2] % 32 == 0 and lse.is_contiguous() and out.is_contiguous()
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (q.shape[1], k.shape[1])
    causal = given["custom_mask_type"] == 1
    found = _backward(*_swapped(grad, q, k, v, out), lse[..., : q.shape[1]], causal, given["scale"])
    return *_swapped(*found), torch.empty(0)


def cudnn_forward(given: Arguments) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert q.shape[1] == k.shape[1] and given["attn_bias"] is None and given["compute_log_sumexp"]
    assert given["dropout_p"] == 0.0 and not given["return_debug_mask"]
    out, lse = _forward(q, k, v, given["is_causal"], given["scale"])
    nothing = torch.empty(0)
    return out, lse.unsqueeze(-1), nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def cudnn_backward(given: Arguments) -> tuple[Any, ...]:
    grad, q, k, v, out = (given[name] for name in ("grad_out", "query", "key", "value", "out"))
    assert given["logsumexp"].shape == (*q.shape[:3], 1) and given["dropout_p"] == 0.0
    assert (given["max_q"], given["max_k"]) == (q.shape[2], k.shape[2])
    return _backward(grad, q, k, v, out, given["logsumexp"].squeeze(-1), given["is_causal"], given["scale"])


aten = torch.ops.aten
OPERATORS: dict[Any, Callable[[Arguments], tuple[Any, ...]]] = {
    aten._flash_attention_forward.default: flash_forward,
    aten._flash_attention_backward.default: flash_backward,
    aten._efficient_attention_forward.default: efficient_forward,
    aten._efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn_forward,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}


class StandIns(TorchDispatchMode):
    """Runs the stand-ins in place of CUDA's operators and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        operator = OPERATORS.get(func)
        if operator is None:
            return func(*args, **(kwargs or {}))
        self.calls[func.name()] = self.calls.get(func.name(), 0) + 1
        given: Arguments = {a.name: a.default_value for a in func._schema.arguments}
        given |= dict(zip(given, args, strict=False)) | (kwargs or {})
        return operator(given)


def run(kernel: Kernel, tensors: list[torch.Tensor], slices: int) -> tuple[list[torch.Tensor], int]:
    """Output and gradients of q, k, v, and how often an operator was called."""
    leaves = [[p.clone().requires_grad_() for p in t.chunk(slices)] for t in tensors[:3]]
    place = {"cache": KVCache(slices), "kernel": kernel, "microbatch": 0, "scale": SCALE}
    with StandIns() as mode:
        outs = [slice_attention(*(t[i] for t in leaves), index=i, **place) for i in range(slices)]
        for i in reversed(range(slices)):
            outs[i].backward(tensors[3].chunk(slices)[i])
    return [torch.cat(outs).detach(), *(torch.cat([p.grad for p in t]) for t in leaves)], sum(mode.calls.values())


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda k: k.name)
def test_slices_equal_full_attention(kernel: Kernel, groups: int) -> None:
    tensors = inputs(3, 4, groups, torch.float64)
    found, calls = run(kernel, tensors, 3)
    whole = [t.clone().requires_grad_() for t in tensors[:3]]
    wanted = full_attention(*whole)
    wanted.backward(tensors[3])
    assert calls == 2 * 5  # own chunk of three slices, one run of earlier ones of two; forward and backward
    for part, reference in zip(found, [wanted.detach(), *(w.grad for w in whole)], strict=True):
        assert relative(part, reference) < 1e-12


@pytest.mark.parametrize(
    ("backend", "device", "name"),
    [("fused", "cuda", "cudnn"), ("flash", "cuda", "cuda-flash"), ("auto", "cuda", None), ("fused", "cpu", None)],
)
def test_backend_names_the_kernel(backend: str, device: str, name: str | None) -> None:
    assert kernel_of_backend(backend, device) == name
    assert name is None or name in {kernel.name for kernel in KERNELS}
