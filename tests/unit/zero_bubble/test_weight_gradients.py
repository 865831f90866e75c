"""A linear layer's backward in two halves: each does its own matrix product, and together they are the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.platform import activate

activate()  # before Megatron is imported, which binds what the platform replaces

from megatron_het.lowering.ranks import RankOp  # noqa: E402
from megatron_het.runtime.feature import BackwardPass  # noqa: E402
from megatron_het.schedule.kinds import Kind  # noqa: E402
from megatron_het.zero_bubble import weight_gradients  # noqa: E402
from megatron_het.zero_bubble.feature import ZeroBubbleFeature  # noqa: E402
from megatron_het.zero_bubble.weight_gradients import SplitForward, WeightGradients  # noqa: E402

TOKENS, BATCH, INPUT, OUTPUT = 5, 2, 3, 4
KEY = (1, 0, 0)
OWN: dict[str, Any] = {"allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}


def tensors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.nn.Parameter, torch.nn.Parameter]:
    torch.manual_seed(7)
    source = torch.randn(TOKENS, BATCH, INPUT, dtype=dtype, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(OUTPUT, INPUT, dtype=dtype))
    return source, weight, torch.nn.Parameter(torch.randn(OUTPUT, dtype=dtype))


def own(*, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_options: Any) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight, bias)


def split(
    source: torch.Tensor,
    weight: torch.nn.Parameter,
    bias: torch.Tensor | None = None,
    to: WeightGradients | None = None,
) -> tuple[torch.Tensor, WeightGradients]:
    gradients = to or WeightGradients()
    with gradients.splitting():
        return SplitForward(own, gradients)(source, weight, bias, **OWN), gradients


def expected() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    source, weight, bias = tensors()
    output = torch.nn.functional.linear(source, weight, bias)
    output.square().sum().backward()
    assert source.grad is not None and weight.grad is not None and bias.grad is not None
    return output.detach(), source.grad, weight.grad, bias.grad


def test_two_halves_are_the_whole() -> None:
    output, source_grad, weight_grad, bias_grad = expected()
    source, weight, bias = tensors()
    weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    found, gradients = split(source, weight, bias)
    assert torch.equal(found, output)
    with gradients.deferring(KEY):
        found.square().sum().backward()
    assert source.grad is not None
    torch.testing.assert_close(source.grad, source_grad)
    torch.testing.assert_close(bias.grad, bias_grad)
    assert weight.grad is None and torch.equal(weight.main_grad, torch.ones_like(weight))
    gradients.compute(KEY)
    torch.testing.assert_close(weight.main_grad, 1 + weight_grad)
    gradients.check_empty()


def test_a_whole_backward_is_the_layers_own() -> None:
    """The output layer of a split vocabulary runs outside of FORWARD and BACKWARD_INPUT."""
    _, source_grad, weight_grad, _ = expected()
    source, weight, bias = tensors()
    SplitForward(own, WeightGradients())(source, weight, bias, **OWN).square().sum().backward()
    torch.testing.assert_close(source.grad, source_grad)
    torch.testing.assert_close(weight.grad, weight_grad)


def test_hooks_of_a_weight_do_not_see_the_first_half() -> None:
    """DDP's stop the run where a gradient that they are to reduce early is missing."""
    source, weight, _ = tensors()
    called = []
    weight.expand_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: called.append(1))  # type: ignore[union-attr]
    found, gradients = split(source, weight)
    with gradients.deferring(KEY):
        found.sum().backward()
    assert not called
    ready: list[torch.nn.Parameter] = []
    gradients.compute(KEY, ready.append)
    assert len(ready) == 1 and ready[0] is weight


def test_each_half_does_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """No schedule would be faster if the first half computed both."""
    source, weight, _ = tensors()
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    count: list[int] = []
    original = weight_gradients._Product.compute
    monkeypatch.setattr(weight_gradients._Product, "compute", lambda self: (count.append(1), original(self))[1])
    found, gradients = split(source, weight)
    with gradients.deferring(KEY):
        found.sum().backward()
    assert not count
    gradients.compute(KEY)
    assert len(count) == 1


def test_what_a_half_keeps_goes_with_the_other_one() -> None:
    source, weight, _ = tensors()
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    gradients = WeightGradients()
    for microbatch in range(3):
        found, _ = split(source, weight, to=gradients)
        with gradients.deferring((microbatch, 0, 0)):
            found.sum().backward()
    assert len(gradients._waiting) == 3
    gradients.compute((0, 0, 0))
    assert set(gradients._waiting) == {(1, 0, 0), (2, 0, 0)}
    with pytest.raises(RuntimeError, match=r"BACKWARD_WEIGHT is missing.*\(1, 0, 0\), \(2, 0, 0\)"):
        gradients.check_empty()


def test_a_recomputed_forward_splits_too() -> None:
    _, source_grad, weight_grad, _ = expected()
    source, weight, bias = tensors()
    weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    gradients = WeightGradients()
    layer = SplitForward(own, gradients)
    with gradients.splitting():
        found = torch.utils.checkpoint.checkpoint(lambda s: layer(s, weight, bias, **OWN), source, use_reentrant=True)
    with gradients.deferring(KEY):
        found.square().sum().backward()
    torch.testing.assert_close(source.grad, source_grad)
    assert not weight.main_grad.any()
    gradients.compute(KEY)
    torch.testing.assert_close(weight.main_grad, weight_grad)


def test_only_half_backwards_are_split() -> None:
    feature = ZeroBubbleFeature()
    nothing: Any = SimpleNamespace()
    for kind, splits in ((Kind.BACKWARD, False), (Kind.BACKWARD_INPUT, True)):
        with feature.around_backward(BackwardPass(RankOp(kind, 0, 0, 0, "")), nothing, nothing):
            assert feature._gradients.splits is splits
    assert set(feature.handlers()) == {Kind.BACKWARD_WEIGHT}


def test_closing_gives_layers_their_own_forward_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(torch.nn.Linear):
        def _forward_impl(self) -> str:
            return "own"

    monkeypatch.setattr(weight_gradients, "ColumnParallelLinear", Layer)
    layer, feature = Layer(2, 2), ZeroBubbleFeature()
    feature.attach([torch.nn.Sequential(layer)])
    assert isinstance(layer._forward_impl, SplitForward)
    feature.close()
    assert layer._forward_impl() == "own"
