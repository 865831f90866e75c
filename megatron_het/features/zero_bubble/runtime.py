"""Backward passes in two halves as a feature of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_het.features.zero_bubble.weight_gradients import WeightGradients, join_linear_layers, split_linear_layers
from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime.feature import (
    BackwardPass,
    Call,
    ForwardPass,
    Handler,
    Iteration,
    OpenContext,
    RuntimeFeature,
)
from megatron_het.schedule.kinds import Kind


class ZeroBubbleFeature(RuntimeFeature):
    """BACKWARD_INPUT leaves the weight gradients of linear layers to BACKWARD_WEIGHT."""

    def __init__(self) -> None:
        self._gradients = WeightGradients()
        self._layers: list[torch.nn.Module] = []

    def handlers(self) -> Mapping[Kind, Handler]:
        """See :class:`RuntimeFeature`."""
        return {Kind.BACKWARD_WEIGHT: self._backward_weight}

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`."""
        self._layers += split_linear_layers(models, self._gradients)

    def around_forward(self, forward: ForwardPass, call: Call) -> contextlib.AbstractContextManager[None]:
        """See :class:`RuntimeFeature`; all backwards of these schedules come in two halves."""
        return contextlib.nullcontext() if call.forward_only else self._gradients.splitting()

    def around_backward(
        self, backward: BackwardPass, call: Call, state: Iteration
    ) -> contextlib.AbstractContextManager[None]:
        """See :class:`RuntimeFeature`."""
        if backward.op.kind == Kind.BACKWARD_INPUT:
            return self._gradients.deferring(backward.op.key)
        return contextlib.nullcontext()

    def _backward_weight(self, op: RankOp, call: Call, state: Iteration) -> None:
        ddp: Any = call.models[op.chunk]
        config = getattr(ddp, "ddp_config", None)
        if config is None or not config.overlap_grad_reduce:
            self._gradients.compute(op.key)
            return
        # What DDP's hooks do after an ordinary backward: a bucket is reduced as soon as all of its gradients
        # are there.  It counts gradients per parameter, wherever they come from.
        self._gradients.compute(
            op.key, lambda weight: ddp.param_to_bucket_group[weight].register_grad_ready(weight, ddp.force_all_reduce)
        )

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._gradients.check_empty()

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        join_linear_layers(self._layers)
        self._layers.clear()
        self._gradients.clear()


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    return ZeroBubbleFeature()
