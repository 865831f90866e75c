"""Thrifty layers on a rank: norms that save only their input, and linear layers of slices with little overhead."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.nn.functional import linear

from megatron_het.families import family_of_model
from megatron_het.runtime.feature import OpenContext, RuntimeFeature

# RMSNorm saves its input and one number per token; PyTorch's saves intermediate results, too, without a fused
# kernel.


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
    """Make PyTorch's RMSNorms save less; returns the number of changed ones.  Names of parameters do not change.

    Norms of Transformer Engine already save no more and are not changed.
    """
    count = 0
    for model in models:
        for module in model.modules():
            if type(module) is torch.nn.RMSNorm and len(module.normalized_shape) == 1:
                module.__class__ = ThriftyRMSNorm
                count += 1
    return count


# Linear layers of slices without tensor parallelism: only the matrix product.
#
# Megatron's parallel layers are autograd functions in Python, with another one for the
# communication before or after, which does nothing on one rank.  Every pass has this overhead, and a sequence in n
# slices has n passes.  Here such a layer calls PyTorch's linear function.  The computed sums are the same.


def _is_changed(module: Any) -> bool:
    """Whether a schedule that splits backward passes, or an offload, has changed the layer's product."""
    return "_forward_impl" in vars(module) or module.config._cpu_offloading_context is not None


def _product(layer: Any, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    if layer.skip_bias_add:
        return linear(input_, layer.weight), layer.bias
    return linear(input_, layer.weight, layer.bias), None


class LightColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel layer for a single TP rank."""

    def forward(self, input_: torch.Tensor, weight: torch.Tensor | None = None, *rest: Any, **more: Any) -> Any:
        """See Megatron; ``[s, b, k]`` to ``[s, b, n]``, and the bias if somebody else adds it."""
        if weight is not None or _is_changed(self):
            return super().forward(input_, weight, *rest, **more)
        return _product(self, input_)


class LightRowLinear(RowParallelLinear):
    """Megatron's row-parallel layer for a single TP rank."""

    def forward(self, input_: torch.Tensor) -> Any:
        """See Megatron; ``[s, b, k]`` to ``[s, b, n]``, and the bias if somebody else adds it."""
        return super().forward(input_) if _is_changed(self) else _product(self, input_)


_LIGHT = {ColumnParallelLinear: LightColumnLinear, RowParallelLinear: LightRowLinear}


def lighten_linear_layers(models: Iterable[torch.nn.Module]) -> int:
    """Replace linear layers of transformer layers by light ones; returns the number of changed layers.

    Names of parameters do not change.  Layers of Transformer Engine, those with tensor or expert parallelism
    and those with a fused gradient accumulation are not changed.

    Args:
        models: GPTModels without wrappers.
    """
    count = 0
    for model in models:
        for module in (module for block in family_of_model(model).blocks(model) for module in block.modules()):
            light = _LIGHT.get(type(module))
            if light is not None and _is_alone(module):
                module.__class__ = light
                count += 1
    return count


def _is_alone(module: Any) -> bool:
    """Whether a layer computes only the product of its input and its weight, with autograd's own backward."""
    return bool(
        module.weight is not None
        and not _is_changed(module)
        and module.tp_group.size() == 1
        and not module.explicit_expert_comm
        and not module.sequence_parallel
        and not module.gradient_accumulation_fusion
        and not module.config.defer_embedding_wgrad_compute
        and module.gtp_remat_size == 1
    )


class ThriftyLayersFeature(RuntimeFeature):
    """Changes the norms of the model; the activation function is set by Megatron's arguments."""

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        make_norms_thrifty(models)


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    return ThriftyLayersFeature()
