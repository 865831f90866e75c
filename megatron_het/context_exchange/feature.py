"""The attention context exchange as a feature of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_het.attention.core import SliceCoreAttention
from megatron_het.attention.kernels import kernel_of_backend
from megatron_het.context_exchange.exchange import ContextExchange
from megatron_het.lowering.ranks import exchange_edges
from megatron_het.runtime.feature import (
    BackwardPass,
    Call,
    ForwardPass,
    Handler,
    Iteration,
    OpenContext,
    RuntimeFeature,
)
from megatron_het.schedule.exchange import exchanged_layers
from megatron_het.schedule.kinds import EXCHANGE, Kind

_PENDING_SENDS = 4
"""Sends to one peer that may be under way over gloo."""


class ContextExchangeFeature(RuntimeFeature):
    """Gives attention away and computes it for others.

    Args:
        exchange: Does the work.
        slice_tokens: Tokens of a slice of the context-parallel group.
        sequences: Sequences of a microbatch.
        args: Megatron's arguments.
        device: Where the models are.
    """

    def __init__(
        self,
        exchange: ContextExchange,
        slice_tokens: int,
        sequences: Callable[[int], int],
        args: Any,
        device: torch.device,
    ) -> None:
        self._exchange, self._slice_tokens, self._sequences = exchange, slice_tokens, sequences
        self._args, self._device = args, device

    def handlers(self) -> Mapping[Kind, Handler]:
        """See :class:`RuntimeFeature`."""
        return dict.fromkeys(EXCHANGE, lambda op, call, state: self._exchange.handle(op))

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`; slice attention is in the models already."""
        placed = [[m for m in model.modules() if isinstance(m, SliceCoreAttention)] for model in models]
        kernel = kernel_of_backend(self._args.attention_backend.name, self._device.type)
        self._exchange.attach(placed, models, self._slice_tokens, self._sequences, kernel)

    def begin(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._exchange.begin(call.forward_only)

    def around_forward(self, forward: ForwardPass, call: Call) -> contextlib.AbstractContextManager[None]:
        """See :class:`RuntimeFeature`."""
        return self._exchange.joint(forward.op)

    def around_backward(
        self, backward: BackwardPass, call: Call, state: Iteration
    ) -> contextlib.AbstractContextManager[None]:
        """See :class:`RuntimeFeature`."""
        return self._exchange.joint(backward.op)

    def finish(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        self._exchange.finish()

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self._exchange.close()


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    plan, options = context.plan, context.options
    slices = context.programs[False].shape.slices
    pairs = exchange_edges(list(context.programs.values()), context.boundaries)
    exchange = ContextExchange(
        context.lowered,
        {rank: tokens // options.units for rank, tokens in context.boundaries.part_lengths().items()},
        context.rank,
        exchanged_layers([stage.layers for stage in plan.stages]),
        context.channels,
        context.new_channels("queries and results", pairs, _PENDING_SENDS),
        context.timeline,
        context.platform.device,
        options.keep,
    )
    return ContextExchangeFeature(
        exchange, context.args.seq_length // slices, plan.training.sequences, context.args, context.platform.device
    )
