"""One slot of the context exchange on a rank: what a pass gives away and does for others, and what is on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime.channels import PendingReceive


class ExchangeError(RuntimeError):
    """The program and the passes do not fit."""


@dataclass(slots=True)
class Message:
    """A message that is expected: its buffer and its receive."""

    buffer: torch.Tensor
    pending: PendingReceive


@dataclass
class Slot:
    """What this rank exchanges in the slot that runs.

    Attributes:
        gives, helps: Operations that belong to the pass.
        is_backward: Whether the pass runs through the layers from the last to the first.
        layers: Layers that exchange.
        done: Of them, those that the pass has left.
        queries: Expected from others, by the help that needs one and the step.
        results: Expected from helpers in the layer that runs, in the order of ``gives``.
    """

    gives: tuple[RankOp, ...]
    helps: tuple[RankOp, ...]
    is_backward: bool
    layers: int
    done: int = 0
    queries: dict[tuple[RankOp, int], Message] = field(default_factory=dict)
    results: list[Message] = field(default_factory=list)

    def layer_at(self, step: int) -> int:
        """The layer that is the ``step``-th of this slot."""
        return self.layers - 1 - step if self.is_backward else step
