"""The report of ``benchmarks.cuda_iterations``: results of several runs are counted together, and lines once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.cuda_iterations import added, cuda_cases, every_rank, is_bad, left_to_do, report_of

LINE = "megatron_het/runtime/channels.py:1"


def run(name: str, waits: int, **more: Any) -> dict[str, Any]:
    found = [{"calls": waits, "during": "forward", "where": "megatron_het/x.py:1"}]
    return {"name": name, "host_waits": found, "traffic": [], **more}


def without(name: str, error: str) -> dict[str, Any]:
    return {"name": f"{name}, without {LINE}", "error": error}


def test_runs_go_on_from_earlier_ones(tmp_path: Path) -> None:
    first, second, third, *_ = (iteration.name for iteration in every_rank(cuda_cases()[:1]))
    runs = {first: run(first, 0, stream_waits=[LINE, "torch/other.py:1"]), second: run(second, 0, stream_waits=[LINE])}
    assert [i.ignored_wait for i in left_to_do(runs, {})] == [LINE]
    noticed = without(first, "x is not ordered after y")
    (tmp_path / "a.json").write_text(json.dumps(report_of(runs, {noticed["name"]: noticed})))
    runs, left_out = added([tmp_path / "a.json"])
    assert left_to_do(runs, left_out) == []
    report = report_of(runs | {third: run(third, 2)}, left_out)
    assert (report["runs"], report["missing_waits"], report["missing_waits_noticed"]) == (3, 1, 1)
    assert report["waits_in_operations"] == 2 and is_bad(report) and not is_bad(report_of(runs, left_out))


def test_a_line_counts_once_and_only_where_every_run_notices_it() -> None:
    entries = [without("a", "x is not ordered after y"), without("b", "something else")]
    report = report_of({}, {entry["name"]: entry for entry in entries})
    assert (report["missing_waits"], report["missing_waits_noticed"]) == (1, 0)
    assert report["missing_waits_unnoticed"] == [entries[1]["name"]] and is_bad(report)
