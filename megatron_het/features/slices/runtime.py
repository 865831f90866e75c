"""Forward and backward passes over slices of sequences, and over a context-parallel rank's part of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_het.features.slices.sequences import SlicedSequences
from megatron_het.features.slices.spec import cutting_of
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, OpenContext, RuntimeFeature


class SlicesFeature(RuntimeFeature):
    """Runs every FORWARD over one slice.

    Args:
        sequences: Cuts batches and knows the attention of the slices.
    """

    def __init__(self, sequences: SlicedSequences) -> None:
        self._sequences = sequences

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        self._sequences.attach(models)

    def begin(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`; with packed documents, their feature begins again when they are known."""
        if self._sequences.documents is None:
            self._sequences.begin()

    def around_forward(self, forward: ForwardPass, call: Call) -> contextlib.AbstractContextManager[None]:
        """See :class:`RuntimeFeature`."""
        return self._sequences.forward(forward.op, call.forward_only)

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._sequences.check_empty()

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """The pools of keys and values."""
        return {"cache": self._sequences.pools()}


def open_sequences(context: OpenContext) -> SlicesFeature:
    """Forwards run slices from here on, of which one may be the whole sequence."""
    where, plan = context.placement.locate(context.rank), context.plan
    side = context.boundaries.side(context.rank)
    sequences = SlicedSequences(
        context.args,
        cutting_of(plan, context.args),
        context.lowered,
        context.platform.device,
        part=where.cp_rank,
        shares=side.shares,
        grain=side.grain,
        batch=plan.training.micro_batch_size,
    )
    context.batches = sequences
    return SlicesFeature(sequences)


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature; from here on batches are cut into slices."""
    return open_sequences(context)
