"""What may happen between two iterations of a session; elastic training is what does something there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_het.plan import Plan


class Boundary:
    """Called by a run with a plan at the places where the plan may change.  This one does nothing.

    Attributes:
        restores: Whether ``load`` is to be called where no checkpoint is to be loaded.
        store: Where the ranks meet; None for where ``torch.distributed`` finds it by itself.
        outlives_sessions: Whether the process goes on after a session, however it ended; then somebody else finds out
            who has stopped.
        plans: Of the whole job, where several take turns.
    """

    restores = False
    store: Any = None
    outlives_sessions = False
    plans: tuple[Plan, ...] = ()

    def prepare(self, args: Any) -> None:
        """Megatron's arguments are parsed and not validated yet."""

    def remember(self, provider: Callable[..., Any]) -> Callable[..., Any]:
        """The datasets provider to call in place of the script's."""
        return provider

    def load(
        self, session: Any, args: Any, models: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any
    ) -> tuple[int, float] | None:
        """Model and optimizer have been built.

        Returns:
            Iterations done and floating-point operations so far, where a state was put into them; None for Megatron's
            own loading.
        """
        return None

    def saves(self) -> None:
        """A checkpoint is about to be written, at the end of an iteration."""

    def reached(self, session: Any, iteration: int) -> None:
        """An iteration of training is about to begin, and nothing of it has been done.

        Args:
            session: The open session.
            iteration: Iterations that are done.
        """
