"""The CPU memory meter against allocations of known size."""

import pytest
import torch

from megatron_het import device as platform
from megatron_het.device import activate
from megatron_het.device.memory import CpuMemoryMeter, CudaMemoryMeter, limited_memory, memory_meter

KIB = 1024


def kib(count: int) -> torch.Tensor:
    return torch.zeros(count * KIB // 4)


@pytest.fixture
def meter():
    platform.activate()
    with CpuMemoryMeter() as meter:
        yield meter


def test_peak_is_of_what_lived_at_once(meter):
    with meter.region("work") as visit:
        a = kib(4)
        b = kib(8)
        del a
        c = kib(2)
        del b
    assert (visit.start_bytes, visit.peak_bytes, visit.end_bytes) == (0, 12 * KIB, 2 * KIB)
    assert visit.growth_bytes == 12 * KIB
    assert meter.peak_bytes == {"work": 12 * KIB}
    assert c.numel()


def test_what_is_allocated_while_ignoring_never_counts(meter):
    with meter.ignoring():
        a = kib(64)
        with meter.ignoring():
            b = kib(8)
        c = kib(8)
    a.add_(b[0])
    d = kib(2)
    assert meter.live_bytes() == 2 * KIB
    assert c.numel() and d.numel()


def test_peak_starts_with_what_lives_on_entry(meter):
    high = kib(64)
    del high
    kept = kib(1)
    with meter.region("quiet") as visit:
        pass
    assert (visit.start_bytes, visit.peak_bytes) == (KIB, KIB)
    assert kept.numel()


def test_views_share_their_storage(meter):
    base = kib(16)
    views = [base[1:], base.view(-1, 2), base.t(), base.detach(), *base.chunk(4)]
    assert meter.live_bytes() == 16 * KIB
    del base
    assert meter.live_bytes() == 16 * KIB
    views = kib(16)[:1]  # of a temporary one
    assert meter.live_bytes() == 16 * KIB
    del views
    assert meter.live_bytes() == 0


def test_in_place_operators_bring_nothing(meter):
    a = kib(4)
    with meter.region("in place") as visit:
        a.add_(1).mul_(2)
        a.zero_()
        torch.add(a, a, out=a)
    assert visit.peak_bytes == meter.live_bytes() == 4 * KIB


def test_tensors_of_before_are_foreign_until_added():
    before = kib(32)
    with CpuMemoryMeter() as meter:
        before.add_(1)
        view = before[1:]
        assert meter.live_bytes() == 0
        meter.add([before, view])
        assert meter.live_bytes() == 32 * KIB
        del before, view
        assert meter.live_bytes() == 0


def test_activations_saved_for_backward_are_live_until_then(meter):
    x = kib(4).requires_grad_()
    base = meter.live_bytes()
    with meter.region("forward") as forward:
        # exp keeps its result; the sum is one number.
        loss = x.exp().sum()
    assert base == 4 * KIB
    assert forward.end_bytes == 8 * KIB + 4
    loss.backward()
    # The saved result is gone, the gradient is there.
    assert meter.live_bytes() == 4 * KIB + 4 + 4 * KIB
    del loss
    x.grad = None
    assert meter.live_bytes() == 4 * KIB


def test_recomputation_keeps_less_and_allocates_in_the_backward(meter):
    from torch.utils.checkpoint import checkpoint

    def block(x):
        for _ in range(8):
            x = x.exp()
        return x

    x = kib(4).requires_grad_()
    with meter.region("stored") as stored:
        kept = block(x)
    del kept
    with meter.region("recomputed") as recomputed:
        kept = checkpoint(block, x, use_reentrant=False)
    assert stored.end_bytes - stored.start_bytes == 8 * 4 * KIB
    assert recomputed.end_bytes - recomputed.start_bytes == 4 * KIB
    with meter.region("backward") as backward:
        kept.sum().backward()
    assert backward.growth_bytes >= 7 * 4 * KIB


def test_released_output_data_as_pipelines_do(meter):
    out = kib(16).requires_grad_().clone()
    out.data = torch.empty(1)
    # What lives is the leaf, which the graph holds, and one element.
    assert meter.live_bytes() == 16 * KIB + 4
    del out
    assert meter.live_bytes() == 0


def test_resized_storage_counts_as_it_is(meter):
    a = kib(4)
    a.resize_(4 * KIB)
    assert meter.live_bytes() == 16 * KIB
    a.untyped_storage().resize_(0)
    assert meter.live_bytes() == 0


def test_regions_nest(meter):
    with meter.region("outer") as outer:
        a = kib(1)
        with meter.region("inner") as inner:
            b = kib(8)
            del b
        c = kib(2)
        with meter.region("inner"):
            pass
    assert (inner.start_bytes, inner.peak_bytes) == (KIB, 9 * KIB)
    assert outer.peak_bytes == 9 * KIB
    assert meter.peak_bytes == {"inner": 9 * KIB, "outer": 9 * KIB}
    assert a.numel() and c.numel()


def test_region_is_complete_after_an_error(meter):
    with pytest.raises(ZeroDivisionError), meter.region("failed"):
        held = kib(4)
        held.numel() / 0
    assert meter.peak_bytes == {"failed": 4 * KIB}


def test_integer_and_half_tensors_and_those_from_data_by_their_size(meter):
    tensors = [torch.zeros(KIB, dtype=dtype) for dtype in (torch.int8, torch.bfloat16, torch.int64)]
    assert meter.live_bytes() == (1 + 2 + 8) * KIB
    tensors.append(torch.tensor([0.0] * 256))
    assert meter.live_bytes() == (1 + 2 + 8 + 1) * KIB


def test_closed_meter_sees_nothing_more():
    meter = CpuMemoryMeter()
    kept = kib(1)
    meter.close()
    meter.close()
    later = kib(8)
    assert meter.live_bytes() == KIB
    assert kept.numel() and later.numel()


def test_meter_of_the_platform():
    active = platform.activate()
    with memory_meter(active) as meter:
        assert isinstance(meter, CudaMemoryMeter if active.is_cuda else CpuMemoryMeter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_meter_sees_known_allocations():
    with CudaMemoryMeter() as meter:
        base = meter.live_bytes()
        with meter.region("outer") as outer:
            with meter.region("inner") as inner:
                a = torch.zeros(256 * KIB, device="cuda")
                del a
            b = torch.zeros(128 * KIB, device="cuda")
        assert inner.peak_bytes - base == 1024 * KIB
        assert outer.peak_bytes - base == 1024 * KIB
        assert outer.end_bytes - base == 512 * KIB
        assert b.numel()


# A limit of memory on the CPU behaves as a full CUDA device does.

_FLOATS = 1000


def test_an_allocation_beyond_the_limit_fails_and_the_next_one_may_fit() -> None:
    with limited_memory(activate(), 5 * _FLOATS * 4):
        kept = torch.zeros(3 * _FLOATS)
        with pytest.raises(torch.OutOfMemoryError, match="limit is 20000"):
            torch.zeros(3 * _FLOATS)
        again = torch.zeros(2 * _FLOATS)
        assert kept.numel() + again.numel() == 5 * _FLOATS
    assert torch.zeros(9 * _FLOATS).numel()  # no limit outside


def test_a_backward_and_a_resized_storage_are_seen() -> None:
    weight = torch.zeros(_FLOATS, requires_grad=True)
    with limited_memory(activate(), 14 * _FLOATS):
        loss = (weight * torch.ones(_FLOATS)).exp().sum()
        filler = torch.zeros(_FLOATS - 100)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        storage = filler.untyped_storage()
        with pytest.raises(torch.OutOfMemoryError):
            storage.resize_(8 * _FLOATS * 4)
