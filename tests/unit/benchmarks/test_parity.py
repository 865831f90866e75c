"""The parity benchmark in pieces: what earlier runs found is added, and only the rest is trained."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import parity
from megatron_het.families import _check_recurrent
from testing.cases import Case
from testing.compare import Differences
from testing.families import RECURRENT_HEADS
from testing.zorse_cases import MinistageLab

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


def test_plans_that_changed_or_failed_are_trained_again(run, tmp_path):
    _, report, first = run("--begin-s", "4")
    report["cases"][0]["chosen"]["stages"] = 99
    (tmp_path / "before.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit, match=f"{first[0]} are other plans now"):
        run("--add", str(tmp_path / "before.json"), "--begin-s", "4")
    _, report, first = run("--begin-s", "2")
    report["cases"][1]["error"] = "it failed"
    (tmp_path / "before.json").write_text(json.dumps(report))
    assert run("--add", str(tmp_path / "before.json"), "--begin-s", "1")[2] == [first[1]]


class SavedRuns(MinistageLab):
    """A lab whose runs are over, with so much between their parameters."""

    runner = SimpleNamespace(device="cpu")

    def __init__(self, difference: float) -> None:
        self._found = difference

    def reference(self, case: Case) -> Path:
        return Path("reference")

    def parameter_difference(self, case: Case) -> float:
        return self._found

    def rounding_difference(self, case: Case) -> float:
        return 3e-5


@pytest.mark.parametrize(("difference", "stock"), [(9e-6, None), (2e-5, 3e-5)])
def test_stock_megatron_is_compared_with_itself_where_parameters_miss_the_bar(monkeypatch, difference, stock):
    case = next(case for case in parity.all_cases(0, "1f1b", True)[0] if parity.compares_parameters(case))
    monkeypatch.setattr(parity, "compare", lambda *_, **__: Differences(0.0, 0.0, 0.0, "none", 0.0, 0.0))
    job = SimpleNamespace(log_dir=Path("case"))
    finished = SimpleNamespace(job=job, elapsed_s=1.0, cpu_s=1.0, check=lambda: None)
    entry = parity._compared(SavedRuns(difference), case, finished)
    assert entry["relative_parameter_difference"] == difference
    assert entry.get("stock_parameter_difference") == stock


@pytest.mark.parametrize("schedule", ["1f1b", "slimpipe", "zero-bubble"])
def test_recurrent_models_get_plans_that_train_them(schedule):
    cases = parity.MODELS["recurrent"](parity.all_cases(7, schedule, True)[0], 7)
    counts = {"mamba_num_heads": 4, "linear_num_value_heads": 4}
    counts |= dict.fromkeys(("mamba_num_groups", "linear_num_key_heads"), RECURRENT_HEADS)
    for case in cases:
        _check_recurrent(case.plan, case.plan.model.pattern, SimpleNamespace(**counts))
    assert len(cases) >= 4
