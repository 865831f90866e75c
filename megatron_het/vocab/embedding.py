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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_het.plan import Placement
from megatron_het.runtime.channels import Channels, PendingReceive
from megatron_het.runtime.lowering import RankOp
from megatron_het.runtime.slicing import Sequences
from megatron_het.schedule.ir import Kind
from megatron_het.vocab.messages import PENDING_SENDS, arrived, position_of, positions, team

if TYPE_CHECKING:  # they import Megatron, or would import this module again
    from megatron_het.runtime.executor import Call, Iteration
    from megatron_het.runtime.timeline import Timeline
    from megatron_het.vocab.layers import SplitEmbedding

Slice = tuple[int, int]
"""(microbatch, slice)"""
_Arriving = list[tuple[torch.Tensor, PendingReceive]]


class EmbeddingTeam:
    """One rank's part in the embedding operations.

    Args:
        placement: The plan's lookup tables; all replicas have one TP size.
        rank: This rank.
        transport: As for the pipeline's transfers.
        timeout_s: Bound on every wait, in seconds.
        tp_group: This rank's TP group.
        timeline: Is told about waiting.
        sequences: Knows the batches.
    """

    def __init__(
        self,
        placement: Placement,
        rank: int,
        transport: str,
        timeout_s: float,
        tp_group: dist.ProcessGroup,
        timeline: Timeline,
        sequences: Sequences,
    ) -> None:
        where = placement.locate(rank)
        self._placement, self._rank, self._where, self._tp_group = placement, rank, where, tp_group
        self._position = position_of(placement, where)
        self._timeline, self._sequences = timeline, sequences
        self._is_first = where.stage == 0
        # Tokens have groups of their own: they are sent earlier, relative to gradients, than received.
        self._tokens, self._channels = (
            Channels(edges, transport, timeout_s, rank, pending_per_edge=PENDING_SENDS)
            for edges in (token_edges(placement), part_edges(placement))
        )
        self._layer: SplitEmbedding | None = None
        self._current: Slice = (-1, -1)
        self._parts: dict[Slice, _Arriving] = {}
        self._own: dict[Slice, torch.Tensor] = {}
        self._gradients: dict[Slice, torch.Tensor] = {}

    # -- the model -------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module) -> torch.nn.Parameter:
        """Give this rank its rows, in its first chunk (GPTModel, not wrapped); returns them."""
        from megatron_het.vocab.layers import EmbeddingHolder, SplitEmbedding, VocabularyShard

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

    def handlers(self) -> dict[Kind, Callable[[RankOp, Call, Iteration], None]]:
        """What the executor runs."""
        return {Kind.EMBED_FORWARD: self._forward, Kind.EMBED_BACKWARD: self._backward}

    def _forward(self, op: RankOp, call: Call, state: Iteration) -> None:
        key = op.microbatch, op.slice
        shape = self._part_shape(call)
        if self._is_first:
            self._send_tokens(op, call)
            self._parts[key] = [self._expect(peer, op, shape, call) for peer in self._helpers(op)]
            return
        tokens = torch.empty(self._token_shape(call), dtype=torch.int64, device=call.device)
        source = team(self._placement, op.microbatch, self._position - self._where.tp_rank)[0]
        pending = self._tokens.receive(tokens, source, op.label)
        (tokens,) = arrived([(tokens, pending)], self._timeline, self._tokens)
        assert self._layer is not None
        with torch.set_grad_enabled(not call.forward_only):
            part = self._layer.part(tokens)
        self._channels.send(part.detach(), self._first(op), op.label)
        if not call.forward_only:
            self._own[key] = part

    def _send_tokens(self, op: RankOp, call: Call) -> None:
        if self._where.tp_rank > 0:
            return
        tokens = self._sequences.peek(op, call.data_iterators[0])["tokens"]
        tokens = tokens.to(device=call.device, dtype=torch.int64).contiguous()
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
        arriving = [self._expect(self._first(op), op, self._part_shape(call), call)]
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

    def _token_shape(self, call: Call) -> tuple[int, int]:
        length, batch, _ = call.shape
        assert self._layer is not None
        spread = self._layer.config.sequence_parallel
        return batch, length * self._tp_group.size() if spread else length

    def _part_shape(self, call: Call) -> tuple[int, ...]:
        assert self._layer is not None
        hidden = call.shape[2]
        return call.shape if self._layer.reduce_scatter_embeddings else (*self._token_shape(call), hidden)

    def _expect(
        self, src: int, op: RankOp, shape: tuple[int, ...], call: Call
    ) -> tuple[torch.Tensor, PendingReceive]:
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
