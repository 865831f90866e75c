"""Multi-token prediction as a feature of a rank.

Megatron builds the layers, with a copy of the embedding, by the plan's layout, and scales their loss by the
tokens of a microbatch, so that gradients are sums over microbatches, like all others.  This module handles the log, a
table that Megatron holds twice on the last stage, and passes that run parts of sequences or have packed documents
without a mask.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import (
    MTPLossAutoScaler,
    MTPLossLoggingHelper,
    _compute_mtp_acceptance_counts,
)

from megatron_het.distributed import PlanGroups, loss_source
from megatron_het.features.documents.spec import PACKING
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement
from megatron_het.runtime.data import Batches
from megatron_het.runtime.feature import Call, ForwardPass, Iteration, OpenContext, RuntimeFeature

# The tokens after the next one, for passes that run parts of sequences.
#
# Megatron shifts the tokens of a pass one position to the left, so that the last position has none.  In a slice, or a
# context-parallel rank's part, one token would be missing at the end of every part.  Here whole sequences are
# shifted before they are divided: the reading rank has all their tokens, and broadcasts them in its TP group.

_WHOLE = ("tokens", "position_ids", "labels")


@dataclass(frozen=True, slots=True)
class LaterTokens:
    """Inputs and labels of a pass's layers for later tokens; the first index is the layer."""

    # tokens, positions: ``[layers, b, s]``: inputs of each layer's embedding
    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor  # ``[layers, b, s]``: tokens to predict
    masks: torch.Tensor  # ``[layers, b, s]``: 1 where a prediction counts
    # ``[1 + layers]``: tokens of the whole microbatch that count for the model's loss, then for each layer's loss
    counts: torch.Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any], layers: int, *, are_packed: bool) -> "LaterTokens":
        """Makes them for whole sequences.

        Args:
            batch: ``tokens``, ``position_ids``, ``labels`` and ``loss_mask``, all ``[b, s]``.
            layers: Number of tokens after the next one that are predicted.
            are_packed: Whether predictions end with a document, where the next position is 0; else they continue
                into the next document.
        """
        begins = batch["position_ids"] == 0 if are_packed else torch.zeros_like(batch["tokens"], dtype=torch.bool)
        ends = begins.roll(-1, dims=1)
        ends[:, -1] = True
        whole, mask = torch.stack([batch[name] for name in _WHOLE]), batch["loss_mask"].float()
        moved, masks = [], [mask]
        for _ in range(layers):
            whole, mask = (tensor.roll(-1, dims=-1).masked_fill(ends, 0) for tensor in (whole, mask))
            moved.append(whole)
            masks.append(mask)
        tokens, positions, labels = torch.stack(moved, dim=1)
        return cls(tokens, positions, labels, torch.stack(masks[1:]), torch.stack([mask.sum() for mask in masks]))

    def part(self, take: Callable[[torch.Tensor], torch.Tensor]) -> "LaterTokens":
        """Takes a part of the sequences; ``take`` returns the part of a tensor ``[..., s]``."""
        tokens, positions, labels, masks = map(take, (self.tokens, self.positions, self.labels, self.masks))
        return LaterTokens(tokens, positions, labels, masks, self.counts)


def told(
    own: LaterTokens | None, shape: tuple[int, int, int], group: dist.ProcessGroup, device: torch.device
) -> LaterTokens:
    """Broadcasts from the first rank of a TP group.  Collective.

    Args:
        own: The value on the first rank.
        shape: ``[layers, b, s]``.
    """
    if group.size() == 1:
        assert own is not None
        return own
    if own is None:
        whole = torch.empty((len(_WHOLE), *shape), dtype=torch.int64, device=device)
        weights = torch.empty(shape[0] * shape[1] * shape[2] + 1 + shape[0], device=device)
    else:
        whole = torch.stack((own.tokens, own.positions, own.labels))
        weights = torch.cat((own.masks.flatten(), own.counts))
    source = dist.get_global_rank(group, 0)
    dist.broadcast(whole, source, group=group)
    dist.broadcast(weights, source, group=group)
    masks, counts = weights.split((weights.numel() - 1 - shape[0], 1 + shape[0]))
    tokens, positions, labels = whole
    return LaterTokens(tokens, positions, labels, masks.view(shape), counts)


# Multi-token prediction in passes that run parts of sequences.
#
# Megatron's own layers run, on tokens that may be beyond the end of the part.  Their losses are computed here,
# because Megatron divides them by the counted tokens of a pass, but a part has to be weighted by its share of the
# microbatch.


