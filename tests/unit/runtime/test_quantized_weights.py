"""Weights in fp8, with stand-ins for the layers of Transformer Engine that quantise them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_het.runtime.building import add_all_gradients, copies_of, drop_copies


class Quantised:
    """A copy of a weight: tensors, and what is none."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._data, self._transpose = weight.detach().clone(), weight.detach().t().clone()
        self._quantizer = object()


class StandIn(torch.nn.Module):
    """A linear layer that keeps a copy of its weight, and of which the first backward overwrites ``main_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 2))
        self.main_grad = torch.zeros(2, 2)
        self.is_first_microbatch = True
        self._fp8_workspaces: dict[str, Quantised] = {}
        self.quantised = 0

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        if self.is_first_microbatch or "weight" not in self._fp8_workspaces:
            self._fp8_workspaces["weight"] = Quantised(self.weight)
            self.quantised += 1
        is_first, self.is_first_microbatch = self.is_first_microbatch, False
        return _Product.apply(source, self, self._fp8_workspaces["weight"]._data, is_first)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, layer: StandIn, weight: torch.Tensor, is_first: bool) -> torch.Tensor:
        ctx.save_for_backward(source)
        ctx.layer, ctx.weight, ctx.is_first = layer, weight, is_first
        return source @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (source,) = ctx.saved_tensors
        own = grads[0].t() @ source
        ctx.layer.main_grad.copy_(own if ctx.is_first else ctx.layer.main_grad + own)
        return grads[0] @ ctx.weight, None, None, None


def _model() -> Any:
    model = torch.nn.Sequential(StandIn(), torch.nn.ReLU(), StandIn())
    add_all_gradients([model])
    return model


@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0)], ids=["in order", "last in, first out"])
def test_gradients_of_all_passes_are_added(backwards: tuple[int, ...]) -> None:
    model = _model()
    layer = model[0]
    drop_copies(model)
    outputs = [model(torch.full((1, 2), i + 1.0, requires_grad=True)).sum() for i in range(3)]
    for i in backwards:
        outputs[i].backward()
    assert layer.main_grad[0, 0] == 2 * (1 + 2 + 3)


def test_weights_are_quantised_once_per_iteration() -> None:
    """The copy of an iteration is of the weights after the update before it."""
    model = _model()
    for iteration in range(3):
        drop_copies(model)
        for _ in range(4):
            model(torch.ones(1, 2))
        assert model[0].quantised == model[2].quantised == iteration + 1
        with torch.no_grad():
            model[0].weight += 1
    assert model[0]._fp8_workspaces["weight"]._data[0, 0] == 3


def test_tensors_of_copies() -> None:
    model = _model()
    assert not list(copies_of(model))
    model(torch.ones(1, 2))
    own = [model[i]._fp8_workspaces["weight"] for i in (0, 2)]
    assert {id(t) for t in copies_of(model)} == {id(t) for one in own for t in (one._data, one._transpose)}


def test_layers_without_copies_stay() -> None:
    layer = torch.nn.Linear(2, 2)
    add_all_gradients([layer])
    drop_copies(layer)
    assert not hasattr(layer, "is_first_microbatch")
