"""A limit of memory on the CPU behaves as a full CUDA device does."""

from __future__ import annotations

import pytest
import torch

from megatron_het.device import activate
from megatron_het.device.memory import limited_memory

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
