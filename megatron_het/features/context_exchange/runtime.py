"""The attention context exchange as a feature of a rank."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_het.attention.core import SliceCoreAttention
from megatron_het.attention.kernel_choice import kernels_of_backend
from megatron_het.families import family_of
from megatron_het.features.context_exchange.exchange import ContextExchange, exchange_edges
from megatron_het.features.context_exchange.helper import Limits
from megatron_het.features.context_exchange.kinds import EXCHANGE, exchanged_layers
from megatron_het.features.context_exchange.spec import Units
from megatron_het.features.registry import cutting_of, packing_argument
from megatron_het.lowering.programs import posted_for, program_of
from megatron_het.lowering.ranks import RankProgram, lower
from megatron_het.runtime import feature
from megatron_het.schedule.cutting import Parts
from megatron_het.schedule.kinds import Kind
from megatron_het.schedule.validate import check

_PENDING_SENDS = 4  # sends to one peer that may be under way over gloo


@dataclass(eq=False)
class ContextExchangeFeature(feature.RuntimeFeature):
    """Gives attention away and computes it for others."""

    exchange: ContextExchange
    sequences: Callable[[int], int]
    args: Any
    device: torch.device
    # makes the program of an iteration in which documents or windows limit attention, or slices are of unequal
    # length; None if all slices of all iterations are equal
    limited: "LimitedPrograms | None"

    def handlers(self) -> Mapping[Kind, feature.Handler]:
        return dict.fromkeys(EXCHANGE, lambda op, call, state: self.exchange.handle(op))

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """See :class:`RuntimeFeature`; slice attention is in the models already."""
        placed = [[m for m in model.modules() if isinstance(m, SliceCoreAttention)] for model in models]
        kernels = kernels_of_backend(self.args.attention_backend.name, self.device.type)
        self.exchange.attach(placed, models, self.sequences, kernels)

    def begin(self, call: feature.Call, state: feature.Iteration) -> None:
        self.exchange.begin(call.forward_only)

    def program(self, call: feature.Call, program: RankProgram) -> RankProgram:
        """Returns the program of this iteration, made for its documents, windows and lengths of slices if needed."""
        if self.limited is None:
            return program
        made = self.limited.program(call.forward_only)
        self.exchange.begin_limited(made, self.limited.limits)
        return made

    def around_forward(self, forward: feature.ForwardPass, call: feature.Call) -> feature.Around:
        return self.exchange.joint(forward.op)

    def around_backward(
        self, backward: feature.BackwardPass, call: feature.Call, state: feature.Iteration
    ) -> feature.Around:
        return self.exchange.joint(backward.op)

    def finish(self, call: feature.Call, state: feature.Iteration) -> None:
        self.exchange.finish()
        if self.limited is not None:
            self.limited.channels.wait_sends()

    def close(self) -> None:
        self.exchange.close()
        if self.limited is not None:
            self.limited.channels.close()


class LimitedPrograms:
    """This rank's programs, made anew for the attention of slices in an iteration.

    Every rank has the document starts of all microbatches, and makes the same program from them.

    Args:
        context: The feature's context; its batches have the cutting of sequences and the starts of documents.
        units: Tokens of exchange units.
    """

    def __init__(self, context: feature.OpenContext, units: Units) -> None:
        self._context, self._batches = context, context.batches
        where = context.placement.locate(context.rank)
        self._device = context.programs[False].shape.device(where.stage, where.replica)
        self._units = units.units
        self._made: dict[bool, tuple[Parts, RankProgram]] = {}
        windows = windows_of(context.args)
        self.limits = Limits(context.placement, context.boundaries.side, units, windows, self._batches.starts)
        """Limits of the slices' attention, for devices that attend for others."""
        self.pairs = self._pairs()
        """Pairs of ranks that may attend for each other, in both directions: all of a pipeline with common heads."""
        self.channels = context.new_channels("keys and values", self.pairs, _PENDING_SENDS)
        """Channels for keys and values; the pipeline's connect only ranks that transfer in the plan's own programs."""

    def program(self, forward_only: bool) -> RankProgram:
        """Returns the program of an iteration after its documents are known."""
        microbatches = range(self._context.programs[forward_only].shape.microbatches)
        parts = tuple(self._batches.slice_parts(microbatch, self._units) for microbatch in microbatches)
        if forward_only not in self._made or self._made[forward_only][0] != parts:
            self._made[forward_only] = parts, self._lowered(forward_only, parts)
        return self._made[forward_only][1]

    def _lowered(self, forward_only: bool, parts: Parts) -> RankProgram:
        context = self._context
        program = program_of(context.plan, forward_only, parts)
        check(program)
        return lower(posted_for(context.transport, program), context.boundaries, self._device, context.rank)

    def _pairs(self) -> list[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for devices in self._context.programs[False].shape.pipelines() or ():
            for owner, helper in itertools.permutations(devices, 2):
                found.update(self._context.boundaries.pairs(owner, helper))
        return sorted(found | {(helper, owner) for owner, helper in found})


def windows_of(args: Any) -> list[int | None]:
    """Number of earlier tokens that a query sees, for each layer with attention; None for all."""
    from megatron.core.transformer.utils import is_layer_window_attention

    size, numbers = getattr(args, "window_size", None), family_of(args).attention_numbers(args)
    if not size:
        return [None for _ in numbers]
    return [size[0] if is_layer_window_attention(size, args.window_attn_skip_freq, n) else None for n in numbers]


def open_feature(context: feature.OpenContext) -> feature.RuntimeFeature:
    """This rank's part of the feature."""
    plan, options, args = context.plan, context.options, context.args
    part_lengths, nominal = context.boundaries.part_lengths(), context.boundaries.tokens
    units = Units(options.units, part_lengths, nominal, context.batches.bounds)
    limited, keys_channels = None, context.channels
    pairs = exchange_edges(list(context.programs.values()), context.boundaries)
    if packing_argument(args) or getattr(args, "window_size", None) or not cutting_of(plan, args).is_even:
        limited = LimitedPrograms(context, units)
        pairs, keys_channels = limited.pairs, limited.channels
    exchange = ContextExchange(
        programs=context.lowered,
        units=units,
        rank=context.rank,
        layers=exchanged_layers(plan.attention_layers),
        keys_channels=keys_channels,
        channels=context.new_channels("queries and results", pairs, _PENDING_SENDS),
        timeline=context.timeline,
        device=context.platform.device,
        keep=options.keep,
        # A replica with fewer ranks gives attention to one of the ranks that share a slice, and all of them send alike.
        always="cp" in context.groups.by_role and len({r.cp for s in plan.stages for r in s.replicas}) > 1,
    )
    return ContextExchangeFeature(exchange, plan.training.sequences, args, context.platform.device, limited)
