"""Inputs, the full attention that slices must equal, and a microbatch that runs slice by slice."""

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from megatron_het.attention.calls import Reach
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Setting
from megatron_het.attention.kv_cache import KVCache
from megatron_het.attention.places import SliceContext
from megatron_het.attention.slice_attention import slice_attention
from megatron_het.features.context_parallel.runtime import CommutedContextParallel
from megatron_het.schedule.cutting import Starts

CPU = choose_kernel(Setting("cpu", torch.float32, 16))
SCALE = 0.25
WAIT_S = 30.0


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention written out; ``[s, b, heads, d]``."""
    return masked_attention(q, k, v, Reach())


def seen(starts: Starts, window: int | None, tokens: int) -> torch.Tensor:
    """``[query, key]``: whether a query sees a key."""
    rows = torch.arange(tokens)
    begin = torch.tensor([max(s for s in starts if s <= row) for row in range(tokens)])
    visible = (rows[None] <= rows[:, None]) & (rows[None] >= begin[:, None])
    return visible if window is None else visible & (rows[:, None] - rows[None] <= window)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: Reach, sink: torch.Tensor | None = None
) -> torch.Tensor:
    times = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(times, dim=2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * SCALE
    starts = reach.starts or ((0,),) * q.shape[1]
    visible = torch.stack([seen(own, reach.window_tokens, len(q)) for own in starts]).unsqueeze(1)
    scores = scores.masked_fill(~visible, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1)[..., : len(q)], v)


def inputs(n: int, heads: int, groups: int, dtype: torch.dtype, batch: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(n * 100 + heads * 10 + groups)
    return [torch.randn(8 * n, batch, h, 16, dtype=dtype) for h in (heads, groups, groups, heads)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


class Sliced:
    """One microbatch, slice by slice: forwards and backwards in any order."""

    def __init__(self, cache: KVCache, tensors: list[torch.Tensor], n: int, microbatch: int = 0) -> None:
        self.cache, self.microbatch, self.outs = cache, microbatch, []
        self.leaves = [[p.clone().requires_grad_() for p in t.chunk(n)] for t in tensors[:3]]
        self.grads = tensors[3].chunk(n)

    def attend(self, index: int, *tensors: torch.Tensor, **more: Any) -> torch.Tensor:
        place = {"cache": self.cache, "kernel": CPU, "microbatch": self.microbatch, "index": index}
        return slice_attention(*tensors, SliceContext(scale=SCALE, **place, **more))

    def forward(self, index: int, again: bool = False, **more: Any) -> None:
        """Attend, or under full recomputation, which does so again in the backward."""
        tensors, attend = [t[index] for t in self.leaves], partial(self.attend, index, **more)
        self.outs.append(checkpoint(attend, *tensors, use_reentrant=True) if again else attend(*tensors))

    def backward(self, index: int) -> None:
        self.outs[index].backward(self.grads[index])

    def errors(self, tensors: list[torch.Tensor]) -> list[float]:
        whole = [t.double().requires_grad_() for t in tensors[:3]]
        out = full_attention(*whole)
        out.backward(tensors[3].double())
        found = [torch.cat([p.grad for p in leaf]) for leaf in self.leaves]
        pairs = [(torch.cat(self.outs).detach(), out.detach())]
        pairs += [(f, w.grad) for f, w in zip(found, whole, strict=True)]
        return [relative(f, w) for f, w in pairs]


class Meeting:
    """Where the threads of a group exchange messages."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.table: dict[int, dict[int, torch.Tensor]] = {}

    def meet(self, rank: int, messages: dict[int, torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
        self.table[rank] = messages
        self.barrier.wait()
        found = dict(self.table)
        self.barrier.wait()
        return found


class InThread(CommutedContextParallel):
    """A rank of a group whose collectives are meetings; counts the bytes that it sends."""

    sent = 0

    def __init__(self, meeting: Meeting, rank: int, tokens: tuple[int, ...]) -> None:
        self.meeting, self.rank, self.size, self._tokens = meeting, rank, len(tokens), tokens

    def _all_gather(self, message: torch.Tensor, sizes: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
        self.sent += message.nbytes * (self.size - 1)
        met = self.meeting.meet(self.rank, {self.rank: message})
        assert [met[r][r].numel() for r in range(self.size)] == sizes
        return lambda: [met[r][r] for r in range(self.size)]

    def _exchange(
        self, message: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], Sequence[torch.Tensor]]:
        self.sent += message.nbytes
        met = self.meeting.meet(self.rank, dict(enumerate(message.split(sent))))
        found = [met[r][self.rank].clone() for r in range(self.size)]
        assert [part.numel() for part in found] == received
        return lambda: found
