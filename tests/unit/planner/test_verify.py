"""``plan --verify``: finalists that do not fit are left, the plan is searched again, and people are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.planner.__main__ import main
from tools.planner.cli import dry_run
from tools.planner.cli import dry_run as verify

GIB = 2**30
CLUSTER = """
name: two nodes
nodes:
  - {gpu: A100-40, count: 1, gpus_per_node: 4, zone: here, network_bytes_per_s: 12.5e9}
"""
MODEL = """
num_layers: 6
hidden_size: 4096
ffn_hidden_size: 11008
num_attention_heads: 32
vocab_size: 32000
seq_length: 4096
global_batch_size: 8
distributed_optimizer: true
"""
Peaks = Callable[[int, int], float]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line that writes a plan."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    files = ["--cluster", str(tmp_path / "cluster.yaml"), "--model", str(tmp_path / "model.yaml")]
    return ["plan", *files, "--out", str(tmp_path / "plan.json"), "--schedules", "1f1b", "--json", "--verify"]


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch) -> Callable[[Peaks], list[dict[str, Any]]]:
    """Stands in for the subprocess: gives every rank a peak, by the number of the call and the rank."""

    def stand_in(peak: Peaks) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_ranks(
            ranks: Sequence[int], flags: Sequence[str], limit_s: float, kernels: str, bound_s: float | None = None
        ) -> dict[int, dict[str, Any]]:
            calls.append({"ranks": list(ranks), "flags": list(flags), "limit_s": limit_s, "bound_s": bound_s})
            return {r: {"memory": {"total_bytes": peak(len(calls), r)}} for r in ranks}

        monkeypatch.setattr(verify, "run_ranks", run_ranks)
        return calls

    return stand_in


def answer(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """What the command prints."""
    assert main(words) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_that_fits_is_written(
    words: list[str], dry: Callable[[Peaks], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    calls = dry(lambda call, rank: 20.0 * GIB)
    found = answer([*words, "--verify-limit-s", "50"], capsys)["verify"]
    assert len(calls) == 1 and calls[0]["limit_s"] == verify.RANK_S and calls[0]["bound_s"] == 50.0
    assert found["complete"] and found["searches"] == 1 and not found["left"]
    assert [check["rank"] for check in found["ranks"]] == calls[0]["ranks"]
    assert all(20 * GIB < check["needed_bytes"] < check["capacity_bytes"] for check in found["ranks"])


def test_the_next_finalist_is_taken(
    words: list[str], dry: Callable[[Peaks], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = answer(words[:-1], capsys)
    calls = dry(lambda call, rank: (40.0 if call == 1 else 20.0) * GIB)
    body = answer(words, capsys)
    assert len(calls) == 2 and body["verify"]["searches"] == 1
    assert len(body["verify"]["left"]) == 1 and "needs 4" in body["verify"]["left"][0]
    assert body["iteration_s"] >= plain["iteration_s"]
    assert Path(body["plan_file"]).exists()


def test_the_plan_is_searched_again_with_a_smaller_share_of_memory(
    words: list[str], dry: Callable[[Peaks], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    dry(lambda call, rank: (40.0 if call <= verify.FINALISTS else 20.0) * GIB)
    found = answer(words, capsys)["verify"]
    assert found["searches"] == 2 and len(found["left"]) == verify.FINALISTS
    assert found["memory_margin"] <= 0.95 - verify.LEAST_STEP


def test_no_plan_is_written_where_none_fits(
    words: list[str], dry: Callable[[Peaks], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = dry(lambda call, rank: 41.0 * GIB)
    error = answer(words, capsys, code=2)["error"]
    assert error["key"] == "--verify" and "needs 4" in error["problem"]
    assert len(calls) <= verify.SEARCHES * verify.FINALISTS
    assert not (tmp_path / "plan.json").exists()


def test_ranks_without_figures_are_named(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "run_ranks", lambda ranks, *rest, **more: {r: {"error": "too slow"} for r in ranks})
    found = answer(words, capsys)["verify"]
    assert not found["complete"] and {check["error"] for check in found["ranks"]} == {"too slow"}
    assert main([w for w in words if w != "--json"]) == 0
    ranks = ", ".join(str(check["rank"]) for check in found["ranks"])
    assert f"\nnot verified: rank{'s' * (len(found['ranks']) > 1)} {ranks}: too slow\n" in capsys.readouterr().out


def test_a_dry_run_that_is_not_done_in_time_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(words: Sequence[str], stdout: Any, **more: Any) -> None:
        stdout.write("a library warns\n[Rank 0] memory\n")
        raise dry_run.subprocess.TimeoutExpired(list(words), more["timeout"])

    monkeypatch.setattr(dry_run.subprocess, "run", too_slow)
    found = dry_run._run_in_turn([0, 4], [], 1.0, "gpu", 120.2, False)
    assert found == {rank: {"error": "not done after 120 s"} for rank in (0, 4)}


def test_a_model_that_cannot_run_is_refused_before_the_search(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.yaml").write_text(MODEL + "attention_window: 64\nwindowed_layers: 0.3\n", encoding="utf-8")
    error = answer(words, capsys, code=2)["error"]
    assert error["key"] == "attention_window" and error["hint"] == "Give --no-verify"


def test_it_is_on_where_dry_runs_are_possible(
    words: list[str],
    dry: Callable[[Peaks], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("megatron.core")
    calls = dry(lambda call, rank: 20.0 * GIB)
    plain = words[:-1]
    assert "verify" not in answer(plain, capsys)  # the tests' own environment says so
    monkeypatch.delenv("HET_PLAN_VERIFY")
    assert answer(plain, capsys)["verify"]["limit_s"] == verify.UNASKED_S and len(calls) == 1
    assert "verify" not in answer([*plain, "--no-verify"], capsys) and len(calls) == 1


def test_ranks_without_transformer_engine_keep_their_attention_matrices(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernels = []

    def run_ranks(ranks: Sequence[int], flags: Sequence[str], limit_s: float, which: str, **_: Any) -> dict[int, Any]:
        kernels.append(which)
        return {r: {"memory": {"total_bytes": GIB}} for r in ranks}

    monkeypatch.setattr(verify, "run_ranks", run_ranks)
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("A100-40", "V100-32"), encoding="utf-8")
    answer([*words, "--precision", "fp16"], capsys)
    assert kernels == ["local"]


def test_ranks_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[list[int]] = []
    monkeypatch.setattr(dry_run.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(
        dry_run, "_run_in_turn", lambda ranks, *_: parts.append(list(ranks)) or {r: {"rank": r} for r in ranks}
    )
    assert list(dry_run.run_ranks([4, 0, 9], [], 1.0, "gpu")) == [4, 0, 9]
    assert sorted(parts) == [[0], [4, 9]]
