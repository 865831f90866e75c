"""A GPTModel and the hybrid model that is equal to it: the weights of one for the other, inside of their runs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from testing.probe import observe

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)")
_OF_ATTENTION = ("input_layernorm.", "self_attention.")


def keep(*, rank: int, weights: str, out: str) -> None:
    """Write the weights that a training in one process starts from, and observe it."""

    def write(models: list[Any]) -> None:
        arrays = {name: parameter.detach().numpy().copy() for name, parameter in _parameters(models)}
        np.savez(weights, **arrays)  # type: ignore[arg-type]

    _after_setup(write)
    observe(rank=rank, out=out)


def take(*, rank: int, weights: str, out: str) -> None:
    """Start a hybrid model from the weights of a GPTModel of half as many layers, and observe the training."""

    def read(models: list[Any]) -> None:
        import torch

        with np.load(Path(weights)) as arrays, torch.no_grad():
            for name, parameter in _parameters(models):
                parameter.copy_(torch.from_numpy(arrays[twin_of(name)]))

    _after_setup(read)
    observe(rank=rank, out=out)


def twin_of(name: str) -> str:
    """The name in the GPTModel of a parameter of the hybrid model."""
    found = _LAYER.match(name)
    if found is None:
        return name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    layer, kind = divmod(int(found[1]), 2)
    assert found[2].startswith(_OF_ATTENTION) == (kind == 0), name
    return f"decoder.layers.{layer}.{found[2]}"


def _parameters(models: list[Any]) -> Iterator[tuple[str, Any]]:
    """Parameters by their names in the whole model."""
    from megatron.core.utils import unwrap_model

    for model in unwrap_model(models):
        for name, parameter in model.named_parameters():
            found = _LAYER.match(name)
            number = model.decoder.layers[int(found[1])].layer_number - 1 if found else 0
            yield f"decoder.layers.{number}.{found[2]}" if found else name, parameter


def _after_setup(change: Callable[[list[Any]], None]) -> None:
    """Do something with the model chunks before the first iteration."""
    from megatron.training import training

    original = training.setup_model_and_optimizer

    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **keywords: Any) -> Any:
        result = original(*positional, **keywords)
        change(result[0])
        return result

    training.setup_model_and_optimizer = setup_model_and_optimizer
