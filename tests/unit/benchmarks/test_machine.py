"""What all benchmarks share: the option ``--json``, a folder for the runs, jobs beside each other, and the report."""

import json
from pathlib import Path

import pytest

from benchmarks.machine import command_line, write_report
from testing.runner import Runner


def test_a_report_says_where_and_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = command_line("benchmarks.example", "Measures nothing.").parse_args(["--json", f"{tmp_path}/new/out.json"])
    write_report(options.json, {"speedup": 2.0, "cases": [1, 2]})
    written, printed = json.loads(options.json.read_text()), json.loads(capsys.readouterr().out)
    assert written["speedup"] == 2.0 and written["cases"] == [1, 2]
    assert written["elapsed_s"] >= 0 and {"date", "processor", "cores"} <= set(written["machine"])
    assert printed == {key: value for key, value in written.items() if key != "cases"}
    write_report(None, {"speedup": 1.0})
    assert json.loads(capsys.readouterr().out)["speedup"] == 1.0


def test_an_answer_to_another_job_is_kept() -> None:
    runner = Runner.__new__(Runner)  # without a server
    runner._unclaimed = {}
    answers = iter([{"id": 1}, {"id": 3}, {"id": 2}])
    runner._read = lambda limit_s: next(answers)  # type: ignore[method-assign]
    assert runner._answer_for([2], 0.0) == {"id": 2}
    assert runner._answer_for([1, 3], 0.0) == {"id": 1}
    assert runner._answer_for([3], 0.0) == {"id": 3}
