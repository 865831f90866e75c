"""Word embeddings from rows that are split over all stages (SlimPipe, section 4.3.2).

Per slice:

==============  =========================================================================================
EMBED_FORWARD   the first stage sends the tokens; every other stage looks up the rows that it has and sends
                ``[s, b, h]`` back, zeros elsewhere; the FORWARD adds them up
EMBED_BACKWARD  the first stage sends the gradient of the embeddings; every other stage adds it to the rows
                that it has
==============  =========================================================================================

The tokens are read ahead of the FORWARD, by the first TP rank, as the training script will read them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_het.features.vocab_parallel.layers import (
    PENDING_SENDS,
    Arriving,
    EmbeddingHolder,
    SplitEmbedding,
    Team,
    VocabularyShard,
    arrived,
    edges,
    sides_of,
)
from megatron_het.lowering.boundary import pieces
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement
from megatron_het.report.timeline import Timeline
from megatron_het.runtime.data import Batches
from megatron_het.runtime.feature import Call, Handler, Iteration, OpenChannels
from megatron_het.schedule.ir import Kind

Slice = tuple[int, int]
"""(microbatch, slice)"""


class EmbeddingTeam:
    """One rank's part in the embedding operations.

    Args:
        placement: The plan's lookup tables.
        rank: This rank.
        open_channels: Opens transfers of a purpose; collective.
        tp_group: This rank's TP group.
        timeline: Is told about waiting.
        batches: What forwards read.
        tokens: Tokens of a slice.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        open_channels: OpenChannels,
        tp_group: dist.ProcessGroup,
        timeline: Timeline,
        batches: Batches,
        tokens: int,
    ) -> None:
        self._placement, self._rank, self._tp_group = placement, rank, tp_group
        self._team = Team(placement, rank, tokens, batches)
        self._timeline, self._batches = timeline, batches
        self._is_first = self._team.where.stage == 0
        # Tokens have groups of their own: they are sent earlier, relative to gradients, than received.
        self._tokens = open_channels("tokens", token_edges(placement, tokens), PENDING_SENDS)
        divided = placement.plan.training.sequence_parallel
        self._channels = open_channels("embeddings", edges(placement, 0, tokens, divided=divided), PENDING_SENDS)
        self._divided = False  # whether TP ranks of the model's first chunk take a part of the sequence each
        self._layer: SplitEmbedding | None = None
        self._current: Slice = (-1, -1)
        self._parts: dict[Slice, list[Arriving]] = {}
        self._own: dict[Slice, torch.Tensor] = {}
        self._gradients: dict[Slice, torch.Tensor] = {}

    # -- the model -------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module) -> torch.nn.Parameter:
        """Give this rank its rows, in its first chunk (GPTModel, not wrapped); returns them."""
        config: Any = model.config
        shard = VocabularyShard.of(self._placement, self._rank, model.vocab_size)  # type: ignore[arg-type]
        # As Megatron's embedding decides it; a replica of TP 1 has no parts, but others that it talks to may.
        learned = model.position_embedding_type == "learned_absolute"
        self._divided = self._placement.plan.training.sequence_parallel and not learned
        reduces = self._divided and bool(config.sequence_parallel)
        self._layer = SplitEmbedding(shard, config, reduces, self._tp_group)
        if self._is_first:
            self._layer.complete = self._complete
            model.embedding.word_embeddings = self._layer  # type: ignore[union-attr]
        else:
            model.embedding = EmbeddingHolder(config, self._layer)
            modules = model._modules  # in the order of the whole model: buffers of gradients are laid out by it
            for name in [name for name in modules if name != "embedding"]:
                modules[name] = modules.pop(name)
        return self._layer.weight

    def enter(self, op: RankOp) -> None:
        """A FORWARD of the first chunk begins."""
        self._current = op.microbatch, op.slice

    def _complete(self, own: torch.Tensor) -> torch.Tensor:
        """The embeddings of the current slice, from this stage's part of them."""
        key = self._current
        if own.requires_grad:
            own.register_hook(lambda gradient: self._gradients.__setitem__(key, gradient))
        total = own
        for part in arrived(self._parts.pop(key), self._timeline, self._channels):
            total = total + self._as_travels(part)
        return total

    def _as_travels(self, part: torch.Tensor) -> torch.Tensor:
        """From a part's layout to that of messages, and back.

        Messages are ``[s, b, h]``.  A part is ``[b, s, h]`` where TP ranks do not divide it.
        """
        assert self._layer is not None
        return part if self._layer.reduce_scatter_embeddings else part.transpose(0, 1).contiguous()

    # -- operations ------------------------------------------------------------------------------

    def handlers(self) -> dict[Kind, Handler]:
        """Returns what the executor runs."""
        return {Kind.EMBED_FORWARD: self._forward, Kind.EMBED_BACKWARD: self._backward}

    def _forward(self, op: RankOp, call: Call, state: Iteration) -> None:
        key = op.microbatch, op.slice
        if self._is_first:
            self._send_tokens(op, call)
            self._parts[key] = [self._expect(stage, op, call) for stage in self._team.others(0)]
            return
        buffer = torch.empty(self._token_shape(op, call), dtype=torch.int64, device=call.device)
        pending = self._team.expect(self._tokens, buffer, 0, op, by_first=True)
        (tokens,) = arrived([pending], self._timeline, self._tokens)
        assert self._layer is not None
        with torch.set_grad_enabled(not call.forward_only):
            part = self._layer(tokens.t().contiguous())
        self._send(part.detach(), 0, op)
        if not call.forward_only:
            self._own[key] = part

    def _send_tokens(self, op: RankOp, call: Call) -> None:
        if self._team.where.tp_rank > 0:
            return
        tokens = self._batches.peek(op, call.data_iterators[0])["tokens"]
        tokens = tokens.to(device=call.device, dtype=torch.int64, non_blocking=True).t().contiguous()
        for stage in self._team.others(0):
            self._team.send(self._tokens, tokens, stage, op, by_first=True)

    def _backward(self, op: RankOp, call: Call, state: Iteration) -> None:
        key = op.microbatch, op.slice
        if self._is_first:
            gradient = self._gradients.pop(key)
            for stage in self._team.others(0):
                self._send(gradient, stage, op)
            return
        (gradient,) = arrived([self._expect(0, op, call)], self._timeline, self._channels)
        torch.autograd.backward(self._own.pop(key), self._as_travels(gradient))

    def finish(self) -> None:
        """All operations of the iteration are done."""
        self._tokens.wait_sends()
        self._channels.wait_sends()
        left = [*self._parts, *self._own, *self._gradients]
        if left:
            raise RuntimeError(f"embedding operations are missing for (microbatch, slice) {sorted(set(left))}")

    def close(self) -> None:
        """Destroy the groups."""
        self._tokens.close()
        self._channels.close()

    # -- messages --------------------------------------------------------------------------------

    def _token_shape(self, op: RankOp, call: Call) -> tuple[int, int]:
        length, batch, _ = call.shape(op)
        assert self._layer is not None
        spread = self._layer.config.sequence_parallel
        return length * self._tp_group.size() if spread else length, batch

    def _send(self, part: torch.Tensor, stage: int, op: RankOp) -> None:
        part = self._as_travels(part)
        self._team.send(self._channels, part, stage, op, divided=self._divided)

    def _expect(self, stage: int, op: RankOp, call: Call) -> Arriving:
        """Post the receives of a part of the embeddings, or of its gradient, in the layout of messages."""
        assert self._layer is not None
        shape = call.shape(op) if self._divided else (*self._token_shape(op, call), call.hidden_size)
        buffer = torch.empty(shape, dtype=self._layer.weight.dtype, device=call.device)
        return self._team.expect(self._channels, buffer, stage, op, divided=self._divided)


def token_edges(placement: Placement, tokens: int) -> list[tuple[int, int]]:
    """Directed pairs that tokens travel on, in an order that is the same on every rank."""
    sides = {
        sides_of(placement, 0, other, microbatch, by_first=True)  # the first TP ranks read them
        for microbatch in range(placement.plan.num_microbatches)
        for other in range(1, placement.num_stages)
    }
    return sorted({(piece.src, piece.dst) for pair in sides for piece in pieces(*pair, tokens)})
