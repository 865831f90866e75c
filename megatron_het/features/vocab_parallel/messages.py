"""What the messages of the embedding and of the output layer have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_het.lowering.boundary import Piece, Side, pieces
from megatron_het.lowering.ranks import RankOp, side_of
from megatron_het.plan import Placement
from megatron_het.report.timeline import Timeline
from megatron_het.runtime.batches import Batches
from megatron_het.runtime.channels import Channels, PendingReceive

PENDING_SENDS = 8
"""Sends to one peer that may be under way over gloo: the messages of a few slices."""


@dataclass(slots=True)
class Arriving:
    """A tensor on its way: the whole of it, and the pieces that fill it."""

    whole: torch.Tensor
    pieces: list[PendingReceive]


class Team:
    """This rank among the ranks that share the vocabulary for a microbatch: one replica of each stage.

    Replicas may have different TP and context-parallel sizes.  What travels has the sequence first.  It travels in the
    pieces that two replicas have in common, as activations between stages do, so that a rank works on its own part of
    the sequence whoever has made it.  What all TP ranks of a replica hold is sent to a rank by one of them.

    Args:
        placement: The plan's lookup tables.
        rank: This rank.
        tokens: Tokens of a slice of nominal length.
        batches: They know how long a slice is.
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
            channels: They connect the two.
            tensor: ``[s, ...]``.
            stage: Who gets it.
            op: Of whose microbatch and slice it is.
            divided: Whether TP ranks hold an interval of the sequence each; else all of them hold all.
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
        """Post the receives of what the replica of another stage sends; arguments as in :meth:`send`."""
        found = []
        for piece in self._pieces(stage, self.where.stage, op, divided, by_first):
            if piece.dst == self._rank:
                found.append(channels.receive(buffer[self._rows(piece, op, sending=False)], piece.src, op.label))
        return Arriving(buffer, found)

    def _pieces(self, sender: int, receiver: int, op: RankOp, divided: bool, by_first: bool) -> list[Piece]:
        """The pieces of a slice of nominal length."""
        sides = sides_of(self._placement, sender, receiver, op.microbatch, divided=divided, by_first=by_first)
        if sides not in self._known:
            self._known[sides] = pieces(*sides, self._tokens)
        return self._known[sides]

    def _rows(self, piece: Piece, op: RankOp, *, sending: bool) -> slice:
        """The rows of a piece on one of its ends, in a slice that need not be of nominal length."""
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
    """Directed pairs over which a stage talks to all others, in an order that is the same on every rank.

    Args:
        placement: The plan's lookup tables.
        stage: It has the embeddings, or the loss.
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
    """Tensors, one by one, as soon as each is complete; waiting does not count as work."""
    for tensor in arriving:
        with timeline.waiting():
            for pending in tensor.pieces:
                channels.wait_receive(pending)
        yield tensor.whole
