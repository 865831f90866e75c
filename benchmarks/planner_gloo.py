"""The cost model against real runs on this machine: profile pinned processes, predict plans, run them.

    python -m benchmarks.planner_gloo --json OUT [--profile FILE] [--plans 0,3,5]

The processes sit on cores of their own, and the profile is taken with all of them busy at once, as training
keeps them.  One set of predictions from the profile; nothing is fitted to the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.machine import machine
from benchmarks.runner import Job, Runner
from examples.llama.data import DataFiles
from examples.llama.devices import PINNING_VARIABLE, CpuDevice, available_cores, pinning
from examples.llama.job import Job as Training
from examples.llama.job import argument_groups
from megatron_het.plan import save_plan
from tools.planner.build import build_plan
from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.catalog import Gpu
from tools.planner.cluster import Cluster, NodeGroup
from tools.planner.emit_flags import plan_arguments
from tools.planner.estimate import Estimator
from tools.planner.files import write_json
from tools.planner.layercost import MeasuredCosts
from tools.planner.model import Model
from tools.planner.profile import WORKER, default_environment, run_profile
from tools.planner.profile_schema import Profile, ProfiledModel
from tools.planner.profile_settings import ProfileSettings
from tools.planner.report import describe
from tools.planner.runtime import CPU_GLOO
from tools.planner.simulation import simulate_candidate

MODEL = Model(
    name="tiny", num_layers=6, hidden_size=256, ffn_hidden_size=688, num_attention_heads=8, num_query_groups=4,
    vocab_size=384, seq_length=256, global_batch_size=16, precision="fp32", attention="unfused", recompute=("none",),
    distributed_optimizer=True,
)  # fmt: skip
ITERATIONS = 8
PROCESSES = 2


def _pipeline(layers: tuple[int, ...], batch: int, **changes: Any) -> Candidate:
    return Candidate(tuple(Stage(n, (Group(0, 1, 1),)) for n in layers), batch, **changes)


def _replicas(count: int, batch: int, **changes: Any) -> Candidate:
    return Candidate((Stage(MODEL.num_layers, (Group(0, 1, count),)),), batch, **changes)


def plans() -> list[Candidate]:
    """Different splits, batches, data parallelism, optimizers and schedules."""
    return [
        _replicas(2, 1), _replicas(2, 2), _replicas(2, 4), _replicas(2, 2, zero_stage=1),
        _pipeline((3, 3), 1), _pipeline((3, 3), 2), _pipeline((3, 3), 4),
        _pipeline((4, 2), 1), _pipeline((2, 4), 2), _pipeline((1, 5), 1), _pipeline((5, 1), 4),
        _pipeline((3, 3), 1, schedule="interleaved", chunks=3), _pipeline((4, 2), 2, schedule="interleaved", chunks=2),
        _pipeline((3, 3), 2, schedule="slimpipe", slices=2),
    ]  # fmt: skip


def measured_profile(folder: Path, devices: list[CpuDevice]) -> Profile:
    """Layers at the micro batch sizes of the plans, all devices at once, and the link between them."""
    settings = ProfileSettings(
        model=ProfiledModel(MODEL.hidden_size, MODEL.ffn_hidden_size, MODEL.num_attention_heads, MODEL.groups,
                            MODEL.vocab_size, MODEL.seq_length, "fp32", "tiny"),
        out=str(folder / "profile.json"), kinds=("core",) * len(devices), devices_per_node=1, micro_batch_sizes=(1, 2, 4),
        link_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 23),
    )  # fmt: skip
    return run_profile(settings, len(devices), {PINNING_VARIABLE: pinning(devices)}, ("examples.llama.pinned", *WORKER))


def estimator_of(profile: Profile) -> Estimator:
    """The planner's model of this machine."""
    cpu = Gpu(flops={"fp32": 5e10}, memory_bytes=4 << 30, memory_bytes_per_s=1e10, intra_node_bytes_per_s=2e9,
              reserved_bytes=0, source="this machine")
    cluster = Cluster(nodes=(NodeGroup(gpu="core", count=PROCESSES, gpus_per_node=1),), gpus={"core": cpu})
    return Estimator(cluster, MODEL, MeasuredCosts(MODEL, profile, cluster.gpu, CPU_GLOO), CPU_GLOO)


