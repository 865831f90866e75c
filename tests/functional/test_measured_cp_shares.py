"""``--het-measured-cp-shares``: the slower rank gets the smaller part, and the losses are those of one process."""

import json
from pathlib import Path

import pytest

from testing.runner import Finished, Job, Runner
from tests.functional.test_auto_batch import FLAGS

_STEPS = ("--micro-batch-size", "1", "--calculate-per-token-loss", "--het-schedule", "1f1b", "--global-batch-size", "2")
_SLOW = 2


def run(runner: Runner, folder: Path, name: str, world_size: int, *more: str) -> Finished:
    setup = ("tests.functional.slowed_rank:slow_one", {"slow": _SLOW}) if world_size > 1 else None
    argv = (*FLAGS, *_STEPS, "--het-report", str(folder / name), *more)
    return runner.run(Job(name, world_size, argv, folder / f"log-{name}", setup=setup, timeout_s=900.0))


def test_parts_follow_the_speed_and_losses_stay(runner: Runner, tmp_path: Path) -> None:
    run(runner, tmp_path, "alone", 1)
    parallel = ("--pipeline-model-parallel-size", "2", "--context-parallel-size", "2", "--het-measured-cp-shares")
    done = run(runner, tmp_path, "parts", 4, *parallel)
    (said,) = (line for line in done.log(0).splitlines() if "context-parallel parts by measured speed" in line)
    slow, fast = map(int, said.rpartition("stage 1, ranks 2 to 3: ")[2].split())
    assert slow < fast, said
    losses = {
        name: [loss for _, loss in json.loads((tmp_path / name / f"rank-{rank}.json").read_text())["losses"]]
        for name, rank in (("alone", 0), ("parts", 3))
    }
    assert len(losses["alone"]) == 3
    assert losses["parts"] == pytest.approx(losses["alone"], rel=1e-5)
    hashes = {json.loads((tmp_path / "parts" / f"rank-{rank}.json").read_text())["plan_hash"] for rank in range(4)}
    assert len(hashes) == 1
