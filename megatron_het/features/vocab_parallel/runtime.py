"""A vocabulary that is split over all stages as a feature of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_het.features.vocab_parallel.output_layer import SplitVocabulary
from megatron_het.runtime.feature import (
    BackwardPass,
    Call,
    ForwardPass,
    Handler,
    Iteration,
    OpenContext,
    RuntimeFeature,
)
from megatron_het.schedule.ir import Kind


class VocabularyFeature(RuntimeFeature):
    """Embedding, output layer and loss as operations of their own.

    Args:
        vocabulary: Does the work.
        ends_pipeline: Whether the model's last chunk is on this rank.
        chunks: Model chunks on this rank.
    """

    def __init__(self, vocabulary: SplitVocabulary, ends_pipeline: bool, chunks: int) -> None:
        self._vocabulary, self._last = vocabulary, chunks - 1 if ends_pipeline else -1

    def handlers(self) -> Mapping[Kind, Handler]:
        """See :class:`RuntimeFeature`."""
        return self._vocabulary.handlers()

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        self._vocabulary.attach(models)

    @contextlib.contextmanager
    def around_forward(self, forward: ForwardPass, call: Call) -> Iterator[None]:
        """The model ends with hidden states, and the loss comes later."""
        self._vocabulary.enter(forward.op)
        if forward.op.chunk != self._last:
            yield
            return
        forward.ends_in_loss = False
        forward.forward_step_func = self._vocabulary.capture(forward.forward_step_func)
        yield
        assert forward.output is not None
        self._vocabulary.put(forward.op, forward.output.detach())

    @contextlib.contextmanager
    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Iterator[None]:
        """The last chunk's gradient comes from all parts of the vocabulary."""
        if backward.op.chunk == self._last:
            backward.gradient = self._vocabulary.hidden_gradient(backward.op)
        yield

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._vocabulary.finish(call, state)

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self._vocabulary.close()


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    chunks = len(context.lowered[False].backwards)
    vocabulary = SplitVocabulary(
        placement=context.placement,
        rank=context.rank,
        open_channels=context.new_channels,
        tp_group=context.groups["tp"],
        timeline=context.timeline,
        batches=context.batches,
        tokens=context.boundaries.tokens,
        chunks=chunks,
    )
    return VocabularyFeature(vocabulary, context.has_loss, chunks)