def predict(estimator: Estimator, candidate: Candidate, file: Path) -> dict[str, Any]:
    """Write the plan; its predicted figures."""
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    plan = build_plan(estimator, candidate, estimate)
    predicted_s = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, iteration_s=predicted_s))  # type: ignore[type-var]
    file.parent.mkdir(parents=True, exist_ok=True)
    save_plan(plan, file)
    return {
        "plan": describe(estimator, candidate), "zero_stage": candidate.zero_stage, "predicted_s": predicted_s,
        "by_cause_s": {"compute": estimate.busy_s, "bubble": estimate.fill_s, "sync": estimate.sync_s, "update": estimate.update_s},
        "predicted_bytes": max(m.total_bytes - m.reserved_bytes for m in estimate.memory),
    }  # fmt: skip


def job_of(file: Path, devices: list[CpuDevice], data: DataFiles) -> Job:
    """The training of a plan file."""
    from megatron_het.plan import load_plan

    plan = load_plan(file)
    training = Training(plan, file, devices, data, ITERATIONS, ITERATIONS, file.parent)
    words = [w for group in argument_groups(training).values() for w in group]
    words += [*plan_arguments(plan), "--make-vocab-size-divisible-by", "128"]
    words += ["--het-plan", str(file), "--het-report", str(file.parent / "ranks")]
    return Job(file.parent.name, plan.world_size, tuple(words), file.parent / "logs",
               setup=("benchmarks.machine:pin", {"cores": [d.core for d in devices]}), timeout_s=120.0)


def compare(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A prediction with what the ranks' reports say."""
    reports = [json.loads(p.read_text()) for p in sorted((folder / "ranks").glob("rank-*.json"))]
    steady = [i for i in reports[-1]["iterations"][2:] if i["elapsed_s"]]
    measured_s = median(i["elapsed_s"] for i in steady)
    measured_bytes = max(sum(v for k, v in r["memory"].items() if k.endswith("_bytes")) for r in reports)
    return row | {
        "measured_s": measured_s, "time_error": row["predicted_s"] / measured_s - 1,
        "measured_schedule_s": median(i["schedule_s"] for i in steady),
        "measured_compute_s": [median(i["compute_s"] for i in r["iterations"][2:]) for r in reports],
        "measured_bytes": measured_bytes, "memory_error": row["predicted_bytes"] / measured_bytes - 1,
        "measured_memory": [r["memory"] for r in reports],
    }  # fmt: skip


def measure(folder: Path, chosen: list[int] | None = None, profile_file: Path | None = None) -> dict[str, Any]:
    """Profile (unless a file is given), predict and run; errors of iteration time and memory."""
    cores = available_cores()[:PROCESSES]
    if len(cores) < PROCESSES:
        return {"skipped": f"needs {PROCESSES} cores"}
    devices = [CpuDevice(f"core-{i}", "core", core, 1) for i, core in enumerate(cores)]
    done = subprocess.run([sys.executable, "-m", "examples.llama.data", "--out", str(folder / "data")],
                          env=default_environment(), capture_output=True, text=True, check=True)
    data = DataFiles(**json.loads(done.stdout))
    if profile_file is not None and profile_file.exists():
        from tools.planner.profile_schema import load_profile

        profile = load_profile(profile_file)
    else:
        profile = measured_profile(folder, devices)
        if profile_file is not None:
            profile_file.write_text((folder / "profile.json").read_text())
    estimator = estimator_of(profile)
    rows = []
    with Runner() as runner:
        for i, candidate in enumerate(plans()):
            if chosen is not None and i not in chosen:
                continue
            file = folder / f"run-{i}" / "plan.json"
            row = predict(estimator, candidate, file)
            runner.run(job_of(file, devices, data))
            rows.append(compare(row, file.parent))
            print(f"  {rows[-1]['plan']}: {rows[-1]['measured_s']:.3f} s ({100 * rows[-1]['time_error']:+.1f} %), "
                  f"memory {100 * rows[-1]['memory_error']:+.1f} %", file=sys.stderr, flush=True)
    return {"time_error": mean(abs(r["time_error"]) for r in rows), "memory_error": mean(abs(r["memory_error"]) for r in rows),
            "machine": machine(), "runs": rows}


def gloo() -> dict[str, Any]:
    """All of it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, metavar="OUT")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="use this profile, or write it when there is none")
    parser.add_argument("--plans", default="", metavar="I,J", help="numbers of the plans to run (default: all)")
    options = parser.parse_args()
    chosen = [int(n) for n in options.plans.split(",")] if options.plans else None
    with tempfile.TemporaryDirectory() as folder:
        write_json(options.json, measure(Path(os.path.realpath(folder)), chosen, options.profile))


if __name__ == "__main__":
    main()
