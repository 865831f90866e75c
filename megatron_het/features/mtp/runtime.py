"""Multi-token prediction as a feature of a rank.

Megatron builds the layers, with a copy of the embedding, where the plan's layout says so, and scales their loss by the
tokens of a microbatch: the gradients are sums over microbatches, as all others are.  Left to do are the log, a table
that Megatron holds twice on the last stage, and passes that run parts of sequences, or know documents by where these
begin (``later.py``, ``passes.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.distributed import PlanGroups, loss_source
from megatron_het.features.documents.spec import PACKING
from megatron_het.features.mtp.later import LaterTokens, PartialPasses, told
from megatron_het.features.slices.sequences import SlicedSequences
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, OpenContext, RuntimeFeature

_COUNTED = ("loss_values", "correct_values", "total_values")
_GROUPS = ("reduce_group", "avg_group")


class MultiTokenPrediction(RuntimeFeature):
    """Losses in the log that are those of one process, and one table where Megatron has two.

    Megatron takes means over equal replicas.  Here replicas have different numbers of microbatches: what all of them
    have recorded is summed, and Megatron divides by the number of microbatches of the batch.

    Args:
        layers: Tokens after the next one that are predicted.
        placement: The plan's lookup tables.
        groups: This rank's groups.
    """

    roles: tuple[str, ...] = ("stage", "loss")

    def __init__(self, layers: int, placement: Placement, groups: PlanGroups) -> None:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        self._layers, self._placement, self._groups = layers, placement, groups
        where = placement.locate(groups.rank)
        self._has_loss = where.stage == placement.last[0]
        self._counts = where.tp_rank == 0
        self._tracker: dict[str, Any] = MTPLossLoggingHelper.tracker

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Tied embeddings: the output layer reads the copy of the embedding, and its own table is never used."""
        for model in models:
            chunk: Any = model
            if chunk.mtp_process and chunk.share_embeddings_and_output_weights and not chunk.pre_process:
                chunk.output_layer.weight = None

    def finish(self, call: Call, state: Iteration) -> None:
        """Sum what the ranks have recorded, and tell it to those that log it."""
        if call.forward_only:
            return
        values = torch.zeros(len(_COUNTED), self._layers, device=call.device)
        for row, name in enumerate(_COUNTED):
            if self._has_loss and self._counts and name in self._tracker:
                values[row] = self._tracker[name]
        if self._has_loss:
            dist.all_reduce(values, group=self._groups["stage"])
        told = self._groups.get("loss")
        if told is not None:  # in a V the model ends on another stage than that of the log
            dist.broadcast(values, src=loss_source(self._placement), group=told)
        if self._has_loss or told is not None:
            self._tracker.update(zip(_COUNTED, values, strict=True))
            self._tracker.update(dict.fromkeys(_GROUPS))

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self._tracker.clear()  # a later session may have other layers


class LaterTokensOfParts(MultiTokenPrediction):
    """The same where passes run parts of sequences, or know documents by where they begin.

    Args:
        layers: Tokens after the next one that are predicted.
        placement: The plan's lookup tables.
        groups: This rank's groups.
        sequences: Reads batches and cuts them.
        are_packed: Whether Megatron predicts nothing beyond the end of a document.
    """

    roles = ("stage", "loss", "tp")

    def __init__(
        self, layers: int, placement: Placement, groups: PlanGroups, sequences: SlicedSequences, *, are_packed: bool
    ) -> None:
        super().__init__(layers, placement, groups)
        self._sequences, self._are_packed = sequences, are_packed
        self._passes = PartialPasses()
        self._attached, self._chunk = 0, -1
        self._whole: dict[int, LaterTokens] = {}

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`; slice attention is in the models already."""
        super().attach(models)
        for model in models:
            if model.mtp_process:
                self._chunk = self._attached
                self._passes.attach(model)
            self._attached += 1

    @contextlib.contextmanager
    def around_forward(self, forward: ForwardPass, call: Call) -> Iterator[None]:
        """What the layers read and predict is known to all TP ranks."""
        op = forward.op
        if op.chunk != self._chunk:
            yield
            return
        shape = self._layers, call.sequences(op.microbatch), call.args.seq_length
        own = self._read(op, call.data_iterators[op.chunk]) if self._counts else None
        self._passes.later = told(own, shape, self._groups["tp"], call.device)
        try:
            yield
        finally:
            self._passes.later = None

    def _read(self, op: RankOp, data_iterator: Any) -> LaterTokens:
        """Of the operation's pass; the whole sequences are kept until their last part."""
        whole = self._whole.get(op.microbatch)
        if whole is None:
            batch = self._sequences.whole(op, data_iterator)
            whole = self._whole[op.microbatch] = LaterTokens.of(batch, self._layers, are_packed=self._are_packed)
        if self._sequences.is_last(op):
            del self._whole[op.microbatch]
        return whole.part(lambda tensor: self._sequences.taken(op, tensor))


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    given = context.options.layers, context.placement, context.groups
    if not isinstance(context.batches, SlicedSequences):
        return MultiTokenPrediction(*given)
    are_packed = any(getattr(context.args, name, False) for name in PACKING)
    return LaterTokensOfParts(*given, context.batches, are_packed=are_packed)
