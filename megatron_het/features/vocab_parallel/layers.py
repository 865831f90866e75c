"""This rank's rows of the output layer and the word embeddings, their names in checkpoints, and their messages."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from megatron_het.lowering.ranks import Piece, RankOp, Side, pieces, side_of
from megatron_het.plan import Placement
from megatron_het.plan.placement import stage_rows, tp_unit
from megatron_het.report import Timeline
from megatron_het.runtime.channels import Channels, PendingReceive
from megatron_het.runtime.data import Batches
from megatron_het.runtime.feature import Call, Handler, Iteration, OpenContext
from megatron_het.schedule.ir import Kind

# Code shared by the messages of the embedding and of the output layer.

PENDING_SENDS = 8  # sends to one peer that may be in flight over gloo: the messages of a few slices


@dataclass(slots=True)
class Arriving:
    """A tensor that is being received: its buffer, and the pieces that fill it."""

    whole: torch.Tensor
    pieces: list[PendingReceive]


class Team:
    """This rank among the ranks that share the vocabulary for a microbatch: one replica of each stage.

    Replicas may have different TP and context-parallel sizes.  Messages have the sequence as their first dimension.
    They are sent in pieces, the intersections of both replicas' parts, as activations between stages are.  So a rank
    works on its own part of the sequence, whichever ranks made it.  Of a replicated tensor each rank gets one copy.

    Args:
        tokens: Tokens of a slice of nominal length.
        batches: The reader, which knows the length of each slice.
    """

    def __init__(self, placement: Placement, rank: int, tokens: int, batches: Batches) -> None:
        self._placement, self._rank, self._tokens, self._batches = placement, rank, tokens, batches
        self.where = placement.locate(rank)
        self._known: dict[tuple[Side, Side], list[Piece]] = {}

    def others(self, stage: int) -> list[int]:
        """All stages but one."""
        return [other for other in range(self._placement.num_stages) if other != stage]

    def send(
        self,
        channels: Channels,
        tensor: torch.Tensor,
        stage: int,
        op: RankOp,
        *,
        divided: bool = False,
        by_first: bool = False,
    ) -> None:
        """Send a tensor of this replica to that of another stage.

        Args:
            channels: Channels between the two replicas.
            tensor: ``[s, ...]``.
            stage: The receiving stage.
            op: The operation with the tensor's microbatch and slice.
            divided: Whether TP ranks hold an interval of the sequence each; otherwise all of them hold all of it.
            by_first: Whether only the first TP ranks have it.
        """
        for piece in self._pieces(self.where.stage, stage, op, divided, by_first):
            if piece.src == self._rank:
                channels.send(tensor[self._rows(piece, op, sending=True)], piece.dst, op.label)

    def expect(
        self,
        channels: Channels,
        buffer: torch.Tensor,
        stage: int,
        op: RankOp,
        *,
        divided: bool = False,
        by_first: bool = False,
    ) -> Arriving:
        """Post the receives of a tensor from another stage's replica; arguments as in :meth:`send`."""
        pieces = self._pieces(stage, self.where.stage, op, divided, by_first)
        own = [(buffer[self._rows(piece, op, sending=False)], piece.src) for piece in pieces if piece.dst == self._rank]
        return Arriving(buffer, [channels.receive(part, source, op.label) for part, source in own])

    def _pieces(self, sender: int, receiver: int, op: RankOp, divided: bool, by_first: bool) -> list[Piece]:
        """The pieces of a slice of nominal length."""
        sides = sides_of(self._placement, sender, receiver, op.microbatch, divided=divided, by_first=by_first)
        if sides not in self._known:
            self._known[sides] = pieces(*sides, self._tokens)
        return self._known[sides]

    def _rows(self, piece: Piece, op: RankOp, *, sending: bool) -> slice:
        """The rows of a piece on one of its ends, scaled to the actual length of the slice."""
        lo, hi = piece.rows(sending=sending)
        return slice(self._batches.rows(lo, op), self._batches.rows(hi, op))


def sides_of(
    placement: Placement, sender: int, receiver: int, microbatch: int, *, divided: bool = False, by_first: bool = False
) -> tuple[Side, Side]:
    """The replicas of two stages that a microbatch visits; arguments as in :meth:`Team.send`."""
    replicas = (placement.replica(stage, placement.route[stage][microbatch]) for stage in (sender, receiver))
    sends, receives = (side_of(placement.plan, replica, divided) for replica in replicas)
    if by_first:
        sends = replace(sends, groups=tuple(group[:1] for group in sends.groups))
    return sends, receives


def edges(placement: Placement, stage: int, tokens: int, *, divided: bool) -> list[tuple[int, int]]:
    """Directed pairs of ranks between a stage and all others, in an order that is the same on every rank.

    Args:
        stage: The stage with the embeddings, or with the loss.
        tokens: Tokens of a slice.
        divided: Whether some of the tensors are divided over TP ranks by the sequence.
    """
    sides = {
        sides_of(placement, *ends, microbatch, divided=spread)
        for microbatch in range(placement.plan.num_microbatches)
        for other in range(placement.num_stages)
        if other != stage
        for ends in ((stage, other), (other, stage))
        for spread in {False, divided}
    }
    return sorted({(piece.src, piece.dst) for pair in sides for piece in pieces(*pair, tokens)})


