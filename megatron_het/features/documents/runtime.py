"""Packed documents as a feature of a rank: read ahead where they begin, and tell every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.features.documents.spec import CONVERSATIONS, PACKING, asked_by
from megatron_het.features.documents.starts import DocumentStarts
from megatron_het.features.slices.runtime import open_sequences
from megatron_het.features.slices.sequences import SlicedSequences
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, OpenContext, RuntimeFeature
from megatron_het.runtime.losses import Reports
from megatron_het.schedule.kinds import Kind


class DocumentsFeature(RuntimeFeature):
    """Attention that ends at documents.

    Args:
        args: Megatron's arguments; the dataset counts positions anew with every document until ``close``.
        sequences: Reads batches and knows the attention of every chunk.
        whole: Runs whole sequences over that attention; None where slices do already.
        first_chunk: Chunk of this rank that reads the tokens; None on a rank that does not.
        programs: This rank's programs.
        sharing: The ranks that share sequences with this one; None for this one alone.
    """

    roles = ("cp",)

    def __init__(
        self,
        args: Any,
        sequences: SlicedSequences,
        whole: RuntimeFeature | None,
        first_chunk: int | None,
        programs: Mapping[bool, RankProgram],
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        self._args = args
        self._asked_positions = args.reset_position_ids
        packs = any(getattr(args, name, False) for name in PACKING)
        self._starts = DocumentStarts(args.reset_position_ids or packs)
        # Conversations are counted anew by themselves, and their dataset does not know the flag.
        args.reset_position_ids = not getattr(args, CONVERSATIONS, False)
        self._sequences = sequences
        sequences.documents = self._starts
        self._whole = whole or RuntimeFeature()
        self._first_chunk = first_chunk
        self._programs = programs
        self._sharing = sharing

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        self._whole.attach(models)

    def begin(self, call: Call, state: Iteration) -> None:
        """Read what the iteration begins with, as far as this rank does, and learn the rest from the others."""
        self._starts.clear()
        for op in self._reading(call.forward_only):
            self._sequences.whole(op, call.data_iterators[op.chunk])
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
        asked = {name: getattr(self._args, name, False) for name in PACKING}
        vars(self._args).update(dict.fromkeys(asked, False))
        try:
            with self._whole.around_forward(forward, call):
                yield
        finally:
            vars(self._args).update(asked)

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._whole.finish(call, state)

    def weigh_losses(self, call: Call, state: Iteration) -> None:
        """Evaluation of conversations is a mean over microbatches, whatever their tokens; Megatron takes it later."""
        if call.forward_only and not call.collect_non_loss_data and getattr(self._args, CONVERSATIONS, False):
            state.reports = of_microbatches(state.reports, state.reported, self._sharing)

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """See :class:`RuntimeFeature`."""
        return self._whole.kept()

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self._args.reset_position_ids = self._asked_positions


def of_microbatches(reports: Reports, microbatches: Sequence[int], sharing: dist.ProcessGroup | None = None) -> Reports:
    """The losses of microbatches, each one of so many, from those of their passes.

    A pass may be over a slice, or a rank's part of one.  Its tokens count as such within the microbatch, so a pass
    without any counts nothing.

    Args:
        reports: (sum, tokens) by name, or a mean, of every pass.
        microbatches: That each of them is of.
        sharing: Ranks that have other parts of the same passes; the first one reports for all.
    """
    found: dict[int, list[dict[str, torch.Tensor]]] = {}
    for entry, microbatch in zip(reports, microbatches, strict=True):
        found.setdefault(microbatch, []).append(entry)
    return [
        {name: _mean([entry[name] for entry in passes], sharing) for name in passes[0]} for passes in found.values()
    ]


def _mean(passes: Sequence[torch.Tensor], sharing: dist.ProcessGroup | None) -> torch.Tensor:
    """The loss of a microbatch as one of so many."""
    total, count = torch.stack([values.view(-1) for values in passes]).sum(dim=0), len(passes)
    if sharing is not None:
        dist.all_reduce(total, group=sharing)
        count *= sharing.size()
    pair = total.numel() == 2
    mean = torch.stack([total[0] / total[1].clamp(min=1), torch.ones_like(total[1])]) if pair else total / count
    return mean if sharing is None or sharing.rank() == 0 else torch.zeros_like(mean)


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    if not asked_by(context.args):
        return RuntimeFeature()
    whole = None if isinstance(context.batches, SlicedSequences) else open_sequences(context)
    assert isinstance(context.batches, SlicedSequences)
    where = context.placement.locate(context.rank)
    stage, chunk = context.plan.path[0]
    reads = where.stage == stage and where.tp_rank == 0
    sharing = context.groups.get("cp")
    return DocumentsFeature(context.args, context.batches, whole, chunk if reads else None, context.lowered, sharing)
