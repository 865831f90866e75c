"""Transfers of slice attention between the ranks that share every slice (SlimPipe, section 5)."""

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_het.attention.core import slice_attentions
from megatron_het.attention.places import Travels, pack, row_count, take_rows, unpack
from megatron_het.attention.recurrent import state_caches
from megatron_het.features.context_parallel.spec import widest
from megatron_het.features.registry import part_grain
from megatron_het.plan.placement import WHOLE, Blocks, DocumentPlacing
from megatron_het.runtime.feature import OpenContext, RuntimeFeature

# Commuted context parallelism (SlimPipe, section 5): queries, outputs and normalisers are sent, not keys and values.
#
# Each rank of a context-parallel group holds a part of the tokens of every slice, and the keys and values of
# that part only.  Ordinary context parallelism sends keys and values to the queries, and with a key-value cache
# would send the cached ones again for every later slice.  Here the queries of a slice are sent to all ranks, each
# rank attends for all of them to its own keys, and the partial outputs return to the rank of their query, where they
# are merged.  In the backward pass the gradients of keys and values are computed where the keys are.
#
# Both transfers overlap with computation: while the others' queries arrive, a rank's own queries attend to its
# part of the slice; while the partial outputs are sent, to its keys of the earlier slices.
#
# Rank k holds the k-th block of a slice from its start and the k-th from its end, both of one size, which may differ
# from rank to rank; see ``plan/placement.py``.

Tensors = tuple[torch.Tensor, ...]


