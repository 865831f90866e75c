"""What the controller knows of its workers, and how long it waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from megatron_het.elastic.pool import Process


@dataclass(frozen=True)
class Bounds:
    """How long the controller waits, in seconds.

    Attributes:
        lost_s: Without a sign of life a process or a node counts as lost.
        leave_s: For the ranks of a session to end once one of them has died.
        start_s: For the first nodes to come.
        return_s: For workers to come back where there is no plan without those that were lost.
        stuck_s: For an iteration to end.
    """

    lost_s: float = 30.0
    leave_s: float = 30.0
    start_s: float = 600.0
    return_s: float = 60.0
    stuck_s: float = 1800.0


@dataclass(frozen=True)
class Moment:
    """When something happened: by the wall clock for people, by another one for waits, because the former may jump.

    Attributes:
        wall_s: Seconds since 1970.
        clock_s: Seconds of the monotonic clock.
    """

    wall_s: float = field(default_factory=time.time)
    clock_s: float = field(default_factory=time.monotonic)

    def ago_s(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.clock_s


@dataclass
class Member:
    """A worker as the controller knows it.

    Attributes:
        process: The worker.
        iteration: Iterations that are done, as it says.
        beats: Newest sign of life.
        seen_s: When that came (monotonic).
        came_s: When it was ready (monotonic).
        identity: Random number of the process; empty where it has not been heard yet.
    """

    process: Process
    iteration: int = 0
    beats: int = -1
    seen_s: float = field(default_factory=time.monotonic)
    came_s: float = field(default_factory=time.monotonic)
    identity: str = ""

    def to_json(self) -> dict[str, Any]:
        """For the controller's document."""
        process = self.process
        return {
            "process": process.number,
            "node": process.node,
            "device": process.device,
            "iteration": self.iteration,
            "identity": self.identity,
        }
