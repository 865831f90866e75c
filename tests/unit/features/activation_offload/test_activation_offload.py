"""Saved tensors that go to the host and come back."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_het.device import Platform
from megatron_het.device.memory import memory_meter
from megatron_het.features.activation_offload import spec
from megatron_het.features.activation_offload.runtime import ActivationOffload, _Forward
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import PlanError
from megatron_het.runtime.feature import BackwardPass, Call, ForwardPass
from megatron_het.schedule.ir import Kind

CPU = Platform("cpu")
SIZE = 64
ANY: Any = None


def _op(kind: Kind = Kind.FORWARD, microbatch: int = 0) -> RankOp:
    return RankOp(kind, microbatch, 0, 0, f"{kind.name} {microbatch}")


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(SIZE, SIZE) if i % 2 else torch.nn.GELU() for i in range(9)]
    return torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), *layers)


def _source() -> torch.Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _move(offload: ActivationOffload, kind: Kind) -> None:
    offload.handlers()[kind](_op(kind), ANY, ANY)


@pytest.mark.parametrize("ratio", [0.3, 0.75, 1.0])
def test_gradients_and_bytes(ratio: float) -> None:
    model, plain = _model(), _source()
    model(plain).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    offload, call = ActivationOffload(ratio, CPU), cast(Call, SimpleNamespace(models=[model], forward_only=False))
    offload.begin(call, ANY)
    with memory_meter(CPU) as meter:
        source = _source()
        with offload.around_forward(ForwardPass(_op(), source, ANY, None, ends_in_loss=False), call):
            loss = model(source).square().sum()
        kept = meter.live_bytes()
        _move(offload, Kind.ACT_OFFLOAD)
        gone = kept - meter.live_bytes()
        assert gone == offload.pool.used_bytes, "what is on the host has left the device"
        total = sum(b.storage.nbytes() for b in offload._forwards[0, 0, 0].blocks if b.storage) + gone
        assert ratio - SIZE * SIZE * 4 / total <= gone / total <= ratio
        _move(offload, Kind.ACT_FETCH)
        assert offload.pool.used_bytes == 0
    with pytest.raises(RuntimeError, match="activations left"):
        offload.finish(call, ANY)
    with offload.around_backward(BackwardPass(_op()), call, ANY):
        loss.backward()
    offload.finish(call, ANY)
    assert torch.equal(source.grad, plain.grad)  # type: ignore[arg-type]
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_weights_stay_and_the_input_is_emptied_where_it_is() -> None:
    model, source, plain = _model(), _source(), _source()
    model(plain).sum().backward()
    offload = ActivationOffload(1.0, CPU)
    offload.start([model])
    with offload.saving(_op(), source):
        loss = model(source).sum()
    weights = {p.data_ptr() for p in model.parameters()}
    blocks = offload._forwards[0, 0, 0].blocks
    assert len(blocks) > 1
    assert not weights & {b.storage.data_ptr() for b in blocks if b.storage is not None}
    before = source.detach().clone()
    _move(offload, Kind.ACT_OFFLOAD)
    assert source.untyped_storage().nbytes() == 0
    _move(offload, Kind.ACT_FETCH)
    assert torch.equal(source, before)
    loss.backward()
    assert torch.equal(source.grad, plain.grad)  # type: ignore[arg-type]


class _Quantised(torch.Tensor):
    """A weight in fp8 as Transformer Engine has it: without memory, beside tensors with it."""

    update_usage = None
    __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: args[0])


def test_quantised_weights_stay() -> None:
    weight: Any = torch.Tensor._make_wrapper_subclass(_Quantised, (SIZE, SIZE))
    offload, forward = ActivationOffload(1.0, CPU), _Forward()
    assert offload._pack(weight, forward) is weight and not forward.blocks


def test_layers_that_add_to_gradients_are_not_asked_early() -> None:
    """Autograd's hooks for saved tensors give back a copy of a weight, without its attributes."""
    args = SimpleNamespace(overlap_grad_reduce=True, gradient_accumulation_fusion=True)
    with pytest.raises(PlanError, match="--overlap-grad-reduce = True.*autograd gives back copies"):
        spec.ActivationOffload().check_arguments(ANY, ANY, args)


def test_an_input_that_the_chunk_before_has_saved_stays() -> None:
    model, source = _model(), _source()
    offload = ActivationOffload(1.0, CPU)
    offload.start([model])
    with offload.saving(_op(), source):
        handed_over = torch.nn.functional.softmax(source, dim=0)  # saves its result
    second = RankOp(Kind.FORWARD, 0, 0, 1, "F")
    with offload.saving(second, handed_over.detach().requires_grad_()):
        pass
    offload.store(second)
    assert handed_over.untyped_storage().nbytes()


def test_a_backward_frees_what_it_has_used() -> None:
    offload, layers, size = ActivationOffload(1.0, CPU), 8, SIZE * SIZE * 4
    offload.start([])
    live: list[int] = []
    with memory_meter(CPU) as meter:
        source = _source()
        with offload.saving(_op(), source):
            value = source
            for i in range(layers):
                value = value.sigmoid()  # saves its result
                if i == layers // 2:
                    value.register_hook(lambda _gradient: live.append(meter.live_bytes()))
            loss = value.sum()
        del value
        _move(offload, Kind.ACT_OFFLOAD)
        _move(offload, Kind.ACT_FETCH)
        offload.release(_op())
        before = meter.live_bytes()
        loss.backward()
    assert before > layers * size
    assert live[0] < before - size, "the later layers' are gone, the gradient has come"


def test_backward_without_fetch_says_so() -> None:
    model, source = _model(), _source()
    offload = ActivationOffload(1.0, CPU)
    offload.start([model])
    with offload.saving(_op(), source):
        loss = model(source).sum()
    _move(offload, Kind.ACT_OFFLOAD)
    with pytest.raises(RuntimeError, match="the fetch is missing"):
        loss.backward()


def test_host_blocks_are_reused() -> None:
    model, offload = _model(), ActivationOffload(1.0, CPU)
    seen: set[int] = set()
    for _ in range(3):
        offload.start([model])
        source = _source()
        with offload.saving(_op(), source):
            loss = model(source).sum()
        _move(offload, Kind.ACT_OFFLOAD)
        first = {b.host.data_ptr() for b in offload._forwards[0, 0, 0].blocks if b.host is not None}
        seen = seen or first
        assert first == seen
        _move(offload, Kind.ACT_FETCH)
        offload.release(_op())
        loss.backward()
        offload.check_empty()