class CommutedContextParallel:
    """A group of ranks that share a slice; see the comment above.

    ``[S, ...]`` are rows of the other ranks, rank after rank, beginning with the next one; ``[s, ...]`` are
    this rank's.  A rank's own queries and keys are the same two blocks, in order, so that their attention is one
    causal square, as without context parallelism.

    ``gather`` and ``give_back`` are collectives of the group; all ranks make the same calls, because they run
    the same program.

    Args:
        group: The ranks; its timeout bounds every wait.
        tokens: Number of the slice's tokens on each rank; all even.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: tuple[int, ...]) -> None:
        self._group = group
        self._tokens = tokens
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @property
    def others(self) -> list[int]:
        """The other ranks, in the order of their rows."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def by_rank(self, own: int) -> list[Blocks]:
        """Blocks of a slice's tokens on each rank, if this one has ``own``; proportions are equal in all slices."""
        tokens = [count * own // self._tokens[self.rank] for count in self._tokens]
        whole, found, first = sum(tokens), list[Blocks](), 0
        for count in tokens:
            end = first + count // 2
            found.append(((first, end), (whole - end, whole - first)))
            first = end
        return found

    def gather(self, *tensors: torch.Tensor, travels: Travels | None = None) -> Callable[[], Tensors]:
        """Start to gather rows of the others; a log-sum-exp ``[b, heads, s]`` has its rows last.

        Args:
            travels: The rows that are sent; None for all.

        Returns:
            A function that waits for the rows and returns them: ``[S, ...]``.
        """
        order = _largest_first(tensors)
        kinds = [(tensors[i], _row_dimension(tensors[i])) for i in order]
        row_bytes = sum(t.nbytes for t in tensors) // self._tokens[self.rank]
        if travels is None:
            counts = [self._tokens[rank] for rank in self.others]
            sizes = [row_bytes * tokens for tokens in self._tokens]
            arriving = self._all_gather(pack(*(tensors[i] for i in order)), sizes)
        else:
            counts = list(travels.received)
            parts = [[take_rows(t, rows, dim) for t, dim in kinds] for rows in travels.sent]
            messages = dict(zip(self.others, (pack(*each) for each in parts), strict=True))
            arriving = self._send(messages, {r: row_bytes * n for r, n in zip(self.others, counts, strict=True)})

        def wait() -> Tensors:
            messages = arriving()
            rows = [
                unpack(messages[rank], [(_with_rows(t, dim, count), t.dtype) for t, dim in kinds])
                for rank, count in zip(self.others, counts, strict=True)
            ]
            parts = zip(order, zip(*rows, strict=True), strict=True)
            found = {i: torch.cat(part, dim=_row_dimension(part[0])) for i, part in parts}
            return tuple(found[i] for i in range(len(tensors)))

        return wait

    def seen(self, own: int) -> list[tuple[slice, slice]]:
        """Ranges of the others' query rows, each with the range of this rank's keys of the slice that they see.

        A lower rank's second block comes after both of the keys' blocks and its first before both; a higher
        rank's blocks lie between the two.

        Args:
            own: Number of this rank's keys.
        """
        half, found, first = own // 2, [], 0
        for rank in self.others:
            end = first + self._tokens[rank]
            if rank < self.rank:
                found.append((slice((first + end) // 2, end), slice(0, own)))
            else:
                found.append((slice(first, end), slice(0, half)))
            first = end
        return found

    def give_back(self, *tensors: torch.Tensor, travels: Travels | None = None) -> Callable[[], list[Tensors]]:
        """Start to send each of the others its rows of tensors ``[S, ...]``.

        Args:
            travels: The rows that were gathered; None for all.

        Returns:
            A function that waits for this rank's rows from the others and returns them by sender.
        """
        order = _largest_first(tensors)
        sizes = list(travels.received) if travels else [self._tokens[rank] for rank in self.others]
        own = [row_count(rows) for rows in travels.sent] if travels else [self._tokens[self.rank]] * len(sizes)
        chunks = [tensors[i].split(sizes, dim=_row_dimension(tensors[i])) for i in order]
        messages = dict(zip(self.others, (pack(*parts) for parts in zip(*chunks, strict=True)), strict=True))
        row_bytes = sum(math.prod(_with_rows(t, _row_dimension(t), 1)) * t.element_size() for t in tensors)
        arriving = self._send(messages, {r: row_bytes * n for r, n in zip(self.others, own, strict=True)})

        def wait() -> list[Tensors]:
            found, arrived = [], arriving()
            for rank, count in zip(self.others, own, strict=True):
                shapes = [(_with_rows(t[0], _row_dimension(t[0]), count), t[0].dtype) for t in chunks]
                parts = dict(zip(order, unpack(arrived[rank], shapes), strict=True))
                found.append(tuple(parts[i] for i in range(len(tensors))))
            return found

        return wait

    def swap(self, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """All-to-all of one tensor per rank; returns tensors of ``shapes``, and one type, from all ranks."""
        others = [0 if rank == self.rank else 1 for rank in range(self.size)]
        sent = [part.numel() * other for part, other in zip(parts, others, strict=True)]
        received = [math.prod(shape) * other for shape, other in zip(shapes, others, strict=True)]
        message = torch.cat([part.reshape(-1) for part, other in zip(parts, others, strict=True) if other])
        arrived = list(self._exchange(message, sent, received)())
        arrived[self.rank] = parts[self.rank]
        return [part.view(shape) for part, shape in zip(arrived, shapes, strict=True)]

    def _all_gather(self, message: torch.Tensor, sizes: Sequence[int]) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to gather the messages of all ranks, which have these sizes; this rank's own may be empty."""
        if len(set(sizes)) > 1:  # not all backends have an all-gather of unequal parts
            others = [0 if rank == self.rank else size for rank, size in enumerate(sizes)]
            sent = [0 if rank == self.rank else message.numel() for rank in range(self.size)]
            return self._exchange(message.repeat(self.size - 1), sent, others)
        gathered = message.new_empty(self.size * message.numel())
        work = dist.all_gather_into_tensor(gathered, message, group=self._group, async_op=True)

        def wait() -> Sequence[torch.Tensor]:
            work.wait()
            return gathered.chunk(self.size)

        return wait

    def _send(self, messages: dict[int, torch.Tensor], sizes: dict[int, int]) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send each of the others its message, and to receive ``sizes`` bytes from each."""
        ranks = range(self.size)
        sent = [messages[rank].numel() if rank in messages else 0 for rank in ranks]
        received = [sizes.get(rank, 0) for rank in ranks]
        return self._exchange(torch.cat([messages[rank] for rank in sorted(messages)]), sent, received)

    def _exchange(
        self, message: torch.Tensor, sent: list[int], received: list[int]
    ) -> Callable[[], Sequence[torch.Tensor]]:
        """Start an all-to-all of parts of a message, with the given sizes in bytes."""
        buffer = message.new_empty(sum(received))
        work = dist.all_to_all_single(buffer, message, received, sent, group=self._group, async_op=True)

        def wait() -> Sequence[torch.Tensor]:
            work.wait()
            return buffer.split(received)

        return wait


def _with_rows(tensor: torch.Tensor, dimension: int, rows: int) -> tuple[int, ...]:
    """Shape of a tensor with another number of rows."""
    shape = list(tensor.shape)
    shape[dimension] = rows
    return tuple(shape)


def _row_dimension(tensor: torch.Tensor) -> int:
    """Dimension of the rows: the first, but the last of log-sum-exps, which have three dimensions."""
    return 2 if tensor.dim() == 3 else 0


def _largest_first(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Indices of tensors by descending size of elements, so that all are aligned in a message."""
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


class ContextParallelFeature(RuntimeFeature):
    """Connects every slice attention with the ranks of the replica that share its slice: those of the same TP rank."""

    roles = ("cp",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Slices of a sequence may differ in length, but most do not.
        self._sharing = functools.lru_cache(maxsize=64)(functools.partial(CommutedContextParallel, group))

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`; slice attention is in the models already."""
        for module in slice_attentions(models):
            module.sharing = self._sharing
        for cache in state_caches(models):
            cache.sharing = self._sharing


def open_feature(context: OpenContext) -> RuntimeFeature:
    """Returns the feature on this rank; one that does nothing if its replica has whole sequences."""
    group, plan = context.groups.get("cp"), context.plan
    if context.options.documents == WHOLE:
        most, own = widest(plan), context.boundaries.side(context.rank)
        context.batches.placing = DocumentPlacing(most.shares, part_grain(plan, most), own.shares, own.grain)
    return RuntimeFeature() if group is None else ContextParallelFeature(group)
