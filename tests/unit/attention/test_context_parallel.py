"""Commuted context parallelism against full causal attention; the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_helpers import CPU, SCALE, full_attention, inputs, masked_attention, relative

from megatron_het.attention.blocks import take_blocks, token_blocks
from megatron_het.attention.context_parallel.commuted import CommutedContextParallel
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.reach import Reach
from megatron_het.attention.slice_attention import UNLIMITED, slice_attention
from megatron_het.schedule.cutting import Starts

_WAIT_S = 30.0


class Meeting:
    """Where the threads of a group exchange messages."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_WAIT_S)
        self.table: dict[int, dict[int, torch.Tensor]] = {}

    def meet(self, rank: int, messages: dict[int, torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
        self.table[rank] = messages
        self.barrier.wait()
        found = dict(self.table)
        self.barrier.wait()
        return found


class InThread(CommutedContextParallel):
    """A rank of a group whose collectives are meetings."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.meeting, self._rank, self.size = meeting, rank, size

    def _all_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        met = self.meeting.meet(self._rank, {self._rank: message})
        return lambda: torch.cat([met[r][r] for r in range(self.size)])

    def _swap(self, messages: dict[int, torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        met = self.meeting.meet(self._rank, messages)
        return lambda: [met[r][self._rank].clone() for r in range(self.size) if r != self._rank]


def local(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's tokens of one slice."""
    return take_blocks(tensor, token_blocks(rank, size, tensor.shape[0]), dim=0)


def run_rank(
    parallel: InThread, tensors: list[torch.Tensor], n: int, reach: Reach = UNLIMITED
) -> list[list[torch.Tensor]]:
    """Outputs and gradients of q, k, v per slice."""
    rank, size = parallel._rank, parallel.size
    cache = KVCache(n)
    leaves = [[local(p, rank, size).clone().requires_grad_() for p in t.chunk(n)] for t in tensors[:3]]
    place = {"cache": cache, "kernel": CPU, "microbatch": 0, "scale": SCALE, "parallel": parallel, "reach": reach}
    outs = [slice_attention(*(t[i] for t in leaves), index=i, **place) for i in range(n)]
    for i in reversed(range(n)):
        outs[i].backward(local(tensors[3].chunk(n)[i], rank, size))
    cache.check_empty()
    return [[out.detach() for out in outs], *([p.grad for p in leaf] for leaf in leaves)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("size", "n", "groups"), [(2, 1, 2), (2, 3, 1), (4, 2, 4)])
def test_exact(size: int, n: int, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(n, 4, groups, dtype)
    whole = [t.to(torch.float64, copy=True).requires_grad_() for t in tensors[:3]]
    wanted = full_attention(*whole)
    wanted.backward(tensors[3].double())
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run_rank, InThread(meeting, r, size), tensors, n) for r in range(size)]
        found = [future.result(timeout=2 * _WAIT_S) for future in ranks]
    for which, reference in enumerate([wanted.detach(), *(w.grad for w in whole)]):
        for rank in range(size):
            expected = torch.cat([local(p, rank, size) for p in reference.chunk(n)])
            assert relative(torch.cat(found[rank][which]), expected) < tolerance


@pytest.mark.parametrize("window", [None, 5, 13])
@pytest.mark.parametrize("starts", [None, ((0, 3, 17, 18, 40), (0, 21)), ((0, 16, 32), (0, 16, 32))])
@pytest.mark.parametrize(("size", "n"), [(2, 1), (2, 3), (4, 2)])
def test_documents_and_windows(size: int, n: int, starts: tuple[Starts, ...] | None, window: int | None) -> None:
    """A rank attends for the others to what their queries reach of its keys, and to nothing else."""
    tensors = [torch.randn(48, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    reach = Reach(starts, window, 48)
    whole = [t.clone().requires_grad_() for t in tensors[:3]]
    wanted = masked_attention(*whole, reach)
    wanted.backward(tensors[3])
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run_rank, InThread(meeting, r, size), tensors, n, reach) for r in range(size)]
        found = [future.result(timeout=2 * _WAIT_S) for future in ranks]
    for which, reference in enumerate([wanted.detach(), *(w.grad for w in whole)]):
        for rank in range(size):
            expected = torch.cat([local(p, rank, size) for p in reference.chunk(n)])
            assert relative(torch.cat(found[rank][which]), expected) < 1e-13


def test_blocks_are_all_tokens_once_and_equal_work() -> None:
    for size in (1, 2, 3):
        held = [token_blocks(rank, size, 12 * size) for rank in range(size)]
        tokens = sorted(t for blocks in held for a, b in blocks for t in range(a, b))
        assert tokens == list(range(12 * size))
        assert len({sum(t for a, b in blocks for t in range(a, b)) for blocks in held}) == 1
