"""The demo's devices, its plans for an even split, its launches, and what it says of a busy machine."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.llama import job, report
from examples.llama.demo import FULL, QUICK, even_splits
from examples.llama.devices import CpuDevice, busy_cores, cluster_document, mixed_devices, paced_devices, pinning
from examples.llama.page import with_measured
from examples.llama.pinned import cores_of
from examples.llama.report import Screen, busy_reason, circumstances
from megatron_het.features.registry import check_plan_alone
from tools.planner.inputs.cluster import cluster_from_document

PACED = paced_devices([0, 1])


@pytest.mark.parametrize(
    ("cores", "kinds", "used"),
    [
        ([7], ["slow", "slow"], [7, 7]),
        ([0, 1], ["fast", "slow", "slow"], [0, 1, 1]),
        ([0, 2, 5], ["fast", "fast", "slow", "slow"], [0, 2, 5, 5]),
        ([0, 1, 2, 3, 4, 5], ["fast", "fast", "slow", "slow", "slow", "slow"], [0, 1, 2, 2, 3, 3]),
    ],
)
def test_devices_that_share_cores(cores: list[int], kinds: list[str], used: list[int]) -> None:
    devices = mixed_devices(cores)
    assert [d.kind for d in devices] == kinds
    assert [d.core for d in devices] == used


def test_every_paced_device_has_a_core_of_its_own() -> None:
    for cores in ([3, 4], [0, 2, 5], [0, 1, 2, 3, 4]):
        devices = paced_devices(cores)
        assert [d.core for d in devices] == cores[:4]
        assert [d.running for d in devices] == [1.0 if d.kind == "fast" else 0.5 for d in devices]
    assert [d.kind for d in paced_devices([0, 1, 2])] == ["fast", "fast", "slow"]
    assert paced_devices([7]) == mixed_devices([7])


def test_pinning_round_trip() -> None:
    value = pinning(mixed_devices([0, 1]))
    assert [cores_of(i, value) for i in range(3)] == [{0}, {1}, {1}]
    with pytest.raises(ValueError, match="local rank 3"):
        cores_of(3, value)
    with pytest.raises(ValueError, match="not a list of core numbers"):
        cores_of(0, "x;1")


def test_the_planner_reads_the_cluster_of_the_devices() -> None:
    cluster = cluster_from_document(cluster_document(PACED, 1e9, 1e-4), "here")
    assert [(n.gpu, n.count, n.gpus_per_node) for n in cluster.nodes] == [("fast", 1, 1), ("slow", 1, 1)]
    assert all(cluster.gpu(name).is_processor for name in ("fast", "slow"))


def test_on_gpus_ranks_get_nccl_and_hosts_of_their_own() -> None:
    """gloo is refused on GPUs, and NCCL refuses two ranks of one host on one GPU."""
    assert "gloo" in job.machine_arguments(is_cuda=False)
    assert "gloo" not in job.machine_arguments(is_cuda=True)
    alone, slowed = job.environments(PACED)
    assert "NCCL_HOSTID" not in alone and alone["HET_DEMO_CORES"] == "0"
    assert "HET_DEMO_SLOWED" not in alone and slowed["HET_DEMO_SLOWED"] == "0:0.5"
    shared = job.environments(PACED, gpus=1)
    assert len({e["NCCL_HOSTID"] for e in shared}) == 2 and {e["CUDA_VISIBLE_DEVICES"] for e in shared} == {"0"}
    apart = job.environments(PACED, gpus=2)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in apart] == ["0", "1"] and "NCCL_HOSTID" not in apart[0]


@pytest.mark.parametrize("size", [FULL, QUICK])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_even_splits_are_even(size: Any, devices: int) -> None:
    plans = even_splits(size.model, size.training, ["fast"] * devices)
    assert plans and len(plans) == len({len(plan.stages) for plan in plans})
    for plan in plans:
        check_plan_alone(plan)
        assert plan.world_size == devices
        assert len({s.layers for s in plan.stages}) == 1
        assert len({len(r.microbatches) for s in plan.stages for r in s.replicas}) == 1


def test_when_one_node_fails_the_others_end(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "print('ValueError: broken on purpose'); raise SystemExit(3)"]
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(job.JobError, match="node 1 ended with exit code 3(.|\n)*broken on purpose"):
        job.start([waiting, failing], [{}, {}], tmp_path, timeout_s=30.0)
    with pytest.raises(job.JobError, match="did not end within 0.1 s"):
        job.start([waiting], [{}], tmp_path, timeout_s=0.1)


def test_iterations_are_told_from_whichever_node_logs_them(tmp_path: Path) -> None:
    said: list[tuple[int, int, float]] = []
    line = "iteration        2/       5 | consumed samples: 24 | lm loss: 5.5E+00 |"
    printing = [sys.executable, "-c", f"print({line!r})"]
    job.start([[sys.executable, "-c", ""], printing], [{}, {}], tmp_path, 30.0, lambda *what: said.append(what))
    assert said == [(2, 5, 5.5)]


def runs(*plan: float) -> dict[str, list[list[float]]]:
    return {"plan_iteration_s": [list(plan)], "even_split_iteration_s": [[2.0] * 4]}


def test_a_busy_machine_is_noticed() -> None:
    assert busy_cores(0.05) >= 0
    assert not busy_reason(0.1, 2) and "1.2 of 2 cores" in busy_reason(1.2, 2)
    assert circumstances(runs(1.0, 1.01, 1.0, 1.02), 0.0, 2, PACED)["doubts"] == []
    uneven = circumstances(runs(1.0, 1.4, 1.0, 1.9), 0.0, 2, PACED)["doubts"]
    assert len(uneven) == 1 and "differ by" in uneven[0]
    assert len(circumstances(runs(1.0, 1.4, 1.0, 1.9), 1.5, 2, PACED)["doubts"]) == 2


RESULT: dict[str, Any] = {
    "plan": "the plan",
    "even_split": "the even split",
    "validation_loss": 2.5,
    "predicted_iteration_s": 0.49,
    "measured_iteration_s": 0.5,
    "even_split_iteration_s": 0.75,
    "even_split_predicted_iteration_s": 0.7,
    "speedup_over_even_split": 1.5,
    "measured_bubble_fraction": 0.2,
    "tokens_per_iteration": 1000,
    "num_layers": 6,
    "date": "2026-01-02",
    "processor": "a processor",
    "cores": 2,
    "doubts": [],
    "per_rank": [
        {
            "rank": rank,
            "device": device.name,
            "stage": rank,
            "predicted_compute_s": 0.1,
            "measured_compute_s": 0.2,
            "predicted_memory_bytes": 100,
            "measured_memory_bytes": 123 << 20,
        }
        for rank, device in enumerate(PACED)
    ],
}


def test_what_was_measured_joins_the_planners_page(tmp_path: Path) -> None:
    import json

    traces = []
    for rank in range(2):
        events = [
            {"ph": "X", "tid": tid, "ts": 1e3 * m, "dur": 900.0, "args": {"kind": "FORWARD", "microbatch": m}}
            for m in range(3)
            for tid in (0, 1)
        ]
        traces.append(tmp_path / f"trace-rank-{rank}.json")
        traces[-1].write_text(json.dumps({"traceEvents": events}))

    def empty() -> Any:
        return {"figures": [], "timelines": [], "notes": []}

    page = with_measured(empty(), RESULT, traces)
    assert {f["name"]: f["value"] for f in page["figures"]}["Iteration, measured"] == 0.5
    (timeline,) = page["timelines"]
    assert len(timeline["events"]["lane"]) == 6 and timeline["makespan_s"] == pytest.approx(2.9e-3)
    assert [r["iteration_s"] for r in page["comparison"]] == [0.5, 0.49, 0.75, 0.7]
    assert any("123 MiB" in note for note in page["notes"])
    traces[0].unlink()
    assert with_measured(empty(), RESULT, traces)["timelines"] == []


def test_only_figures_of_an_idle_machine_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, picture = tmp_path / "README.md", tmp_path / "picture.png"
    monkeypatch.setattr(report, "README", readme)
    monkeypatch.setattr(report, "PICTURE", picture)
    monkeypatch.setattr(report, "REPOSITORY", tmp_path)
    text = report.REPOSITORY / "README.md"
    text.write_text("before\n<!-- demo: figures -->\nold\n<!-- end of demo -->\nafter\n")
    (tmp_path / "timeline.png").write_bytes(b"new")
    with pytest.raises(report.BusyError, match="stays as it is: busy"):
        report.publish(RESULT | {"doubts": ["busy"]}, tmp_path, Screen())
    assert "old" in readme.read_text() and not picture.exists()
    report.publish(RESULT, tmp_path, Screen())
    assert "6 layers in 2 stages" in readme.read_text() and "2026-01-02" in readme.read_text()
    assert readme.read_text().startswith("before\n<!-- demo") and picture.read_bytes() == b"new"
    readme.write_text("no place")
    with pytest.raises(report.BusyError, match="no place"):
        report.publish(RESULT, tmp_path, Screen())


def test_the_readme_has_a_place_for_the_figures() -> None:
    assert report._BLOCK.search(report.README.read_text())


def test_devices_that_share_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    from examples.llama.devices import describe

    assert "run 50% of the time" in describe(PACED)
    assert "share core(s) 1" in describe(mixed_devices([0, 1]))
    assert "one core" in describe([CpuDevice("slow-0", "slow", 7), CpuDevice("slow-1", "slow", 7)])


def test_a_printed_command_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "tools.planner", "emit", str(Path.cwd() / "runs" / "p.json"), *["--model", "m.yaml"] * 12, "--extra"]
    Screen().command([*words, "--log-interval 1 " * 40])
    said = capsys.readouterr().out.removeprefix("$ ")
    assert shlex.split(said.replace("\\\n", "")) == [
        "python",
        *words[:3],
        "runs/p.json",
        *words[4:],
        "--log-interval 1 " * 40,
    ]
    assert all(len(line) <= 79 for line in said.splitlines() if "--log" not in line)


@pytest.mark.parametrize(
    ("value", "expected"), [("0:0.25", [pytest.approx((0.015, 0.005))]), ("1:0.5", []), ("", []), ("0", [()])]
)
def test_only_the_named_rank_is_slowed(value: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.llama import pinned

    slowed: list[tuple[float, ...]] = []
    monkeypatch.setattr(pinned, "slow_down", lambda *times_s: slowed.append(times_s))
    monkeypatch.setenv(pinned.SLOWED_VARIABLE, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    pinned.slow()
    assert slowed == expected
