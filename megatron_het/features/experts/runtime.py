"""Mixture of experts as a feature of a rank: balancing losses and their log, over all slices and ranks."""

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_het.distributed.gradient_sums import GradientFinalizer
from megatron_het.features.experts.spec import GLOBAL, SINKHORN, balancing_of
from megatron_het.features.registry import extra_layers
from megatron_het.lowering.ranks import RankOp, expert_name
from megatron_het.plan import Cut
from megatron_het.runtime.feature import Around, BackwardPass, Call, ForwardPass, Iteration, OpenContext, RuntimeFeature

# Losses that balance experts, exact even if a pass has only a part of the sequences.
#
# The loss of a layer and microbatch is ``E c / (k T^2) * sum_e f_e p_e``: E experts, coefficient c, k experts per
# token, T tokens, f_e how many tokens chose expert e, and p_e the sum of the scores that tokens give it (Switch
# Transformer, 2101.03961, section 2.2).  It is a product of two sums over all tokens, so the losses of slices do not
# add up to it.
#
# The f_e have no gradient, and a token's score has the gradient ``E c / (k T^2) f_e``.  In SlimPipe all slices of a
# microbatch have run forward before its first backward begins (section 4.1 of 2504.14519).  So forward passes only
# count, the last one adds the counts of the replica's other ranks, and every backward pass uses the complete f_e.


_MEAN_OF_MICROBATCH, _MEAN_OF_SEQUENCE, _MEAN_OF_BATCH = "aux_loss", "seq_aux_loss", "global_aux_loss"
_LOGGED = {
    _MEAN_OF_MICROBATCH: "load_balancing_loss",
    _MEAN_OF_SEQUENCE: "seq_load_balancing_loss",
    _MEAN_OF_BATCH: "global_load_balancing_loss",
}
"""The losses of this kind: Megatron's names for their flags and in its log."""


@dataclass(slots=True)
class Passes:
    """The pass that runs on this rank, and the ranks with the other parts of its microbatch.

    The backward of a CUDA graph of operations runs on another thread, so this is no thread-local.
    """

    slices: int  # slices per sequence
    groups: Sequence[dist.ProcessGroup] = ()  # groups over which counts are summed one after the other: TP, then CP
    current: tuple[int, int] | None = None  # (microbatch, slice) of the running pass of training; None outside
    # (tokens of its slice if all ranks had as many as this one, tokens of a sequence); (0, 0) if slices and the
    # ranks' parts of them are equal
    part: tuple[int, int] = (0, 0)

    @property
    def ranks(self) -> int:
        """Number of ranks that have a part of every pass."""
        return math.prod(group.size() for group in self.groups)

    @property
    def parts(self) -> int:
        """Number of parts of a microbatch: slices x ranks."""
        return self.slices * self.ranks

    @property
    def weight(self) -> float:
        """Length of this rank's part of the running slice, relative to the mean."""
        tokens, of = self.part
        return tokens * self.slices / of if of else 1.0

    def whole(self, rows: int) -> int:
        """Rows of the whole microbatch, from this rank's rows of the running pass."""
        tokens, of = self.part
        return rows * self.ranks * of // tokens if of else rows * self.parts


@dataclass(slots=True, eq=False)
class Sums:
    """Sums over the tokens of one microbatch for the experts of one layer."""

    chosen: Tensor  # ``[e]``: tokens by expert, of the slices so far; for a loss per sequence ``[b * e]``
    scores: Tensor  # of the same shape, the sum of their scores on this rank
    slices: set[int] = field(default_factory=set)
    # ``[e]`` or ``[b * e]``: the gradient of a score is proportional to it; set when all slices are counted
    whole: Tensor | None = None


