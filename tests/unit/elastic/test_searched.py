"""Plans are made ahead, and the controller goes on meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.pool import Learned, NoPlanError, Process
from megatron_het.elastic.searched import SearchedPlans
from megatron_het.plan import Plan
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_pool import plan as plan_of

WAIT_S = 20.0


class Searches:
    """Stands in for the planner: a plan with a stage per GPU, once it may answer."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.open = threading.Event()
        self.measured: list[tuple[dict[str, Any], float]] = []
        self.answer: Learned | None = None
        self.profiles: list[Path | None] = []

    def run(self, document: str) -> Plan:
        size = sum(group["count"] * group["gpus_per_node"] for group in json.loads(document)["nodes"])
        self.sizes.append(size)
        assert self.open.wait(WAIT_S)
        if size == 1:
            raise NoPlanError("one GPU is too small")
        return plan_of([[1]] * size)

    def check(self) -> None:
        """Whatever it is given."""

    def better(self, document: str, plan: Plan, measured: dict[str, Any], change_s: float) -> Learned | None:
        self.measured.append((measured, change_s))
        return self.answer

    def with_profile(self, profile: Path | None) -> Searches:
        self.profiles.append(profile)
        return self


@pytest.fixture
def searches() -> Searches:
    return Searches()


@pytest.fixture
def plans(tmp_path: Path, searches: Searches) -> SearchedPlans:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(json.dumps({"nodes": [{"gpu": "T4", "count": 9, "gpus_per_node": 1}]}))
    return SearchedPlans(cluster, searches, lambda _: None)


def pool(size: int) -> list[Process]:
    return [Process(i + 1, f"n{i}", "T4") for i in range(size)]


def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_plans_are_made_ahead_and_once(plans: SearchedPlans, searches: Searches):
    plans.prepare([pool(3), pool(2), pool(2)])
    assert not plans.is_ready(pool(3))
    searches.open.set()
    until(lambda: plans.is_ready(pool(3)) and plans.is_ready(pool(2)))
    assert plans.plan(pool(3))[0].world_size == 3
    assert plans.plan(pool(2))[1] == (1, 2)
    assert searches.sizes == [3, 2]


def test_a_search_that_is_under_way_is_waited_for(plans: SearchedPlans, searches: Searches):
    plans.prepare([pool(3)])
    until(lambda: searches.sizes)
    threading.Timer(0.1, searches.open.set).start()
    assert plans.plan(pool(3))[0].world_size == 3
    assert searches.sizes == [3]


def test_a_pool_that_nobody_has_foreseen_waits_for_no_other_search(plans: SearchedPlans, searches: Searches):
    plans.prepare([pool(3), pool(2)])
    until(lambda: searches.sizes)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(plans.plan(pool(4))[0].world_size), daemon=True)
    thread.start()
    until(lambda: searches.sizes == [3, 4])
    searches.open.set()
    thread.join(WAIT_S)
    assert found == [4]


def test_an_error_is_an_answer(plans: SearchedPlans, searches: Searches):
    searches.open.set()
    plans.prepare([pool(1)])
    until(lambda: plans.is_ready(pool(1)))
    for _ in range(2):
        with pytest.raises(NoPlanError, match="too small"):
            plans.plan(pool(1))
    assert searches.sizes == [1]


def test_a_planner_that_cannot_be_run_is_an_answer(plans: SearchedPlans, tmp_path: Path):
    class Broken(Searches):
        def run(self, document: str) -> Plan:
            raise OSError("no space left")

    broken = SearchedPlans(tmp_path / "cluster.yaml", Broken(), lambda _: None)
    broken.prepare([pool(2)])
    until(lambda: broken.is_ready(pool(2)))
    with pytest.raises(NoPlanError, match="no space left"):
        broken.plan(pool(2))


def test_renewed_plans_are_searched_again(plans: SearchedPlans, searches: Searches):
    plans.prepare([pool(2)])
    until(lambda: searches.sizes)
    plans.renew()  # what the search that is under way finds is outdated
    searches.open.set()
    plans.prepare([pool(3)])
    until(lambda: plans.is_ready(pool(3)))
    assert not plans.is_ready(pool(2))
    plans.plan(pool(2))
    assert searches.sizes == [2, 3, 2]


def test_the_controller_goes_on_while_a_plan_is_made(plans: SearchedPlans, searches: Searches, tmp_path: Path):
    board: Any = Notes()
    controller = Controller(board, plans, tmp_path / "state.json", 2, Bounds(), lambda _: None)

    def come(number: int) -> None:
        board.post({"type": "ready", "process": number, "node": f"n{number}", "device": "T4", "signature": "s"})

    def step_until(condition: Callable[[], Any]) -> None:
        until(lambda: controller._step() or condition())

    searches.open.set()
    come(1), come(2)
    step_until(lambda: board.has("latest"))
    step_until(lambda: plans.is_ready(pool(1)))
    assert searches.sizes == [2, 1], "what is left when a node is lost is planned ahead"
    searches.open.clear()
    come(3)
    for _ in range(20):
        controller._step()
    assert [member["process"] for member in controller.status()["members"]] == [1, 2, 3]
    assert not board.has("0/wanted")
    searches.open.set()
    step_until(lambda: board.has("check/3"))
    assert not board.has("0/wanted"), "the newcomer says first whether the flags go with the plan"
    board.post({"type": "checked", "id": board.get("check/3")["id"], "problems": []})
    step_until(lambda: board.has("0/wanted"))
    assert board.get("0/wanted") == "a node joins"


def test_replan_searches_again(plans: SearchedPlans, searches: Searches, tmp_path: Path):
    board: Any = Notes()
    controller = Controller(board, plans, tmp_path / "state.json", 1, Bounds(), lambda _: None)
    searches.open.set()
    for number in (1, 2):
        board.post({"type": "ready", "process": number, "node": f"n{number}", "device": "T4", "signature": "s"})
    until(lambda: controller._step() or board.has("latest"))
    until(lambda: searches.sizes == [2, 1])
    board.post({"type": "replan"})
    until(lambda: controller._step() or board.has("0/wanted"))
    assert board.get("0/wanted") == "a new plan was asked for"
    assert searches.sizes.count(2) == 2


def test_a_cluster_file_that_is_broken_later_breaks_nothing(plans: SearchedPlans, searches: Searches, tmp_path: Path):
    board: Any = Notes()
    lines: list[str] = []
    controller = Controller(board, plans, tmp_path / "state.json", 1, Bounds(), lines.append)
    searches.open.set()
    board.post({"type": "ready", "process": 1, "node": "n1", "device": "T4", "signature": "s"})
    board.post({"type": "ready", "process": 2, "node": "n2", "device": "T4", "signature": "s"})
    until(lambda: controller._step() or board.has("latest"))
    (tmp_path / "cluster.yaml").write_text("nodes: [")
    board.post({"type": "replan"})
    for _ in range(5):
        assert not controller._step()
    assert any("cluster.yaml" in line for line in lines)
    assert not board.has("0/wanted")
