"""Automatic batches: two unequal ranks measure, agree on a plan and train under it, as one process does.

A rank with less memory (an artificial limit) raises the ZeRO stage for both.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from testing.compare import reported_losses
from testing.runner import Finished, Job, Runner

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--max-position-embeddings", "64", "--untie-embeddings-and-output-weights", "--global-batch-size", "9"),
    *("--train-iters", "3", "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"),
    *("--split", "100,0,0", "--eval-iters", "0", "--eval-interval", "100", "--hidden-dropout", "0"),
    *("--attention-dropout", "0", "--transformer-impl", "local", "--attention-backend", "unfused"),
    *("--distributed-backend", "gloo", "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
    *("--no-rope-fusion", "--no-masked-softmax-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion"),
    *("--num-workers", "0", "--use-cpu-initialization"),
)
# ZeRO-0 keeps 16 bytes for each of 242,000 parameters; the second rank has room for one or two sequences beside.
LIMITS = "12000000;5000000"


def run(runner: Runner, folder: Path, name: str, world_size: int, *more: str) -> Finished:
    environment = {"HET_MEMORY_LIMIT_BYTES": LIMITS if world_size > 1 else ""}
    argv = (*FLAGS, "--het-report", str(folder / name), *more)
    return runner.run(Job(name, world_size, argv, folder / f"log-{name}", environment=environment, timeout_s=900.0))


@pytest.fixture(scope="module")
def finished(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Finished]]:
    folder = tmp_path_factory.mktemp("auto")
    alone = ("--het-schedule", "1f1b", "--micro-batch-size", "1", "--calculate-per-token-loss")
    return folder, {
        "alone": run(runner, folder, "alone", 1, *alone),
        "first": run(runner, folder, "first", 2, "--het-auto-batch", str(folder)),
        "again": run(runner, folder, "again", 2, "--het-auto-batch", str(folder)),
    }


@pytest.fixture(scope="module")
def measured(finished: tuple[Path, dict[str, Finished]]) -> dict[str, Any]:
    return json.loads((finished[0] / "auto_batch" / "measured.json").read_text())


def test_the_rank_with_little_memory_raises_the_stage_for_both(measured: dict[str, Any]) -> None:
    assert measured["zero"] > 0
    assert "rank 1" in measured["did_not_fit"][0]["problems"]
    assert "rank 0" not in measured["did_not_fit"][0]["problems"]
    large, small = (curve["sizes"][-1] for curve in measured["curves"])
    assert large > small
    assert sum(map(sum, measured["passes"])) == 9
    assert max(measured["passes"][1]) <= small


@pytest.mark.parametrize("name", ["first", "again"])
def test_trains_as_one_process(finished: tuple[Path, dict[str, Finished]], name: str) -> None:
    expected, found = (reported_losses(finished[0] / run) for run in ("alone", name))
    assert len(expected) == 3
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_later_start_takes_the_stored_plan(finished: tuple[Path, dict[str, Finished]]) -> None:
    first, again = (finished[1][name].log(0) for name in ("first", "again"))
    assert "automatic batches: ZeRO-" in first and "predicted" in first
    assert "automatic batches of an earlier start: ZeRO-" in again
