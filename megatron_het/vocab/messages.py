"""What the messages of the embedding and of the output layer have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_het.plan import Placement
from megatron_het.plan.placement import Location
from megatron_het.report.timeline import Timeline
from megatron_het.runtime.channels import Channels, PendingReceive

PENDING_SENDS = 8
"""Sends to one peer that may be under way over gloo: the messages of a few slices."""


def team(placement: Placement, microbatch: int, position: int) -> list[int]:
    """The ranks at one position of their replicas that a microbatch visits, by stage.

    Equal positions have equal TP ranks and equal parts of the sequence.
    """
    return [placement.replica(stage, row[microbatch]).ranks[position] for stage, row in enumerate(placement.route)]


def position_of(placement: Placement, where: Location) -> int:
    """A rank's position in its replica: TP ranks first, context-parallel ranks slower."""
    return where.cp_rank * placement.replica(where.stage, where.replica).tp + where.tp_rank


def positions(placement: Placement) -> range:
    """Positions of the replicas that split the vocabulary; all replicas have as many."""
    return range(len(placement.replica(0, 0).ranks))


def arrived(
    arriving: Sequence[tuple[torch.Tensor, PendingReceive]], timeline: Timeline, channels: Channels
) -> Iterator[torch.Tensor]:
    """Buffers, one by one, as soon as each is filled; waiting does not count as work."""
    for buffer, pending in arriving:
        with timeline.waiting():
            channels.wait_receive(pending)
        yield buffer
