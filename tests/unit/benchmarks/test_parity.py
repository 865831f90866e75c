"""The parity benchmark in pieces: what earlier runs found is added, and only the rest is trained."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import parity

GOOD = {f"relative_{key}_difference": 1e-7 for key in ("loss", "validation", "gradient", "norm", "later_norm")}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command line with some words; returns its exit code, the report and the plans that it trained."""

    def measured(cases, _folder, _at_once, _device, *, on_entry, begin_s, **_more):
        for case in cases[: int(begin_s)]:
            on_entry(parity._entry(case, **GOOD))
            trained.append(case.name)

    def of(*words: str):
        trained.clear()
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["parity", "--json", str(out), "--quick", *words])
        code = parity.main()
        return code, json.loads(out.read_text()), list(trained)

    trained: list[str] = []
    monkeypatch.setattr(parity, "measure", measured)
    return of


def test_pieces_are_put_together(run, tmp_path):
    code, report, first = run("--begin-s", "4")
    assert code == 0 and len(report["cases"]) == 4
    code, report, second = run("--add", str(tmp_path / "out.json"), "--begin-s", "1000")
    assert code == 0 and not set(first) & set(second)
    assert [entry["name"] for entry in report["cases"]] == sorted(first + second)
    assert report["fp32"]["plans"] + report["bf16"]["plans"] == len(first + second)


@pytest.mark.parametrize("words", [["--seed", "1"], ["--schedule", "gpipe"], ["--model", "packed"]])
def test_other_draws_are_not_added(run, tmp_path, words):
    run("--begin-s", "4")
    with pytest.raises(SystemExit, match="and this run has"):
        run("--add", str(tmp_path / "out.json"), "--begin-s", "4", *words)


def test_plans_that_changed_are_trained_again(run, tmp_path):
    _, report, first = run("--begin-s", "4")
    report["cases"][0]["chosen"]["stages"] = 99
    (tmp_path / "before.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit, match=f"{first[0]} are other plans now"):
        run("--add", str(tmp_path / "before.json"), "--begin-s", "4")


def test_a_plan_that_failed_is_tried_again(run, tmp_path):
    _, report, first = run("--begin-s", "2")
    report["cases"][1]["error"] = "it failed"
    (tmp_path / "before.json").write_text(json.dumps(report))
    assert run("--add", str(tmp_path / "before.json"), "--begin-s", "1")[2] == [first[1]]
