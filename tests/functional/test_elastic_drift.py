"""An elastic job in which a device becomes slow gets a better plan by itself, and goes on."""

import json
from pathlib import Path

import pytest

from benchmarks import drift
from megatron_het.elastic.pool import GivenPlans
from megatron_het.elastic.searched import Search, SearchedPlans
from testing.compare import reported_losses
from testing.lab import Lab
from tests.functional.test_elastic_job import Running
from tools.planner.search.outcome import CLUSTER, MODEL, PROFILE

pytest.importorskip("megatron.core")

_AT, _ITERATIONS = 5, 18


@pytest.mark.full
def test_a_slow_device_gets_less_work(lab: Lab, tmp_path: Path) -> None:
    inputs, folder = drift.folder_of(drift.planned((4, 4)), tmp_path / "inputs"), tmp_path / "job"
    folder.mkdir()
    search = Search(inputs / CLUSTER, inputs / MODEL, inputs / PROFILE, folder, 60.0)
    lines: list[str] = []
    planner = GivenPlans([drift.planned((4, 4))], SearchedPlans(inputs / CLUSTER, search, lines.append))
    stand_in = drift.Scenario("test", (4, 4), (), slowed=(1,)).stand_in(_AT) | {"factor": 4.0}
    job = Running(
        lab,
        folder,
        [("a", ""), ("b", "")],
        planner=planner,
        flags=drift.training_flags(_ITERATIONS),
        setup=("benchmarks.drift_stand_ins:paced", stand_in),
        device="core",
    )
    finished = job.end()
    assert set(finished.returncodes) == {0}, finished.log(0)
    history = job.controller.history
    assert len(history) == 2 and "shorter for what was measured" in history[1]["why"], (job.lines, lines)
    assert {m["device"] for m in job.controller.status()["members"]} == {"core", "core slow 1"}
    state = json.loads((folder / "state.json").read_text())
    work: dict[str, int] = {}
    for stage in state["generation"]["plan"]["stages"]:
        for replica in stage["replicas"]:
            passes = sum(stage["layers"]) * len(replica["microbatches"])
            work[replica["device"]] = work.get(replica["device"], 0) + passes
    assert work["core"] > 2 * work.get("core slow 1", 0), "four times as slow"
    done = [iteration for generation in folder.glob("generation-*") for iteration in reported_losses(generation)]
    assert sorted(done) == list(range(1, _ITERATIONS + 1)), "none is lost, and none is done twice"
