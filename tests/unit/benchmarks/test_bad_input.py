"""The benchmark of malformed inputs: a sample of it here, and that it sees what it looks for."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import bad_input
from benchmarks.bad_input import reported
from benchmarks.bad_input_cases import Case, command, mutated, random_numbers
from benchmarks.bad_input_listed import jobs, listed

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="forks processes that have imported everything")


def test_a_sample_of_malformed_input_gets_clear_errors() -> None:
    rng = random.Random(11)
    light = [case for case in listed(rng) if case.tool != "checkpoint"]  # the others import Megatron
    cases = [*rng.sample(light, 30), *mutated(rng, 30), *random_numbers(rng, 10)]
    bad = [a for a in bad_input.run(cases) if a.verdict not in ("clear", "accepted")]
    assert not bad, "\n".join(f"{a.verdict}: {a.case.kind}: {' '.join(a.case.words)}\n{a.text}" for a in bad)


def test_what_was_found_once_gets_clear_errors() -> None:
    """Commands in the input, hangs, tracebacks, and what was accepted although it is wrong."""
    found = bad_input.run(list(reported()))
    bad = [a for a in found if a.verdict != ("clear" if a.case.wrong else "accepted")]
    assert len(found) > 50 and not bad, "\n".join(f"{a.verdict}: {a.case.kind}: {a.case.tool}: {a.text}" for a in bad)


def test_a_job_refuses_what_it_cannot_use() -> None:
    kinds = ("bad token", "state of a job", "model.yaml of a job", "cluster.yaml of a job", "bad --workers")
    kinds += ("bad words of replan", "output onto mine.txt", "output onto plan.json", "a pipe as rank-0.json")
    found = bad_input.run([case for case in jobs() if case.kind in kinds])
    bad = [answer for answer in found if answer.verdict != "clear"]
    assert len(found) > 30 and not bad, "\n".join(f"{a.verdict}: {a.case.kind}: {a.text}" for a in bad)


def test_megatrons_parser_is_asked_without_another_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its imports took more than the five seconds that a case has."""
    monkeypatch.setenv("HET_PLAN_VERIFY", "1")
    monkeypatch.setattr(bad_input, "check_flags", lambda words: print(json.dumps([f"{len(words) > 20}, of a parser"])))
    monkeypatch.setattr(subprocess, "run", None)
    answer = bad_input.run_case(Case("x", "planner", command("emit")), tmp_path)
    assert answer.verdict == "clear" and "the job would not start: True, of a parser" in answer.text, answer


def answers(*verdicts: str) -> list[bad_input.Answer]:
    return [bad_input.Answer(verdict, 0.5, 2, "", Case("x", "planner", ())) for verdict in verdicts]


def test_parts_are_counted_together_and_once(tmp_path: Path) -> None:
    first = tmp_path / "first.json"
    first.write_text(json.dumps(bad_input.report_of(answers("clear", "hang"), 1, 3, "1/2", [])))
    both = bad_input.report_of(answers("clear"), 1, 3, "2/2", [first])
    assert (both["cases"], both["clear"], both["hang"], both["parts"]) == (3, 2, 1, ["1/2", "2/2"])
    for seed, of, part in ((1, 3, "1/2"), (1, 3, "2/3"), (2, 3, "2/2"), (1, 4, "2/2")):
        with pytest.raises(SystemExit, match="first.json"):
            bad_input.report_of(answers("clear"), seed, of, part, [first])


def _refuse(act: Callable[[], object]) -> int:
    act()
    sys.stderr.write("error: x\n")
    return 2


@pytest.mark.parametrize(
    ("verdict", "act"),
    [
        ("traceback", lambda: dict[str, int]()["x"]),
        ("accepted_wrong", lambda: 0),
        ("unclear", lambda: 2),
        ("clear", lambda: _refuse(list)),
        ("written", lambda: _refuse(lambda: Path("new").touch())),
        ("written", lambda: _refuse(lambda: Path("plan.json").write_text("x"))),
        ("hang", lambda: time.sleep(60)),
        ("executed", lambda: _refuse(lambda: os.system("touch $MARK_FOLDER/executed.mark"))),
    ],
)
def test_verdicts(verdict: str, act: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bad_input, "_run_tool", lambda case: act())
    monkeypatch.setattr(bad_input, "CLOCK_S", 1.0 if verdict == "hang" else 20.0)
    answer = bad_input.run_case(Case("x", "planner", ()), tmp_path)
    assert answer.verdict == verdict, answer.text
