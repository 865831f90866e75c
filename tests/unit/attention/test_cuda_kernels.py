"""The CUDA kernels' calls, without a GPU: their operators are stood in for by plain arithmetic.

The stand-ins get what PyTorch's dispatcher made of the call, so wrong names, places and numbers of arguments
fail; and they insist on the layouts, shapes and types that the real operators want.
"""

import math
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_helpers import SCALE, full_attention, inputs, masked_attention, relative
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_het.attention.calls import Reach
from megatron_het.attention.kernel_choice import kernels_of_backend
from megatron_het.attention.kernels import KERNELS, Kernel, TransformerEngineFused
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import SliceContext
from megatron_het.attention.slice_attention import slice_attention
from testing.attention_stand_ins import CALLS, TransformerEngine214, attend, attend_backward, stand_ins

Arguments = dict[str, Any]


def _sides(given: Arguments) -> tuple[int, int]:
    """How many keys a query sees before its own, and after it."""
    left, right = given["window_size_left"], given["window_size_right"]
    assert right in (None, 0) and (left is None or given["is_causal"])
    return -1 if left is None else left, 0 if given["is_causal"] else -1


def _swapped(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def flash_forward(given: Arguments) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert given["cum_seq_q"] is None and given["cum_seq_k"] is None and not given["return_debug_mask"]
    assert (given["max_q"], given["max_k"], given["dropout_p"]) == (q.shape[1], k.shape[1], 0.0)
    assert all(t.stride(-1) == 1 for t in (q, k, v))
    out, lse = attend(_swapped(q, k, v), _sides(given), given["scale"])
    return out.transpose(1, 2), lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def flash_backward(given: Arguments) -> tuple[Any, ...]:
    grad, q, k, v, out = (given[name] for name in ("grad_out", "query", "key", "value", "out"))
    assert (given["max_q"], given["max_k"], given["dropout_p"]) == (q.shape[1], k.shape[1], 0.0)
    assert given["rng_state"].dtype == torch.uint64 and out.is_contiguous() and grad.is_contiguous()
    found = attend_backward(_swapped(grad, q, k, v, out), given["logsumexp"], _sides(given), given["scale"])
    return tuple(_swapped(*found))


def _mask(given: Arguments, q: torch.Tensor, k: torch.Tensor) -> int:
    """Keys that a query sees after its own, by the number of the mask: 1 is aligned top-left, 2 bottom-right."""
    number = given["custom_mask_type"]
    assert number in (0, 1, 2) and (number != 1 or q.shape[1] == k.shape[1])
    return 0 if number else -1


def efficient_forward(given: Arguments) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert q.shape[2] == k.shape[2] == v.shape[2], "has no grouped queries"
    assert given["bias"] is None and given["compute_log_sumexp"]
    out, lse = attend(_swapped(q, k, v), (-1, _mask(given, q, k)), given["scale"])
    lse = torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=math.inf)
    return out.transpose(1, 2), lse, torch.empty(()), torch.empty(()), q.shape[1], k.shape[1]


def efficient_backward(given: Arguments) -> tuple[Any, ...]:
    grad, q, k, v, out = (given[name] for name in ("grad_out_", "query", "key", "value", "out"))
    lse = given["logsumexp"]
    assert q.shape[2] == k.shape[2] and given["bias"] is None and not given["bias_requires_grad"]
    assert lse.shape[2] % 32 == 0 and lse.is_contiguous() and out.is_contiguous()
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (q.shape[1], k.shape[1])
    sides = -1, _mask(given, q, k)
    found = attend_backward(_swapped(grad, q, k, v, out), lse[..., : q.shape[1]], sides, given["scale"])
    return *_swapped(*found), torch.empty(0)


def cudnn_forward(given: Arguments) -> tuple[Any, ...]:
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert given["attn_bias"] is None and given["compute_log_sumexp"]
    assert given["dropout_p"] == 0.0 and not given["return_debug_mask"]
    assert not given["is_causal"] or q.shape[2] == k.shape[2], "aligned top-left"
    out, lse = attend((q, k, v), (-1, 0 if given["is_causal"] else -1), given["scale"])
    nothing = torch.empty(0)
    return out, lse.unsqueeze(-1), nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


