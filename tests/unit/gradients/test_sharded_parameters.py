"""What the exchange between TP classes takes a parameter for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_het.gradients.finalize import mark_sharded
from megatron_het.gradients.resharding import sharded_parameters


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_norms_hold_partial_gradients(sequence_parallel: bool, qk_layernorm: bool) -> None:
    """The norms of a layer under sequence parallelism; those of heads wherever there are some."""
    of_layer, of_heads, weight = (torch.nn.Parameter(torch.zeros(4)) for _ in range(3))
    of_layer.sequence_parallel = True  # type: ignore[attr-defined]
    weight.tensor_model_parallel, weight.partition_dim = True, 0  # type: ignore[attr-defined]
    named = [
        ("decoder.layers.0.input_layernorm.weight", of_layer),
        ("decoder.layers.0.self_attention.q_layernorm.weight", of_heads),
        ("decoder.layers.0.self_attention.linear_qkv.weight", weight),
    ]
    found = sharded_parameters(iter(named), lambda p: p.data, sequence_parallel, qk_layernorm)
    assert [p.partial for p in found] == [sequence_parallel, qk_layernorm, False]
    assert [p.dim for p in found] == [-1, -1, 0]


@pytest.mark.parametrize("gated", [False, True])
def test_gated_experts_are_cut_in_two_halves(gated: bool) -> None:
    """Transformer Engine's experts say that they are cut in one piece, with one weight for each expert."""
    model = torch.nn.Module()
    model.config = SimpleNamespace(gated_linear_unit=gated)  # type: ignore[assignment]
    for path in ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2", "mlp.shared_experts.linear_fc1"):
        layer = torch.nn.Module()
        layer.weight0 = torch.nn.Parameter(torch.zeros(4))
        layer.weight0.tensor_model_parallel, layer.weight0.partition_stride = True, 1  # type: ignore[attr-defined]
        holder = model
        *parents, last = path.split(".")
        for name in parents:
            if not hasattr(holder, name):
                holder.add_module(name, torch.nn.Module())
            holder = getattr(holder, name)
        holder.add_module(last, layer)
    mark_sharded([model])
    found = {name: p.partition_stride for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    assert found == {
        "mlp.experts.linear_fc1.weight0": 2 if gated else 1,
        "mlp.experts.linear_fc2.weight0": 1,
        "mlp.shared_experts.linear_fc1.weight0": 1,
    }
