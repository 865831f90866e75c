"""What the exchange between TP classes takes a parameter for."""

from __future__ import annotations

import pytest
import torch

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
