"""The report of a run: written while the run goes on, and bounded."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_het.lowering.programs import Choice
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement, ScheduleSpec
from megatron_het.plan.run_config import HetConfig, plan_from_flags
from megatron_het.report import _WRITTEN_EVERY_S, MOST_KEPT, RunReport, Timeline, TransferLog, event
from megatron_het.schedule.kinds import Kind
from tests.unit.plan.megatron_flags import flags

TIMELINE: Any = SimpleNamespace(finish=lambda: None, work_s=lambda backward: 0.25)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunReport:
    plan = plan_from_flags(flags("--num-layers 4 --num-attention-heads 8"), 1, ScheduleSpec("1f1b"))[0]
    platform: Any = SimpleNamespace(device_name="GPU")
    monkeypatch.setattr("megatron_het.report._current_iteration", itertools.count(7).__next__)
    monkeypatch.setattr(RunReport, "_meter", lambda self: pytest.MonkeyPatch.context())
    return RunReport(HetConfig(plan, report_dir=tmp_path), Placement(plan), 0, "hash", Choice("gloo", ""), platform)


def iterate(report: RunReport, count: int) -> None:
    for _ in range(count):
        with report.measure(False, TIMELINE):
            pass


def test_a_killed_run_leaves_what_there_was(report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = tmp_path / "rank-0.json"
    iterate(report, 2)
    assert not file.exists()
    now[0] += _WRITTEN_EVERY_S
    iterate(report, 2)
    found = json.loads(file.read_text())
    assert not found["ended"] and len(found["iterations"]) == 3
    now[0] += _WRITTEN_EVERY_S
    monkeypatch.setattr("megatron_het.report.write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    iterate(report, 1)
    monkeypatch.undo()
    report.write()
    found = json.loads(file.read_text())
    assert found["ended"] and len(found["iterations"]) == 5


def test_an_iteration_that_runs_again_counts_once(report: RunReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron repeats one that gave NaN."""
    monkeypatch.setattr("megatron_het.report._current_iteration", iter((1, 2, 2)).__next__)
    iterate(report, 3)
    assert ": 2 iterations, too few to time" in report.closing()


def test_the_newest_iterations_are_kept(report: RunReport, tmp_path: Path) -> None:
    iterate(report, MOST_KEPT + 3)
    report.write()
    found = json.loads((tmp_path / "rank-0.json").read_text())
    assert len(found["iterations"]) == MOST_KEPT and found["iterations_left_out"] == 3
    assert "median iteration" in report.closing()


# Times of operations on a CUDA device come from events, which stand-ins replace here.

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
