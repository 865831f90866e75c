"""Norms and activation functions that keep their input only."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

from megatron_het.features.thrifty_layers.runtime import ThriftyRMSNorm, make_norms_thrifty


def run(norm: torch.nn.Module, source: torch.Tensor, grad: torch.Tensor) -> tuple[list[torch.Tensor], int]:
    """(output and gradients, bytes that autograd keeps besides source and weight)."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    source = source.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = norm(source)
    for own in (source, norm.weight):
        kept.pop(own.untyped_storage().data_ptr(), None)
    out.backward(grad)
    assert source.grad is not None
    return [out.detach(), source.grad, norm.weight.grad], sum(kept.values())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    plain = torch.nn.RMSNorm(64, eps=1e-5, dtype=dtype)
    torch.nn.init.normal_(plain.weight)
    model = torch.nn.Sequential(copy.deepcopy(plain))
    assert make_norms_thrifty([model]) == 1 and isinstance(model[0], ThriftyRMSNorm)
    assert list(model.state_dict()) == ["0.weight"]
    source, grad = torch.randn(10, 2, 64, dtype=dtype), torch.randn(10, 2, 64, dtype=dtype)
    wanted, _ = run(plain, source, grad)
    found, kept = run(model[0], source, grad)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert kept == 20 * (8 if dtype == torch.float64 else 4)  # a number per token


def test_layer_norm_keeps_its_input_only() -> None:
    """PyTorch's LayerNorm needs no replacement: its input, and two numbers per token in fp32."""
    norm = torch.nn.LayerNorm(64)
    assert make_norms_thrifty([norm]) == 0 and type(norm) is torch.nn.LayerNorm
    kept = _kept(norm)
    assert [size for size in kept if size > norm.weight.nbytes] == []
    assert sum(kept) == 2 * norm.weight.nbytes + 2 * 20 * 4


@pytest.mark.parametrize("is_fused", [False, True])
def test_gelu_keeps_its_input_only(is_fused: bool) -> None:
    """With a bias too: what comes in, or its sum with the bias, and never what comes out."""
    bias = torch.zeros(64, requires_grad=True)
    if is_fused:
        assert sum(_kept(lambda source: bias_gelu_impl(source, bias))) == bias.nbytes
    else:
        assert sum(_kept(torch.nn.functional.gelu)) == 0
        assert sum(_kept(lambda source: torch.nn.functional.gelu(source + bias))) == 20 * 64 * 4


def _kept(run: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Bytes of each tensor that autograd keeps besides the input."""
    source, kept = torch.randn(10, 2, 64).requires_grad_(), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(source)
    kept.pop(source.untyped_storage().data_ptr(), None)
    assert out.requires_grad
    return list(kept.values())
