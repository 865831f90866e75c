"""Thrifty layers on a rank: norms that keep only their input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_het.runtime.feature import OpenContext, RuntimeFeature

# Layers that keep less from forward to backward (SlimPipe, section 5).
#
# RMSNorm keeps its input and one number per token; PyTorch's keeps intermediate results too where it
# has no fused kernel.  SwiGLU that keeps only its input is Megatron's own ``bias_swiglu_fusion``.


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = source.to(torch.promote_types(source.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(source, weight, scale)
        return (wide * scale).mul_(weight).to(source.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        source, weight, scale = ctx.saved_tensors
        normed = source.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        grad_weight = (wide * normed).sum(dim=tuple(range(wide.dim() - 1)))
        wide = wide * weight
        grad_source = (wide - normed * (wide * normed).mean(dim=-1, keepdim=True)) * scale
        return grad_source.to(source.dtype), grad_weight.to(weight.dtype), None


class ThriftyRMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, keeping only its input and a number per token."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., h]``."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _RMSNorm.apply(x, self.weight, eps)


def make_norms_thrifty(models: Iterable[torch.nn.Module]) -> int:
    """Let PyTorch's RMSNorms of models keep less.  Parameters and their names stay as they are.

    Norms of Transformer Engine keep no more than that by themselves and are left alone.

    Returns:
        How many norms were changed.
    """
    count = 0
    for model in models:
        for module in model.modules():
            if type(module) is torch.nn.RMSNorm and len(module.normalized_shape) == 1:
                module.__class__ = ThriftyRMSNorm
                count += 1
    return count


class ThriftyLayersFeature(RuntimeFeature):
    """Changes the norms of the model; the activation function follows from Megatron's arguments."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        make_norms_thrifty(models)


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    return ThriftyLayersFeature()
