"""Commuted context parallelism (SlimPipe, section 5): queries, outputs and normalisers travel, keys and values stay.

Each rank of a context-parallel group holds a part of the tokens of every slice, and the keys and values of
that part only.  Ordinary context parallelism moves keys and values to the queries, and with a key-value cache
would move the cached ones again for every later slice.  Here the queries of a slice go to all ranks, each
attends for all of them to its own keys, and the partial outputs return to the rank of their query, where they
are merged.  In the backward pass the gradients of keys and values are made where the keys are.

Rank k holds blocks k and ``2 * size - 1 - k`` of the ``2 * size`` blocks of a slice; see ``blocks.py``.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from megatron_het.attention.context_exchange import pack, unpack
from megatron_het.attention.kernels import Kernel
from megatron_het.attention.merge import merge_

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ContextParallel(Protocol):
    """How the ranks that share a slice attend to each other's tokens.

    ``[S, ...]`` below are rows of all ranks, rank after rank; ``[s, ...]`` are this rank's.
    """

    @property
    def size(self) -> int:
        """Ranks that share a slice."""

    def gather(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows of all ranks; a log-sum-exp ``[b, heads, s]`` has its rows last."""

    def causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Kernel, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of queries ``[S, ...]`` to this rank's part of their own slice."""

    def causal_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kernel: Kernel,
        scale: float,
    ) -> Gradients:
        """Gradients of queries ``[S, ...]`` and of this rank's keys and values."""

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows of the output and log-sum-exp, from the parts of all ranks."""

    def total(self, dq: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of a gradient over all ranks."""


class Alone:
    """One rank holds whole slices."""

    size = 1

    def gather(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`ContextParallel`."""
        return tensors

    def causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Kernel, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ContextParallel`."""
        return kernel.forward(query, key, value, True, scale)

    def causal_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kernel: Kernel,
        scale: float,
    ) -> Gradients:
        """See :class:`ContextParallel`."""
        return kernel.backward(grad, query, key, value, out, lse, True, scale)

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ContextParallel`."""
        return out, lse

    def total(self, dq: torch.Tensor) -> torch.Tensor:
        """See :class:`ContextParallel`."""
        return dq


class CommutedContextParallel:
    """A group of ranks that share slices; see the module's text.

    Every call is a collective of the group; all ranks make the same calls, because they run the same
    program.

    Args:
        group: The ranks; its timeout bounds every wait.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    def gather(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`ContextParallel`."""
        order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
        message = pack(*(tensors[i] for i in order))
        gathered = self._all_gather(message)
        parts = [(tuple(tensors[i].shape), tensors[i].dtype) for i in order]
        rows = [unpack(part, parts) for part in gathered.chunk(self.size)]
        found = {i: torch.cat([r[n] for r in rows], dim=_row_dimension(tensors[i])) for n, i in enumerate(order)}
        return tuple(found[i] for i in range(len(tensors)))

    def causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Kernel, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ContextParallel`."""
        out = torch.zeros_like(query)
        lse = None
        for rows, keys, is_causal in self._parts(key.shape[0]):
            part, part_lse = kernel.forward(query[rows], key[keys], value[keys], is_causal, scale)
            out[rows] = part
            if lse is None:
                # Queries that see nothing of this slice here: merging leaves them alone.
                lse = part_lse.new_full((*part_lse.shape[:2], query.shape[0]), -torch.inf)
            lse[..., rows] = part_lse
        assert lse is not None
        return out, lse

    def causal_backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kernel: Kernel,
        scale: float,
    ) -> Gradients:
        """See :class:`ContextParallel`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        for rows, keys, is_causal in self._parts(key.shape[0]):
            parts = kernel.backward(
                grad[rows], query[rows], key[keys], value[keys], out[rows],
                lse[..., rows].contiguous(), is_causal, scale,
            )  # fmt: skip
            for total, place, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                total[place] += part
        return dq, dk.to(key.dtype), dv.to(value.dtype)

    def _parts(self, tokens: int) -> list[tuple[slice, slice, bool]]:
        """(rows of the queries of all ranks, own keys that they see, whether causal), own queries first.

        Own queries and keys are both blocks k and 2 size - 1 - k, in order: a causal square.  A lower rank's
        second block comes after both of the keys' blocks and its first before both; a higher rank's
        blocks lie between the two.
        """
        half, me = tokens // 2, self._rank
        found = [(slice(me * tokens, (me + 1) * tokens), slice(0, tokens), True)]
        for rank in range(self.size):
            if rank < me:
                found.append((slice(rank * tokens + half, (rank + 1) * tokens), slice(0, tokens), False))
            elif rank > me:
                found.append((slice(rank * tokens, (rank + 1) * tokens), slice(0, half), False))
        return found

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ContextParallel`; parts travel in the type of ``out``."""
        messages = [
            pack(part_lse, part)
            for part, part_lse in zip(out.chunk(self.size), lse.chunk(self.size, dim=-1), strict=True)
        ]
        first = out.shape[0] // self.size
        shapes = [((*lse.shape[:-1], first), lse.dtype), ((first, *out.shape[1:]), out.dtype)]
        parts = [unpack(message, shapes) for message in self._swap(messages)]
        # Its own part first: it is never empty.
        own_lse, own = parts.pop(self._rank)
        merged = own.to(torch.promote_types(out.dtype, torch.float32), copy=True)
        for part_lse, part in parts:
            own_lse = merge_(merged, own_lse, part, part_lse)
        return merged, own_lse

    def total(self, dq: torch.Tensor) -> torch.Tensor:
        """See :class:`ContextParallel`."""
        rows = dq.shape[0] // self.size
        shapes = [((rows, *dq.shape[1:]), dq.dtype)]
        swapped = self._swap([pack(part) for part in dq.chunk(self.size)])
        parts = [unpack(message, shapes)[0] for message in swapped]
        return torch.stack(parts).sum(dim=0)

    def _all_gather(self, message: torch.Tensor) -> torch.Tensor:
        """The messages of all ranks, one after the other."""
        gathered = message.new_empty(self.size * message.numel())
        dist.all_gather_into_tensor(gathered, message, group=self._group)
        return gathered

    def _swap(self, messages: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Message r goes to rank r; one comes from each rank."""
        sent = torch.cat(messages)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received.chunk(self.size)


def _row_dimension(tensor: torch.Tensor) -> int:
    """Log-sum-exps have three dimensions and their rows last."""
    return 2 if tensor.dim() == 3 else 0


ALONE = Alone()
