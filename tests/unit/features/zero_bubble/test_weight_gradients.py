"""A linear layer's backward in two halves: each does its own matrix product, and together they are the whole."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.features.base import NoOptions
from megatron_het.features.zero_bubble import runtime as weight_gradients
from megatron_het.features.zero_bubble.runtime import SplitForward, WeightGradients, ZeroBubbleFeature
from megatron_het.features.zero_bubble.spec import ZeroBubble
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import PlanError
from megatron_het.runtime.feature import BackwardPass
from megatron_het.schedule.kinds import Kind
from tests.functional.engine_layers import Multiply, Store

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


def expected(has_bias: bool = True) -> tuple[torch.Tensor, Any, Any, Any]:
    source, weight, bias = tensors()
    output = torch.nn.functional.linear(source, weight, bias if has_bias else None)
    output.square().sum().backward()
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
    original = weight_gradients._Product.add
    monkeypatch.setattr(weight_gradients._Product, "add", lambda self: (count.append(1), original(self))[1])
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
    assert not any(half.source.grad_fn or half.source.requires_grad for half in gradients._waiting[KEY])  # no history
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


class _EngineLinear(torch.nn.Module):
    """Stands in for ``transformer_engine.pytorch.Linear`` and for its grouped relative."""

    def __init__(self, weight: torch.nn.Parameter, fused: bool, grouped: bool, asks_first: bool) -> None:
        super().__init__()
        self.weight, self.fuse_wgrad_accumulation, self.grouped = weight, fused, grouped
        self.asks_first = asks_first  # whether the forward asks too, as from release 2.16 on
        self.bias = torch.nn.Parameter(weight.detach()[:, 0].clone())
        self.wgrad_store: Any = Store()

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return Multiply.apply(source, self.weight, self)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        if self.grouped and (self.wgrad_store.context is None or self.wgrad_store.context.empty()):
            return
        (found, of_bias), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = found.to(self.weight.dtype)  # in place of what was there
        if self.bias.grad is None:
            self.bias.grad = (of_bias[0] if self.grouped else of_bias).to(self.bias.dtype)


class _MegatronLinear(_EngineLinear):
    """Megatron's subclass, which asks its configuration first."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.config = SimpleNamespace(delay_wgrad_compute=False)

    def backward_dw(self) -> None:
        if self.config.delay_wgrad_compute:
            super().backward_dw()


@pytest.mark.parametrize("asks_first", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("has_main_grad", "fused"), [(False, False), (True, False), (True, True)])
def test_layers_of_transformer_engine(has_main_grad: bool, fused: bool, grouped: bool, asks_first: bool) -> None:
    """Two passes wait at a time, and the later one is completed first."""
    _, source_grad, weight_grad, _ = expected(has_bias=False)
    weight = tensors()[1]
    layer, gradients = _MegatronLinear(weight, fused, grouped, asks_first), WeightGradients()
    own_store = layer.wgrad_store
    if has_main_grad:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    changed = weight_gradients.split_linear_layers([layer], gradients)
    assert changed == [layer]
    for key, factor in (((0, 0, 0), 1.0), ((1, 0, 0), 2.0)):
        source = tensors()[0]
        with gradients.splitting():
            found = layer(source)
        with gradients.deferring(key):
            (factor * found.square().sum() + layer.bias.sum()).backward()
        torch.testing.assert_close(source.grad, factor * source_grad)
    assert weight.grad is None and (not has_main_grad or not weight.main_grad.any())
    for key, total in (((1, 0, 0), 2.0), ((0, 0, 0), 3.0)):
        gradients.compute(key)
        torch.testing.assert_close(weight.main_grad if has_main_grad else weight.grad, total * weight_grad)
    gradients.check_empty()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 2.0))
    layer(tensors()[0]).square().sum().backward()  # a whole backward, as of the output layer's parts
    whole = weight.main_grad if fused else weight.grad
    torch.testing.assert_close(whole, (4.0 if fused or not has_main_grad else 1.0) * weight_grad)
    weight_gradients.join_linear_layers(changed)
    assert layer.wgrad_store is own_store


def test_what_comes_with_the_first_half_is_added_and_no_hook_of_ddp_sees_it() -> None:
    layer, feature = _EngineLinear(tensors()[1], False, False, False), ZeroBubbleFeature()
    feature.attach([layer])
    parameters: list[Any] = list(layer.parameters())
    for parameter in parameters:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False
    config = SimpleNamespace(overlap_grad_reduce=True)
    ddp: Any = SimpleNamespace(ddp_config=config, param_to_bucket_group=dict.fromkeys(parameters))
    with feature._first_half(KEY, ddp):
        assert not ddp.param_to_bucket_group
        (layer(tensors()[0]).square().sum() + layer.bias.sum()).backward()
    assert list(ddp.param_to_bucket_group) == parameters and layer.bias.grad is None
    assert torch.equal(parameters[1].main_grad, torch.ones_like(layer.bias)) and not parameters[0].main_grad.any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overlap_grad_reduce": True}, None),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap = True.*both gradients at once"),
        ({"use_transformer_engine_op_fuser": True}, "--use-transformer-engine-op-fuser = True.*nobody computes"),
    ],
)
def test_what_layers_of_transformer_engine_cannot_go_with(given: dict[str, Any], message: str | None) -> None:
    plan: Any = SimpleNamespace(schedule=SimpleNamespace(name="zb-h1"))
    args = SimpleNamespace(**{"transformer_impl": "transformer_engine", "overlap_grad_reduce": False, **given})
    refused = pytest.raises(PlanError, match=message) if message else contextlib.nullcontext()
    with refused:
        ZeroBubble().check_arguments(plan, NoOptions(), args)
