"""Mixture of experts as a feature of a rank: what Megatron's layers report, summed over a plan's ranks."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_het.distributed.gradient_sums import GradientFinalizer
from megatron_het.features.experts.spec import GLOBAL, balancing_of
from megatron_het.lowering.ranks import RankOp, expert_name
from megatron_het.plan import Cut
from megatron_het.runtime.feature import BackwardPass, Call, ForwardPass, Iteration, OpenContext, RuntimeFeature

if TYPE_CHECKING:
    from megatron_het.features.experts.balancing import BalancedRouter, Passes

_SYNC = "_sync_metrics"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"


class Experts(RuntimeFeature):
    """Sizes of this rank's experts, and balancing losses in the log that are those of one process.

    Megatron sums losses over a pipeline group and takes means over equal replicas.  Here stages have different numbers
    of ranks, and replicas different numbers of microbatches: what all ranks have recorded is summed, each layer's on
    the ranks that have it, and Megatron divides by the number of microbatches of the batch.

    Args:
        cut: How this rank's replica cuts weights.
        passes: Which pass runs, and into how many a microbatch is divided.
        layers: That the log has a place for.
        whole: Whether balancing losses have to be put together from several passes or ranks.
    """

    def __init__(self, cut: Cut, passes: Passes, layers: int, *, whole: bool) -> None:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        self._cut, self._passes, self._layers, self._whole = cut, passes, layers, whole
        self._routers: list[BalancedRouter] = []
        self._tracker: Any = get_moe_metrics_tracker()
        setattr(self._tracker, _SYNC, self._sync)

    def prepare_config(self, model_config: Any) -> None:
        """Layers of experts read the sizes here."""
        model_config.transformer.expert_model_parallel_size = self._cut.ep
        model_config.transformer.expert_tensor_parallel_size = self._cut.expert_tp

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Keep gradients and state of the experts with those of all other weights, where these have the same copies.

        Megatron gives divided experts buffers and an optimizer of their own, for copies of theirs.  That is right where
        expert groups are no TP groups.
        """
        for model in models:
            for name, parameter in model.named_parameters():
                if expert_name(name) is not None:
                    parameter.allreduce = self._cut.divides_alike  # type: ignore[attr-defined]
        if self._whole:
            from megatron_het.features.experts.balancing import balance_whole_microbatches

            self._routers += balance_whole_microbatches(models, self._passes)

    def around_forward(self, forward: ForwardPass, call: Call) -> contextlib.AbstractContextManager[None]:
        """Routers know the pass that runs."""
        return contextlib.nullcontext() if call.forward_only else self._running(forward.op, call)

    def around_backward(
        self, backward: BackwardPass, call: Call, state: Iteration
    ) -> contextlib.AbstractContextManager[None]:
        """Tells routers the pass of a recomputation."""
        return self._running(backward.op, call)

    @contextlib.contextmanager
    def _running(self, op: RankOp, call: Call) -> Iterator[None]:
        self._passes.current, self._passes.part = (op.microbatch, op.slice), call.batches.part(op)
        try:
            yield
        finally:
            self._passes.current = None

    def _sync(self, metric_names: Sequence[str], pg_collection: Any = None) -> None:
        """In place of the tracker's own."""
        del pg_collection
        for name in metric_names:
            entry = self._tracker.metrics.get(name)
            if entry is None:
                continue
            if entry.values.numel() < self._layers:
                # A hybrid model's log is as long as its number of experts' layers on a rank without one.
                entry.values = entry.values.new_zeros(self._layers)
            values: torch.Tensor = entry.values
            if entry.avg_group is not None:  # a mean over the tokens of every pass and rank, not a share of a sum
                values /= self._passes.parts
            dist.all_reduce(values)

    def finish(self, call: Call, state: Iteration) -> None:
        """Move the biases of the experts, unless Megatron's own function does it, with which gradients end."""
        for router in self._routers:
            router.sums.clear()
        if call.forward_only or isinstance(call.config.finalize_model_grads_func, GradientFinalizer):
            return
        from megatron.core import parallel_state

        upstream = importlib.import_module(_FINALIZE)  # its package shows a function of the same name
        if call.config.moe_router_enable_expert_bias:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            upstream._update_router_expert_bias(call.models, call.config, tp_dp_cp_group=group)
        upstream.reset_model_temporary_tensors(call.config, call.models)

    def close(self) -> None:
        """See :class:`RuntimeFeature`."""
        vars(self._tracker).pop(_SYNC, None)
        self._tracker.metrics.clear()  # a later session may have other layers


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    from megatron_het.features.experts.balancing import Passes, layers_in_log

    where = context.placement.locate(context.rank)
    replica = context.placement.replica(where.stage, where.replica)
    slices = context.programs[False].shape.slices
    sizes = {"tp": replica.tp, "cp": replica.cp}
    groups = [context.groups[role] for role, size in sizes.items() if size > 1]
    whole = slices > 1 or replica.cp > 1 or GLOBAL in balancing_of(context.args)
    return Experts(replica.cut, Passes(slices, groups), layers_in_log(context.args), whole=whole)
