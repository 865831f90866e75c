"""From what a run measured to a better plan: the figures, the gain, the files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_het.plan import load_plan, save_plan
from tests.unit.planner import watched_runs as runs
from tools.planner.__main__ import main
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, load_cluster
from tools.planner.inputs.kept import cluster_text, model_text
from tools.planner.inputs.profile_schema import load_profile, save_profile
from tools.planner.replan.measured import load_watched
from tools.planner.replan.replan import correct, estimator_of, predicted_s, replan
from tools.planner.search.outcome import Goal

_GOAL = Goal(schedules=("1f1b",))


def test_a_slow_device_gets_less_work_and_the_gain_is_what_the_plans_take(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    slow = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    found = replan(
        plan,
        runs.cluster(),
        runs.MODEL,
        runs.watched(plan, slow, tmp_path),
        profile=runs.profile(),
        goal=_GOAL,
        restart_s=30.0,
    )
    assert found.plan is not None
    work = {r.device: sum(s.layers) * len(r.microbatches) for s in found.plan.stages for r in s.replicas}
    assert work["core slow 1"] < 0.7 * work["core"]
    assert found.before_s > 1.8 * plan.predicted.iteration_s  # type: ignore[union-attr]
    assert 0.15 < found.gain < 0.45
    saved_s = 1.0 * found.gain  # the stand-in's iterations take a second
    assert found.pays_after == pytest.approx(30.0 / saved_s, abs=1)
    assert found.pays(1000) and not found.pays(1)


def test_a_run_as_planned_is_priced_as_planned(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 1.0)
    assert not monitor.watch.active
    found = replan(
        plan, runs.cluster(), runs.MODEL, runs.watched(plan, monitor, tmp_path), profile=runs.profile(), goal=_GOAL
    )
    assert found.before_s == pytest.approx(plan.predicted.iteration_s, rel=1e-3)  # type: ignore[union-attr]
    assert found.pays_after is None or found.gain > 0


def test_what_a_whole_kind_has_in_common_scales_the_profile(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 1.5)
    corrected = correct(plan, runs.cluster(), runs.profile(), runs.watched(plan, monitor, tmp_path))
    assert corrected.profile is not None
    layer = corrected.profile.devices[0].timings[1]
    assert layer.forward_s == pytest.approx(1.5 * runs.FORWARD_S, rel=1e-3)
    assert layer.backward_s == pytest.approx(1.5 * runs.BACKWARD_S, rel=1e-3)
    assert [node.gpu for node in corrected.cluster.nodes] == ["core"]


@pytest.mark.parametrize("measured_links", [True, False])
def test_a_slow_link_costs_what_was_measured(tmp_path: Path, measured_links: bool) -> None:
    plan = runs.pipeline(4, 2, 2)
    slow = {(0, 1), (1, 0)}
    monitor = runs.follow(plan, lambda i, rank: 1.0, lambda i, a, b: 0.02 if i >= 15 and (a, b) in slow else 1.2e-4)
    assert {f.name for f in monitor.watch.active.values()} == {"rank 0 -> rank 1", "rank 1 -> rank 0"}
    profile = runs.profile() if measured_links else None
    corrected = correct(plan, runs.cluster(3), profile, runs.watched(plan, monitor, tmp_path))
    names = {node.gpu: node for node in corrected.cluster.nodes}
    assert set(names) == {"core", "core link 0", "core link 1"}
    if measured_links:
        assert corrected.profile is not None
        by_kinds = {(k.first_kind, k.second_kind): k for k in corrected.profile.links}
        assert by_kinds["core link 0", "core link 1"].latency_s > 50 * by_kinds["core", "core link 1"].latency_s
    else:
        first, second = names["core link 0"], names["core link 1"]
        was = runs.cluster(3).nodes[0].network_bytes_per_s
        assert corrected.cluster.link(first, second)[0] < was / 50
        assert corrected.cluster.link(names["core"], second)[0] == was


def test_a_slow_gpu_leaves_its_node(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    one_node = Cluster(nodes=(NodeGroup(gpu="core", count=1, gpus_per_node=4),), gpus=runs.cluster().gpus)
    corrected = correct(plan, one_node, runs.profile(), runs.watched(plan, monitor, tmp_path))
    assert [(n.gpu, n.count, n.gpus_per_node) for n in corrected.cluster.nodes] == [
        ("core", 1, 3),
        ("core slow 1", 1, 1),
    ]


def test_the_host_of_a_slow_node_goes_with_it(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    monitor = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    named = Cluster(
        nodes=(NodeGroup(gpu="core", count=2, gpus_per_node=1, hosts=("n0", "n1")),), gpus=runs.cluster().gpus
    )
    corrected = correct(plan, named, runs.profile(), runs.watched(plan, monitor, tmp_path))
    assert {n.gpu: n.hosts for n in corrected.cluster.nodes} == {"core": ("n0",), "core slow 1": ("n1",)}


def _folder(tmp_path: Path) -> Path:
    plan = runs.pipeline(4, 4)
    slow = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "cluster.yaml").write_text(cluster_text(runs.cluster()), encoding="utf-8")
    (tmp_path / "model.yaml").write_text(model_text(runs.MODEL), encoding="utf-8")
    save_profile(runs.profile(), tmp_path / "profile.json")
    (tmp_path / "ranks").mkdir()
    runs.watched(plan, slow, tmp_path / "ranks")
    return tmp_path


def test_the_command_finds_the_files_of_a_run_and_writes_the_better_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path)
    assert main(["replan", str(folder), "--schedules", "1f1b", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
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
def test_a_damaged_file_is_one_error(
    tmp_path: Path, change: dict[str, object], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path)
    file = folder / "ranks" / "watch.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change), encoding="utf-8")
    assert main(["replan", str(folder)]) == 2
    assert named in capsys.readouterr().err


def test_a_folder_without_the_files_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replan", str(tmp_path)]) == 2
    assert "plan.json" in capsys.readouterr().err


def test_the_corrected_plan_is_priced_on_the_corrected_cluster(tmp_path: Path) -> None:
    plan = runs.pipeline(4, 4)
    slow = runs.follow(plan, lambda i, rank: 2.0 if rank == 1 and i >= 15 else 1.0)
    found = replan(
        plan, runs.cluster(), runs.MODEL, runs.watched(plan, slow, tmp_path), profile=runs.profile(), goal=_GOAL
    )
    assert found.plan is not None
    estimator = estimator_of(found.corrected, runs.MODEL, runs.CPU_GLOO)
    assert predicted_s(estimator, found.plan) == pytest.approx(found.after_s, rel=1e-6)