class _WithLoss(torch.autograd.Function):
    """Identity of the probabilities; the backward adds the gradient of a balancing loss to the scores."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, scores: Tensor, sums: Sums, factor: float) -> Tensor:
        ctx.sums, ctx.factor, ctx.like = sums, factor, (scores.shape, scores.dtype)
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        whole: Tensor | None = ctx.sums.whole
        if whole is None:
            raise RuntimeError(
                f"slices {sorted(ctx.sums.slices)} of a microbatch have been counted, and a backward pass needs all: "
                "the schedule runs a backward before the last forward of its microbatch"
            )
        shape, dtype = ctx.like
        scale: Any = MoEAuxLossAutoScaler.main_loss_backward_scale
        gradient = whole * (ctx.factor if scale is None else scale * ctx.factor)
        return grad, gradient.to(dtype).expand(shape), None, None


@contextlib.contextmanager
def _counted(times: float) -> Iterator[None]:
    """Context that multiplies values recorded for Megatron's log in it by ``times``."""
    metrics = get_moe_metrics_tracker().metrics if times != 1 else {}
    before = {name: entry.values.clone() for name, entry in metrics.items()}
    yield
    for name, entry in metrics.items():
        old = before.get(name, 0)
        entry.values.sub_(old).mul_(times).add_(old)  # in place: a captured layer adds to this tensor


