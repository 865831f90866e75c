"""Times of operations on a CUDA device come from events, which stand-ins replace here."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_het.lowering.ranks import RankOp
from megatron_het.report.timeline import Timeline
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
