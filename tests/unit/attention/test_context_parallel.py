"""Commuted context parallelism against full causal attention; the ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from attention_helpers import CPU, SCALE, full_attention, inputs, masked_attention, relative

from megatron_het.attention.calls import Reach
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import UNLIMITED, SliceContext, take_blocks
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.features.context_parallel.runtime import CommutedContextParallel
from megatron_het.plan.placement import part_tokens, token_blocks
from megatron_het.schedule.cutting import Starts

_WAIT_S = 30.0
Shares = tuple[int, ...]


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

    def __init__(self, meeting: Meeting, rank: int, tokens: tuple[int, ...]) -> None:
        self.meeting, self._rank, self.size, self._tokens = meeting, rank, len(tokens), tokens

    def _all_gather(self, message: torch.Tensor, sizes: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
        met = self.meeting.meet(self._rank, {self._rank: message})
        assert [met[r][r].numel() for r in range(self.size)] == sizes
        return lambda: [met[r][r] for r in range(self.size)]

    def _swap(self, messages: dict[int, torch.Tensor], size: int) -> Callable[[], list[torch.Tensor]]:
        met = self.meeting.meet(self._rank, messages)
        found = [met[r][self._rank].clone() for r in range(self.size) if r != self._rank]
        assert {message.numel() for message in found} == {size}
        return lambda: found


def local(tensor: torch.Tensor, rank: int, shares: Shares) -> torch.Tensor:
    """A rank's tokens of one slice."""
    return take_blocks(tensor, token_blocks(shares, tensor.shape[0])[rank], dim=0)


def run_rank(
    parallel: InThread, tensors: list[torch.Tensor], n: int, shares: Shares, reach: Reach = UNLIMITED
) -> list[list[torch.Tensor]]:
    """Outputs and gradients of q, k, v per slice."""
    rank = parallel._rank
    cache = KVCache(n)
    leaves = [[local(p, rank, shares).clone().requires_grad_() for p in t.chunk(n)] for t in tensors[:3]]
    place = {"cache": cache, "kernel": CPU, "microbatch": 0, "scale": SCALE, "parallel": parallel, "reach": reach}
    outs = [slice_attention(*(t[i] for t in leaves), SliceContext(index=i, **place)) for i in range(n)]
    for i in reversed(range(n)):
        outs[i].backward(local(tensors[3].chunk(n)[i], rank, shares))
    cache.check_empty()
    return [[out.detach() for out in outs], *([p.grad for p in leaf] for leaf in leaves)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("shares", "n", "groups"),
    [((1, 1), 1, 2), ((1, 1), 3, 1), ((1,) * 4, 2, 4), ((3, 1), 2, 2), ((1, 3), 1, 1), ((1, 2, 1), 2, 4)],
)
def test_exact(shares: Shares, n: int, groups: int, dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(n, 4, groups, dtype)
    whole = [t.to(torch.float64, copy=True).requires_grad_() for t in tensors[:3]]
    wanted = full_attention(*whole)
    wanted.backward(tensors[3].double())
    size, meeting = len(shares), Meeting(len(shares))
    tokens = tuple(part_tokens(blocks) for blocks in token_blocks(shares, tensors[0].shape[0] // n))
    assert [t * sum(shares) for t in tokens] == [sum(tokens) * share for share in shares]
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run_rank, InThread(meeting, r, tokens), tensors, n, shares) for r in range(size)]
        found = [future.result(timeout=2 * _WAIT_S) for future in ranks]
    for which, reference in enumerate([wanted.detach(), *(w.grad for w in whole)]):
        for rank in range(size):
            expected = torch.cat([local(p, rank, shares) for p in reference.chunk(n)])
            assert relative(torch.cat(found[rank][which]), expected) < tolerance


@pytest.mark.parametrize("window", [None, 5, 13])
@pytest.mark.parametrize("starts", [None, ((0, 3, 17, 18, 40), (0, 21)), ((0, 16, 32), (0, 16, 32))])
@pytest.mark.parametrize(("shares", "n"), [((1, 1), 1), ((1, 1), 3), ((1, 2, 1), 2), ((1, 1, 1, 1), 2)])
def test_documents_and_windows(shares: Shares, n: int, starts: tuple[Starts, ...] | None, window: int | None) -> None:
    """A rank attends for the others to what their queries reach of its keys, and to nothing else."""
    tensors = [torch.randn(48, 2, heads, 16, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    reach, size = Reach(starts, window, 48), len(shares)
    whole = [t.clone().requires_grad_() for t in tensors[:3]]
    wanted = masked_attention(*whole, reach)
    wanted.backward(tensors[3])
    meeting, tokens = Meeting(size), tuple(map(part_tokens, token_blocks(shares, 48 // n)))
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(run_rank, InThread(meeting, r, tokens), tensors, n, shares, reach) for r in range(size)]
        found = [future.result(timeout=2 * _WAIT_S) for future in ranks]
    for which, reference in enumerate([wanted.detach(), *(w.grad for w in whole)]):
        for rank in range(size):
            expected = torch.cat([local(p, rank, shares) for p in reference.chunk(n)])
            assert relative(torch.cat(found[rank][which]), expected) < 1e-13