class BalancedRouter(TopKRouter):
    """Megatron's router with balancing losses of whole microbatches; see the comment above.

    Routers become one by :func:`balance_whole_microbatches`.
    """

    passes: Passes
    sums: dict[tuple[str, int], Sums]

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Megatron.  A pass that will be recomputed is counted, too: its recomputation comes too late."""
        counts = self.training and not torch.is_grad_enabled() and self.passes.current is not None
        if counts and self.is_aux_loss_enabled():
            seq_length, sequences = logits.shape[:2]
            chosen, scores = compute_routing_scores_for_aux_loss(
                logits.view(-1, self.config.num_moe_experts),
                self.topk,
                self.score_function,
                fused=self.config.moe_router_fusion,
            )
            for kind in _LOGGED:
                if self.get_aux_loss_coeff(kind):
                    rows = seq_length if kind == _MEAN_OF_SEQUENCE else seq_length * sequences
                    self._count(kind, scores.reshape(rows, -1), chosen.reshape(rows, -1))
        return super().routing(logits, padding_mask)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """See Megatron, whose log has the mean over passes: here each is weighted by its length."""
        with _counted(self.passes.weight):
            return super().apply_z_loss(logits, padding_mask)

    def sinkhorn_load_balancing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See Megatron, which normalises over the tokens of one TP rank; here over those of all TP ranks."""
        group = self.passes.groups[0]
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(parts, logits.detach().contiguous(), group=group)
        parts[group.rank()] = logits
        scores, routing_map = super().sinkhorn_load_balancing(torch.cat(parts))
        return scores.chunk(len(parts))[group.rank()], routing_map.chunk(len(parts))[group.rank()]

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores: Tensor, routing_map: Tensor, seq_length: int, bsz: int, **padding: bool
    ) -> Tensor:
        scores, routing_map = scores.reshape(seq_length, -1), routing_map.reshape(seq_length, -1)
        return self._with_loss(_MEAN_OF_SEQUENCE, probs, scores, routing_map, **padding)

    def _with_loss(
        self, kind: str, probs: Tensor, scores: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """The routing probabilities with a loss attached; ``scores`` is ``[t, e]``, or ``[s, b * e]`` per sequence."""
        if not self.get_aux_loss_coeff(kind):
            return probs
        if with_padding_mask:
            raise RuntimeError(f"{kind}: tokens that are padding cannot be left out of whole microbatches")
        sums = self._count(kind, scores, routing_map)
        # Gradients are divided by the tokens of the batch at the end of an iteration; Megatron compensates like this.
        tokens = self.passes.whole(probs.shape[0]) if self.calculate_per_token_loss else 1
        return _WithLoss.apply(probs, scores, sums, self._factor(kind, scores) * tokens)

    _apply_aux_loss = functools.partialmethod(_with_loss, _MEAN_OF_MICROBATCH)
    _apply_global_aux_loss = functools.partialmethod(_with_loss, _MEAN_OF_BATCH)

    def _factor(self, kind: str, scores: Tensor) -> float:
        """Returns the factor of the product of the two sums: ``E c / (k T^2)``."""
        experts, tokens = self.config.num_moe_experts, self.passes.whole(scores.shape[0])
        sequences = scores.shape[1] // experts  # 1 except for a loss per sequence, which is their mean
        return experts * self.get_aux_loss_coeff(kind) / (self.topk * tokens * tokens * sequences)

    @torch.no_grad()
    def _count(self, kind: str, scores: Tensor, routing_map: Tensor) -> Sums:
        """The sums of the pass's microbatch including this pass; a recomputed pass is already included."""
        if self.passes.current is None:
            raise RuntimeError("a layer of experts runs outside of the schedule, which balances whole microbatches")
        microbatch, index = self.passes.current
        sums = self.sums.get((kind, microbatch))
        if sums is None:
            sums = Sums(torch.zeros_like(routing_map[0], dtype=torch.float32), torch.zeros_like(scores[0]))
            self.sums[kind, microbatch] = sums
        if index in sums.slices:
            return sums
        sums.slices.add(index)
        sums.chosen += routing_map.sum(dim=0)
        sums.scores += scores.sum(dim=0)
        if len(sums.slices) == self.passes.slices:
            self._complete(kind, sums, self._factor(kind, scores) / self.get_aux_loss_coeff(kind))
        return sums

    def _complete(self, kind: str, sums: Sums, factor: float) -> None:
        """After the last slice: add the other ranks' counts, and log this rank's share of the loss."""
        whole = sums.chosen
        for group in self.passes.groups:
            dist.all_reduce(whole, group=group)
        if kind == _MEAN_OF_BATCH:  # the mean over the microbatches so far
            self.global_tokens_per_expert += whole
            self.ga_steps += 1
            whole = self.global_tokens_per_expert / self.ga_steps
        sums.whole = whole
        number: int | None = self.layer_number
        if number is not None and self.is_mtp_layer:  # in the log they come after all others
            number += int(self.config.num_layers)
        get_moe_metrics_tracker().record(
            _LOGGED[kind],
            (sums.scores * whole).sum() * factor,
            number,
            layers_in_log(self.config),
            reduce_group=self.tp_cp_group,
            needs_dp_avg=kind != _MEAN_OF_BATCH,
        )


def layers_in_log(config: Any) -> int:
    """Returns the number of layers in Megatron's log, including those for multi-token prediction."""
    return int(config.num_layers + extra_layers(config))


def balance_whole_microbatches(models: Sequence[torch.nn.Module], passes: Passes) -> list[BalancedRouter]:
    """Make the routers of model chunks balance whole microbatches; returns them.

    Args:
        models: GPTModels without wrappers.

    Raises:
        ValueError: A router is not Megatron's own.
    """
    found = []
    for module in (module for model in models for module in model.modules()):
        if not isinstance(module, TopKRouter):
            continue
        if type(module) is not TopKRouter:
            raise ValueError(f"{type(module).__name__}: only Megatron's TopKRouter balances whole microbatches")
        module.__class__ = BalancedRouter
        assert isinstance(module, BalancedRouter)
        module.passes, module.sums = passes, {}
        found.append(module)
    return found


def share_loss_scale(parts: Sequence[Any]) -> None:
    """In fp16 make all optimizers of a rank skip together, and divide gradients by the scale of the losses.

    Megatron scales losses by the first optimizer's scaler, and gives each a scaler that sees only its own overflows.
    """
    shared = getattr(parts[0], "grad_scaler", None) if len(parts) > 1 else None
    if shared is None or parts[1].grad_scaler is shared:
        return
    update, found = shared.update, list[bool]()

    def update_once(overflow: bool) -> None:
        found.append(overflow)
        if len(found) == len(parts):
            update(any(found))
            found.clear()

    shared.update = update_once
    for part in parts:
        part.grad_scaler = shared


class Experts(RuntimeFeature):
    """Sizes of this rank's experts, and logged balancing losses equal to those of a single process.

    Megatron sums losses over a pipeline group and takes means over equal replicas.  Here stages have different numbers
    of ranks, and replicas different numbers of microbatches.  So the records of all ranks are summed, each layer's on
    the ranks that have it, and Megatron divides by the number of microbatches of the batch.

    Args:
        passes: The running pass, and the parts of a microbatch.
        layers: Number of layers in the log.
        whole: Whether balancing losses are computed over several passes or ranks.
        batches_of: For each microbatch, as how many microbatches Megatron counts it.
    """

    def __init__(self, cut: Cut, passes: Passes, layers: int, *, whole: bool, batches_of: Sequence[int]) -> None:
        self._cut, self._passes, self._layers, self._whole = cut, passes, layers, whole
        self._batches_of = batches_of
        self._routers: list[BalancedRouter] = []
        self._tracker: Any = get_moe_metrics_tracker()
        self._tracker._sync_metrics = self._sync

    def prepare_config(self, model_config: Any) -> None:
        """Set this rank's sizes, which layers of experts read."""
        model_config.transformer.expert_model_parallel_size = self._cut.ep
        model_config.transformer.expert_tensor_parallel_size = self._cut.expert_tp

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """Keep gradients and state of experts with those of the other weights, if both have the same replicas.

        Megatron gives divided experts buffers and an optimizer of their own, for replicas of their own.  That is right
        only if expert groups are no TP groups.
        """
        for model in models:
            for name, parameter in model.named_parameters():
                if expert_name(name) is not None:
                    parameter.allreduce = self._cut.divides_alike  # type: ignore[attr-defined]
        if self._whole:
            self._routers += balance_whole_microbatches(models, self._passes)

    def begin(self, call: Call, state: Iteration) -> None:
        """In fp16, treat an overflow of the experts as one of all weights."""
        share_loss_scale(getattr(call.optimizer, "chained_optimizers", ()))

    def around_forward(self, forward: ForwardPass, call: Call) -> Around:
        """Tells routers the pass that runs."""
        return contextlib.nullcontext() if call.forward_only else self._running(forward.op, call)

    def around_backward(self, backward: BackwardPass, call: Call, state: Iteration) -> Around:
        """Tells routers the pass of a recomputation."""
        return self._running(backward.op, call)

    @contextlib.contextmanager
    def _running(self, op: RankOp, call: Call) -> Iterator[None]:
        self._passes.current, self._passes.part = (op.microbatch, op.slice), call.batches.part(op)
        try:
            with _counted(self._batches_of[op.microbatch]):
                yield
        finally:
            self._passes.current = None

    def _sync(self, metric_names: Sequence[str], pg_collection: Any = None) -> None:
        """Replaces the tracker's own method."""
        for name in metric_names:
            entry = self._tracker.metrics.get(name)
            if entry is None:
                continue
            if entry.values.numel() < self._layers:
                # A hybrid model's log is as long as its number of experts' layers on a rank without one.
                entry.values = entry.values.new_zeros(self._layers)
            values: Tensor = entry.values
            if entry.avg_group is not None:  # a mean over the tokens of every pass and rank, not a share of a sum
                values /= self._passes.parts
            dist.all_reduce(values)

    def finish(self, call: Call, state: Iteration) -> None:
        """Update the biases of the experts, unless Megatron's own ``finalize_model_grads`` does it."""
        for router in self._routers:
            router.sums.clear()
        if call.forward_only or isinstance(call.config.finalize_model_grads_func, GradientFinalizer):
            return
        # its package shows a function of the same name
        upstream = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        if call.config.moe_router_enable_expert_bias:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            upstream._update_router_expert_bias(call.models, call.config, tp_dp_cp_group=group)
        upstream.reset_model_temporary_tensors(call.config, call.models)

    def close(self) -> None:
        vars(self._tracker).pop("_sync_metrics", None)
        self._tracker.metrics.clear()  # a later session may have other layers


def open_feature(context: OpenContext) -> RuntimeFeature:
    """The feature on this rank."""
    where = context.placement.locate(context.rank)
    replica = context.placement.replica(where.stage, where.replica)
    slices = context.programs[False].shape.slices
    sizes = {"tp": replica.tp, "cp": replica.cp}
    groups = [context.groups[role] for role, size in sizes.items() if size > 1]
    balancing = balancing_of(context.args)
    whole = slices > 1 or replica.cp > 1 or GLOBAL in balancing or (SINKHORN in balancing and replica.tp > 1)
    batches_of = context.plan.training.batches_of_microbatches
    return Experts(replica.cut, Passes(slices, groups), layers_in_log(context.args), whole=whole, batches_of=batches_of)
