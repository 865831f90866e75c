"""How many iterations lie between copies: one where a copy fits behind the compute, else the fewest that do."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

SHARE = 0.03
"""Of an iteration; copies may take so much on average."""
_SEEN = 9


@dataclass
class Cost:
    """Holds what one copy took, in seconds.

    Attributes:
        held_s: The training stood still for it, the wait for the copy before it apart.
        sent_s: By the clock, from then to its arrival; the training went on meanwhile.
        processor_s: Of the thread that sent it.
    """

    held_s: float
    sent_s: float = 0.0
    processor_s: float = 0.0


class Pace:
    """Iterations between copies; outlives sessions.

    Args:
        every: So many; 0 for no copies, None to choose by measured times.
    """

    def __init__(self, every: int | None) -> None:
        self.is_chosen = every is None
        self.every = 1 if every is None else every
        self._iterations: list[float] = []
        self._costs: list[Cost] = []
        self._left_s: float | None = None

    def begin(self) -> None:
        """A session begins: another plan has other iterations and copies."""
        self._iterations, self._costs, self._left_s = [], [], None
        if self.is_chosen:
            self.every = 1

    def is_due(self, iteration: int) -> bool:
        """Whether a copy is taken after so many iterations."""
        return bool(self.every) and iteration % self.every == 0

    def arrived(self, now_s: float) -> None:
        """An iteration has ended."""
        if self._left_s is not None:
            self._iterations = [*self._iterations, now_s - self._left_s][-_SEEN:]

    def left(self, now_s: float) -> None:
        """The next iteration begins."""
        self._left_s = now_s

    def copied(self, cost: Cost) -> None:
        """A copy has been taken and sent."""
        self._costs = [*self._costs, cost][-_SEEN:]

    def iteration_s(self) -> float:
        """Median of the last iterations, without their copies; 0 where none has been seen."""
        return statistics.median(self._iterations) if self._iterations else 0.0

    def cost_s(self, *, host_computes: bool) -> float:
        """Median of what the last copies took from the training.

        Args:
            host_computes: The training runs on the processor that sends the copies.
        """
        taken = [cost.held_s + (cost.processor_s if host_computes else 0.0) for cost in self._costs]
        return statistics.median(taken) if taken else 0.0

    def wanted(self, *, host_computes: bool) -> int:
        """The fewest iterations between copies with which this rank keeps to ``SHARE`` and waits for no copy.

        Args:
            host_computes: See :meth:`cost_s`.
        """
        iteration_s = self.iteration_s()
        if not iteration_s or not self._costs:
            return 1
        sent_s = statistics.median(cost.sent_s for cost in self._costs)
        share = self.cost_s(host_computes=host_computes) / (SHARE * iteration_s)
        return max(1, math.ceil(share), math.ceil(sent_s / iteration_s))
