"""Multi-token prediction in passes that run parts of sequences.

Megatron's own layers run, on tokens that come from beyond the end of the part.  Their losses are computed here, because
Megatron divides them by the tokens that count in a pass, and a part is to count for what it is of its microbatch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_het.features.mtp.later import LaterTokens


class PartialPasses:
    """Hooks of the chunk that predicts later tokens."""

    def __init__(self) -> None:
        self.later: LaterTokens | None = None
        """Of the pass that runs."""
        self._depth = 0

    def attach(self, model: Any) -> None:
        """Hook into the chunk (GPTModel, not wrapped), after the hooks that say which part runs."""
        for layer in model.mtp.layers:  # one after the other; or one of them, several times
            layer.register_forward_pre_hook(self._embed, with_kwargs=True)
        model.register_forward_pre_hook(self._end_before_losses, with_kwargs=True)
        model.register_forward_hook(self._end_in_losses, with_kwargs=True)

    def _end_before_losses(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The chunk's forward gives the hidden states of its last layer and of every layer for later tokens."""
        model.post_process = False
        self._depth = 0

    def _embed(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer embeds the tokens that are known for it, whatever it makes of those of the pass."""
        assert self.later is not None
        tokens, positions = self.later.tokens[self._depth], self.later.positions[self._depth]
        embedding, run = kwargs["embedding"], self._depth if layer.config.mtp_use_repeated_layer else 0
        self._depth += 1

        def embed(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            del input_ids, position_ids
            return embedding(input_ids=tokens, position_ids=positions)

        # Without documents in the pass that it knows of, the layer moves nothing.
        params = replace(kwargs["packed_seq_params"], cu_seqlens_q=(), run=run)
        return args, {**kwargs, "embedding": embed, "packed_seq_params": params}

    def _end_in_losses(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Token losses ``[b, s]`` of the hidden states that the chunk ends with, one above the other."""
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
    """The hidden states of the last layer, whose gradient will bring about those of the losses of later tokens.

    Args:
        model: The chunk.
        hidden: ``[(1 + layers) s, b, h]``.
        later: Of the pass.
        weight: Of the output layer where it has none of its own.
    """
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    config, layers = model.config, len(later.tokens)
    if config.mtp_detach_heads:
        weight = (model.output_layer.weight if weight is None else weight).detach()
    last, *states = hidden.chunk(1 + layers)
    for depth, state in enumerate(states):
        logits = model._scale_logits(model.output_layer(state, weight=weight)[0])
        losses = later.masks[depth] * model.compute_language_model_loss(later.labels[depth], logits)
        count = later.counts[depth + 1].clamp(min=1)
        if model.training:
            _record(model, losses.sum() / count, logits, later, depth)
        # All gradients are divided by the tokens that count in the loss of the model.
        scale = config.mtp_loss_scaling_factor / layers * later.counts[0] / count
        last = MTPLossAutoScaler.apply(last, scale * losses)
    return last


def _record(model: Any, loss: torch.Tensor, logits: torch.Tensor, later: LaterTokens, depth: int) -> None:
    """What Megatron logs: the part's share of a microbatch's loss, and how many predictions were right."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, _compute_mtp_acceptance_counts

    right, total = _compute_mtp_acceptance_counts(
        logits, later.labels[depth], later.masks[depth], model.output_layer, None, model.tp_group
    )
    MTPLossLoggingHelper.save_metrics_to_tracker(loss, right, total, depth, len(later.tokens))
