"""A job that is not as planned gets a better plan, where the change pays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.pool import GivenFirst, Learned, NoPlanError, Process, read_better, write_run
from megatron_het.elastic.searched import SearchedPlans
from megatron_het.plan import Plan, save_plan
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_pool import plan as plan_of
from tests.unit.elastic.test_searched import Searches, until

CLUSTER = {"nodes": [{"gpu": "T4", "count": 9, "gpus_per_node": 1}]}
TAUGHT = {
    "gpus": {"T4 slow 1": {"flops": {"fp32": 1e12}}},
    "nodes": [{"gpu": name, "count": 1, "gpus_per_node": 1} for name in ("T4", "T4 slow 1")],
}


def on(kinds: tuple[str, ...]) -> Plan:
    """A stage on each kind."""
    plan = plan_of([[1]] * len(kinds))
    stages = tuple(
        replace(s, replicas=(replace(s.replicas[0], device=kind),)) for s, kind in zip(plan.stages, kinds, strict=True)
    )
    return replace(plan, stages=stages)


def learned(pays_after: int = 5) -> Learned:
    return Learned(on(("T4 slow 1", "T4")), ("T4", "T4 slow 1"), TAUGHT, None, 0.25, pays_after)


class Job:
    """A controller with two nodes and a planner that answers at once."""

    def __init__(self, folder: Path, answer: Learned | None, given: tuple[Plan, ...] = ()) -> None:
        self.searches, self.lines, self.board = Searches(), [], Notes()
        self.searches.answer = answer
        self.searches.open.set()
        self.lines: list[str]
        (folder / "cluster.yaml").write_text(json.dumps(CLUSTER))
        self.plans = SearchedPlans(folder / "cluster.yaml", self.searches, self.lines.append)
        planner = GivenFirst(given, self.plans) if given else self.plans
        self.state = folder / "state.json"
        self.planner = planner
        self.controller = self.start()
        for number in (1, 2):
            self.board.post(
                {"type": "ready", "process": number, "node": f"n{number}", "device": "T4", "signature": "s"}
            )
        self.until(lambda: self.board.has("latest"))

    def start(self) -> Controller:
        board: Any = self.board
        return Controller(board, self.planner, self.state, 2, Bounds(), self.lines.append)

    def until(self, condition: Any) -> None:
        until(lambda: self.controller._step() or condition())

    def drifts(self, last: int) -> None:
        self.board.post({"type": "drift", "generation": 0, "measured": {"iteration_s": 2.0}, "last": last})


def test_a_better_plan_is_taken_and_the_slow_device_is_its_own_kind(tmp_path: Path) -> None:
    job = Job(tmp_path, learned())
    job.drifts(last=100)
    job.until(lambda: job.board.has("0/wanted"))
    assert "25.0 % shorter" in job.board.get("0/wanted")
    assert job.searches.measured == [({"iteration_s": 2.0}, 10.0)]
    for process in (1, 2):
        job.board.post(
            {"type": "ended", "process": process, "generation": 0, "how": "left", "error": "", "iteration": 7}
        )
    job.until(lambda: job.board.get("latest") == 1)
    generation = job.board.get("1/generation")
    # Process 2 was rank 1, which is slow; the better plan has the slow kind first.
    assert generation["ranks"] == [2, 1] and generation["plan"]["stages"][0]["replicas"][0]["device"] == "T4 slow 1"
    again = job.start()
    assert {m["device"] for m in again.status()["members"]} == {"T4", "T4 slow 1"}
    assert again.status()["corrected"] == {"cluster": TAUGHT, "profile": None}


def test_a_change_that_does_not_pay_any_more_is_left_out(tmp_path: Path) -> None:
    job = Job(tmp_path, learned(pays_after=50))
    job.drifts(last=40)
    job.until(lambda: any("nothing changes" in line for line in job.lines))
    assert not job.board.has("0/wanted")


def test_nothing_changes_where_nothing_is_better(tmp_path: Path) -> None:
    job = Job(tmp_path, None)
    job.drifts(last=100)
    job.until(lambda: job.searches.measured)
    for _ in range(20):
        job.controller._step()
    assert not job.board.has("0/wanted")


def test_what_an_earlier_generation_measured_is_left_out(tmp_path: Path) -> None:
    job = Job(tmp_path, learned())
    job.board.post({"type": "drift", "generation": 3, "measured": {}, "last": 100})
    for _ in range(20):
        job.controller._step()
    assert not job.searches.measured


def test_a_given_plan_gives_way_to_what_was_measured(tmp_path: Path) -> None:
    job = Job(tmp_path, learned(), given=(on(("T4", "T4")),))
    job.drifts(last=100)
    job.until(lambda: job.board.has("0/wanted"))
    pool = [Process(1, "n1", "T4"), Process(2, "n2", "T4 slow 1")]
    assert job.planner.plan(pool)[0].stages[0].replicas[0].device == "T4 slow 1"


def test_a_new_cluster_file_keeps_the_kinds_that_were_learned(tmp_path: Path) -> None:
    job = Job(tmp_path, learned())
    pool = [Process(1, "n1", "T4"), Process(2, "n2", "T4 slow 1")]
    job.plans.accept(learned(), pool)
    # A kind that was taken out of the file does not come back, but the slow one stays.
    (tmp_path / "cluster.yaml").write_text(json.dumps({"nodes": [{**CLUSTER["nodes"][0], "gpu": "L4"}]}))
    job.plans.renew()
    with pytest.raises(NoPlanError, match="no kind of GPU of the cluster file, which has L4, T4 slow 1"):
        job.plans.plan(pool)
    (tmp_path / "cluster.yaml").write_text(json.dumps(CLUSTER))
    job.plans.renew()
    assert job.plans.plan(pool)[0].world_size == 2


def test_the_files_of_a_better_plan(tmp_path: Path) -> None:
    ran = on(("T4", "T4"))
    words = write_run(tmp_path, ran, json.dumps(CLUSTER), {"iteration_s": 1.0})
    assert words[:2] == ["--plan", str(tmp_path / "plan.json")]
    save_plan(on(("T4 slow 1", "T4")), tmp_path / "better.json")
    (tmp_path / "better.cluster.yaml").write_text(json.dumps(TAUGHT))
    body = {"kinds": {"T4": [0], "T4 slow 1": [1]}, "files": [], "gain": 0.25, "pays_after_iterations": 5}
    found = read_better(tmp_path, json.dumps(body))
    assert (found.kinds, found.cluster, found.profile, found.pays_after) == (("T4", "T4 slow 1"), TAUGHT, None, 5)
    with pytest.raises(ValueError, match="cannot be read"):
        read_better(tmp_path, json.dumps({**body, "pays_after_iterations": None}))
