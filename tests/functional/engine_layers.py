"""Linear layers that put their weight gradients off as Transformer Engine's do, on a machine without it."""

from functools import partial
from typing import Any

import torch

from testing import probe


class Store:
    """What Transformer Engine's layers have without delayed gradients."""

    context = None

    def delay_wgrad_compute(self) -> bool:
        return False


class Multiply(torch.autograd.Function):
    """``source @ weight.T``, whose second product goes to the layer's store."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.nn.Parameter, layer: Any) -> torch.Tensor:
        ctx.save_for_backward(source, weight)
        ctx.layer, ctx.store = layer, layer.wgrad_store  # as Transformer Engine does
        if layer.asks_first and not ctx.store.delay_wgrad_compute():
            ctx.store = None
        return source @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        source, weight = ctx.saved_tensors
        fused = ctx.layer.fuse_wgrad_accumulation

        def second(source: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, Any]:
            found = grad.flatten(0, 1).t() @ source.flatten(0, 1)
            of_bias = [torch.empty(0)] if ctx.layer.grouped else None  # it is added outside of the layer
            return weight.main_grad.add_(found) if fused else found, of_bias

        delays = ctx.store is not None and ctx.store.delay_wgrad_compute()
        found = ctx.store.put([source, grad], second) if delays else second(source, grad)[0]
        found = None if fused else found
        if fused and hasattr(weight, "grad_added_to_main_grad"):  # DDP gets a placeholder that no hook may add
            weight.grad_added_to_main_grad, found = True, torch.full_like(weight, torch.nan)
        return grad @ weight, found, None


def _stand_in(layer: Any, fused: bool) -> None:
    def forward(*, input: torch.Tensor, weight: torch.nn.Parameter, bias: None, **_: Any) -> torch.Tensor:
        assert bias is None
        return Multiply.apply(input, weight, layer)

    def backward_dw() -> None:
        (found, _), _ = layer.wgrad_store.pop()
        if not fused:
            layer.weight.grad = found

    layer.asks_first, layer.grouped, layer.fuse_wgrad_accumulation = True, False, fused
    layer.wgrad_store, layer._forward_impl, layer.backward_dw = Store(), forward, backward_dw


def _observe(fuses: bool, **given: Any) -> None:
    """As :func:`testing.probe.observe`; layers of decoders add to ``main_grad`` themselves, or leave that to hooks."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_het.features.zero_bubble import runtime

    split = runtime.split_linear_layers

    def split_layers(models: Any, store: Any) -> list[Any]:
        for layer in (layer for model in models for layer in model.decoder.modules()):
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                _stand_in(layer, fuses)
        return split(models, store)

    none_is_own: Any = type("None", (), {})  # no layer is one of Megatron's own
    runtime.ColumnParallelLinear = runtime.RowParallelLinear = none_is_own
    runtime.split_linear_layers = split_layers
    probe.observe(**given)


fused, unfused = partial(_observe, True), partial(_observe, False)