def arrived(arriving: Sequence[Arriving], timeline: Timeline, channels: Channels) -> Iterator[torch.Tensor]:
    """Yields each tensor as soon as it is complete; waiting does not count as work in the timeline."""
    for tensor in arriving:
        with timeline.waiting():
            for pending in tensor.pieces:
                channels.wait_receive(pending)
        yield tensor.whole


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which rows of the vocabulary a rank holds: stages first, TP ranks within a stage."""

    first: int  # vocabulary id of this rank's first row
    rows: int  # rows of this rank
    tp: int  # TP size of this rank's replica; its ranks share the stage's rows equally
    total: int  # rows of the vocabulary
    unit: int  # common divisor of the rows of every rank of every replica

    @classmethod
    def of(cls, placement: Placement, rank: int, vocab_size: int) -> "VocabularyShard":
        """The shard of a rank; raises ValueError where the vocabulary is not padded to divide over the stages."""
        where, plan = placement.locate(rank), placement.plan
        tp = placement.replica(where.stage, where.replica).tp
        of_stage = stage_rows(plan, vocab_size)
        rows = of_stage[where.stage] // tp
        first = sum(of_stage[: where.stage]) + where.tp_rank * rows
        unit = math.gcd(*of_stage) // tp_unit(plan)
        return cls(first, rows, tp, vocab_size, unit)

    @property
    def stage_rows(self) -> int:
        """Rows of all TP ranks of this stage."""
        return self.tp * self.rows

    def for_checkpoint(self, weight: torch.Tensor, prefix: str, metadata: dict[str, Any]) -> dict[str, Any]:
        """The rows as a part of the whole weight, by stock Megatron's key.

        Checkpoints need parts of one size, so ranks of smaller TP sizes write several.
        """
        key, replica = f"{prefix}weight", (0, 0, metadata["dp_cp_group"].rank())
        if self.rows == self.unit:
            return {key: self._part(weight, 0, key, replica)}

        @torch.no_grad()
        def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened: slice | None) -> list[ShardedTensor]:
            assert flattened is None, "a flattened range of rows is not a part of the vocabulary"
            return [self._part(rows, i, key, replica_id) for i, rows in enumerate(tensor.split(self.unit))]

        return {key: ShardedTensorFactory(key, weight, build, torch.cat, replica)}

    def _part(self, rows: torch.Tensor, index: int, key: str, replica: Any) -> ShardedTensor:
        """One unit, or the only part."""
        offset = (0, self.first // self.unit + index, self.total // self.unit)
        return ShardedTensor.from_rank_offsets(key, rows, offset, replica_id=replica, allow_shape_mismatch=True)


def _mark(weight: torch.nn.Parameter, config: Any) -> None:
    """Set the attributes on the weight by which the optimizer groups parameters, as Megatron's model does."""
    marked: Any = weight
    marked.is_embedding_or_output_parameter = True
    if config.use_mup:
        marked.is_embedding_parameter = True


class SplitOutputLayer(ColumnParallelLinear):
    """Projects hidden states to this rank's part of the vocabulary.

    Args:
        init_method: For the weight.
        has_weight: False for tied embeddings, whose weight is passed to ``logits``.
    """

    def __init__(
        self,
        shard: VocabularyShard,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        tp_group: dist.ProcessGroup,
        has_weight: bool = True,
    ) -> None:
        super().__init__(
            config.hidden_size,
            shard.stage_rows,
            config=config,
            init_method=init_method,
            bias=False,
            skip_weight_param_allocation=not has_weight,
            tp_group=tp_group,
        )
        self.shard = shard
        self._scale = config.mup_output_mult if config.use_mup else 1.0
        if has_weight:
            _mark(self.weight, config)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """``[s, b, rows]`` from hidden states ``[s, b, h]`` (with sequence parallel: this rank's part)."""
        logits: torch.Tensor = self(hidden, weight)[0]
        return logits if self._scale == 1.0 else logits * self._scale

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See Megatron; the keys are those of the whole output layer, a hybrid model's empty state too."""
        found = {} if self.weight is None else self.shard.for_checkpoint(self.weight, prefix, metadata or {})
        if self.shard.first == 0:
            key, replica = f"{prefix}_extra_state", (0, 0, (metadata or {})["dp_cp_group"].rank())
            found[key] = ShardedObject(key, None, (1,), (0,), replica)
        return found