class PartialPasses:
    """Hooks of the chunk that predicts later tokens."""

    def __init__(self) -> None:
        self.later: LaterTokens | None = None
        """Inputs and labels of the running pass."""
        self._depth = 0

    def attach(self, model: Any) -> None:
        """Add hooks to the chunk (GPTModel without wrappers), after the hooks that select the part."""
        for layer in model.mtp.layers:  # several layers in sequence, or one that runs several times
            layer.register_forward_pre_hook(self._embed, with_kwargs=True)
        model.register_forward_pre_hook(self._end_before_losses, with_kwargs=True)
        model.register_forward_hook(self._end_in_losses, with_kwargs=True)

    def _end_before_losses(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the chunk's forward return the hidden states of its last layer and of every layer for later tokens."""
        model.post_process = False
        self._depth = 0

    def _embed(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make a layer embed its prepared tokens instead of shifting those of the pass."""
        assert self.later is not None
        tokens, positions = self.later.tokens[self._depth], self.later.positions[self._depth]
        embedding, run = kwargs["embedding"], self._depth if layer.config.mtp_use_repeated_layer else 0
        self._depth += 1

        def embed(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return embedding(input_ids=tokens, position_ids=positions)

        # Without parameters of packed sequences the layer shifts nothing.
        params = replace(kwargs["packed_seq_params"], cu_seqlens_q=(), run=run)
        return args, {**kwargs, "embedding": embed, "packed_seq_params": params}

    def _end_in_losses(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Token losses ``[b, s]`` from the concatenated hidden states that the chunk returns."""
        model.post_process = True
        labels = kwargs.get("labels")
        if labels is None or self.later is None:
            raise RuntimeError(
                "the training script gave the model no labels, which multi-token prediction needs where sequences are "
                "cut or have several documents"
            )
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        hidden = add_later_losses(model, hidden, self.later, weight)
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=kwargs.get("runtime_gather_output"))
        return model.compute_language_model_loss(labels, model._scale_logits(logits))


def add_later_losses(model: Any, hidden: torch.Tensor, later: LaterTokens, weight: torch.Tensor | None) -> torch.Tensor:
    """Attaches the losses of later tokens to the hidden states of the last layer; returns these.

    Args:
        model: The chunk.
        hidden: ``[(1 + layers) s, b, h]``.
        weight: Weight for an output layer without one of its own.
    """
    config, layers = model.config, len(later.tokens)
    if config.mtp_detach_heads:
        weight = (model.output_layer.weight if weight is None else weight).detach()
    last, *states = hidden.chunk(1 + layers)
    for depth, state in enumerate(states):
        logits = model._scale_logits(model.output_layer(state, weight=weight)[0])
        losses = later.masks[depth] * model.compute_language_model_loss(later.labels[depth], logits)
        count = later.counts[depth + 1].clamp(min=1)
        if model.training:
            right, total = _compute_mtp_acceptance_counts(
                logits, later.labels[depth], later.masks[depth], model.output_layer, None, model.tp_group
            )
            MTPLossLoggingHelper.save_metrics_to_tracker(losses.sum() / count, right, total, depth, layers)
        # All gradients are later divided by the number of tokens in the model's loss.
        scale = config.mtp_loss_scaling_factor / layers * later.counts[0] / count
        last = MTPLossAutoScaler.apply(last, scale * losses)
    return last


_COUNTED = ("loss_values", "correct_values", "total_values")
_GROUPS = ("reduce_group", "avg_group")


class MultiTokenPrediction(RuntimeFeature):
    """Logged losses equal to those of a single process, and one table of embeddings where Megatron has two.

    Megatron takes means over equal replicas.  Here replicas have different numbers of microbatches, so the records of
    all replicas are summed, and Megatron divides by the number of microbatches of the batch.

    Args:
        layers: Number of tokens after the next one that are predicted.
    """

    roles: tuple[str, ...] = ("stage", "loss")

    def __init__(self, layers: int, placement: Placement, groups: PlanGroups) -> None:
        self._layers, self._placement, self._groups = layers, placement, groups
        where = placement.locate(groups.rank)
        self._has_loss = where.stage == placement.last[0]
        self._counts = where.tp_rank == 0
        self._tracker: dict[str, Any] = MTPLossLoggingHelper.tracker

    def attach(self, models: Sequence[torch.nn.Module]) -> None:
        """With tied embeddings, make the output layer use the copy of the embedding instead of its own table."""
        for model in models:
            chunk: Any = model
            if chunk.mtp_process and chunk.share_embeddings_and_output_weights and not chunk.pre_process:
                chunk.output_layer.weight = None

    def finish(self, call: Call, state: Iteration) -> None:
        """Sum the records of all ranks, and send the sum to the ranks that log it."""
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
        self._tracker.clear()  # a later session may have other layers


class LaterTokensOfParts(MultiTokenPrediction):
    """Multi-token prediction for passes that run parts of sequences, or have packed documents without a mask.

    Args:
        layers: Number of tokens after the next one that are predicted.
        sequences: Reads batches and divides them.
        are_packed: Whether predictions end with a document, as in Megatron.
    """

    roles = ("stage", "loss", "tp")

    def __init__(
        self, layers: int, placement: Placement, groups: PlanGroups, sequences: Batches, *, are_packed: bool
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
        """Broadcasts the inputs and labels of the layers to all TP ranks, around a forward."""
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
        """Returns the tokens of the operation's pass; the whole sequences are kept until their last part."""
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
    if not context.batches.cuts:
        return MultiTokenPrediction(*given)
    are_packed = any(getattr(context.args, name, False) for name in PACKING)
    return LaterTokensOfParts(*given, context.batches, are_packed=are_packed)
