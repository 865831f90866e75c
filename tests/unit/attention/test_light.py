"""Linear layers without communication: the sums of Megatron's, and only where there is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_het.features.thrifty_layers.light import LightColumnLinear, LightRowLinear, lighten_linear_layers

LAYERS = "megatron.core.tensor_parallel.layers"
LIGHT = {ColumnParallelLinear: LightColumnLinear, RowParallelLinear: LightRowLinear}


def layer(kind: type[torch.nn.Module], **changed: Any) -> Any:
    """One of Megatron's layers as it is on a TP group of one rank, without the groups that making one takes."""
    torch.manual_seed(3)
    module: Any = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    module.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    module.bias = torch.nn.Parameter(torch.randn(6, dtype=torch.float64))
    module.config = SimpleNamespace(_cpu_offloading_context=None, defer_embedding_wgrad_compute=False)
    module.tp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    plain = {
        "allreduce_dgrad": False,
        "disable_grad_reduce": False,
        "explicit_expert_comm": False,
        "gather_output": False,
        "gradient_accumulation_fusion": False,
        "gtp_remat_size": 1,
        "input_is_parallel": True,
        "output_size_per_partition": 6,
        "input_size": 4,
        "sequence_parallel": False,
        "skip_bias_add": False,
        "use_inference_optimized_all_gather": False,
    }
    for name, value in (plain | changed).items():
        setattr(module, name, value)
    return module


def model(module: torch.nn.Module) -> Any:
    return SimpleNamespace(decoder=torch.nn.Sequential(module))


def passed(module: Any) -> list[torch.Tensor | None]:
    """Output, the bias that is left to add, and gradients."""
    source = torch.randn(5, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out, bias = module(source)
    out.sin().sum().backward()
    return [out.detach(), bias, source.grad, module.weight.grad, module.bias.grad]


@pytest.mark.parametrize("kind", LIGHT)
@pytest.mark.parametrize("skips", [False, True])
def test_equals_megatron(kind: type[torch.nn.Module], skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("copy_to", "reduce_from"):  # nothing, on one rank; they ask a group of torch.distributed
        monkeypatch.setattr(f"{LAYERS}.{name}_tensor_model_parallel_region", lambda tensor, **_: tensor)
    monkeypatch.setattr(f"{LAYERS}.get_tensor_model_parallel_group_if_none", lambda group, **_: group)
    wanted, module = passed(layer(kind, skip_bias_add=skips)), layer(kind, skip_bias_add=skips)
    names = list(module.state_dict())
    assert lighten_linear_layers([model(module)]) == 1 and type(module) is LIGHT[kind]
    assert list(module.state_dict()) == names
    for a, b in zip(passed(module), wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", LIGHT)
@pytest.mark.parametrize(
    "changed",
    [
        {"tp_group": SimpleNamespace(size=lambda: 2)},
        {"sequence_parallel": True},
        {"explicit_expert_comm": True},
        {"gradient_accumulation_fusion": True},
        {"gtp_remat_size": 2},
        {"_forward_impl": lambda **_: None},
        {"weight": None},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_left_alone(kind: type[torch.nn.Module], changed: dict[str, Any]) -> None:
    module = layer(kind, **changed)
    assert lighten_linear_layers([model(module)]) == 0 and type(module) is kind


def test_a_weight_from_elsewhere_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LAYERS}.copy_to_tensor_model_parallel_region", lambda tensor, **_: tensor)
    module, other = layer(ColumnParallelLinear), torch.zeros(6, 4, dtype=torch.float64)
    lighten_linear_layers([model(module)])
    out, _ = module(torch.ones(1, 1, 4, dtype=torch.float64), weight=other.requires_grad_())
    torch.testing.assert_close(out[0, 0], module.bias)


@pytest.mark.parametrize("kind", LIGHT)
def test_a_split_backward_that_comes_later_is_kept(
    kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("copy_to", "reduce_from"):
        monkeypatch.setattr(f"{LAYERS}.{name}_tensor_model_parallel_region", lambda tensor, **_: tensor)
    module = layer(kind)
    lighten_linear_layers([model(module)])
    module._forward_impl = lambda input, weight, bias, **_: input.new_full((*input.shape[:2], 6), 7.0)
    out, _ = module(torch.ones(1, 1, 4, dtype=torch.float64))
    assert (out - (0 if kind is ColumnParallelLinear else module.bias) == 7).all()
