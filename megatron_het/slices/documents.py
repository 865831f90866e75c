"""Packed documents as a feature of a rank: read ahead where they begin, and tell every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_het.features.documents import BY_DATASET, asked_by
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, OpenContext, RuntimeFeature
from megatron_het.schedule.kinds import Kind
from megatron_het.slices.feature import open_sequences
from megatron_het.slices.sequences import SlicedSequences
from megatron_het.slices.starts import DocumentStarts


class DocumentsFeature(RuntimeFeature):
    """Attention that ends at documents.

    Args:
        args: Megatron's arguments; the dataset counts positions anew with every document until ``close``.
        sequences: Reads batches and knows the attention of every chunk.
        whole: Runs whole sequences over that attention; None where slices do already.
        first_chunk: Chunk of this rank that reads the tokens; None on a rank that does not.
        programs: This rank's programs.
    """

    def __init__(
        self,
        args: Any,
        sequences: SlicedSequences,
        whole: RuntimeFeature | None,
        first_chunk: int | None,
        programs: Mapping[bool, RankProgram],
    ) -> None:
        self._args = args
        self._asked_positions = args.reset_position_ids
        self._starts = DocumentStarts(args.reset_position_ids or getattr(args, BY_DATASET))
        args.reset_position_ids = True
        self._sequences = sequences
        sequences.documents = self._starts
        self._whole = whole or RuntimeFeature()
        self._first_chunk = first_chunk
        self._programs = programs

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        self._whole.attach(models)

    def begin(self, call: Call, state: Iteration) -> None:
        """Read what the iteration begins with, as far as this rank does, and learn the rest from the others."""
        self._starts.clear()
        for op in self._reading(call.forward_only):
            self._sequences.read(op, call.data_iterators[op.chunk])
        self._starts.exchange(call.num_microbatches, call.sequences, self._args.seq_length, call.device)
        self._sequences.begin()

    def _reading(self, forward_only: bool) -> Iterator[RankOp]:
        """The forwards that read, each microbatch once, in the order in which it is read."""
        for op in self._programs[forward_only].ops:
            if op.kind is Kind.FORWARD and op.chunk == self._first_chunk and op.slice == 0:
                yield op

    @contextlib.contextmanager
    def around_forward(self, forward: ForwardPass, call: Call) -> Iterator[None]:
        """The training script sees a sequence as any other: it need not pack anything."""
        packs = getattr(self._args, BY_DATASET)
        setattr(self._args, BY_DATASET, False)
        try:
            with self._whole.around_forward(forward, call):
                yield
        finally:
            setattr(self._args, BY_DATASET, packs)

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._whole.finish(call, state)

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """See :class:`RuntimeFeature`."""
        return self._whole.kept()

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self._args.reset_position_ids = self._asked_positions


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    if not asked_by(context.args):
        return RuntimeFeature()
    whole = None if isinstance(context.batches, SlicedSequences) else open_sequences(context)
    assert isinstance(context.batches, SlicedSequences)
    where = context.placement.locate(context.rank)
    stage, chunk = context.plan.path[0]
    reads = where.stage == stage and where.tp_rank == 0
    return DocumentsFeature(context.args, context.batches, whole, chunk if reads else None, context.lowered)
