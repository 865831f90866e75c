"""From what a run measured to a better plan: the figures, the gain, the files, and what is refused."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.plan import load_plan, save_plan
from testing.planner_cases import estimator_of, processors, write_inputs
from tests.unit.planner import watched_runs as runs
from tests.unit.planner.emit_plans import answer
from tools.planner.__main__ import main
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, cluster_from_document, load_cluster
from tools.planner.inputs.profile_schema import load_profile, save_profile
from tools.planner.replay import policies
from tools.planner.replay.command import _tables, limited
from tools.planner.replay.measured import DeviceTimes, Times, find_files, load_watched
from tools.planner.replay.replan import _factors, correct, predicted_s, replan
from tools.planner.report.tables import say
from tools.planner.search.outcome import Goal, file_text

Said = pytest.CaptureFixture[str]

_GOAL = Goal(schedules=("1f1b",))


def test_a_slow_device_gets_less_work_and_the_gain_is_what_the_plans_take(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    slow = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    watched, more = runs.watched(plan, slow, tmp_path), {"goal": _GOAL, "restart_s": 30.0}
    found = replan(plan, processors(2), runs.MODEL, watched, profile=runs.profile(), **more)
    work = {r.device: sum(s.layers) * len(r.microbatches) for s in found.plan.stages for r in s.replicas}
    assert work["core slow 1"] < 0.7 * work["core"]
    assert found.before_s > 1.8 * plan.predicted.iteration_s  # type: ignore[union-attr]
    assert 0.15 < found.gain < 0.45
    saved_s = 1.0 * found.gain  # the stand-in's iterations take a second
    assert found.pays_after == pytest.approx(30.0 / saved_s, abs=1)
    assert 1 < found.pays_after < 1000
    # What is promised is the price of the plan on the corrected cluster.
    estimator = estimator_of(found.corrected.cluster, runs.MODEL, found.corrected.profile, runs.CPU_GLOO)
    assert predicted_s(estimator, found.plan) == pytest.approx(found.after_s, rel=1e-6)


def test_a_run_as_planned_is_priced_as_planned(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 1.0)
    assert not monitor.watch.active
    found = replan(
        plan, processors(2), runs.MODEL, runs.watched(plan, monitor, tmp_path), profile=runs.profile(), goal=_GOAL
    )
    assert found.before_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)  # type: ignore[union-attr]
    assert found.pays_after is None or found.gain > 0


def test_what_a_whole_kind_has_in_common_scales_the_profile(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 1.5)
    corrected = correct(plan, processors(2), runs.profile(), runs.watched(plan, monitor, tmp_path))
    layer = corrected.profile.devices[0].timings[1]
    assert layer.forward_s == pytest.approx(1.5 * runs.FORWARD_S, rel=1e-3)
    assert layer.backward_s == pytest.approx(1.5 * runs.BACKWARD_S, rel=1e-3)
    assert [node.gpu for node in corrected.cluster.nodes] == ["core"]


@pytest.mark.parametrize("measured_links", [True, False])
def test_a_slow_link_costs_what_was_measured(tmp_path: Path, measured_links: bool) -> None:
    plan = runs.pipeline(4, 2, 2)
    monitor = runs.follow(plan, lambda i, rank: 1.0, lambda i, a, b: 0.02 if i >= 15 and a + b == 1 else 1.2e-4)
    assert {f.name for f in monitor.watch.active.values()} == {"rank 0 -> rank 1", "rank 1 -> rank 0"}
    profile = runs.profile() if measured_links else None
    corrected = correct(plan, processors(3), profile, runs.watched(plan, monitor, tmp_path))
    names = {node.gpu: node for node in corrected.cluster.nodes}
    assert set(names) == {"core", "core link 0", "core link 1"}
    if measured_links:
        by_kinds = {(k.first_kind, k.second_kind): k for k in corrected.profile.links}
        assert by_kinds["core link 0", "core link 1"].latency_s > 50 * by_kinds["core", "core link 1"].latency_s
    else:
        first, second = names["core link 0"], names["core link 1"]
        was = processors(3).nodes[0].network_bytes_per_s
        assert corrected.cluster.link(first, second)[0] < was / 50
        assert corrected.cluster.link(names["core"], second)[0] == was


def test_a_slow_gpu_leaves_its_node_and_its_host_goes_with_it(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    watched = runs.watched(plan, monitor, tmp_path)
    gpus = processors(2).gpus
    one_node = Cluster(nodes=(NodeGroup(gpu="core", count=1, gpus_per_node=4),), gpus=gpus)
    nodes = correct(plan, one_node, runs.profile(), watched).cluster.nodes
    assert [(n.gpu, n.count, n.gpus_per_node) for n in nodes] == [("core", 1, 3), ("core slow 1", 1, 1)]
    named = Cluster(nodes=(NodeGroup(gpu="core", count=2, gpus_per_node=1, hosts=("n0", "n1")),), gpus=gpus)
    corrected = correct(plan, named, runs.profile(), watched)
    assert {n.gpu: n.hosts for n in corrected.cluster.nodes} == {"core": ("n0",), "core slow 1": ("n1",)}


def test_a_slow_device_does_not_speak_for_its_kind_while_ranks_of_it_elsewhere_are_not_slow() -> None:
    devices = []
    for n, kind, slow in ((0, "a + b", 1.0), (1, "b", 2.0)):
        times = dict.fromkeys(("FORWARD", "BACKWARD"), Times(predicted_s=1.0, measured_s=slow, reference_s=1.0))
        devices.append(DeviceTimes(device=n, stage=n, replica=0, ranks=(n,), kind=kind, operations=times))
    found = _factors(SimpleNamespace(devices=devices), {1: " slow 1"}, [("a", "b"), ("b", "b")])  # type: ignore[arg-type]
    assert found["b"] == (1.0, 1.0) and found["b slow 1"] == (2.0, 2.0)


def _folder(tmp_path: Path) -> Path:
    plan = runs.pipeline(4, 4)
    slow = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "cluster.yaml").write_text(file_text(processors(2)), encoding="utf-8")
    (tmp_path / "model.yaml").write_text(file_text(runs.MODEL), encoding="utf-8")
    save_profile(runs.profile(), tmp_path / "profile.json")
    (tmp_path / "ranks").mkdir()
    runs.watched(plan, slow, tmp_path / "ranks")
    return tmp_path


def test_the_command_finds_the_files_of_a_run_and_writes_the_better_plan(tmp_path: Path, capsys: Said) -> None:
    folder = _folder(tmp_path)
    body = answer(capsys, ["replan", str(folder), "--schedules", "1f1b"])
    better = load_plan(folder / "plan-2.json")
    assert better.predicted is not None and better.predicted.costs is not None
    assert better.predicted.iteration_s == pytest.approx(body["predicted_after_s"])
    assert 0.15 < body["gain"] < 0.45 and body["pays_after_iterations"] > 0
    corrected, profile = load_cluster(folder / "plan-2.cluster.yaml"), load_profile(folder / "plan-2.profile.json")
    assert {n.gpu for n in corrected.nodes} == {"core", "core slow 1"} == {d.kind for d in profile.devices}
    assert main(["replan", str(folder), "--schedules", "1f1b"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rank 1" in text and "shorter" in text and "pays after" in text


def test_what_was_measured_under_another_plan_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    with pytest.raises(PlannerError, match=r"there is no plan.json in '\.'\. Give the path"):
        find_files(Path("."), {})
    (job := tmp_path / "a" / "quick" / "job").parent.mkdir(parents=True)
    job.symlink_to(folder)
    assert find_files(job.parent, {"watch": "w"}).cluster.parent == job
    with pytest.raises(PlannerError, match="another plan"):
        load_watched(folder / "ranks" / "watch.json", runs.pipeline(5, 3))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": "other"}, "format"),
        ({"version": 9}, "format"),
        ({"iteration_s": -1.0}, "iteration_s"),
        ({"surprise": 1}, "surprise"),
        ({"devices": []}, "devices"),
    ],
)
def test_a_damaged_file_is_one_error(tmp_path: Path, change: dict[str, object], named: str, capsys: Said) -> None:
    folder = _folder(tmp_path)
    file = folder / "ranks" / "watch.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change), encoding="utf-8")
    assert main(["replan", str(folder)]) == 2
    assert named in capsys.readouterr().err


def test_a_folder_without_the_files_is_one_error(tmp_path: Path, capsys: Said) -> None:
    assert main(["replan", str(tmp_path)]) == 2
    assert "plan.json" in capsys.readouterr().err


COSTS = policies.Costs(join_s=3.0, leave_s=2.0, death_s=4.0, start_s=10.0, restart_s=20.0, save_every=5)


def time_of(pool: tuple[int, ...]) -> float | None:
    """An iteration takes 2 s on four nodes, 4 s on two or three; on one nothing fits."""
    return {0: None, 1: None, 2: 4.0, 3: 4.0, 4: 2.0}[pool[0]]


def trace(*changes: tuple[float, int, bool], end_s: float = 100.0) -> policies.Trace:
    return policies.Trace(tuple(policies.Change(time_s, (nodes,), notice) for time_s, nodes, notice in changes), end_s)


def test_without_changes_all_policies_do_the_same() -> None:
    quiet = trace((0.0, 4, False))
    courses = [policies.run_elastic(quiet, time_of, COSTS), policies.run_restart(quiet, time_of, COSTS)]
    courses.append(policies.run_full_pool(quiet, time_of, COSTS, (4,)))
    assert [(c.iterations, c.training_s, c.paused_s, c.idle_s) for c in courses] == [(50, 100.0, 0.0, 0.0)] * 3


def test_a_death_costs_the_running_iteration_or_all_since_the_checkpoint() -> None:
    death = trace((0.0, 4, False), (25.0, 3, False), end_s=103.0)
    course = policies.run_elastic(death, time_of, COSTS)
    # 12 iterations and a half; the half is lost; 74 s from 29 s on at 4 s.
    assert (course.iterations, course.repeated, course.paused_s) == (12 + 18, 0.5, 4.0)
    course = policies.run_restart(death, time_of, COSTS)
    # Back to iteration 10; 58 s from 45 s on.
    assert (course.iterations, course.repeated, course.paused_s) == (10 + 14, 2.5, 20.0)
    course = policies.run_full_pool(death, time_of, COSTS, (4,))
    assert (course.iterations, course.idle_s) == (10, 78.0)


def test_a_notice_costs_no_iteration() -> None:
    leave = trace((0.0, 4, False), (25.0, 3, True))
    course = policies.run_elastic(leave, time_of, COSTS)
    # The 13th ends at 26 s, and 28 s to 100 s are 18 more.
    assert (course.iterations, course.repeated) == (13 + 18, 0.0)
    assert policies.run_restart(leave, time_of, COSTS).iterations == 13 + 13  # 46 s to 100 s


def test_a_node_joins_when_it_has_started_and_only_where_it_helps() -> None:
    join = trace((0.0, 2, False), (10.0, 3, False), (30.0, 4, False))
    course = policies.run_elastic(join, time_of, COSTS)
    # The third node brings nothing.  The fourth is ready at 40 s, a boundary; 43 s to 100 s at 2 s.
    assert (course.iterations, course.changes, course.paused_s) == (10 + 28, 1, 3.0)
    assert [change.time_s for change in policies.with_start(join, 10.0)] == [0.0, 20.0, 40.0]


def test_a_node_that_goes_before_it_is_ready_was_never_there() -> None:
    short = trace((0.0, 2, False), (10.0, 4, False), (15.0, 2, False))
    assert policies.run_elastic(short, time_of, COSTS).iterations == 25


def test_where_no_plan_fits_the_job_waits_and_comes_back_from_a_checkpoint() -> None:
    gap = trace((0.0, 4, False), (25.0, 1, False), (50.0, 4, False))
    course = policies.run_elastic(gap, time_of, COSTS)
    # Iteration 10; the nodes are ready at 60 s, the job at 80 s.
    assert (course.iterations, course.idle_s, course.paused_s) == (10 + 10, 35.0, 20.0)
    assert course.training_s + course.paused_s + course.idle_s == pytest.approx(100.0)


def test_a_change_during_a_pause_begins_anew() -> None:
    twice = trace((0.0, 4, False), (20.0, 3, False), (22.0, 4, False), (32.0, 2, False))
    course = policies.run_elastic(twice, time_of, COSTS)
    # 20 s to 24 s; at 32 s the fourth node would be ready, and is gone.
    assert (course.paused_s, course.iterations) == (4.0, 10 + 19)
    close = trace((0.0, 4, False), (20.0, 3, False), (22.0, 1, False), (30.0, 2, False))
    assert policies.run_elastic(close, time_of, COSTS).iterations == 10 + 10  # 30 + 10 + 20 s to 100 s


def cluster(**more: Any) -> Cluster:
    nodes = [{"gpu": "A100-40", "count": 2, "gpus_per_node": 4}, {"gpu": "T4", "count": 3, "gpus_per_node": 2, **more}]
    return cluster_from_document({"nodes": nodes}, "cluster.yaml")


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("gpu,time_s,nodes,notice\nT4,0,1,\nT4,60,2,\nA100-40,60,1,yes\n\nT4,100,0,no\n")
    found = policies.load_trace(file, cluster())
    assert [(c.time_s, c.pool, c.notice) for c in found.changes] == [
        (0.0, (2, 1), False),
        (60.0, (1, 2), False),
        (100.0, (1, 0), False),
    ]
    assert found.end_s == 100.0


def test_pauses_grow_with_the_state_as_measured() -> None:
    def of(pauses_s: list[float]) -> tuple[float, float]:
        wholes = [{kind: {"whole": whole} for kind in policies.CHANGES} for whole in pauses_s]
        measured = [{"state_bytes": 100 * n, "pause_s": own} for n, own in enumerate(wholes, 1)]
        return policies.pauses_by_state(measured)["leave"]

    assert of([1.5, 2.0, 2.5]) == pytest.approx((1.0, 0.005))
    assert of([0.5, 2.0]) == pytest.approx((0.0, 4.5 / 500)), "nothing takes less than no time"
    assert of([2.0, 1.0]) == (1.5, 0.0)
    with pytest.raises(ValueError, match="two sizes"):
        of([1.0])


def test_the_cluster_of_a_pool() -> None:
    assert [(n.gpu, n.count) for n in limited(cluster(), (0, 2)).nodes] == [("T4", 2)]
    assert limited(cluster(), (0, 0)) is None


def test_the_command(tmp_path: Path, capsys: Said) -> None:
    model = {"name": "m", "num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16}
    model |= {"vocab_size": 1000, "seq_length": 1024, "global_batch_size": 64, "precision": "fp16"}
    inputs = write_inputs(tmp_path, {"nodes": [{"gpu": "T4", "count": 2, "gpus_per_node": 2}]}, model)
    (tmp_path / "trace.csv").write_text("time_s,gpu,nodes\n600,T4,1\n1200,T4,2\n3600,T4,2\n")
    pauses = {"pause_s": {kind: {"whole": 5.0} for kind in policies.CHANGES}, "restart_s": 100.0}
    (tmp_path / "pauses.json").write_text(json.dumps(pauses))
    words = ["replay", str(tmp_path / "trace.csv"), *inputs, "--schedules", "1f1b", "--limit-s", "20"]
    words += ["--pauses", str(tmp_path / "pauses.json"), "--picture", str(tmp_path / "out.svg"), "--save-every", "1000"]
    said = answer(capsys, [*words, "--html", str(tmp_path / "out.html")])
    elastic, restart, full = said["policies"]
    assert elastic["goodput"] > restart["goodput"] > full["goodput"] > 0
    assert (elastic["paused_s"], restart["paused_s"], full["paused_s"]) == (10.0, 200.0, 100.0)
    assert full["idle_s"] == 600.0 and [pool["gpus"] for pool in said["pools"]] == [2, 4]
    assert said["pauses"]["join_s"] == {"value": 5.0, "from": str(tmp_path / "pauses.json")}
    assert said["pauses"]["save_every"] == {"value": 1000, "from": "the command line"}
    assert said["pauses"]["start_s"]["from"] == "assumptions"
    elastic["training_s"] = 143_870.4  # a day and more: all columns are still there
    say({}, Namespace(json=False), *_tables(said, load_cluster(str(tmp_path / "c.yaml"))))
    assert capsys.readouterr().out.splitlines()[3].split()[-4:] == ["143870", "10", "0", "2"]
    assert "<svg" in (tmp_path / "out.svg").read_text()
    page = (tmp_path / "out.html").read_text()
    assert page.count("<polyline") == 3 and "goodput, full pool" in page and "no plan found" not in page
    wholes = {mb: {kind: {"whole": 5 + mb / 1e6} for kind in policies.CHANGES} for mb in (50, 200)}
    sizes = [{"state_bytes": mb * 1e6, "pause_s": whole} for mb, whole in wholes.items()]
    (tmp_path / "pauses.json").write_text(json.dumps({"sizes": sizes}))
    told = answer(capsys, [*words, "--join-s", "3"])["pauses"]
    assert told["join_s"]["value"] == 3.0 and told["restart_s"]["value"] > policies.Costs().restart_s + 0.1
    assert 5.0 < told["leave_s"]["value"] == told["death_s"]["value"] < 5.05, "5 s, and 1 s for 10^12 bytes of state"
    (tmp_path / "pauses.json").write_text("{}")
    assert main(words) == 2 and "benchmarks.elastic" in capsys.readouterr().err


def test_a_save_at_notice_counts_when_a_node_fails_later() -> None:
    job = policies._Job("restart", policies.Costs(save_every=100), 1.0, 1000.0)
    job.train_until(150.0)
    job.save()
    job.train_until(180.0)
    job.lose(to_checkpoint=True)
    assert (job.course.iterations, job.course.repeated) == (150, 30)


def test_nothing_is_trained_after_the_end_of_the_trace() -> None:
    job = policies._Job("elastic", policies.Costs(save_s=0.0), 100.0, 960.0)
    job.train_until(950.0)
    job.change(job.finish_iteration(950.0), 5.0, 100.0)
    course = job.end(960.0)
    assert (course.iterations, course.training_s, course.paused_s) == (9, 960.0, 0.0)


@pytest.mark.parametrize(
    ("line", "said"), [('0,"' + "x" * 200_000, "is no CSV"), ("1e308,A10G,1,", "time_s")], ids=["quote", "time"]
)
def test_lines_that_cannot_be_counted_with(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(f"time_s,gpu,nodes,notice\n{line}\n")
    with pytest.raises(PlannerError, match=said):
        policies.load_trace(tmp_path / "trace.csv", cluster())
