"""What the messages of the embedding and of the output layer have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_het.plan import Placement
from megatron_het.runtime.channels import Channels, PendingReceive

if TYPE_CHECKING:
    from megatron_het.runtime.timeline import Timeline

PENDING_SENDS = 8
"""Sends to one peer that may be under way over gloo: the messages of a few slices."""


def team(placement: Placement, microbatch: int, tp_rank: int) -> list[int]:
    """The ranks of one TP rank that a microbatch visits, by stage."""
    return [
        placement.replica(stage, row[microbatch]).ranks[tp_rank] for stage, row in enumerate(placement.route)
    ]


def arrived(
    arriving: Sequence[tuple[torch.Tensor, PendingReceive]], timeline: Timeline, channels: Channels
) -> Iterator[torch.Tensor]:
    """Buffers, one by one, as soon as each is filled; waiting does not count as work."""
    for buffer, pending in arriving:
        with timeline.waiting():
            channels.wait_receive(pending)
        yield buffer
