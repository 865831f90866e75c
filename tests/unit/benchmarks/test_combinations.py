"""Parts of the table of combinations, put together."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import combinations
from benchmarks.combinations import added, from_before, read_entries, trained_cases
from testing.combination_cases import case_of, pair_row
from testing.compare import failures


def _written(file: Path, seed: int, *entries: dict[str, Any]) -> Path:
    file.write_text(json.dumps({"seed": seed, "cases": entries}), encoding="utf-8")
    return file


def test_later_results_of_a_plan_replace_earlier_ones_and_other_plans_are_refused(tmp_path: Path) -> None:
    cases = [case_of(pair_row([("schedule", name)]), name, 3) for name in ("1f1b", "gpipe")]
    entries: list[dict[str, Any]] = [{"name": case.name, "chosen": case.chosen, "error": "hung"} for case in cases]
    fine = {key: value for key, value in entries[0].items() if key != "error"}
    first = _written(tmp_path / "first.json", 3, *entries)
    second = _written(tmp_path / "second.json", 3, fine)
    found = added([first, second], 3, cases)
    assert from_before(found, 3) == []
    assert {name: entry.get("error") for name, entry in found.items()} == {"1f1b": None, "gpipe": "hung"}
    with pytest.raises(SystemExit, match=r"second.json: of seed 3"):
        added([second], 4, cases)
    with pytest.raises(SystemExit, match="1f1b are other plans now"):
        added([second], 3, cases[1:])


def test_plans_from_before_a_parameter_was_in_the_table_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(pair_row([("schedule", "interleaved"), ("tied", True)]), "plan-000", 3)
    row = {key: value for key, value in case.chosen["row"].items() if key != "chunks"}
    file = _written(tmp_path / "old.json", 3, {"name": case.name, "chosen": {**case.chosen, "row": row}})
    before = from_before(read_entries([file], 3), 3)
    assert before == [case]
    added([file], 3, before)
    wanted: list[Any] = [
        (("schedule", "interleaved"), ("tied", True)),
        (("schedule", "interleaved"), ("chunks", "different")),
    ]
    monkeypatch.setattr(combinations, "argument_problems", lambda cases, folder: [[] for _ in cases])
    known, more = trained_cases(wanted, set(), 3, tmp_path, before)
    assert known == case
    assert more.name == "more-000" and more.chosen["row"]["chunks"] == "different"
    assert sorted(len(stage.layers) for stage in more.plan.stages) == [1, 2]


def test_a_plan_without_a_figure_failed() -> None:
    entry: dict[str, Any] = {"name": "plan", "chosen": {"precision": "fp32"}}
    figures = dict.fromkeys((f"relative_{k}_difference" for k in ("loss", "validation", "gradient", "norm")), 1e-7)
    assert failures([entry, {**entry, **figures}, {**entry, **figures, "relative_norm_difference": 1e-4}]) == [
        "plan",
        "plan",
    ]
