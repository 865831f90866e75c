"""Which parameters of a chunk get the weights that belong to their names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_het.features.initial_weights.runtime import InitialWeightsByName
from megatron_het.plan import Cut


class Linear(torch.nn.Module):
    """A layer that is filled as Megatron's are, or makes its parameter anew afterwards as Transformer Engine's do."""

    def __init__(self, config: Any, rewraps: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 4))
        config.init_method(self.weight)
        if rewraps:
            self.weight = torch.nn.Parameter(self.weight)


class Model(torch.nn.Module):
    """A chunk with an output layer alone, and a parameter that nobody fills."""

    def __init__(self, config: Any, rewraps: bool) -> None:
        super().__init__()
        self.output_layer = Linear(config, rewraps)
        self.scale = torch.nn.Parameter(torch.zeros(8, 4))


def built(rewraps: bool, seed: int = 1234) -> Model:
    config = SimpleNamespace(**dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method")))
    for name in vars(config):
        setattr(config, name, torch.nn.init.normal_)
    feature = InitialWeightsByName(seed, Cut(1), 0, 0, 0, in_blocks=True)
    feature.prepare_config(SimpleNamespace(transformer=config))
    model = Model(config, rewraps)
    feature.attach([model])
    feature.close()
    return model


def test_a_parameter_that_its_layer_makes_anew_is_filled_too() -> None:
    plain, rewrapped = built(False), built(True)
    assert plain.output_layer.weight.detach().std() > 0.5
    assert torch.equal(plain.output_layer.weight, rewrapped.output_layer.weight)
    assert not rewrapped.scale.any()


def test_tensors_without_memory_are_told_apart() -> None:
    """Of a dry run: what is filled there does not matter, but that nothing fails does."""
    with FakeTensorMode():
        model = built(True)
    assert model.output_layer.weight.shape == (8, 4)
