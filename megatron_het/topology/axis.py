"""A position along a parallel axis that has no communicator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Stands where Megatron expects a process group but only asks for rank and size.

    The pipeline axis of a heterogeneous plan is an Axis: stages have different numbers of ranks,
    so there is no group with one rank per stage, and a stray collective on the axis fails at once
    instead of hanging.
    """

    position: int
    length: int

    def rank(self) -> int:
        """This rank's position."""
        return self.position

    def size(self) -> int:
        """Number of positions."""
        return self.length