def cudnn_backward(given: Arguments) -> tuple[Any, ...]:
    grad, q, k, v, out = (given[name] for name in ("grad_out", "query", "key", "value", "out"))
    assert given["logsumexp"].shape == (*q.shape[:3], 1) and given["dropout_p"] == 0.0
    assert (given["max_q"], given["max_k"]) == (q.shape[2], k.shape[2])
    sides = -1, 0 if given["is_causal"] else -1
    return attend_backward((grad, q, k, v, out), given["logsumexp"].squeeze(-1), sides, given["scale"])


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


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine and FlashAttention 3, without the limits of their kernels."""
    for name, stand_in in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(TransformerEngineFused, "granule_tokens", 1)
    CALLS.clear()


def run(
    kernel: Kernel, tensors: list[torch.Tensor], slices: int, reach: Reach, grows_down: bool = False
) -> tuple[list[torch.Tensor], int]:
    leaves = [[p.clone().requires_grad_() for p in t.chunk(slices)] for t in tensors[:3]]
    cache = KVCache(slices, in_line=kernel.takes_prefix(128, 256))
    if grows_down:  # the pool's other end
        cache.append(9, 0, *(t.detach() for t in (leaves[1][0], leaves[2][0])))
    place = {"cache": cache, "kernel": kernel, "microbatch": 0, "scale": SCALE, "reach": reach}
    with StandIns() as mode, patch.object(torch, "are_deterministic_algorithms_enabled", lambda: grows_down):
        outs = []
        for i in range(slices):
            outs.append(slice_attention(*(t[i] for t in leaves), SliceContext(index=i, **place)))
            if not i and grows_down:
                cache.drop(9)
        for i in reversed(range(slices)):
            outs[i].backward(tensors[3].chunk(slices)[i])
    cache.check_empty()
    found = [torch.cat(outs).detach(), *(torch.cat([p.grad for p in t]) for t in leaves)]
    return found, sum(mode.calls.values()) + sum(CALLS.values())


@pytest.mark.parametrize("grows_down", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kernel", KERNELS[1:], ids=lambda k: k.name)
def test_slices_equal_full_attention(kernel: Kernel, groups: int, grows_down: bool) -> None:
    tensors = inputs(4, 4, groups, torch.float64)
    found, calls = run(kernel, tensors, 4, Reach(), grows_down)
    whole = [t.clone().requires_grad_() for t in tensors[:3]]
    wanted = full_attention(*whole)
    wanted.backward(tensors[3])
    # One call for every slice, or one for its own keys and one for a run of earlier ones; forward and backward.
    forward = 4 if kernel.takes_prefix(128, 256) else 7
    assert calls == forward + (7 if kernel.splits_backward else forward)
    for part, reference in zip(found, [wanted.detach(), *(w.grad for w in whole)], strict=True):
        assert relative(part, reference) < 1e-12


def test_transformer_engine_before_2_15(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TransformerEngineFused()
    monkeypatch.setitem(sys.modules, kernel.module, TransformerEngine214(kernel.module))
    test_slices_equal_full_attention(kernel, 2, False)


@pytest.mark.parametrize(
    ("reach", "calls"),
    [
        (Reach(None, 5, 32), 4),
        (Reach(None, 11, 32), 4),
        (Reach(((0, 10, 20),) * 2, None, 32), 6),
        (Reach(((0, 10, 20), (0, 9)), 6, 32), 11),
    ],
    ids=["window", "longer window", "documents", "both"],
)
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.takes_window], ids=lambda k: k.name)
def test_a_document_is_one_call(kernel: Kernel, reach: Reach, calls: int) -> None:
    tensors = inputs(4, 4, 2, torch.float64)
    found, made = run(kernel, tensors, 4, reach)
    whole = [t.clone().requires_grad_() for t in tensors[:3]]
    wanted = masked_attention(*whole, reach)
    wanted.backward(tensors[3])
    assert made == 2 * calls
    for part, reference in zip(found, [wanted.detach(), *(w.grad for w in whole)], strict=True):
        assert relative(part, reference) < 1e-12


@pytest.mark.parametrize(
    ("backend", "device", "names"),
    [
        ("fused", "cuda", ("te-fused", "cudnn")),
        ("flash", "cuda", ("cuda-flash-3", "cuda-flash")),
        ("auto", "cuda", ()),
        ("fused", "cpu", ()),
    ],
)
def test_backend_names_the_kernels(backend: str, device: str, names: tuple[str, ...]) -> None:
    assert kernels_of_backend(backend, device) == names
    assert set(names) <= {kernel.name for kernel in KERNELS}
