"""How the buckets of a ministage are divided over the replicas, and the collectives of each division.

Equal parts are Megatron's own division, with the collectives for them.  Unequal parts (``state_share``
of the plan's replicas) are gathered by a broadcast, and reduced by a reduce, from or to every owner: on
NCCL as the grouped operations that the list forms of all-gather and reduce-scatter make of unequal
tensors, elsewhere one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron_het.plan.shares import cuts

_ATTRIBUTE = "het_state_shares"


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block, or order the current stream, until it is done."""

    def is_completed(self) -> bool:
        """Whether it is done."""


class Parts(Protocol):
    """A division of flat buckets over the ranks of a group."""

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of this rank's part of a bucket."""

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Pending:
        """Start to fill ``whole`` from everybody's ``part``."""

    def reduce(self, whole: torch.Tensor) -> Pending:
        """Start to sum ``whole`` over the ranks into everybody's own part; the rest is lost."""


class EqualParts:
    """Megatron's division.

    Args:
        group: The ranks that share the buckets.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of this rank's part of a bucket."""
        return shard_buffer(whole, self._group.size())[self._group.rank()]

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Pending:
        """Start to fill ``whole`` from everybody's ``part``."""
        return dist.all_gather_into_tensor(whole, part, group=self._group, async_op=True)

    def reduce(self, whole: torch.Tensor) -> Pending:
        """Start to sum ``whole`` over the ranks into everybody's own part; the rest is lost."""
        return dist.reduce_scatter_tensor(self.own(whole), whole, group=self._group, async_op=True)


class UnequalParts:
    """Parts by shares.

    Args:
        group: The ranks that share the buckets.
        shares: One per rank of the group, together 1.
    """

    def __init__(self, group: dist.ProcessGroup, shares: Sequence[float]) -> None:
        if len(shares) != group.size():
            raise ValueError(f"{len(shares)} shares for a group of {group.size()} ranks")
        self._group, self._shares = group, tuple(shares)
        self._takes_lists = dist.get_backend(group) == "nccl"
        self._ranks = dist.get_process_group_ranks(group)

    def of_all(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Views of all parts of a bucket, in the group's order."""
        edges = cuts(whole.numel(), self._shares)
        return [whole[start:stop] for start, stop in zip(edges, edges[1:])]

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of this rank's part of a bucket."""
        return self.of_all(whole)[self._group.rank()]

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> Pending:
        """Start to fill ``whole`` from everybody's ``part``."""
        parts = self.of_all(whole)
        if self._takes_lists:
            return dist.all_gather(parts, part, group=self._group, async_op=True)
        parts[self._group.rank()].copy_(part)
        return _Together([dist.broadcast(p, r, group=self._group, async_op=True) for p, r in self._owned(parts)])

    def reduce(self, whole: torch.Tensor) -> Pending:
        """Start to sum ``whole`` over the ranks into everybody's own part; the rest is lost."""
        parts = self.of_all(whole)
        if self._takes_lists:
            own = parts[self._group.rank()]
            return dist.reduce_scatter(own, parts, group=self._group, async_op=True)
        return _Together([dist.reduce(p, r, group=self._group, async_op=True) for p, r in self._owned(parts)])

    def _owned(self, parts: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
        """Parts that are not empty, with their owners' world ranks."""
        return [(part, rank) for part, rank in zip(parts, self._ranks, strict=True) if part.numel()]


class _Together:
    """Several collectives that count as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all are done."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)


def set_shares(chunks: list[Any], shares: Sequence[float] | None) -> list[Any]:
    """Say how the buffers of wrapped chunks are divided, before the optimizer is built on them.

    Args:
        chunks: Model chunks in Megatron's DDP.
        shares: One per rank of the data-parallel group; None for equal ones.

    Returns:
        The chunks, as Megatron expects it of a hook that runs after wrapping.
    """
    if shares is not None:
        for buffer in (buffer for chunk in chunks for buffer in chunk.buffers):
            setattr(buffer, _ATTRIBUTE, tuple(shares))
    return chunks


def shares_of(buffer: Any) -> tuple[float, ...] | None:
    """Returns what ``set_shares`` said of a buffer, None for equal parts."""
    return getattr(buffer, _ATTRIBUTE, None)


def parts_of(buffers: Sequence[Any], group: dist.ProcessGroup) -> Parts:
    """The division of a chunk's buffers over a group."""
    shares = shares_of(buffers[0]) if buffers else None
    return EqualParts(group) if shares is None else UnequalParts(group, shares)
