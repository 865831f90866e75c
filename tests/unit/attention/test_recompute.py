"""An MLP that runs its first half again gives the same gradients and keeps its input only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from megatron_het.device import Platform
from megatron_het.device.memory import memory_meter
from megatron_het.runtime.building import RecomputingMLP, recompute_up_projections

HIDDEN, FFN, TOKENS = 16, 64, 32


class _Linear(torch.nn.Linear):
    """Answers as Megatron's do, and counts."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        self.calls += 1
        return super().forward(hidden), None


def _mlp() -> MLP:
    torch.manual_seed(0)
    mlp = MLP.__new__(MLP)
    torch.nn.Module.__init__(mlp)
    mlp.config = SimpleNamespace(  # type: ignore[assignment]
        use_te_activation_func=False,
        bias_activation_fusion=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        activation_func_clamp_value=None,
        glu_linear_offset=0.0,
        fp8=None,
    )
    mlp.linear_fc1 = _Linear(HIDDEN, 2 * FFN, bias=False)
    mlp.linear_fc2 = _Linear(FFN, HIDDEN, bias=False)
    return mlp


def _model() -> SimpleNamespace:
    layer = SimpleNamespace(recompute_mlp=True, mlp=_mlp())
    return SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))


def _run(mlp: MLP) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Output, gradients, and bytes that are kept in between."""
    source = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with memory_meter(Platform("cpu")) as meter:
        before = meter.live_bytes()
        output = mlp(source.sin(), padding_mask=None)[0]
        kept = meter.live_bytes() - before
        output.square().sum().backward()
    gradients = [source.grad, *(p.grad for p in mlp.parameters())]
    return output.detach(), [g for g in gradients if g is not None], kept


def test_same_gradients_fewer_bytes() -> None:
    plain_output, plain_gradients, plain_kept = _run(_mlp())
    model = _model()
    assert recompute_up_projections([model]) == 1
    layer = model.decoder.layers[0]
    assert type(layer.mlp) is RecomputingMLP
    assert not layer.recompute_mlp, "or Megatron would run the whole MLP again"
    output, gradients, kept = _run(layer.mlp)
    assert torch.equal(output, plain_output)
    assert len(gradients) == 3
    for found, expected in zip(gradients, plain_gradients, strict=True):
        assert torch.equal(found, expected)
    assert (layer.mlp.linear_fc1.calls, layer.mlp.linear_fc2.calls) == (2, 1)
    row = TOKENS * 4
    assert kept == 2 * HIDDEN * row, "the MLP's input and its output"
    assert plain_kept >= kept + 3 * FFN * row


def test_without_gradients_nothing_is_kept() -> None:
    model = _model()
    recompute_up_projections([model])
    mlp = model.decoder.layers[0].mlp
    with torch.no_grad():
        mlp(torch.randn(TOKENS, 1, HIDDEN))
    assert mlp.linear_fc1.calls == 1


@pytest.mark.parametrize("in_fp8", [False, True])
def test_other_layers_stay(in_fp8: bool) -> None:
    """In fp8 Megatron's own recomputation enters the recipe again, which a second run in a backward has left."""
    model = _model()
    layer = model.decoder.layers[0]
    if in_fp8:
        layer.mlp.config.fp8 = "hybrid"
    layer.recompute_mlp = in_fp8
    assert recompute_up_projections([model]) == 0
    assert type(model.decoder.layers[0].mlp) is MLP
