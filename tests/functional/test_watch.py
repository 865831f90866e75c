"""A real run in which one process slows down: it is named, in the log and in the files, and a better plan is found."""

import json
from pathlib import Path

import pytest

from benchmarks import drift
from testing.runner import Runner
from tests.unit.planner.emit_plans import answer

pytest.importorskip("megatron.core")

_FACTOR, _AT, _UNTIL = 5.0, 10, 20


@pytest.mark.full
def test_a_slowed_rank_is_named_and_a_better_plan_found(
    runner: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = drift.folder_of(drift.planned((4, 4)), tmp_path / "run")
    stand_in = drift.Scenario("test", (4, 4), ("rank 1",), slowed=(1,)).stand_in(_AT) | {"factor": _FACTOR}
    board = tmp_path / "tensorboard"
    flags = ("--tensorboard-dir", str(board), "--tensorboard-log-interval", "1")
    done = runner.run(drift.job(folder / "plan.json", folder, _UNTIL, stand_in, *flags))

    slow = [(i, text) for i, text in drift.said(done) if text.startswith("rank 1 ") and "computes slowly" in text]
    assert slow, done.log()
    assert _AT <= slow[0][0] < _AT + 10, "named within ten iterations"
    assert "het-plan replan" in slow[0][1]

    watched = json.loads((folder / "ranks" / "watch.json").read_text())
    named = [f for f in watched["findings"] if f["what"] == "device" and f["name"] == "rank 1"]
    assert named and named[0]["factor"] > 2
    trace = json.loads((folder / "ranks" / "watch-trace.json").read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
    assert [title.rsplit(", ", 1)[1] for title in titles] == ["predicted", "measured"] * 2
    assert {e["pid"] for e in trace if e["ph"] == "X"} == {0, 1, 2, 3}, "all four rows have operations"
    report = json.loads((folder / "ranks" / "rank-0.json").read_text())
    assert report["watch"]["iterations"] >= _UNTIL - 3

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board))
    events.Reload()
    assert {"het/iteration-s", "het/predicted-iteration-s", "het/slowest-device", "het/device-1"} <= set(
        events.Tags()["scalars"]
    )

    assert answer(capsys, ["replan", str(folder), "--schedules", "1f1b"])["gain"] > 0.1


def test_a_plan_without_costs_is_not_watched(runner: Runner, tmp_path: Path) -> None:
    folder = drift.folder_of(drift.planned((4, 4)), tmp_path / "run")
    plan = json.loads((folder / "plan.json").read_text())
    del plan["predicted"]["costs"]
    (folder / "plan.json").write_text(json.dumps(plan))
    off = drift.Scenario("test", (4, 4), ()).stand_in(99)
    done = runner.run(drift.job(folder / "plan.json", folder, 4, off))
    assert "het: watch" not in done.log()
    assert "watch" not in json.loads((folder / "ranks" / "rank-0.json").read_text())
    wanted = drift.job(folder / "plan.json", tmp_path / "again", 4, off, "--het-watch", "on")
    refused = runner.run(wanted, check=False)
    assert not refused.succeeded
    assert "predicted.costs" in refused.log(0)
