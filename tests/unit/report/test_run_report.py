"""The report of a run: written while the run goes on, and bounded."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.launch.megatron_args import HetConfig
from megatron_het.lowering.programs import Choice
from megatron_het.plan import Placement, ScheduleSpec
from megatron_het.plan.from_flags import plan_from_flags
from megatron_het.report import run_report
from megatron_het.report.run_report import RunReport
from tests.unit.plan.megatron_flags import flags

TIMELINE: Any = SimpleNamespace(finish=lambda: None, work_s=lambda backward: 0.25)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunReport:
    plan = plan_from_flags(flags("--num-layers 4 --num-attention-heads 8"), 1, ScheduleSpec("1f1b"))[0]
    platform: Any = SimpleNamespace(device_name="GPU")
    monkeypatch.setattr(run_report, "_current_iteration", lambda: 7)
    monkeypatch.setattr(RunReport, "_meter", lambda self: pytest.MonkeyPatch.context())
    return RunReport(HetConfig(plan, report_dir=tmp_path), Placement(plan), 0, "hash", Choice("gloo", ""), platform)


def iterate(report: RunReport, count: int) -> None:
    for _ in range(count):
        with report.measure(False, TIMELINE):
            pass


def test_a_run_that_is_killed_leaves_what_there_was(
    report: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = tmp_path / "rank-0.json"
    iterate(report, 2)
    assert not file.exists()
    now[0] += run_report._WRITTEN_EVERY_S
    iterate(report, 2)
    found = json.loads(file.read_text())
    assert not found["ended"] and len(found["iterations"]) == 3
    now[0] += run_report._WRITTEN_EVERY_S
    monkeypatch.setattr(run_report, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    iterate(report, 1)
    monkeypatch.undo()
    report.write()
    found = json.loads(file.read_text())
    assert found["ended"] and len(found["iterations"]) == 5


def test_the_newest_iterations_are_kept(report: RunReport, tmp_path: Path) -> None:
    iterate(report, run_report.MOST_KEPT + 3)
    report.write()
    found = json.loads((tmp_path / "rank-0.json").read_text())
    assert len(found["iterations"]) == run_report.MOST_KEPT and found["iterations_left_out"] == 3
    assert "median iteration" in report.closing()
