"""What the messages of the embedding and of the output layer have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_het.lowering.boundary import Piece, Side, pieces
from megatron_het.plan import Placement
from megatron_het.report.timeline import Timeline
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

    With context parallelism, of every replica the ranks with this rank's part of the sequence.  Replicas may have
    different TP sizes.  A tensor that all ranks of a replica hold is sent to a rank by one of them.  One whose
    sequence they divide travels in the pieces that two replicas have in common, as activations between stages do.

    Args:
        placement: The plan's lookup tables.
        rank: This rank.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        self._placement, self._rank = placement, rank
        self.where = placement.locate(rank)
        self._mine = placement.replica(self.where.stage, self.where.replica).tp_group(self.where.cp_rank)

    def ranks(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """The ranks of a stage that a microbatch visits."""
        return team_of(self._placement, microbatch, self.where.cp_rank)[stage]

    def others(self, stage: int) -> list[int]:
        """All stages but one."""
        return [other for other in range(self._placement.num_stages) if other != stage]

    def send(
        self,
        channels: Channels,
        tensor: torch.Tensor,
        stage: int,
        microbatch: int,
        label: str,
        *,
        divided: bool = False,
    ) -> None:
        """Send a tensor of this replica to that of another stage.

        Args:
            channels: They connect the two.
            tensor: If divided, with the sequence first: ``[s, ...]``.
            stage: Who gets it.
            microbatch: Of which it is.
            label: For messages.
            divided: Whether TP ranks hold an interval of the sequence each; else all of them hold all.
        """
        theirs = self.ranks(stage, microbatch)
        for piece, lo, hi in self._pieces(self._mine, theirs, tensor, divided):
            if piece.src == self._rank:
                channels.send(tensor[lo:hi] if divided else tensor, piece.dst, label)

    def expect(
        self,
        channels: Channels,
        buffer: torch.Tensor,
        stage: int,
        microbatch: int,
        label: str,
        *,
        divided: bool = False,
    ) -> Arriving:
        """Post the receives of what the replica of another stage sends; arguments as in :meth:`send`."""
        theirs = self.ranks(stage, microbatch)
        found = [
            channels.receive(buffer[lo:hi] if divided else buffer, piece.src, label)
            for piece, lo, hi in self._pieces(theirs, self._mine, buffer, divided)
            if piece.dst == self._rank
        ]
        return Arriving(buffer, found)

    def _pieces(
        self, senders: tuple[int, ...], receivers: tuple[int, ...], local: torch.Tensor, divided: bool
    ) -> Iterator[tuple[Piece, int, int]]:
        """The pieces, each with its rows in this rank's tensor."""
        tokens = local.shape[0] * len(self._mine) if divided else 1
        start, _ = Side(self._mine, divided).interval(self.where.tp_rank, tokens)
        for piece in pieces(Side(senders, divided), Side(receivers, divided), tokens):
            yield piece, piece.lo - start, piece.hi - start


def team_of(placement: Placement, microbatch: int, cp_rank: int) -> list[tuple[int, ...]]:
    """The TP ranks that a microbatch visits with one part of its sequence, by stage."""
    return [placement.replica(stage, row[microbatch]).tp_group(cp_rank) for stage, row in enumerate(placement.route)]


def edges(placement: Placement, stage: int, *, divided: bool) -> list[tuple[int, int]]:
    """Directed pairs over which a stage talks to all others, in an order that is the same on every rank.

    Args:
        placement: The plan's lookup tables.
        stage: It has the embeddings, or the loss.
        divided: Whether some of the tensors are divided over TP ranks by the sequence.
    """
    # As many tokens as every replica can divide: each rank's interval is then at least one of them.
    tokens = math.lcm(*(r.tp for s in placement.plan.stages for r in s.replicas))
    found: set[tuple[int, int]] = set()
    pairs: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for microbatch in range(placement.plan.num_microbatches):
        for part in range(placement.num_cp_ranks):
            ranks = team_of(placement, microbatch, part)
            others = [theirs for other, theirs in enumerate(ranks) if other != stage]
            pairs.update(pair for theirs in others for pair in ((ranks[stage], theirs), (theirs, ranks[stage])))
    for senders, receivers in pairs:
        for spread in {False, divided}:
            sides = Side(senders, spread), Side(receivers, spread)
            found.update((piece.src, piece.dst) for piece in pieces(*sides, tokens))
    return sorted(found)


def arrived(arriving: Sequence[Arriving], timeline: Timeline, channels: Channels) -> Iterator[torch.Tensor]:
    """Tensors, one by one, as soon as each is complete; waiting does not count as work."""
    for tensor in arriving:
        with timeline.waiting():
            for pending in tensor.pieces:
                channels.wait_receive(pending)
        yield tensor.whole
