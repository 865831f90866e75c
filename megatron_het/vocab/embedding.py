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

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement
from megatron_het.report.timeline import Timeline
from megatron_het.runtime.batches import Batches
from megatron_het.runtime.channels import PendingReceive
from megatron_het.runtime.feature import Call, Handler, Iteration, OpenChannels
from megatron_het.schedule.ir import Kind
from megatron_het.vocab.layers import EmbeddingHolder, SplitEmbedding, VocabularyShard
from megatron_het.vocab.messages import PENDING_SENDS, arrived, position_of, positions, team

Slice = tuple[int, int]
"""(microbatch, slice)"""
_Arriving = list[tuple[torch.Tensor, PendingReceive]]


class EmbeddingTeam:
    """One rank's part in the embedding operations.

    Args:
        placement: The plan's lookup tables; all replicas have one TP size.
        rank: This rank.
        open_channels: Opens transfers of a purpose; collective.
        tp_group: This rank's TP group.
        timeline: Is told about waiting.
        batches: What forwards read.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        open_channels: OpenChannels,
        tp_group: dist.ProcessGroup,
        timeline: Timeline,
        batches: Batches,
    ) -> None:
        where = placement.locate(rank)
        self._placement, self._rank, self._where, self._tp_group = placement, rank, where, tp_group
        self._position = position_of(placement, where)
        self._timeline, self._batches = timeline, batches
        self._is_first = where.stage == 0
        # Tokens have groups of their own: they are sent earlier, relative to gradients, than received.
        self._tokens = open_channels("tokens", token_edges(placement), PENDING_SENDS)
        self._channels = open_channels("embeddings", part_edges(placement), PENDING_SENDS)
        self._layer: SplitEmbedding | None = None
        self._current: Slice = (-1, -1)
        self._parts: dict[Slice, _Arriving] = {}
        self._own: dict[Slice, torch.Tensor] = {}
        self._gradients: dict[Slice, torch.Tensor] = {}

    # -- the model -------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module) -> torch.nn.Parameter:
        """Give this rank its rows, in its first chunk (GPTModel, not wrapped); returns them."""
        config: Any = model.config
        shard = VocabularyShard.of(self._placement, self._rank, model.vocab_size)  # type: ignore[arg-type]
        reduces = bool(config.sequence_parallel and model.position_embedding_type != "learned_absolute")
        if self._is_first:
            reduces = model.embedding.reduce_scatter_embeddings  # type: ignore[union-attr, assignment]
        self._layer = SplitEmbedding(shard, config, reduces, self._tp_group)
        if self._is_first:
            self._layer.complete = self._complete
            model.embedding.word_embeddings = self._layer  # type: ignore[union-attr]
        else:
            model.embedding = EmbeddingHolder(config, self._layer)
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
            total = total + part
        return total

    # -- operations ------------------------------------------------------------------------------

    def handlers(self) -> dict[Kind, Handler]:
        """What the executor runs."""
        return {Kind.EMBED_FORWARD: self._forward, Kind.EMBED_BACKWARD: self._backward}

    def _forward(self, op: RankOp, call: Call, state: Iteration) -> None:
        key = op.microbatch, op.slice
        shape = self._part_shape(op, call)
        if self._is_first:
            self._send_tokens(op, call)
            self._parts[key] = [self._expect(peer, op, shape, call) for peer in self._helpers(op)]
            return
        tokens = torch.empty(self._token_shape(op, call), dtype=torch.int64, device=call.device)
        source = team(self._placement, op.microbatch, self._position - self._where.tp_rank)[0]
        pending = self._tokens.receive(tokens, source, op.label)
        (tokens,) = arrived([(tokens, pending)], self._timeline, self._tokens)
        assert self._layer is not None
        with torch.set_grad_enabled(not call.forward_only):
            part = self._layer(tokens)
        self._channels.send(part.detach(), self._first(op), op.label)
        if not call.forward_only:
            self._own[key] = part

    def _send_tokens(self, op: RankOp, call: Call) -> None:
        if self._where.tp_rank > 0:
            return
        tokens = self._batches.peek(op, call.data_iterators[0])["tokens"]
        tokens = tokens.to(device=call.device, dtype=torch.int64, non_blocking=True).contiguous()
        for tp_rank in range(self._tp_group.size()):
            for peer in team(self._placement, op.microbatch, self._position + tp_rank)[1:]:
                self._tokens.send(tokens, peer, op.label)

    def _backward(self, op: RankOp, call: Call, state: Iteration) -> None:
        key = op.microbatch, op.slice
        if self._is_first:
            gradient = self._gradients.pop(key)
            for peer in self._helpers(op):
                self._channels.send(gradient, peer, op.label)
            return
        arriving = [self._expect(self._first(op), op, self._part_shape(op, call), call)]
        (gradient,) = arrived(arriving, self._timeline, self._channels)
        torch.autograd.backward(self._own.pop(key), gradient)

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

    def _first(self, op: RankOp) -> int:
        return team(self._placement, op.microbatch, self._position)[0]

    def _helpers(self, op: RankOp) -> Sequence[int]:
        return team(self._placement, op.microbatch, self._position)[1:]

    def _token_shape(self, op: RankOp, call: Call) -> tuple[int, int]:
        length, batch, _ = call.shape(op.microbatch)
        assert self._layer is not None
        spread = self._layer.config.sequence_parallel
        return batch, length * self._tp_group.size() if spread else length

    def _part_shape(self, op: RankOp, call: Call) -> tuple[int, ...]:
        assert self._layer is not None
        if self._layer.reduce_scatter_embeddings:
            return call.shape(op.microbatch)
        return (*self._token_shape(op, call), call.hidden_size)

    def _expect(self, src: int, op: RankOp, shape: tuple[int, ...], call: Call) -> tuple[torch.Tensor, PendingReceive]:
        assert self._layer is not None
        buffer = torch.empty(shape, dtype=self._layer.weight.dtype, device=call.device)
        return buffer, self._channels.receive(buffer, src, op.label)


def token_edges(placement: Placement) -> list[tuple[int, int]]:
    """Directed pairs that tokens travel on, in an order that is the same on every rank."""
    found: set[tuple[int, int]] = set()
    for microbatch in range(placement.plan.num_microbatches):
        for position in positions(placement):
            # The first TP rank of those with the same part of the sequence reads them.
            source = team(placement, microbatch, position - position % placement.max_tp())[0]
            found.update((source, peer) for peer in team(placement, microbatch, position)[1:])
    return sorted(found)


def part_edges(placement: Placement) -> list[tuple[int, int]]:
    """Directed pairs that embeddings and their gradients travel on, likewise."""
    found: set[tuple[int, int]] = set()
    for microbatch in range(placement.plan.num_microbatches):
        for position in positions(placement):
            first, *helpers = team(placement, microbatch, position)
            found.update(edge for peer in helpers for edge in ((first, peer), (peer, first)))
    return sorted(found)
