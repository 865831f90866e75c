"""Ranks that share every slice: their half of the slice attention (SlimPipe, section 5)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_het.attention.core import SliceCoreAttention
from megatron_het.attention.places import pack, unpack
from megatron_het.plan.placement import Blocks
from megatron_het.runtime.feature import OpenContext, RuntimeFeature

# Commuted context parallelism (SlimPipe, section 5): queries, outputs and normalisers travel, keys and values stay.
#
# Each rank of a context-parallel group holds a part of the tokens of every slice, and the keys and values of
# that part only.  Ordinary context parallelism moves keys and values to the queries, and with a key-value cache
# would move the cached ones again for every later slice.  Here the queries of a slice go to all ranks, each
# attends for all of them to its own keys, and the partial outputs return to the rank of their query, where they
# are merged.  In the backward pass the gradients of keys and values are made where the keys are.
#
# Both transfers run during computation: while the others' queries arrive, a rank attends for its own to its own
# part of the slice; while the partial outputs travel, for its own to the earlier slices.
#
# Rank k holds the k-th block of a slice from its start and the k-th from its end, both of one size, which may differ
# from rank to rank; see ``plan/placement.py``.


Tensors = tuple[torch.Tensor, ...]


class CommutedContextParallel:
    """A group of ranks that share a slice; see the module's text.

    ``[S, ...]`` are rows of the other ranks, rank after rank, beginning with the next one; ``[s, ...]`` are
    this rank's.  A rank's own queries and keys are the same two blocks, in order, so that their attention is one
    causal square, as without context parallelism.

    ``gather`` and ``give_back`` are collectives of the group; all ranks make the same calls, because they run
    the same program.

    Args:
        group: The ranks; its timeout bounds every wait.
        tokens: Of the slice, on each rank; all even.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: tuple[int, ...]) -> None:
        self._group = group
        self._tokens = tokens
        self.size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)

    @property
    def _others(self) -> list[int]:
        """The other ranks, in the order of their rows."""
        return [(self._rank + k) % self.size for k in range(1, self.size)]

    def blocks(self, own: int) -> tuple[Blocks, Sequence[Blocks]]:
        """Tokens of a slice that this rank has, and those of the others in the order of their rows.

        Args:
            own: How many this rank has of that slice; other slices are cut in the same proportion.
        """
        tokens = [count * own // self._tokens[self._rank] for count in self._tokens]
        whole, found, first = sum(tokens), [], 0
        for count in tokens:
            end = first + count // 2
            found.append(((first, end), (whole - end, whole - first)))
            first = end
        return found[self._rank], [found[rank] for rank in self._others]

    def gather(self, *tensors: torch.Tensor) -> Callable[[], Tensors]:
        """Start to collect rows of the others; a log-sum-exp ``[b, heads, s]`` has its rows last.

        Returns:
            Waits for them and gives them: ``[S, ...]``.
        """
        order = _largest_first(tensors)
        message = pack(*(tensors[i] for i in order))
        size, own = message.numel(), self._tokens[self._rank]
        arriving = self._all_gather(message, [size // own * tokens for tokens in self._tokens])
        kinds = [(tensors[i], _row_dimension(tensors[i])) for i in order]

        def wait() -> Tensors:
            messages = arriving()
            rows = [
                unpack(messages[rank], [(_with_rows(t, dim, self._tokens[rank]), t.dtype) for t, dim in kinds])
                for rank in self._others
            ]
            parts = zip(order, zip(*rows, strict=True), strict=True)
            found = {i: torch.cat(part, dim=_row_dimension(part[0])) for i, part in parts}
            return tuple(found[i] for i in range(len(tensors)))

        return wait

    def seen(self, own: int) -> list[tuple[slice, slice]]:
        """Rows of the others' queries, and this rank's keys of their slice that these see.

        A lower rank's second block comes after both of the keys' blocks and its first before both; a higher
        rank's blocks lie between the two.

        Args:
            own: How many keys this rank has.
        """
        half, found, first = own // 2, [], 0
        for rank in self._others:
            end = first + self._tokens[rank]
            if rank < self._rank:
                found.append((slice((first + end) // 2, end), slice(0, own)))
            else:
                found.append((slice(first, end), slice(0, half)))
            first = end
        return found

    def give_back(self, *tensors: torch.Tensor) -> Callable[[], list[Tensors]]:
        """Start to send each of the others its rows of tensors ``[S, ...]``.

        Returns:
            Waits for what the others send, and gives it by sender: this rank's rows.
        """
        order, sizes = _largest_first(tensors), [self._tokens[rank] for rank in self._others]
        chunks = [tensors[i].split(sizes, dim=_row_dimension(tensors[i])) for i in order]
        messages = dict(zip(self._others, (pack(*parts) for parts in zip(*chunks, strict=True)), strict=True))
        own = self._tokens[self._rank]
        shapes = [(_with_rows(parts[0], _row_dimension(parts[0]), own), parts[0].dtype) for parts in chunks]
        arriving = self._swap(messages, sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes))

        def wait() -> list[Tensors]:
            found = []
            for message in arriving():
                parts = dict(zip(order, unpack(message, shapes), strict=True))
                found.append(tuple(parts[i] for i in range(len(tensors))))
            return found

        return wait

    def _all_gather(self, message: torch.Tensor, sizes: Sequence[int]) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to collect the messages of all ranks, which have these sizes; this rank's own may be empty."""
        if len(set(sizes)) > 1:  # there is no such collective of unequal parts that all backends have
            others = [0 if rank == self._rank else size for rank, size in enumerate(sizes)]
            sent = [0 if rank == self._rank else message.numel() for rank in range(self.size)]
            return self._exchange(message.repeat(self.size - 1), sent, others)
        gathered = message.new_empty(self.size * message.numel())
        work = dist.all_gather_into_tensor(gathered, message, group=self._group, async_op=True)

        def wait() -> Sequence[torch.Tensor]:
            work.wait()
            return gathered.chunk(self.size)

        return wait

    def _swap(self, messages: dict[int, torch.Tensor], size: int) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send each of the others its message; one of ``size`` bytes comes from each."""
        ranks = range(self.size)
        sent = [messages[rank].numel() if rank in messages else 0 for rank in ranks]
        received = [0 if rank == self._rank else size for rank in ranks]
        arriving = self._exchange(torch.cat([messages[rank] for rank in sorted(messages)]), sent, received)
        return lambda: [part for rank, part in enumerate(arriving()) if rank != self._rank]

    def _exchange(
        self, message: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send every rank its bytes of a message and to receive as many as it sends."""
        buffer = message.new_empty(sum(received))
        work = dist.all_to_all_single(buffer, message, received, sent, group=self._group, async_op=True)

        def wait() -> Sequence[torch.Tensor]:
            work.wait()
            return buffer.split(received)

        return wait


def _with_rows(tensor: torch.Tensor, dimension: int, rows: int) -> tuple[int, ...]:
    """The shape of a tensor with another number of rows."""
    shape = list(tensor.shape)
    shape[dimension] = rows
    return tuple(shape)


def _row_dimension(tensor: torch.Tensor) -> int:
    """Log-sum-exps have three dimensions and their rows last."""
    return 2 if tensor.dim() == 3 else 0


def _largest_first(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices by size of the elements, so that all are aligned in a message."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


class ContextParallelFeature(RuntimeFeature):
    """Tells every slice attention which ranks share its slice.

    Args:
        group: The ranks of this replica that have this rank's TP rank.
    """

    roles = ("cp",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Slices of a sequence may differ in length, but most do not.
        self._sharing = functools.lru_cache(maxsize=64)(functools.partial(CommutedContextParallel, group))

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`; slice attention is in the models already."""
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, SliceCoreAttention):
                module.sharing = self._sharing


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature; nothing where its replica has whole sequences."""
    group = context.groups.get("cp")
    return RuntimeFeature() if group is None else ContextParallelFeature(group)