class SplitEmbedding(VocabParallelEmbedding):
    """Looks up this rank's part of the word embeddings.

    On the first stage it replaces the model's own, and adds the other stages' parts.

    Args:
        reduce_scatter: Whether the output is a part of the sequence per TP rank, ``[s / tp, b, h]``; otherwise
            it is all of it, ``[b, s, h]``.
    """

    def __init__(self, shard: VocabularyShard, config: Any, reduce_scatter: bool, tp_group: dist.ProcessGroup) -> None:
        super().__init__(
            shard.stage_rows,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=reduce_scatter,
            config=config,
            tp_group=tp_group,
        )
        self.shard = shard
        _mark(self.weight, config)
        self.complete: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Adds the parts of other stages (first stage)."""

    def _part(self, tokens: torch.Tensor) -> torch.Tensor:
        elsewhere = (tokens < self.shard.first) | (tokens >= self.shard.first + self.shard.rows)
        own = (tokens - self.shard.first).masked_fill(elsewhere, 0)
        found = self.weight[own] if self.deterministic_mode else F.embedding(own, self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            found = found.transpose(0, 1).contiguous()
            return reduce_scatter_to_sequence_parallel_region(found, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(found, group=self.tp_group)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Embeddings of ``input_`` ``[b, s]``, in the layout that the model expects.

        On the first stage they are complete.  On others they are this stage's part: zero where it has no row.  All
        stages call the module, because its hooks wait for parameters that are gathered late.
        """
        part = self._part(input_)
        return part if self.complete is None else self.complete(part)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See Megatron; the key is that of the whole table."""
        return self.shard.for_checkpoint(self.weight, prefix, metadata or {})


class EmbeddingHolder(MegatronModule):
    """Wraps a later stage's part so that its parameter has the same name as in the whole model."""

    def __init__(self, config: Any, word_embeddings: SplitEmbedding) -> None:
        super().__init__(config=config)
        self.word_embeddings = word_embeddings


# Word embeddings from rows that are split over all stages (SlimPipe, section 4.3.2).
#
# Per slice:
#
# ==============  =========================================================================================
# EMBED_FORWARD   the first stage sends the tokens; every other stage looks up the rows that it has and sends
#                 ``[s, b, h]`` back, zeros elsewhere; the FORWARD adds them up
# EMBED_BACKWARD  the first stage sends the gradient of the embeddings; every other stage adds it to the rows
#                 that it has
# ==============  =========================================================================================
#
# The first TP rank reads the tokens before the FORWARD, exactly as the training script will read them.

Slice = tuple[int, int]  # (microbatch, slice)


class EmbeddingTeam:
    """One rank's part in the embedding operations.

    Args:
        team: This rank's team.
        context: Opens channels, which is collective.
    """

    def __init__(self, team: Team, context: OpenContext) -> None:
        placement, tokens = context.placement, context.boundaries.tokens
        self._placement, self._rank, self._tp_group = placement, context.rank, context.groups["tp"]
        self._team, self._timeline, self._batches = team, context.timeline, context.batches
        self._is_first = team.where.stage == 0
        # Tokens have groups of their own: relative to gradients, they are sent earlier than they are received.
        self._tokens = context.new_channels("tokens", token_edges(placement, tokens), PENDING_SENDS)
        divided = placement.plan.training.sequence_parallel
        pairs = edges(placement, 0, tokens, divided=divided)
        self._channels = context.new_channels("embeddings", pairs, PENDING_SENDS)
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
        # The rule of Megatron's embedding; a replica of TP 1 has no parts, but its peers may.
        learned = model.position_embedding_type == "learned_absolute"
        self._divided = self._placement.plan.training.sequence_parallel and not learned
        reduces = self._divided and bool(config.sequence_parallel)
        self._layer = SplitEmbedding(shard, config, reduces, self._tp_group)
        if self._is_first:
            self._layer.complete = self._complete
            model.embedding.word_embeddings = self._layer  # type: ignore[union-attr]
        else:
            model.embedding = EmbeddingHolder(config, self._layer)
            modules = model._modules  # in the order of the whole model, by which gradient buffers are laid out
            for name in [name for name in modules if name != "embedding"]:
                modules[name] = modules.pop(name)
        return self._layer.weight

    def enter(self, op: RankOp) -> None:
        """Called when a FORWARD of the first chunk begins."""
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
        """Convert a part's layout to that of messages, or back.

        Messages are ``[s, b, h]``.  A part is ``[b, s, h]`` where TP ranks do not divide it.
        """
        assert self._layer is not None
        return part if self._layer.reduce_scatter_embeddings else part.transpose(0, 1).contiguous()

    # -- operations ------------------------------------------------------------------------------

    def handlers(self) -> dict[Kind, Handler]:
        """Handlers of the embedding operations."""
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
        """Called when all operations of the iteration are done."""
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
    """Directed pairs of ranks that send tokens, in an order that is the same on every rank."""
    sides = {
        sides_of(placement, 0, other, microbatch, by_first=True)  # the first TP ranks read them
        for microbatch in range(placement.plan.num_microbatches)
        for other in range(1, placement.num_stages)
    }
    return sorted({(piece.src, piece.dst) for pair in sides for piece in pieces(*pair, tokens)})
