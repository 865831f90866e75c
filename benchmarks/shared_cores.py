"""Predict an iteration when several devices share a core.

Two processes on one core slow each other down only while both are busy, so one fixed time per
operation cannot describe them.  Here every operation is an amount of *work* (seconds on a core of
its own) and a core divides itself equally among the processes that have something to do
(processor sharing, which is what the kernel's fair scheduler does).  Cores share memory and caches, so that
a core is faster while the others have nothing to do: by how much, the profile measures.  Order and dependencies come
from the schedule library's Program, the same that the executor runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_het.schedule import Graph, Op, Program


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated iteration.

    Attributes:
        start_s, end_s: Per operation, in the graph's numbering.
        device_end_s: Per device, when its last operation ends.
        work_s: Per device, the sum of its work.
        span_s: Per device, the time its operations took, waiting for the core included.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    device_end_s: tuple[float, ...]
    work_s: tuple[float, ...]
    span_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last operation."""
        return max(self.device_end_s)


def simulate_shared(
    program: Program,
    work_s: Callable[[int, Op], float],
    core: Sequence[int],
    transfer_s: Callable[[int, int], float] = lambda a, b: 0.0,
    alone: Sequence[float] = (),
) -> Timeline:
    """Simulate the compute operations of a program on shared cores.

    Args:
        program: A program without transfers (its compute order).
        work_s: Seconds of an operation on a whole core while all others are busy, by device and operation.
        core: The core of each device.
        transfer_s: Time between the end of an operation on one device and the moment its result is
            on another.
        alone: By device, seconds of work while the other cores wait over those while they are busy; without, 1.

    Raises:
        ValueError: The operations wait for each other in a circle.
    """
    return _Shared(program, work_s, core, transfer_s, alone or (1.0,) * len(core)).run()


class _Shared:
    def __init__(
        self,
        program: Program,
        work_s: Callable[[int, Op], float],
        core: Sequence[int],
        transfer_s: Callable[[int, int], float],
        alone: Sequence[float],
    ) -> None:
        self.graph = Graph(program)
        self.core, self.transfer_s, self.alone = core, transfer_s, alone
        self.others = max(1, len(set(core)) - 1)
        count = len(self.graph.ops)
        self.work = [work_s(self.graph.device[i], self.graph.ops[i]) for i in range(count)]
        self.start, self.end = [math.nan] * count, [math.inf] * count
        self.devices = len(program.ops)
        self.head = list(self.graph.first[: self.devices])
        self.left: list[float | None] = [None] * self.devices
        self.now = 0.0

    def ready_s(self, node: int) -> float:
        """When the inputs of an operation are there; infinite while one has not ended."""
        here = self.graph.device[node]
        return max(
            (
                self.end[w] + (0.0 if self.graph.device[w] == here else self.transfer_s(self.graph.device[w], here))
                for w in self.graph.waits[node]
            ),
            default=0.0,
        )

    def run(self) -> Timeline:
        """Advance from one start or end to the next."""
        while any(self.head[d] < self.graph.first[d + 1] for d in range(self.devices)):
            next_start = self._start_what_can()
            active = [d for d in range(self.devices) if self.left[d] is not None]
            if not active and next_start == math.inf:
                raise ValueError("the operations wait for each other in a circle")
            self._advance(active, next_start)
        return self._result()

    def _start_what_can(self) -> float:
        """Start operations whose inputs are there; returns the next moment at which one may start."""
        upcoming = math.inf
        for d in range(self.devices):
            node = self.head[d]
            if self.left[d] is not None or node >= self.graph.first[d + 1]:
                continue
            at = self.ready_s(node)
            if at <= self.now + 1e-12:
                self.left[d], self.start[node] = self.work[node], self.now
            else:
                upcoming = min(upcoming, at)
        return upcoming

    def _advance(self, active: Sequence[int], next_start: float) -> None:
        """Move the clock to the next end or start, with every core divided among its active devices."""
        sharers: dict[int, int] = {}
        for d in active:
            sharers[self.core[d]] = sharers.get(self.core[d], 0) + 1
        beside = (len(sharers) - 1) / self.others
        slow = {d: sharers[self.core[d]] * (self.alone[d] + (1 - self.alone[d]) * beside) for d in active}
        step = next_start - self.now
        for d in active:
            step = min(step, (self.left[d] or 0.0) * slow[d])
        self.now += step
        for d in active:
            remaining = (self.left[d] or 0.0) - step / slow[d]
            if remaining <= 1e-12:
                self.end[self.head[d]] = self.now
                self.head[d] += 1
                self.left[d] = None
            else:
                self.left[d] = remaining

    def _result(self) -> Timeline:
        first = self.graph.first
        rows = [range(first[d], first[d + 1]) for d in range(self.devices)]
        return Timeline(
            tuple(self.start),
            tuple(self.end),
            tuple(max((self.end[i] for i in row), default=0.0) for row in rows),
            tuple(sum(self.work[i] for i in row) for row in rows),
            tuple(sum(self.end[i] - self.start[i] for i in row) for row in rows),
        )
