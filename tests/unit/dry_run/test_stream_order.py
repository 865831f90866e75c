"""Streams that check order, and the code that copies on streams of its own, run over them.

Every wait of that code is left out once: each time the missing order must be noticed.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch

from megatron_het.device import Platform
from megatron_het.dry_run.stream_order import StreamOrderError, stream_order
from megatron_het.features.activation_offload.runtime import ActivationOffload
from megatron_het.features.window.chunk import HostCopy, SideStream, Streams
from megatron_het.lowering.ranks import RankOp
from megatron_het.schedule.ir import Kind

SIZE = 64


class Device(Platform):
    """Believes that it is a CUDA device."""

    @property
    def is_cuda(self) -> bool:
        return True


class AllStreams(Streams):
    """Streams for tensors on the CPU."""

    def of(self, device, purpose):
        key = device, purpose
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream()
        return self._streams[key]


def copy_beside(stream, source, target):
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


@pytest.fixture
def copied():
    """A tensor, its copy that a stream has begun, and the stream."""
    with stream_order():
        source, target, side = torch.zeros(4), torch.zeros(4), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        copy_beside(side, source, target)
        one = [source, target, side]
        del source, target, side
        yield one


def test_a_copy_needs_its_source():
    with stream_order():
        source, target, side = torch.zeros(4), torch.zeros(4), torch.cuda.Stream()
        with pytest.raises(StreamOrderError, match="copy_ on stream 1 is not ordered after"):
            copy_beside(side, source, target)
        side.wait_stream(torch.cuda.current_stream())
        copy_beside(side, source, target)


def test_a_reader_needs_the_copy(copied):
    source, target, side = copied
    event = torch.cuda.Event()
    event.record(side)
    with pytest.raises(StreamOrderError, match="is not ordered after aten::copy_"):
        target + 1
    with pytest.raises(StreamOrderError):
        source.add_(1)  # it is being read
    source + 1  # two readers are no conflict
    torch.cuda.current_stream().wait_event(event)
    assert float((target + 1)[0]) == 1


def test_the_host_may_wait_too(copied):
    _, target, side = copied
    event = torch.cuda.Event()
    event.record(side)
    assert not event.query()
    event.synchronize()
    target + 1


@pytest.mark.parametrize("is_recorded", [True, False])
def test_memory_that_another_stream_uses_needs_record_stream(copied, is_recorded):
    source, _, side = copied
    if is_recorded:
        source.record_stream(side)
    source.untyped_storage().resize_(0)
    with contextlib.nullcontext() if is_recorded else pytest.raises(StreamOrderError, match="given out again"):
        torch.zeros(4)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_tensor_that_goes_is_memory_that_is_freed(copied, is_awaited):
    copied[0] = None
    if is_awaited:
        torch.cuda.current_stream().wait_stream(copied[2])
    with contextlib.nullcontext() if is_awaited else pytest.raises(StreamOrderError, match="given out again"):
        torch.zeros(4)


def test_parts_of_a_storage_are_told_apart():
    with stream_order():
        whole, side = torch.zeros(8), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            whole[4:].add_(1)
        whole[:4].add_(1)
        with pytest.raises(StreamOrderError):
            whole[3:5].add_(1)


def offload_activations() -> None:
    """Two microbatches whose activations leave and come back, in 1F1B order, twice."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(2)))
    offload = ActivationOffload(1.0, Device("cpu"))
    offload.pool._pinned = False

    def op(kind: Kind, microbatch: int) -> RankOp:
        return RankOp(kind, microbatch, 0, 0, f"{kind.name} {microbatch}")

    for _ in range(2):
        offload.start([model])
        losses, unused = [], []
        for m in range(2):
            source = torch.randn(SIZE, SIZE, requires_grad=True)
            with offload.saving(op(Kind.FORWARD, m), source):
                losses.append(model(source).square().sum())
                unused.append((source * 2).square())  # what it saves comes back, and no backward waits for it
            offload.store(op(Kind.ACT_OFFLOAD, m))
        for m in range(2):
            offload.fetch(op(Kind.ACT_FETCH, m))
            offload.release(op(Kind.BACKWARD, m))
            losses[m].backward()
        offload.check_empty()


def keep_on_the_host() -> None:
    """A shard that leaves, comes back, is changed, and leaves again."""
    streams = AllStreams()
    tensor = torch.randn(SIZE)
    copy = HostCopy(tensor, streams)
    expected = tensor.clone()
    for _ in range(2):
        copy.store(tensor)
        copy.fetch(tensor)
        copy.wait()
        assert torch.equal(tensor, expected)
        tensor.add_(1)
        expected.add_(1)
    copy.store(tensor, free=False)
    tensor.add_(1)
    copy.restore(tensor)
    assert torch.equal(tensor, expected)
    copy.store(tensor)
    with pytest.raises(AssertionError, match="may still run"):
        copy.read(torch.device("cpu"))
    with pytest.raises(AssertionError, match="may still run"):
        copy.restore(torch.empty(SIZE))
    copy.fetch(tensor)
    copy.wait()
    assert torch.equal(copy.read(torch.device("cpu")), expected)


def open_beside() -> None:
    """What the side stream writes is read after joining, and read by it after following."""
    side = SideStream(torch.device("cpu"), AllStreams())
    whole, shard = torch.zeros(SIZE), torch.ones(SIZE)
    for _ in range(2):
        with side.following():
            whole.copy_(shard)
        side.join()
        shard.copy_(whole * 2)


@pytest.mark.parametrize("work", [offload_activations, keep_on_the_host, open_beside])
def test_waits_are_enough(work: Callable[[], None]) -> None:
    with stream_order() as order:
        work()
    assert order.waits


@pytest.mark.parametrize("work", [offload_activations, keep_on_the_host, open_beside])
def test_every_wait_is_needed(work: Callable[[], None]) -> None:
    """Every line that waits is left out once, and each time the missing order is noticed."""
    with stream_order() as order:
        work()
    for line in sorted(order.waits):
        with pytest.raises(StreamOrderError), stream_order(ignored=line):
            work()
            pytest.fail(f"{line} can go, and nobody notices")
