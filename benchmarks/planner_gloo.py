"""The cost model against real runs on this machine: profile two pinned processes, predict plans, run them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from examples.llama.data import DataFiles
from examples.llama.devices import PINNING_VARIABLE, CpuDevice, available_cores, pinning
from examples.llama.job import Job, run
from megatron_het.plan import save_plan
from tools.planner.build import build_plan
from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.catalog import Gpu
from tools.planner.cluster import Cluster, NodeGroup
from tools.planner.estimate import Estimator
from tools.planner.layercost import MeasuredCosts
from tools.planner.model import Model
from tools.planner.profile import WORKER, default_environment, run_profile
from tools.planner.profile_schema import ProfiledModel
from tools.planner.profile_settings import ProfileSettings
from tools.planner.runtime import CPU_GLOO
from tools.planner.simulation import simulate_candidate

MODEL = Model(
    name="tiny", num_layers=6, hidden_size=256, ffn_hidden_size=688, num_attention_heads=8, num_query_groups=4,
    vocab_size=384, seq_length=256, global_batch_size=16, precision="fp32", attention="unfused", recompute=("none",),
)  # fmt: skip
ITERATIONS = 8


def plans() -> list[Candidate]:
    """Different stages, splits, batches, and data parallelism, on one or two processes."""
    out = [Candidate((Stage(6, (Group(0, 1, n),)),), b) for n in (1, 2) for b in (1, 2, 4)]
    out += [Candidate((Stage(k, (Group(0, 1, 1),)), Stage(6 - k, (Group(0, 1, 1),))), b) for k in (1, 2, 3, 4) for b in (1, 2)]
    return out


def measure(folder: Path) -> dict[str, Any]:
    """Profile, predict and run; errors of iteration time and memory."""
    cores = available_cores()[:2]
    if len(cores) < 2:
        return {"skipped": "needs two cores"}
    devices = [CpuDevice(f"core-{i}", "core", core, 1) for i, core in enumerate(cores)]
    done = subprocess.run([sys.executable, "-m", "examples.llama.data", "--out", str(folder / "data")],
                          env=default_environment(), capture_output=True, text=True, check=True)
    data = DataFiles(**json.loads(done.stdout))
    settings = ProfileSettings(
        model=ProfiledModel(MODEL.hidden_size, MODEL.ffn_hidden_size, MODEL.num_attention_heads, MODEL.groups,
                            MODEL.vocab_size, MODEL.seq_length, "fp32", "tiny"),
        out=str(folder / "profile.json"), kinds=("core", "core"), devices_per_node=1, micro_batch_sizes=(1, 2, 4),
        link_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 23),
    )  # fmt: skip
    profile = run_profile(settings, 2, {PINNING_VARIABLE: pinning(devices)}, ("examples.llama.pinned", *WORKER))
    cpu = Gpu(flops={"fp32": 5e10}, memory_bytes=4 << 30, memory_bytes_per_s=1e10, intra_node_bytes_per_s=2e9,
              reserved_bytes=0, source="this machine")
    cluster = Cluster(nodes=(NodeGroup(gpu="core", count=2, gpus_per_node=1),), gpus={"core": cpu})
    estimator = Estimator(cluster, MODEL, MeasuredCosts(MODEL, profile, cluster.gpu, CPU_GLOO), CPU_GLOO)
    rows = [_one(estimator, candidate, devices, data, folder / f"run-{i}") for i, candidate in enumerate(plans())]
    return {"time_error": mean(abs(r["time_error"]) for r in rows), "memory_error": mean(abs(r["memory_error"]) for r in rows),
            "runs": rows}


def _one(estimator: Estimator, candidate: Candidate, devices: list[CpuDevice], data: DataFiles, folder: Path) -> dict[str, Any]:
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    plan = build_plan(estimator, candidate, estimate)
    predicted_s = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
    folder.mkdir()
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, iteration_s=predicted_s))  # type: ignore[type-var]
    save_plan(plan, folder / "plan.json")
    reports = run(Job(plan, folder / "plan.json", devices[: plan.world_size], data, ITERATIONS, ITERATIONS, folder / "out"))
    measured_s = median(i["elapsed_s"] for i in reports[-1]["iterations"][2:] if i["elapsed_s"])
    predicted = max(m.total_bytes - m.reserved_bytes - m.workspace_bytes for m in estimate.memory)
    measured = max(sum(v for k, v in r["memory"].items() if k.endswith("_bytes")) for r in reports)
    return {
        "stages": [[s.layers, sum(g.count for g in s.groups)] for s in candidate.stages],
        "micro_batch_size": candidate.micro_batch_size, "predicted_s": predicted_s, "measured_s": measured_s,
        "time_error": predicted_s / measured_s - 1, "predicted_bytes": predicted, "measured_bytes": measured,
        "memory_error": predicted / measured - 1,
    }  # fmt: skip


def gloo() -> dict[str, Any]:
    """All of it in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))
