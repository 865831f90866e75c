"""How a FORWARD operation is run: over whole sequences, or over one slice of a sequence.

The executor hands every forward to one of these two; everything that a slice changes is here and
in ``megatron_het.attention``.  Training scripts need not know: they read a batch and call the
model, and for a slice the batch, the sequence length and the positions are those of the slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from megatron_het.attention.blocks import Blocks, take_blocks, token_blocks
from megatron_het.runtime.lowering import RankOp, RankProgram
from megatron_het.schedule.ir import Kind

if TYPE_CHECKING:  # it imports Megatron
    from megatron_het.runtime.exchange import ContextExchange

_CUT = ("tokens", "labels", "loss_mask", "position_ids")  # [b, s]


class Sequences(Protocol):
    """Prepares the forward of one operation."""

    def forward(
        self, op: RankOp, data_iterator: Any, forward_only: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """A context for the forward; yields the data iterator to give to the training script."""

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """What the forward of an operation will read, ahead of it (first TP rank)."""

    def backward(self, op: RankOp) -> contextlib.AbstractContextManager[None]:
        """A context for the backward of one operation."""

    def finish(self) -> None:
        """All operations of the iteration are done."""


class WholeSequences:
    """A forward runs a microbatch from its first token to its last."""

    def __init__(self) -> None:
        self._ahead: dict[tuple[int, int], Mapping[str, Any]] = {}

    @contextlib.contextmanager
    def forward(self, op: RankOp, data_iterator: Any, forward_only: bool) -> Iterator[Any]:
        """See :class:`Sequences`."""
        ahead = self._ahead.pop((op.microbatch, op.chunk), None)
        yield data_iterator if ahead is None else iter([ahead])

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """See :class:`Sequences`."""
        found = self._ahead[op.microbatch, op.chunk] = next(data_iterator)
        return found

    def backward(self, op: RankOp) -> contextlib.AbstractContextManager[None]:
        """See :class:`Sequences`."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """See :class:`Sequences`."""


class SlicedSequences:
    """A forward runs one of ``slices`` equal slices of a microbatch, or this rank's part of one.

    Args:
        args: Megatron's arguments; ``args.seq_length`` is the slice's while a slice runs, because
            scripts allocate what they receive from other TP ranks by it.
        slices: Slices per sequence.
        programs: This rank's programs; they decide how many key-value chunks live at once.
        device: What this rank computes on.
        exchange: Attention that is computed for and by other devices, None for none.
        group: The context-parallel group, None when this rank holds whole slices.
    """

    def __init__(
        self,
        args: Any,
        slices: int,
        programs: Mapping[bool, RankProgram],
        device: torch.device,
        exchange: ContextExchange | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        from megatron_het.attention.context_parallel import CommutedContextParallel
        from megatron_het.attention.core import CurrentSlice

        self._args = args
        self._slices = slices
        self._device = device
        self._exchange = exchange
        self._seq_length = args.seq_length
        self._parallel = None if group is None else CommutedContextParallel(group)
        rank, self._size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        whole = args.seq_length // slices
        self._tokens = whole // self._size
        # Blocks of tokens of the sequence that this rank holds of each slice.
        self._blocks = [
            tuple((s * whole + a, s * whole + b) for a, b in token_blocks(rank, self._size, whole))
            for s in range(slices)
        ]
        self._slots = {
            chunk: max(live_slices(program, chunk, slices) for program in programs.values())
            for chunk in range(len(programs[False].backwards))
        }
        self._current = CurrentSlice()
        self._models: list[torch.nn.Module] = []
        self._batches: dict[tuple[int, int], Mapping[str, Any]] = {}

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Put slice attention into the model chunks of this rank, all at once or one after the other.

        Args:
            models: GPTModels, not wrapped, in the order of the chunks.
        """
        from megatron_het.attention.core import replace_core_attention
        from megatron_het.attention.kernels import kernel_of_backend

        first = len(self._models)
        self._models += models
        kernel = kernel_of_backend(self._args.attention_backend.name, self._device.type)
        placed = [
            replace_core_attention(model, self._slots[chunk], self._device, kernel)
            for chunk, model in enumerate(models, first)
        ]
        if self._exchange is not None:
            query_tokens = self._tokens * self._size
            self._exchange.attach(placed, models, query_tokens, self._args.micro_batch_size, kernel)
        for module in (m for modules in placed for m in modules):
            module.parallel = self._parallel
        self._current.attach(models)

    @contextlib.contextmanager
    def forward(self, op: RankOp, data_iterator: Any, forward_only: bool) -> Iterator[Any]:
        """See :class:`Sequences`."""
        from megatron_het.attention.core import SliceParams, slice_caches

        self._current.params = SliceParams.make(
            op.microbatch, op.slice, self._blocks[op.slice], self._seq_length
        )
        self._args.seq_length = self._tokens
        try:
            with self._joint(op):
                yield self._cut_batches(op, data_iterator)
        finally:
            self._args.seq_length = self._seq_length
            self._current.params = None
        if forward_only and op.slice == self._slices - 1:
            for cache in slice_caches([self._models[op.chunk]]):
                cache.drop(op.microbatch)

    def backward(self, op: RankOp) -> contextlib.AbstractContextManager[None]:
        """See :class:`Sequences`."""
        return self._joint(op)

    def _joint(self, op: RankOp) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._exchange is None else self._exchange.joint(op)

    def finish(self) -> None:
        """See :class:`Sequences`.

        Raises:
            CacheError: Keys and values are left in a cache.
        """
        from megatron_het.attention.core import slice_caches

        for cache in slice_caches(self._models):
            cache.check_empty()
        self._batches.clear()
        if self._exchange is not None:
            self._exchange.finish()

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """See :class:`Sequences`."""
        return cut_batch(self._batch(op, data_iterator), self._blocks[op.slice])

    def _batch(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        key = op.microbatch, op.chunk
        if key not in self._batches:
            self._batches[key] = next(data_iterator)
        return self._batches[key]

    def _cut_batches(self, op: RankOp, data_iterator: Any) -> Iterator[Mapping[str, Any]]:
        """The batch of an operation: read when its first slice asks for it, kept until the last."""
        batch = self._batch(op, data_iterator)
        if op.slice == self._slices - 1:
            del self._batches[op.microbatch, op.chunk]
        yield cut_batch(batch, self._blocks[op.slice])


def cut_batch(batch: Mapping[str, Any], blocks: Blocks) -> dict[str, Any]:
    """Some blocks of tokens of a batch; the attention mask goes: slices are causal."""
    found = {k: v for k, v in batch.items() if k != "attention_mask"}
    for name in _CUT:
        if found.get(name) is not None:
            found[name] = take_blocks(found[name], blocks, dim=1).contiguous()
    return found


def live_slices(program: RankProgram, chunk: int, slices: int) -> int:
    """The most slices of a chunk whose keys and values are held at the same time."""
    live = most = 0
    ends = Kind.FORWARD if program.backwards[chunk] == 0 else Kind.BACKWARD
    for op in program.ops:
        if op.chunk != chunk:
            continue
        if op.kind == Kind.FORWARD:
            live += 1
            most = max(most, live)
        if op.kind == ends and (ends == Kind.BACKWARD or op.slice == slices - 1):
            live -= 1 if ends == Kind.BACKWARD else slices
    return most
