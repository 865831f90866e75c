"""The planner's memory of big plans against dry runs of their ranks that were measured once."""

import json
from pathlib import Path

import pytest

from benchmarks.dry_run import big_plans

_MEASURED = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "dry_run.json"
_ENTRIES = json.loads(_MEASURED.read_text(encoding="utf-8"))["big"]


@pytest.mark.parametrize("name", sorted({entry["name"] for entry in _ENTRIES}))
def test_within_three_percent_of_dry_runs(name: str) -> None:
    plan = next(plan for plan in big_plans() if plan.name == name)
    said = {memory.stage: memory.total_bytes - memory.reserved_bytes for memory in plan.planned()[1]}
    for entry in _ENTRIES:
        if entry["name"] == name:
            error = said[entry["stage"]] / entry["dry_run_bytes"] - 1
            assert -0.03 <= error <= 0.03, entry["rank"]
