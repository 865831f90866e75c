"""How a FORWARD operation is run over one slice of a sequence.

Everything that a slice changes is here and in ``megatron_het.attention``.  Training scripts need not know: they
read a batch and call the model, and for a slice the batch, the sequence length and the positions are those of the
slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron_het.attention.blocks import take_blocks
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.plan.parts import Blocks, part_tokens, token_blocks
from megatron_het.runtime.batches import Batches
from megatron_het.schedule.kinds import INPUT_GRADIENTS, Kind

_CUT = ("tokens", "labels", "loss_mask", "position_ids")  # [b, s]
_UNSEEN = ("attention_mask", "cu_seqlens", "max_seqlen")


class Documents(Protocol):
    """Where the documents of microbatches begin (``starts.py``)."""

    def note(self, microbatch: int, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """See where the documents of a batch that was read begin; the batch as the script is to see it."""

    def of(self, microbatch: int) -> tuple[tuple[int, ...], ...]:
        """Where the documents of each sequence of a microbatch begin."""


class SlicedSequences(Batches):
    """A forward runs one of ``slices`` equal slices of a microbatch, or this rank's part of one.

    Args:
        args: Megatron's arguments; ``args.seq_length`` is the slice's while a slice runs, because
            scripts allocate what they receive from other TP ranks by it.
        slices: Slices per sequence.
        programs: This rank's programs; they decide how many key-value chunks live at once.
        device: What this rank computes on.
        part: Which part of every slice this rank holds.
        shares: How the ranks of the context-parallel group divide a slice.
        grain: What the tokens of each are a multiple of.
        batch: Sequences of the largest microbatch; None where all are alike.
    """

    def __init__(
        self,
        args: Any,
        slices: int,
        programs: Mapping[bool, RankProgram],
        device: torch.device,
        part: int = 0,
        shares: Sequence[int] = (1,),
        grain: int = 1,
        batch: int | None = None,
    ) -> None:
        from megatron_het.attention.core import CurrentSlice

        super().__init__()
        self._args = args
        self._slices = slices
        self._device = device
        self._largest = batch
        self._seq_length = args.seq_length
        whole = args.seq_length // slices
        blocks = token_blocks(shares, whole, grain)
        self._parts = tuple(map(part_tokens, blocks))
        self._tokens = self._parts[part]
        # Blocks of tokens of the sequence that this rank holds of each slice.
        self._blocks = [tuple((s * whole + a, s * whole + b) for a, b in blocks[part]) for s in range(slices)]
        self._slots = {
            chunk: max(live_slices(program, chunk, slices) for program in programs.values())
            for chunk in range(len(programs[False].backwards))
        }
        self.documents: Documents | None = None
        """Set where attention ends at documents."""
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
        for chunk, model in enumerate(models, first):
            replace_core_attention(model, self._slots[chunk], self._device, kernel, self._largest)
        self._current.attach(models)

    @contextlib.contextmanager
    def forward(self, op: RankOp, forward_only: bool) -> Iterator[None]:
        """A context for the forward of one operation."""
        from megatron_het.attention.core import SliceParams, slice_caches

        starts = None if self.documents is None else self.documents.of(op.microbatch)
        blocks = self._blocks[op.slice]
        self._current.params = SliceParams.make(op.microbatch, op.slice, blocks, self._seq_length, starts, self._parts)
        self._args.seq_length = self._tokens
        try:
            yield
        finally:
            self._args.seq_length = self._seq_length
            self._current.params = None
        if forward_only and op.slice == self._slices - 1:
            for cache in slice_caches([self._models[op.chunk]]):
                cache.drop(op.microbatch)

    def check_empty(self) -> None:
        """All passes of an iteration are done.

        Raises:
            CacheError: Keys and values are left in a cache.
        """
        from megatron_het.attention.core import slice_caches

        for cache in slice_caches(self._models):
            cache.check_empty()

    def pools(self) -> list[torch.Tensor]:
        """The slabs of all key-value caches, and the gradients that they collect."""
        from megatron_het.attention.core import slice_caches

        return [tensor for cache in slice_caches(self._models) for tensor in cache.tensors()]

    def finish(self) -> None:
        """See :class:`Batches`."""
        self._batches.clear()

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """See :class:`Batches`."""
        return cut_batch(self._batch(op, data_iterator), self._blocks[op.slice])

    def _batch(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        key = op.microbatch, op.chunk
        if key not in self._batches:
            batch = next(data_iterator)
            if self.documents is not None:
                batch = self.documents.note(op.microbatch, batch)
            # Cut on the device: a part of a pinned batch is not pinned, and the host would wait for every copy of one.
            self._batches[key] = {
                name: value.to(self._device, non_blocking=True) if name in _CUT and value is not None else value
                for name, value in batch.items()
            }
        return self._batches[key]

    def iterator(self, op: RankOp, data_iterator: Any) -> Iterator[Mapping[str, Any]]:
        """The batch of an operation: read when its first slice asks for it, kept until the last."""
        batch = self._batch(op, data_iterator)
        if op.slice == self._slices - 1:
            del self._batches[op.microbatch, op.chunk]
        yield cut_batch(batch, self._blocks[op.slice])


def cut_batch(batch: Mapping[str, Any], blocks: Blocks) -> dict[str, Any]:
    """Some blocks of tokens of a batch; masks go: slices are causal, and know themselves where documents begin."""
    found = {k: v for k, v in batch.items() if k not in _UNSEEN}
    for name in _CUT:
        if found.get(name) is not None:
            found[name] = take_blocks(found[name], blocks, dim=1).contiguous()
    return found


def live_slices(program: RankProgram, chunk: int, slices: int) -> int:
    """The most slices of a chunk whose keys and values are held at the same time."""
    live = most = 0
    trains = program.backwards[chunk] > 0
    for op in program.ops:
        if op.chunk != chunk:
            continue
        if op.kind == Kind.FORWARD:
            live += 1
            most = max(most, live)
        if trains and op.kind in INPUT_GRADIENTS:
            live -= 1
        if not trains and op.kind == Kind.FORWARD and op.slice == slices - 1:
            live -= slices
    return most
