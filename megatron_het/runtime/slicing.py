"""How a FORWARD operation is run: over whole sequences, or over one slice of a sequence.

The executor hands every forward to one of these two; everything that a slice changes is here and
in ``megatron_het.attention``.  Training scripts need not know: they read a batch and call the
model, and for a slice the batch, the sequence length and the positions are those of the slice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron_het.runtime.lowering import RankOp, RankProgram
from megatron_het.schedule.ir import Kind

_CUT = ("tokens", "labels", "loss_mask", "position_ids")  # [b, s]


class Sequences(Protocol):
    """Prepares the forward of one operation."""

    def forward(
        self, op: RankOp, data_iterator: Any, forward_only: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """A context for the forward; yields the data iterator to give to the training script."""

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """What the forward of an operation will read, ahead of it (first TP rank)."""

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

    def finish(self) -> None:
        """See :class:`Sequences`."""


class SlicedSequences:
    """A forward runs one of ``slices`` equal slices of a microbatch.

    Args:
        args: Megatron's arguments; ``args.seq_length`` is the slice's while a slice runs, because
            scripts allocate what they receive from other TP ranks by it.
        slices: Slices per sequence.
        programs: This rank's programs; they decide how many key-value chunks live at once.
    """

    def __init__(self, args: Any, slices: int, programs: Mapping[bool, RankProgram]) -> None:
        from megatron_het.attention.core import CurrentSlice

        self._args = args
        self._slices = slices
        self._seq_length = args.seq_length
        self._tokens = args.seq_length // slices
        self._slots = {
            chunk: max(live_slices(program, chunk, slices) for program in programs.values())
            for chunk in range(len(programs[False].backwards))
        }
        self._current = CurrentSlice()
        self._models: list[torch.nn.Module] = []
        self._batches: dict[tuple[int, int], Mapping[str, Any]] = {}

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Put slice attention into the model chunks of this rank (GPTModel, not wrapped)."""
        from megatron_het.attention.core import replace_core_attention

        self._models = list(models)
        for chunk, model in enumerate(self._models):
            replace_core_attention(model, self._slots[chunk])
        self._current.attach(self._models)

    @contextlib.contextmanager
    def forward(self, op: RankOp, data_iterator: Any, forward_only: bool) -> Iterator[Any]:
        """See :class:`Sequences`."""
        from megatron_het.attention.core import SliceParams, slice_caches

        self._current.params = SliceParams.make(
            op.microbatch, op.slice, self._tokens, self._seq_length
        )
        self._args.seq_length = self._tokens
        try:
            yield self._cut_batches(op, data_iterator)
        finally:
            self._args.seq_length = self._seq_length
            self._current.params = None
        if forward_only and op.slice == self._slices - 1:
            for cache in slice_caches([self._models[op.chunk]]):
                cache.drop(op.microbatch)

    def finish(self) -> None:
        """See :class:`Sequences`.

        Raises:
            CacheError: Keys and values are left in a cache.
        """
        from megatron_het.attention.core import slice_caches

        for cache in slice_caches(self._models):
            cache.check_empty()
        self._batches.clear()

    def peek(self, op: RankOp, data_iterator: Any) -> Mapping[str, Any]:
        """See :class:`Sequences`."""
        return cut_batch(self._batch(op, data_iterator), op.slice * self._tokens, self._tokens)

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
        yield cut_batch(batch, op.slice * self._tokens, self._tokens)


def cut_batch(batch: Mapping[str, Any], first: int, tokens: int) -> dict[str, Any]:
    """Tokens ``[first, first + tokens)`` of a batch; the attention mask goes: slices are causal."""
    found = {k: v for k, v in batch.items() if k != "attention_mask"}
    for name in _CUT:
        if found.get(name) is not None:
            found[name] = found[name][:, first : first + tokens].contiguous()
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
