"""When each operation of an iteration ran on this rank.

On the CPU the clock is read around every operation.  On CUDA the host runs ahead of the device,
so compute operations are bracketed by events, and only while ``device_events`` is on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megatron_het.lowering.ranks import RankOp
from megatron_het.schedule.columns import Direction, Role
from megatron_het.schedule.kinds import where

_WORKING = (Role.PASS, Role.PART, Role.HELP)
_FORWARD = where(lambda kind: kind.role in _WORKING and kind.direction is Direction.FORWARD)
_BACKWARD = where(lambda kind: kind.role in _WORKING and kind.direction is Direction.BACKWARD)


@dataclass(slots=True)
class Record:
    """One executed operation; times in seconds since the start of the iteration.

    ``wait_s`` is the part spent waiting for a transfer, which comes before the work proper.
    """

    op: RankOp
    start_s: float
    stop_s: float
    wait_s: float = 0.0


@dataclass
class Timeline:
    """Records of the current iteration.

    Args:
        on_cuda: Whether work runs asynchronously on a CUDA device.
        device_events: Bracket compute with CUDA events (used for traces and reports).
    """

    on_cuda: bool = False
    device_events: bool = False
    records: list[Record] = field(default_factory=list)
    _origin: float = 0.0
    _waited: float = 0.0
    _events: list[tuple[Record, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _origin_event: torch.cuda.Event | None = None

    def start(self) -> None:
        """Forget the last iteration and set time zero."""
        self.records.clear()
        self._events.clear()
        self._origin = time.perf_counter()
        if self.on_cuda and self.device_events:
            self._origin_event = torch.cuda.Event(enable_timing=True)
            self._origin_event.record()

    @contextlib.contextmanager
    def measure(self, op: RankOp) -> Iterator[None]:
        """Record one operation."""
        self._waited = 0.0
        timed = self.on_cuda and self.device_events and op.kind in _FORWARD | _BACKWARD
        if timed:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter() - self._origin
        yield
        record = Record(op, start, time.perf_counter() - self._origin, self._waited)
        self.records.append(record)
        if timed:
            end.record()
            self._events.append((record, begin, end))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside counts as waiting, not as work."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def finish(self) -> None:
        """Replace host times of compute operations by device times (CUDA only)."""
        if not self._events or self._origin_event is None:
            return
        torch.cuda.synchronize()
        for record, begin, end in self._events:
            record.start_s = self._origin_event.elapsed_time(begin) / 1e3
            record.stop_s = self._origin_event.elapsed_time(end) / 1e3
            record.wait_s = 0.0
        self._events.clear()

    def work_s(self, backward: bool) -> float:
        """Seconds of compute in this iteration, without waiting."""
        kinds = _BACKWARD if backward else _FORWARD
        return sum(r.stop_s - r.start_s - r.wait_s for r in self.records if r.op.kind in kinds)
