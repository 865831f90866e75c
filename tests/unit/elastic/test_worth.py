"""A better plan is taken where it pays in what is left of the run."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic import worth
from megatron_het.elastic.job import Generation
from megatron_het.elastic.members import Lessons, Member
from megatron_het.elastic.pool import GivenPlans, Learned, NoPlanError, Process, read_better, write_run
from megatron_het.elastic.searched import SearchedPlans
from megatron_het.elastic.worth import DEATH, JOIN, LEAVE, Rates, against, change_s, grows_for_s, state_bytes
from megatron_het.plan import LinkCosts, Plan, PlannedCosts, Prediction, RankPrediction, save_plan
from tests.unit.elastic.notes import WAIT_S, Job, plan, trained, until
from tests.unit.elastic.notes import plan as plan_of


def predicted(sizes: list[list[int]], iteration_s: float) -> Plan:
    return replace(plan(sizes), predicted=Prediction(iteration_s, 0.0))


FAST, SLOW = predicted([[1], [1], [1]], 1.5), predicted([[1], [1]], 2.0)


def entry(generation: int, seen: float, steps: tuple[float, ...], began: int = 0) -> dict[str, Any]:
    opened = {str(i): {"iteration": began, "last": 100, "times": {"first_step": step}} for i, step in enumerate(steps)}
    return {"generation": generation, "seen": seen, "opened": opened}


def test_what_a_change_takes_grows_with_state_links_and_groups() -> None:
    def of(held_bytes: int, link_bytes_per_s: float, sizes: list[list[int]], rates: Rates | None = None) -> float:
        ranks = tuple(RankPrediction(r, 1.0, held_bytes // 2, 0, held_bytes // 2, 0) for r in range(len(sizes)))
        costs = PlannedCosts((), (LinkCosts(((0, 1),), 1e-5, link_bytes_per_s),))
        made = replace(plan(sizes), predicted=Prediction(1.0, 0.0, ranks, costs))
        if rates is not None:
            assert change_s([], made, JOIN, rates) == worth.CHANGE_S + grows_for_s(made, rates)
        return grows_for_s(made, rates or Rates())

    small, large = of(10**9, 1e9, [[1], [1]]), of(10**10, 1e9, [[1], [1]])
    assert large - small == pytest.approx(9 * 1.5), "once out, once over the link, once in"
    assert of(10**9, 1e8, [[1], [1]]) - small == pytest.approx(9.0)
    assert of(10**9, 1e9, [[1], [1, 1]]) - small == pytest.approx(2 * worth.GROUP_S)
    assert grows_for_s(SLOW, Rates()) == 0.0 and change_s([], SLOW) == worth.CHANGE_S
    measured = of(10**9, 1e9, [[1], [1]], Rates(4e9, 1e8))
    assert measured - small == pytest.approx(9.0), "copies have told that the link is slower"
    assert of(10**9, 1e8, [[1], [1]], Rates(4e9, 1e9)) == measured, "of the planned and the seen link the slower one"
    assert of(10**9, 1e9, [[1], [1]], Rates(4e8, None)) - small == pytest.approx(4.5)


def test_what_a_change_takes_is_learned_from_the_changes_of_the_job() -> None:
    def seen(number: int, took_s: float, moved_s: float) -> dict[str, Any]:
        told = {"iteration": 5, "times": {"built": 3.0, "loaded": 3.0 + moved_s, "first_step": 10.0 + took_s}}
        return {"generation": number, "seen": 10.0, "took_s": took_s, "state_bytes": 4e9, "opened": {"0": told}}

    ranks = (RankPrediction(0, 1.0, 10**10, 0, 10**10, 0),)
    large = replace(FAST, predicted=Prediction(1.0, 0.0, ranks))
    start, ratio = entry(0, 0.0, (9.0,)), 5.0
    assert change_s([start, seen(1, 7.0, 4.0)], large) == pytest.approx(3.0 + 4.0 * ratio)
    assert change_s([start, seen(1, 7.0, 9.0)], large) == pytest.approx(7.0 * ratio), "never more than the whole"
    changes = [seen(1, 1.0, 0.0), seen(2, 7.0, 0.0), seen(3, 90.0, 0.0), seen(4, 8.0, 0.0)]
    assert change_s([start, *changes], large) == 8.0, "one slow change does not count, nor does an old one"
    assert change_s([start, *changes]) == 8.0


def test_a_join_is_not_judged_by_deaths() -> None:
    """Who stays holds most of its state; a newcomer gets all of it."""
    history = [entry(0, 0.0, (9.0,))]
    history += [entry(i, 10.0, (10.0, 10.0 + took_s)) | {"kind": kind} for i, kind, took_s in
                ((1, JOIN, 9.0), (2, DEATH, 0.4), (3, DEATH, 0.5), (4, LEAVE, 1.0), (5, DEATH, 0.3))]  # fmt: skip
    assert change_s(history, kind=JOIN) == 9.0
    assert change_s(history, kind=DEATH) == pytest.approx(0.4)
    assert change_s([*history[:-1], history[-1] | {"kind": "other"}], kind="") == 0.5
    assert change_s(history[:1] + history[2:4], kind=JOIN) == pytest.approx(0.45), "the others, where there is none"


def test_the_controller_knows_how_fast_copies_went(tmp_path: Path) -> None:
    job = trained(tmp_path, predicted([[1], [1]], 1.0))
    for copies, expected in (
        ({}, Rates()),
        ({1: [2e9, 3e8], 2: [1e9, 5e8]}, Rates(1e9, 3e8)),  # the slowest
        ({1: [0.0, -1.0]}, Rates(1e9, 5e8)),  # nonsense tells nothing
    ):
        for number, rates in copies.items():
            job.beat(number, 4 + len(copies), rates=rates)
        job.step()
        assert job.controller._rates() == expected


def test_the_controller_notes_what_is_learned(tmp_path: Path) -> None:
    made = replace(plan([[1]]), predicted=Prediction(1.0, 0.0, (RankPrediction(0, 1.0, 10**9, 0, 10**9, 0),)))
    job = trained(tmp_path, made, nodes=1)
    for generation in range(2):
        job.opened(generation, last=9, times={"built": 1.0, "loaded": 2.0, "first_step": 3.0})
        job.step()
        if not generation:
            job.ended(1, error="", iteration=1)
            job.step()
    noted = job.controller.history[-1]
    assert noted["generation"] == 1 and noted["state_bytes"] == state_bytes(made) == 2e9 and noted["kind"] == DEATH
    assert 0.0 <= noted["took_s"] < 60.0


def test_what_an_iteration_takes() -> None:
    assert worth.measured_s({}, 5, 10.0) is None
    assert worth.measured_s(entry(0, 0.0, (9.0, 10.0), began=10), 13, 20.0) is None, "too few"
    assert worth.measured_s(entry(0, 0.0, (9.0, 10.0), began=10), 15, 22.0) == 3.0


@pytest.mark.parametrize(
    ("reached", "now_s", "said"),
    [
        (50, 108.0, ""),  # 50 iterations of 2 s, a quarter of it saved: 25 s
        (90, 188.0, "25.0 % shorter, which saves 5.0 s in the 10 that are left; a change takes 10.0 s"),
        (90, 899.0, ""),  # iterations take 10 s in truth
    ],
)
def test_savings_and_costs(reached: int, now_s: float, said: str) -> None:
    assert said in against(FAST, SLOW, [entry(0, 0.0, (10.0,))], reached, now_s) or not said
    assert bool(said) == bool(against(FAST, SLOW, [entry(0, 0.0, (10.0,))], reached, now_s))


def test_where_nobody_can_say_the_users_order_counts() -> None:
    history = [entry(0, 0.0, (10.0,))]
    assert not against(plan([[1], [1], [1]]), SLOW, history, 99, 300.0)
    assert not against(FAST, SLOW, [{**history[0], "opened": {}}], 0, 5.0), "nobody knows how long the run is"
    assert not against(SLOW, FAST, history, 99, 300.0), "preferred for a reason of the user's own"


@pytest.mark.parametrize(("reached", "clock_s"), [(10, 0.0), (99, 0.0), (99, -36000.0)])
def test_a_node_joins_where_it_pays(reached: int, clock_s: float, tmp_path: Path) -> None:
    """The clock of the ranks' node may be another one than the controller's."""
    job, now_s = trained(tmp_path, FAST, SLOW), time.time() + clock_s
    job.opened(last=100, times={"loaded": now_s - 22.0, "first_step": now_s - 20.0, "told": now_s})
    job.beat(1, reached)
    job.step()
    job.come(3)
    job.step()
    if reached == 10:
        job.board.post({"type": "checked", "id": job.get("check/3")["id"], "problems": []})
    job.step(3)
    refused = [line for line in job.said if "a node joins, and nothing changes: iterations would be" in line]
    assert (job.has("0/wanted"), len(refused)) == ((True, 0) if reached == 10 else (False, 1))


# A job that is not as planned gets a better plan, where the change pays.

CLUSTER = {"nodes": [{"gpu": "T4", "count": 9, "gpus_per_node": 1}]}
TAUGHT = {
    "gpus": {"T4 slow 1": {"flops": {"fp32": 1e12}}},
    "nodes": [{"gpu": name, "count": 1, "gpus_per_node": 1} for name in ("T4", "T4 slow 1")],
}


def on(kinds: tuple[str, ...]) -> Plan:
    plan = plan_of([[1]] * len(kinds))
    stages = tuple(
        replace(s, replicas=(replace(s.replicas[0], device=kind),)) for s, kind in zip(plan.stages, kinds, strict=True)
    )
    return replace(plan, stages=stages)


def learned(pays_after: int = 5) -> Learned:
    return Learned(on(("T4 slow 1", "T4")), ("T4", "T4 slow 1"), TAUGHT, None, 0.25, pays_after)


class Drifting(Job):
    """A job on two nodes whose planner answers at once."""

    def __init__(self, folder: Path, answer: Learned | None, given: tuple[Plan, ...] = ()) -> None:
        self.searches = Searches()
        self.searches.answer = answer
        self.searches.open.set()
        (folder / "cluster.yaml").write_text(json.dumps(CLUSTER))
        self.plans = SearchedPlans(folder / "cluster.yaml", self.searches, lambda _: None)
        super().__init__(folder, planner=GivenPlans(given, self.plans) if given else self.plans)
        self.come(1, 2, device="T4")
        self.until(lambda: self.has("latest"))

    def drifts(self, last: int) -> None:
        self.board.post({"type": "drift", "generation": 0, "measured": {"iteration_s": 2.0}, "last": last})


def test_a_better_plan_is_taken_and_the_slow_device_is_its_own_kind(tmp_path: Path) -> None:
    job = Drifting(tmp_path, learned())
    job.drifts(last=100)
    job.until(lambda: job.has("0/wanted"))
    assert "25.0 % shorter" in job.get("0/wanted")
    assert job.searches.measured == [({"iteration_s": 2.0}, 10.0)]
    job.ended(1, 2, how="left", error="", iteration=7)
    job.until(lambda: job.get("latest") == 1)
    generation = job.get("1/generation")
    # Process 2 was rank 1, which is slow; the better plan has the slow kind first.
    assert generation["ranks"] == [2, 1] and generation["plan"]["stages"][0]["replicas"][0]["device"] == "T4 slow 1"
    again = job.start()
    assert {m["device"] for m in again.status()["members"]} == {"T4", "T4 slow 1"}
    assert again.status()["corrected"] == {"cluster": TAUGHT, "profile": None}


def test_a_change_that_does_not_pay_any_more_is_left_out(tmp_path: Path) -> None:
    job = Drifting(tmp_path, learned(pays_after=50))
    job.drifts(last=40)
    job.until(lambda: any("nothing changes" in line for line in job.said))
    assert not job.has("0/wanted")


def test_nothing_changes_where_nothing_is_better(tmp_path: Path) -> None:
    job = Drifting(tmp_path, None)
    job.board.post({"type": "drift", "generation": 3, "measured": {}, "last": 100})
    job.step(20)
    assert not job.searches.measured, "another generation said so"
    job.drifts(last=100)
    job.until(lambda: job.searches.measured)
    job.step(20)
    assert not job.has("0/wanted")


def test_what_was_searched_for_an_earlier_generation_is_left_out(tmp_path: Path) -> None:
    job, goes_on = Drifting(tmp_path, learned()), threading.Event()
    better = job.searches.better
    job.searches.better = lambda *given: better(*given) if goes_on.wait(WAIT_S) else None  # type: ignore[method-assign]
    lessons = Lessons(job.plans, job.said.append)
    for number, ranks in enumerate(((1, 2), (1,))):
        generation = Generation(number, on(("T4",) * len(ranks)), ranks)
        pool = [Process(rank, f"n{rank}", "T4") for rank in ranks]
        lessons.note({"measured": {}, "last": 100}, generation, pool, [], Rates())
    goes_on.set()
    until(lambda: not job.plans._learns)
    assert lessons.reason(generation, {1: Member(pool[0])}) == "" and lessons.corrected is None


def test_a_given_plan_gives_way_to_what_was_measured(tmp_path: Path) -> None:
    job = Drifting(tmp_path, learned(), given=(on(("T4", "T4")),))
    job.drifts(last=100)
    job.until(lambda: job.has("0/wanted"))
    pool = [Process(1, "n1", "T4"), Process(2, "n2", "T4 slow 1")]
    assert job.planner.plan(pool)[0].stages[0].replicas[0].device == "T4 slow 1"


def test_a_new_cluster_file_keeps_the_kinds_that_were_learned(tmp_path: Path) -> None:
    job = Drifting(tmp_path, learned())
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


# Plans are made ahead, and the controller goes on meanwhile.


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
    job = Job(tmp_path, planner=plans)
    searches.open.set()
    job.come(1, 2, device="T4")
    job.until(lambda: job.has("latest"))
    job.until(lambda: plans.is_ready(pool(1)))
    assert searches.sizes == [2, 1], "what is left when a node is lost is planned ahead"
    searches.open.clear()
    job.come(3, device="T4")
    job.step(20)
    assert [member["process"] for member in job.controller.status()["members"]] == [1, 2, 3]
    assert not job.has("0/wanted")
    searches.open.set()
    job.until(lambda: job.has("check/3"))
    assert not job.has("0/wanted"), "the newcomer says first whether the flags go with the plan"
    job.board.post({"type": "checked", "id": job.get("check/3")["id"], "problems": []})
    job.until(lambda: job.has("0/wanted"))
    assert job.get("0/wanted") == "a node joins"


@pytest.fixture
def searched(plans: SearchedPlans, searches: Searches, tmp_path: Path) -> Job:
    job = Job(tmp_path, planner=plans, nodes=1)
    searches.open.set()
    job.come(1, 2, device="T4")
    job.until(lambda: job.has("latest"))
    return job


def test_replan_searches_again(searched: Job, searches: Searches):
    until(lambda: searches.sizes == [2, 1])
    searched.board.post({"type": "replan"})
    searched.until(lambda: searched.has("0/wanted"))
    assert searched.get("0/wanted") == "a new plan was asked for"
    assert searches.sizes.count(2) == 2


def test_a_cluster_file_that_is_broken_later_breaks_nothing(searched: Job, tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text("nodes: [")
    searched.board.post({"type": "replan"})
    assert not searched.step(5)
    assert any("asked for, and nothing changes: " in line and "cluster.yaml" in line for line in searched.said)
    assert not searched.has("0/wanted")
