"""When each operation of an iteration ran on this rank.

On the CPU the clock is read around every operation.  On CUDA the host runs ahead of the device,
so compute operations are bracketed by events, and only while ``device_events`` is on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_het.lowering.ranks import RankOp
from megatron_het.schedule.kinds import Direction, where

# When the two ends of every transfer were posted, and when what was waited for had come.
#
# On the CPU, and where tensors are staged through the host, marks are times of the host's clock.  Over NCCL they are
# events on the stream that computes.


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


_FORWARD = where(lambda kind: kind.works and kind.direction is Direction.FORWARD)
_BACKWARD = where(lambda kind: kind.works and kind.direction is Direction.BACKWARD)
TIMED = where(lambda kind: kind.works)
"""Kinds of operations that compute, whose times mean something on every device."""

_Pair = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass(slots=True)
class Record:
    """One executed operation; times in seconds since the start of the iteration.

    ``wait_s`` is the part spent waiting for a transfer, which comes before the work proper.
    """

    op: RankOp
    start_s: float
    stop_s: float
    wait_s: float = 0.0


@dataclass(slots=True)
class _Timed:
    """A record whose times come from the device: events around it, and around what it waited for."""

    record: Record
    around: _Pair
    waits: list[_Pair]

    def resolve(self, origin: torch.cuda.Event) -> None:
        """Put the device's times into the record; all events have happened."""
        begin, end = self.around
        self.record.start_s = origin.elapsed_time(begin) / 1e3
        self.record.stop_s = origin.elapsed_time(end) / 1e3
        self.record.wait_s = sum(first.elapsed_time(last) / 1e3 for first, last in self.waits)


@dataclass
class Past:
    """Holds what is left of an iteration that has ended.

    Attributes:
        records: Its operations.
        origin_s: The host's clock at its start.
        departures, arrivals: Its transfers, if they were logged.
    """

    records: list[Record]
    origin_s: float
    departures: list[Departure] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    timed: list[_Timed] = field(default_factory=list)
    origin: torch.cuda.Event | None = None

    def resolve(self) -> bool:
        """Take the device's times, if the device is done; never waits for it.

        Returns:
            Whether all times are there.
        """
        if self.origin is None:
            return True
        marks: list[Mark] = [end for one in self.timed for end in one.around]
        marks += [departure.posted for departure in self.departures]
        marks += [mark for arrival in self.arrivals for mark in (arrival.posted, arrival.ended)]
        if not all(mark.query() for mark in marks if mark is not None and not isinstance(mark, float)):
            return False
        for one in self.timed:
            one.resolve(self.origin)
        self.timed.clear()
        for departure in self.departures:
            departure.posted = self._seconds(departure.posted)
        for arrival in self.arrivals:
            arrival.posted, arrival.waited, arrival.ended = map(
                self._seconds, (arrival.posted, arrival.waited, arrival.ended)
            )
        self.origin = None
        return True

    def _seconds(self, mark: Mark) -> Mark:
        if mark is None or isinstance(mark, float):
            return mark
        assert self.origin is not None
        return self.origin_s + self.origin.elapsed_time(mark) / 1e3


@dataclass
class Timeline:
    """Records of the current iteration.

    Args:
        on_cuda: Whether work runs asynchronously on a CUDA device.
        device_events: Bracket compute with CUDA events (used for traces, reports and the watch).
        synchronises: Whether :meth:`finish` waits for the device, for the times of the iteration that just ended.
        keeps_last: Whether :attr:`last` is kept.
        transfers: Where the pipeline's transfers are logged; None for nowhere.
    """

    on_cuda: bool = False
    device_events: bool = False
    synchronises: bool = True
    keeps_last: bool = False
    transfers: TransferLog | None = None
    records: list[Record] = field(default_factory=list)
    last: Past | None = None
    """The iteration before the current one."""
    _origin: float = 0.0
    _waited: float = 0.0
    _waits: list[_Pair] = field(default_factory=list)
    _timed: list[_Timed] = field(default_factory=list)
    _origin_event: torch.cuda.Event | None = None

    def start(self) -> None:
        """Forget the last iteration, or put it aside, and set time zero."""
        if self.keeps_last:
            departures, arrivals = self.transfers.take() if self.transfers is not None else ([], [])
            self.last = Past(self.records, self._origin, departures, arrivals, self._timed, self._origin_event)
        self.records, self._timed = [], []
        self._origin = time.perf_counter()
        if self.on_cuda and self.device_events:
            self._origin_event = event()

    @contextlib.contextmanager
    def measure(self, op: RankOp) -> Iterator[None]:
        """Record one operation."""
        self._waited = 0.0
        timed = self.on_cuda and self.device_events and op.kind in TIMED
        if timed:
            self._waits = []
            begin = event()
        start = time.perf_counter() - self._origin
        yield
        record = Record(op, start, time.perf_counter() - self._origin, self._waited)
        self.records.append(record)
        if timed:
            self._timed.append(_Timed(record, (begin, event()), self._waits))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time inside counts as waiting, not as work."""
        timed = self.on_cuda and self.device_events
        begin = event() if timed else None
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start
        if begin is not None:
            self._waits.append((begin, event()))

    def finish(self) -> None:
        """Replace host times of compute operations by device times (CUDA only)."""
        if not self._timed or self._origin_event is None or not self.synchronises:
            return
        torch.cuda.synchronize()
        for one in self._timed:
            one.resolve(self._origin_event)
        self._timed.clear()

    def work_s(self, backward: bool) -> float:
        """Seconds of compute in this iteration, without waiting."""
        kinds = _BACKWARD if backward else _FORWARD
        return sum(r.stop_s - r.start_s - r.wait_s for r in self.records if r.op.kind in kinds)


def event() -> torch.cuda.Event:
    """An event that has been recorded on the current stream."""
    made = torch.cuda.Event(enable_timing=True)
    made.record()
    return made
