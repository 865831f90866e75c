"""A dry run of a rank holds, computes and sends, to the byte, what a real run does; ``plan --verify`` asks it."""

from pathlib import Path

import pytest

from benchmarks.dry_run import compare, dry_run_cases
from testing.planner_cases import write_inputs
from testing.runner import Runner
from tests.functional.selected import tiers
from tests.unit.planner.emit_plans import answer

_CHOSEN = (
    "1f1b, distributed optimizer, bf16",
    "interleaved",
    "zero-bubble",
    "zero-bubble in a V",
    "ministage with a window",
    "ministage with a window, split vocabulary",
    "slimpipe",
    "1f1b, experts, mixed TP in a stage",
)
_FULL = {"interleaved", "zero-bubble", "ministage with a window", "1f1b, experts, mixed TP in a stage"}


@pytest.mark.parametrize("name", tiers(_CHOSEN, _FULL))
def test_equals_a_real_run(name: str, runner: Runner, tmp_path: Path) -> None:
    (case,) = (case for case in dry_run_cases() if case.name == name)
    ranks = [0, 2] if case.plan.world_size > 3 and "experts" in case.name else [0]
    entry = compare(runner, case, tmp_path / "runs", ranks)
    assert "error" not in entry, entry["error"]
    assert entry["differences"] == {rank: {} for rank in ranks}


_CLUSTER = """
name: one node
nodes:
  - {gpu: A100-40, count: 1, gpus_per_node: 2, zone: here}
"""
_MODEL = """
num_layers: 4
hidden_size: 1024
ffn_hidden_size: 4096
num_attention_heads: 16
vocab_size: 32000
seq_length: 8192
global_batch_size: 8
micro_batch_sizes: [2]
recompute: [none]
"""


def test_the_planner_verifies_with_dry_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_inputs(tmp_path, _CLUSTER, _MODEL)
    words = ["plan", *files, "--out", str(tmp_path / "plan.json"), "--schedules", "1f1b", "--verify"]
    found = answer(capsys, words)["verify"]
    assert found["complete"] and found["searches"] == 1 and not found["left"], found
    assert found["ranks"]
    for check in found["ranks"]:
        assert check["needed_bytes"] == pytest.approx(check["predicted_bytes"], rel=0.03)
    assert (tmp_path / "plan.json").exists()
