"""What all benchmarks share: the option ``--json``, a folder for the runs, and the report."""

import json
from pathlib import Path

import pytest

from benchmarks.machine import command_line, write_report


def test_a_report_says_where_and_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = command_line("benchmarks.example", "Measures nothing.").parse_args(["--json", f"{tmp_path}/new/out.json"])
    write_report(options.json, {"speedup": 2.0, "cases": [1, 2]})
    written, printed = json.loads(options.json.read_text()), json.loads(capsys.readouterr().out)
    assert written["speedup"] == 2.0 and written["cases"] == [1, 2]
    assert written["elapsed_s"] >= 0 and {"date", "processor", "cores"} <= set(written["machine"])
    assert printed == {key: value for key, value in written.items() if key != "cases"}
    write_report(None, {"speedup": 1.0})
    assert json.loads(capsys.readouterr().out)["speedup"] == 1.0
