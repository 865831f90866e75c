"""When the two ends of every transfer were posted, and when what was waited for had come.

On the CPU, and where tensors are staged through the host, marks are times of the host's clock.  Over NCCL they are
events on the stream that computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Mark = Any
"""Seconds of ``time.perf_counter``, or a CUDA event."""


@dataclass(slots=True)
class Departure:
    """A send, from when it was posted."""

    peer: int
    posted: Mark


@dataclass(slots=True)
class Arrival:
    """A receive: when it was posted, when somebody began to wait for it, and when the waiting ended.

    The last two are None until then.  A receive that had come before anybody waited has no known end: the two marks
    are nearly equal.
    """

    peer: int
    posted: Mark
    waited: Mark = None
    ended: Mark = None


@dataclass
class TransferLog:
    """The transfers of the current iteration, in the order in which they were posted.

    Attributes:
        now: Makes a mark.
    """

    now: Callable[[], Mark] = time.perf_counter
    departures: list[Departure] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def sent(self, peer: int) -> None:
        """A send has been posted."""
        self.departures.append(Departure(peer, self.now()))

    def receiving(self, peer: int) -> Arrival:
        """A receive has been posted."""
        arrival = Arrival(peer, self.now())
        self.arrivals.append(arrival)
        return arrival

    def take(self) -> tuple[list[Departure], list[Arrival]]:
        """Returns what has been logged; the log is empty then."""
        taken = self.departures, self.arrivals
        self.departures, self.arrivals = [], []
        return taken
