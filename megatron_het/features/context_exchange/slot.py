"""One slot of the context exchange on a rank: what a pass gives away and does for others, and what is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime.channels import Moment, PendingReceive


class ExchangeError(RuntimeError):
    """The program and the passes do not fit."""


@dataclass(slots=True)
class Message:
    """A message that is expected: its buffer and its receive."""

    buffer: torch.Tensor
    pending: PendingReceive


@dataclass
class Slot:
    """Holds what this rank exchanges in the slot that runs.

    Attributes:
        gives, helps: Operations that belong to the pass.
        is_backward: Whether the pass runs through the layers from the last to the first.
        layers: Layers that exchange.
        done: Of them, those that the pass has left.
        moment: Of the compute stream, when all that is received in the layer that runs had its memory.
        queries: Expected from others in that layer, in the order of ``helps``.
        results: Memory for what helpers send back in it, in the order of ``gives``.
        expected: Receives of these, once they are posted.
        answers: Made for others in it and not sent yet: the operation, the message, and the moment when it was made.
    """

    gives: tuple[RankOp, ...]
    helps: tuple[RankOp, ...]
    is_backward: bool
    layers: int
    done: int = 0
    moment: Moment | None = None
    queries: list[Message] = field(default_factory=list)
    results: list[torch.Tensor] = field(default_factory=list)
    expected: list[PendingReceive] = field(default_factory=list)
    answers: list[tuple[RankOp, torch.Tensor, Moment | None]] = field(default_factory=list)

    def layer_at(self, step: int) -> int:
        """The layer that is the ``step``-th of this slot."""
        return self.layers - 1 - step if self.is_backward else step
