"""Times of operations on a CUDA device come from events, which stand-ins replace here."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_het.lowering.ranks import RankOp
from megatron_het.report.timeline import Timeline, TransferLog, event
from megatron_het.schedule.kinds import Kind

_CLOCK = itertools.count(1)


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0

    def record(self) -> None:
        self.at = next(_CLOCK)

    def elapsed_time(self, later: _Event) -> float:
        return 1e3 * (later.at - self.at)


def _op(kind: Kind) -> RankOp:
    return RankOp(kind=kind, microbatch=0, slice=0, chunk=0, label=kind.name)


def test_passes_are_timed_by_events_and_transfers_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timeline = Timeline(on_cuda=True, device_events=True)
    timeline.start()
    for kind in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.BACKWARD):
        with timeline.measure(_op(kind)):
            pass
    timeline.finish()
    assert timeline.work_s(backward=False) == timeline.work_s(backward=True) == pytest.approx(1.0)
    assert timeline.records[1].stop_s < 0.5, "a transfer keeps the host's times"


class _Device:
    """Events of a device that is behind the host until it is told to catch up."""

    done = False

    class Event(_Event):
        def query(self) -> bool:
            return _Device.done


def _iteration(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    def refuse() -> None:
        raise AssertionError("the host waits for the device")

    monkeypatch.setattr(torch.cuda, "Event", _Device.Event)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    timeline = Timeline(on_cuda=True, device_events=True, synchronises=False, keeps_last=True)
    timeline.transfers = TransferLog(event)
    timeline.start()
    with timeline.measure(_op(Kind.FORWARD)):
        arrival = timeline.transfers.receiving(1)
        with timeline.waiting():
            arrival.waited = event()
            arrival.ended = event()
    timeline.transfers.sent(1)
    timeline.finish()
    timeline.start()
    return timeline


def test_the_last_iteration_is_read_when_the_device_is_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Device, "done", False)
    timeline = _iteration(monkeypatch)
    assert timeline.last is not None and not timeline.records
    assert not timeline.last.resolve(), "the device is behind"
    _Device.done = True
    assert timeline.last.resolve()
    (record,) = timeline.last.records
    # origin, begin, receive posted, wait begins, waited, ended, wait ends, end: one tick each
    assert record.wait_s == pytest.approx(3.0)
    assert record.stop_s - record.start_s == pytest.approx(6.0)
    (arrival,), (departure,) = timeline.last.arrivals, timeline.last.departures
    assert arrival.ended - arrival.posted == pytest.approx(3.0)
    assert departure.posted > arrival.ended
    assert timeline.last.resolve(), "and stays so"


def test_without_a_reader_nothing_of_an_iteration_is_kept() -> None:
    timeline = Timeline()
    for _ in range(2):
        timeline.start()
        with timeline.measure(_op(Kind.FORWARD)):
            pass
    assert timeline.last is None and len(timeline.records) == 1
