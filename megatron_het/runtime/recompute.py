"""Selective recomputation of the up projection and SwiGLU (SlimPipe, section 6.4).

With ``--recompute-granularity selective --recompute-modules mlp`` Megatron runs the whole MLP a second
time.  The down projection's output is not needed for any gradient, so here only what comes before it
is run again, when its backward asks for its input.  What stays from the forward is the MLP's input.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.mlp import MLP


class _Recomputed(torch.autograd.Function):
    """Runs a function now without a graph, and once more, with one, when its output is asked for."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, promise: _Promise) -> torch.Tensor:
        with torch.no_grad():
            output = promise.run(source)
        ctx.save_for_backward(source)
        ctx.promise = promise
        promise.context = ctx
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        source, output = ctx.promise.keep()
        ctx.promise.kept = None
        torch.autograd.backward(output, grad)
        return source.grad, None


@dataclass(slots=True, eq=False)
class _Promise:
    """The output of a function that can be made again."""

    run: Callable[[torch.Tensor], torch.Tensor]
    context: Any = None
    kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def keep(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input, output) of the second run, which happens at the first call."""
        if self.kept is None:
            (source,) = self.context.saved_tensors
            self.context = None  # it refers to this
            source = source.detach().requires_grad_()
            with torch.enable_grad():
                self.kept = source, self.run(source)
        return self.kept


@dataclass(frozen=True, slots=True)
class _Reference:
    """Stands for the promised output among saved tensors."""

    promise: _Promise
    size: torch.Size


class _PassOn(torch.nn.Module):
    """In place of a down projection."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns what it is given, and no bias."""
        return hidden, None


class RecomputingMLP(MLP):
    """Megatron's MLP, keeping its input only."""

    def forward(self, hidden_states: torch.Tensor, per_token_scale: Any = None, **keywords: Any) -> Any:
        """See Megatron; ``[s, b, h]`` in and out, and the bias of the down projection."""
        if per_token_scale is not None or not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **keywords)
        promise = _Promise(self._up)
        up = _Recomputed.apply(hidden_states, promise)
        address, numel = up.data_ptr(), up.numel()

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Reference:
            is_up = tensor.data_ptr() == address and tensor.numel() == numel
            return _Reference(promise, tensor.size()) if is_up else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return self.linear_fc2(up)

    def _up(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The MLP up to its down projection: ``[s, b, h]`` to ``[s, b, ffn / tp]``."""
        front = copy.copy(self)  # shares the layers, not the list of them
        front._modules = {**self._modules, "linear_fc2": _PassOn()}
        return MLP.forward(front, hidden_states)[0]


def _unpack(saved: torch.Tensor | _Reference) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    return saved.promise.keep()[1].detach().view(saved.size)


def recompute_up_projections(models: Iterable[torch.nn.Module]) -> int:
    """Let layers whose MLP Megatron would recompute recompute its first half only.

    Args:
        models: GPTModels, not wrapped.

    Returns:
        How many layers were changed.
    """
    count = 0
    for model in models:
        if getattr(model.config, "fp8", None):
            continue  # what runs again must be quantised again, and the down projection keeps no input as it was
        for layer in model.decoder.layers:  # type: ignore[union-attr]
            if getattr(layer, "recompute_mlp", False) and type(layer.mlp) is MLP:
                layer.recompute_mlp = False
                layer.mlp.__class__ = RecomputingMLP
                count += 1
    return count
