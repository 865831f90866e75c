"""The command ``dry-run``: which ranks it runs, with which flags, and what it refuses before anything is started."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import Plan, save_plan
from testing.cases import FFN, GROUPS, HEADS, HIDDEN, MICROBATCHES, SEQUENCE, build_plan
from tools.planner.__main__ import main
from tools.planner.cli import dry_run

MODEL = f"""
num_layers: 5
hidden_size: {HIDDEN}
ffn_hidden_size: {FFN}
num_attention_heads: {HEADS}
num_query_groups: {GROUPS}
vocab_size: 250
seq_length: {SEQUENCE}
global_batch_size: {MICROBATCHES}
precision: fp32
"""


def plan() -> Plan:
    """Two equal replicas before one of TP 2."""
    return build_plan([[1, 1], [2]], [2, 3], random.Random(0))


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line for the plan and its model."""
    save_plan(plan(), tmp_path / "plan.json")
    (tmp_path / "model.yaml").write_text(MODEL, encoding="utf-8")
    return ["dry-run", str(tmp_path / "plan.json"), "--model", str(tmp_path / "model.yaml"), "--json"]


def test_ranks_that_run_alike_are_one_kind() -> None:
    assert [kind.ranks for kind in dry_run.rank_kinds(plan())] == [(0, 1), (2, 3)]
    (first, second), last = plan().stages[0].replicas, plan().stages[1]
    uneven = (replace(first, microbatches=(0,)), replace(second, microbatches=(1, 2, 3, 4, 5)))
    stages = (replace(plan().stages[0], replicas=uneven), last)
    assert [kind.ranks for kind in dry_run.rank_kinds(replace(plan(), stages=stages))] == [(0,), (1,), (2, 3)]


@pytest.mark.parametrize(
    ("more", "ranks"), [([], [0, 2]), (["--all"], [0, 1, 2, 3]), (["--rank", "3", "--rank", "1"], [3, 1])]
)
def test_the_asked_for_ranks_run_with_the_users_flags_last(
    words: list[str],
    more: list[str],
    ranks: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: dict[str, Any] = {}

    def run_ranks(
        asked: list[int], flags: list[str], limit_s: float, kernels: str, *, cuda: bool
    ) -> dict[int, dict[str, Any]]:
        seen.update(ranks=asked, flags=flags)
        return {rank: {"error": "no figures"} for rank in asked}

    monkeypatch.setattr(dry_run, "run_ranks", run_ranks)
    assert main([*words, *more, "--", "--lr", "1", "--vocab-size", "9"]) == 1
    assert seen["ranks"] == ranks
    assert seen["flags"][-4:] == ["--lr", "1", "--vocab-size", "9"] and "--het-plan" in seen["flags"]
    assert [row["error"] for row in json.loads(capsys.readouterr().out)["ranks"]] == ["no figures"] * len(ranks)


@pytest.mark.parametrize(
    ("change", "more", "key"),
    [
        ("", ["--rank", "4"], "--rank"),
        ("hidden_size: 128", [], "model.hidden_size"),
        ("fp8: true\nprecision: bf16", [], "fp8"),
        ("", ["--cuda", "--kernels", "cpu"], "--cuda"),
    ],
)
def test_what_cannot_run_is_refused(
    words: list[str], change: str, more: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(words[words.index("--model") + 1])
    kept = [line for line in MODEL.splitlines() if line.split(":")[0] not in change]
    path.write_text("\n".join([*kept, change]), encoding="utf-8")
    assert main([*words, *more]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == key


def test_flags_of_megatron_are_refused_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", "plan.json", "--cluster", "c.yaml", "--model", "m.yaml", "--", "--lr", "1"])
    assert stop.value.code == 2 and "--lr" in capsys.readouterr().err


def test_a_plan_without_such_a_rank_ends_before_torch_is_imported(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_het.dry_run.__main__ import main as run

    for flags, text in (([], "--het-plan is missing"), (["--het-plan", words[1]], "ranks 0 to 3")):
        with pytest.raises(SystemExit) as stop:
            run(["--rank", "9", "--out", "x.json", "--", *flags])
        assert stop.value.code == 2 and text in capsys.readouterr().err


def test_waits_of_the_host_are_shown(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those inside operations come first, and their sum is in a line of its own."""
    waits = [
        {"what": "value read", "where": "training.py:7", "during": "", "calls": 9},
        {"what": "copy to pageable memory", "where": "channels.py:3", "during": "send_forward", "calls": 2},
    ]
    names = ("parameters", "gradients", "optimizer", "activations", "cache", "temporaries", "other")
    memory = {"by_category": dict.fromkeys(names, 0), "total_bytes": 0, "label": "F1"}
    row = {"stage": 0, "flops": {}, "traffic": [], "memory": memory, "seconds": 1.0, "host_waits": waits}

    def run_ranks(asked: list[int], *_: object, cuda: bool) -> dict[int, dict[str, Any]]:
        return {rank: row | ({"stream_waits": []} if cuda else {}) for rank in asked}

    monkeypatch.setattr(dry_run, "run_ranks", run_ranks)
    words.remove("--json")
    assert main([*words, "--rank", "0", "--cuda"]) == 0
    text = capsys.readouterr().out
    assert text.index("send_forward") < text.index("training.py:7") and "waits inside operations: 2" in text
    assert main([*words, "--rank", "0"]) == 0
    assert "Waits of the host" not in capsys.readouterr().out
