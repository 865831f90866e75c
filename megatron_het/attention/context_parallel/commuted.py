"""Commuted context parallelism (SlimPipe, section 5): queries, outputs and normalisers travel, keys and values stay.

Each rank of a context-parallel group holds a part of the tokens of every slice, and the keys and values of
that part only.  Ordinary context parallelism moves keys and values to the queries, and with a key-value cache
would move the cached ones again for every later slice.  Here the queries of a slice go to all ranks, each
attends for all of them to its own keys, and the partial outputs return to the rank of their query, where they
are merged.  In the backward pass the gradients of keys and values are made where the keys are.

Both transfers run during computation: while the others' queries arrive, a rank attends for its own to its own
part of the slice; while the partial outputs travel, for its own to the earlier slices.

Rank k holds blocks k and ``2 * size - 1 - k`` of the ``2 * size`` blocks of a slice; see ``blocks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_het.attention.blocks import Blocks, token_blocks
from megatron_het.attention.context_exchange import pack, unpack
from megatron_het.attention.kernels import Gradients, Kernel

Tensors = tuple[torch.Tensor, ...]


class CommutedContextParallel:
    """A group of ranks that share slices; see the module's text.

    ``[S, ...]`` are rows of the other ranks, rank after rank, beginning with the next one; ``[s, ...]`` are
    this rank's.  A rank's own queries and keys are both blocks k and ``2 * size - 1 - k``, in order, so that
    their attention is one causal square, as without context parallelism.

    ``gather`` and ``give_back`` are collectives of the group; all ranks make the same calls, because they run
    the same program.

    Args:
        group: The ranks; its timeout bounds every wait.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    @property
    def _others(self) -> list[int]:
        """The other ranks, in the order of their rows."""
        return [(self._rank + k) % self.size for k in range(1, self.size)]

    def blocks(self, tokens: int) -> tuple[Blocks, Sequence[Blocks]]:
        """Tokens of a slice that this rank has, and those of the others in the order of their rows."""
        found = [token_blocks(rank, self.size, tokens) for rank in (self._rank, *self._others)]
        return found[0], found[1:]

    def gather(self, *tensors: torch.Tensor) -> Callable[[], Tensors]:
        """Start to collect rows of the others; a log-sum-exp ``[b, heads, s]`` has its rows last.

        Returns:
            Waits for them and gives them: ``[S, ...]``.
        """
        order = _largest_first(tensors)
        arriving = self._all_gather(pack(*(tensors[i] for i in order)))
        shapes = [(tuple(tensors[i].shape), tensors[i].dtype) for i in order]

        def wait() -> Tensors:
            messages = arriving().chunk(self.size)
            rows = [unpack(messages[rank], shapes) for rank in self._others]
            parts = zip(order, zip(*rows, strict=True), strict=True)
            found = {i: torch.cat(part, dim=_row_dimension(part[0])) for i, part in parts}
            return tuple(found[i] for i in range(len(tensors)))

        return wait

    def causal(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: Kernel, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of the others' queries ``[S, ...]`` to this rank's part of their own slice."""
        out = torch.zeros_like(query)
        lse = None
        for rows, keys in self._parts(key.shape[0]):
            out[rows], part_lse = kernel.forward(query[rows], key[keys], value[keys], False, scale)
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
        out: torch.Tensor,
        lse: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kernel: Kernel,
        scale: float,
    ) -> Gradients:
        """Gradients of the others' queries ``[S, ...]`` and of this rank's keys and values, in wide types."""
        wide = torch.promote_types(query.dtype, torch.float32)
        dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (query, key, value))
        for rows, keys in self._parts(key.shape[0]):
            parts = kernel.backward(
                grad[rows], query[rows], key[keys], value[keys], out[rows], lse[..., rows].contiguous(), False, scale
            )
            for total, place, part in zip((dq, dk, dv), (rows, keys, keys), parts, strict=True):
                total[place] += part
        return dq, dk, dv

    def _parts(self, tokens: int) -> list[tuple[slice, slice]]:
        """(rows of the others' queries, own keys that they see).

        A lower rank's second block comes after both of the keys' blocks and its first before both; a higher
        rank's blocks lie between the two.
        """
        half, found = tokens // 2, []
        for first, rank in zip(range(0, self.size * tokens, tokens), self._others):
            if rank < self._rank:
                found.append((slice(first + half, first + tokens), slice(0, tokens)))
            else:
                found.append((slice(first, first + tokens), slice(0, half)))
        return found

    def give_back(self, *tensors: torch.Tensor) -> Callable[[], list[Tensors]]:
        """Start to send each of the others its rows of tensors ``[S, ...]``.

        Returns:
            Waits for what the others send, and gives it by sender: this rank's rows.
        """
        order, count = _largest_first(tensors), self.size - 1
        chunks = [tensors[i].chunk(count, dim=_row_dimension(tensors[i])) for i in order]
        messages = dict(zip(self._others, (pack(*parts) for parts in zip(*chunks, strict=True)), strict=True))
        shapes = [(tuple(parts[0].shape), parts[0].dtype) for parts in chunks]
        arriving = self._swap(messages)

        def wait() -> list[Tensors]:
            found = []
            for message in arriving():
                parts = dict(zip(order, unpack(message, shapes), strict=True))
                found.append(tuple(parts[i] for i in range(len(tensors))))
            return found

        return wait

    def _all_gather(self, message: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to collect the messages of all ranks, one after the other."""
        gathered = message.new_empty(self.size * message.numel())
        work = dist.all_gather_into_tensor(gathered, message, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return gathered

        return wait

    def _swap(self, messages: dict[int, torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send each of the others its message; all are equally long, and one comes from each."""
        size = next(iter(messages.values())).numel()
        sizes = [0 if rank == self._rank else size for rank in range(self.size)]
        sent = torch.cat([messages[rank] for rank in sorted(messages)])
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, sizes, sizes, group=self._group, async_op=True)

        def wait() -> Sequence[torch.Tensor]:
            work.wait()
            return received.chunk(self.size - 1)

        return wait


def _row_dimension(tensor: torch.Tensor) -> int:
    """Log-sum-exps have three dimensions and their rows last."""
    return 2 if tensor.dim() == 3 else 0


def _largest_first(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices by size of the elements, so that all are aligned in a message."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
