"""What ``make test-upstream`` makes of outcomes, and what it says without a checkout."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FILE = Path(__file__).resolve().parents[2] / "upstream" / "run.py"


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    spec = importlib.util.spec_from_file_location("upstream_suite", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_surprise_is_named(suite: ModuleType) -> None:
    outcomes = {
        name: {"outcome": outcome, "text": "why"}
        for name, outcome in {"a": "passed", "b": "failed", "c": "unfinished", "d": "passed", "e": "failed"}.items()
    }
    expected = {"d": "it needs a GPU", "e": "it needs two", "f": "it is gone"}
    wrong = suite.judge(outcomes, expected, whole=True)
    assert [line.split(":")[0] for line in wrong] == [
        "unexpected failure",
        "unexpected failure",
        "unexpected passed",
        "expected to fail, but not there",
    ]
    assert (
        "b (failed)" in wrong[0] and "c (unfinished)" in wrong[1] and "it needs a GPU" in wrong[2] and "f" in wrong[3]
    )
    assert suite.judge(outcomes, {"b": "", "c": "", "e": ""}, whole=False) == []


def test_a_test_has_the_worst_outcome_and_an_open_one_is_unfinished(suite: ModuleType, tmp_path: Path) -> None:
    recorder = suite.Recorder(tmp_path / "0.json")
    report = lambda name, when, **more: SimpleNamespace(  # noqa: E731
        nodeid=name, when=when, longrepr="text", **({"failed": False, "skipped": False} | more)
    )
    for name in ("passes", "fails late", "hangs"):
        recorder.pytest_runtest_logstart(name)
    recorder.pytest_runtest_logreport(report("passes", "call"))
    recorder.pytest_runtest_logreport(report("fails late", "call"))
    recorder.pytest_runtest_logreport(report("fails late", "teardown", failed=True))
    found = {name: r["outcome"] for name, r in json.loads((tmp_path / "0.json").read_text()).items()}
    assert found == {"passes": "passed", "fails late": "failed", "hangs": "unfinished"}


def test_without_a_checkout_it_says_what_to_do(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for value in ("", str(tmp_path)):
        monkeypatch.setenv("MEGATRON_LM_PATH", value)
        assert suite.main([]) == 2
        assert "Clone tag core_v0.19.0" in capsys.readouterr().out


def test_every_expected_failure_has_a_reason_and_a_file_of_the_list(suite: ModuleType) -> None:
    files = suite.FILES.read_text(encoding="utf-8").split()
    for name, reason in json.loads(suite.EXPECTED.read_text(encoding="utf-8")).items():
        assert len(reason) > 10 and name.split("::")[0].split(" ")[0] in files
