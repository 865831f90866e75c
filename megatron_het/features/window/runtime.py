"""The parameter window as a feature of a rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_het.distributed.gradient_sums import class_exchange, tied_exchange
from megatron_het.families import family_of_config
from megatron_het.features import tied_copies
from megatron_het.features.window.shards import set_shares
from megatron_het.features.window.state import StageSums
from megatron_het.features.window.window import ParameterWindow
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan.placement import rank_shares
from megatron_het.runtime.feature import BackwardPass, Call, Handler, Iteration, OpenContext, RuntimeFeature
from megatron_het.schedule.kinds import Kind, executed_by


class WindowFeature(RuntimeFeature):
    """Opens, closes and updates ministages.

    Args:
        window: Does the work.
        shares: This rank's stage's shares of its state, None for equal ones.
    """

    roles = ("stage",)

    def __init__(self, window: ParameterWindow, shares: tuple[float, ...] | None) -> None:
        self.window, self._shares = window, shares

    def handlers(self) -> Mapping[Kind, Handler]:
        """See :class:`RuntimeFeature`."""
        return dict.fromkeys(executed_by("window"), lambda op, call, state: self.window.handle(op))

    def prepare_config(self, model_config: Any) -> None:
        """See :class:`RuntimeFeature`; the window finalises gradients itself."""
        model_config.transformer.finalize_model_grads_func = self.window.finalize
        model_config.post_wrap_hooks.append(functools.partial(set_shares, shares=self._shares))
        model_config.post_wrap_hooks.append(self.window.adopt)
        model_config.builder = family_of_config(model_config).window_builder

    def begin(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`; before training all parameters are whole."""
        if not call.forward_only:
            self.window.attach(call.models, call.optimizer)
        elif not self.window.is_attached:
            self.window.open_all()
        self.window.begin()

    def losses_known(self, call: Call, state: Iteration) -> None:
        """See :class:`RuntimeFeature`."""
        assert state.num_tokens is not None
        self.window.count_tokens(state.num_tokens)

    @contextlib.contextmanager
    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Iterator[None]:
        """See :class:`RuntimeFeature`."""
        self.window.before_backward(backward.op.chunk)
        yield

    def before_part(self, op: RankOp, state: Iteration) -> None:
        """See :class:`RuntimeFeature`; the rows of a split vocabulary are in the first and the last chunk."""
        self.window.before_part(op)

    def before_loading(self, models: Sequence[Any], optimizer: Any) -> None:
        """See :class:`RuntimeFeature`; from here on state is where it is between updates, one ministage at a time."""
        if optimizer is not None:
            self.window.attach(models, optimizer)

    def materialise(self) -> None:
        """See :class:`RuntimeFeature`."""
        self.window.open_all()

    def settle(self) -> None:
        """See :class:`RuntimeFeature`."""
        self.window.settle()

    def copies(self, parameters: Iterable[torch.Tensor]) -> Mapping[torch.Tensor, torch.Tensor]:
        """See :class:`RuntimeFeature`; one ministage is whole at a time."""
        return self.window.copies(parameters)

    def figures(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes and collectives in the latest iteration."""
        return {"window": self.window.use.as_json()}

    def kept(self) -> Mapping[str, Iterable[torch.Tensor]]:
        """Shards, besides what Megatron's buffers hold."""
        return self.window.shards()

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        self.window.close()


def open_feature(context: OpenContext) -> RuntimeFeature:
    """This rank's part of the feature."""
    counts_tokens = context.has_loss and context.placement.locate(context.rank).tp_rank == 0
    groups = context.groups
    tied = tied_exchange(groups) if tied_copies(context.plan) else None
    sums = StageSums(class_exchange(groups), tied)
    window = ParameterWindow(
        context.options, groups["tp"], groups["stage"], counts_tokens, sums, context.plan.loss_divisor
    )
    return WindowFeature(window, rank_shares(context.placement, context.rank))
