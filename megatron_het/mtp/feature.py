"""Multi-token prediction as a feature of a rank.

Megatron builds the layers, with a copy of the embedding, where the plan's layout says so, and scales their loss by the
tokens of a microbatch: the gradients are sums over microbatches, as all others are.  Left to do are the log, and a
table that Megatron holds twice on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.plan import Placement
from megatron_het.runtime.feature import Call, Iteration, OpenContext, RuntimeFeature
from megatron_het.topology import PlanGroups, loss_source

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

    roles = ("stage", "loss")

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


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    return MultiTokenPrediction(context.options.layers, context.placement, context.groups)
