"""Compares the cost model with real runs on this machine: profile pinned processes, predict plans, run them.

    python -m benchmarks.planner_gloo --json OUT [--rounds N] [--model dense|moe|hybrid]

The processes sit on cores of their own, and the profile is taken with all of them busy at once, as training
keeps them.  One set of predictions from the profile; nothing is fitted to the runs.

Virtual machines change their speed by tens of percent within minutes, so everything is measured in
rounds: profile, all plans, profile, all plans, ...  Predictions come from the medians of the profiles, and are
compared with the medians of the runs.  An existing file gets further rounds.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.machine import command_line, machine
from examples.llama.data import DataFiles
from examples.llama.devices import PINNING_VARIABLE, CpuDevice, available_cores, pinning
from examples.llama.job import CPU_ARGUMENTS, training_arguments
from megatron_het.plan import load_plan, save_plan
from testing.planner_cases import model_of, processors
from testing.runner import Job, Runner
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator, estimator_of
from tools.planner.costs.layer import CPU_GLOO
from tools.planner.costs.simulation import simulate_candidate
from tools.planner.emit.flags import model_arguments, plan_arguments
from tools.planner.inputs.files import write_json
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.inputs.profile_schema import TIMES, Profile, load_profile
from tools.planner.profile.settings import WORKER, ProfileSettings, default_environment, run_profile
from tools.planner.report.tables import describe

ITERATIONS = 7
PROCESSES = 2
_SHAPE: dict[str, Any] = {"layers": 6, "hidden": 256, "ffn": 688, "heads": 8, "groups": 4, "words": 384, "tokens": 256}
_TRAINING: dict[str, Any] = {"batch": 16, "precision": "fp32", "recompute": ("none",), "distributed": True}
_DENSE: dict[str, Any] = {"name": "tiny", "attention": "unfused", **_SHAPE, **_TRAINING}
_MOE = _DENSE | {"name": "tiny-moe", "experts": Experts(count=4, top_k=2, ffn_hidden_size=344)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the sizes to profile, and the plans that train it."""

    model: Model
    plans: tuple[Candidate, ...]
    # tp, ep: sizes to profile; TP groups need processes of one node
    tp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)

    @property
    def per_node(self) -> int:
        """Number of processes that count as one node."""
        return max(self.tp)


def _pipeline(layers: tuple[int, ...], batch: int, **changes: Any) -> Candidate:
    return Candidate(tuple(Stage(n, (Group(0, 1, 1),)) for n in layers), batch, **changes)


def _replicas(count: int, batch: int, tp: int = 1, **changes: Any) -> Candidate:
    return Candidate((Stage(_DENSE["layers"], (Group(0, tp, count),)),), batch, **changes)


CASES = {
    "dense": Case(  # different splits, batches, data parallelism, optimizers and schedules
        model_of(**_DENSE),
        (
            _replicas(2, 1),
            _replicas(2, 2),
            _replicas(2, 4),
            _replicas(2, 2, zero_stage=1),
            _pipeline((3, 3), 1),
            _pipeline((3, 3), 2),
            _pipeline((3, 3), 4),
            _pipeline((4, 2), 1),
            _pipeline((2, 4), 2),
            _pipeline((1, 5), 1),
            _pipeline((5, 1), 4),
            _pipeline((3, 3), 1, schedule="interleaved", chunks=3),
            _pipeline((4, 2), 2, schedule="interleaved", chunks=2),
            _pipeline((3, 3), 2, schedule="slimpipe", slices=2),
        ),
    ),
    "moe": Case(  # replicas, stages, and a TP group that cuts experts or divides them
        model_of(**_MOE),
        (
            _replicas(2, 1),
            _pipeline((3, 3), 1),
            _pipeline((2, 4), 2),
            _pipeline((3, 3), 1, schedule="interleaved", chunks=3),
            _replicas(1, 1, tp=2),
            _replicas(1, 2, tp=2, ep=2),
        ),
        tp=(1, 2),
        ep=(1, 2),
    ),
    "hybrid": Case(  # three layers for two stages: cut between layers, and inside the second one
        model_of(**_DENSE | {"name": "tiny-hybrid", "pattern": "*-*-*-"}),
        (_pipeline((2, 4), 1), _pipeline((4, 2), 1), _pipeline((3, 3), 1)),
    ),
}


def measured_profile(case: Case, folder: Path, devices: list[CpuDevice]) -> Profile:
    """Profile layers at the micro batch sizes of the plans on all devices at once, and the link between them."""
    settings = ProfileSettings(
        model=case.model.profiled,
        out=str(folder / "profile.json"),
        kinds=("core",) * len(devices),
        devices_per_node=case.per_node,
        micro_batch_sizes=tuple(sorted({c.micro_batch_size for c in case.plans})),
        tp=case.tp,
        ep=case.ep,
        window_s=0.6,
        link_bytes=(1 << 10, 1 << 16, 1 << 20, 1 << 23),
    )
    return run_profile(settings, len(devices), {PINNING_VARIABLE: pinning(devices)}, ("examples.llama.pinned", *WORKER))


def _prices(case: Case, profile: Profile) -> Estimator:
    """Returns the planner's model of this machine."""
    cluster = processors(PROCESSES // case.per_node, case.per_node, is_processor=True)
    return estimator_of(cluster, case.model, profile, CPU_GLOO)


def predict(estimator: Estimator, candidate: Candidate, file: Path) -> dict[str, Any]:
    """Write the plan; returns its predicted figures."""
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    plan = build_plan(estimator, candidate, estimate)
    predicted_s = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
    plan = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, iteration_s=predicted_s))  # type: ignore[type-var]
    file.parent.mkdir(parents=True, exist_ok=True)
    save_plan(plan, file)
    return {
        "plan": describe(estimator, candidate),
        "zero_stage": candidate.zero_stage,
        "predicted_s": predicted_s,
        "by_cause_s": {
            "compute": estimate.busy_s,
            "bubble": estimate.fill_s,
            "sync": estimate.sync_s,
            "update": estimate.update_s,
        },
        "predicted_bytes": max(m.total_bytes - m.reserved_bytes for m in estimate.memory),
    }


def job_of(case: Case, file: Path, devices: list[CpuDevice], data: DataFiles) -> Job:
    """Returns the job that trains a plan file."""
    plan = load_plan(file)
    words = model_arguments(plan, case.model)
    words += [*data.arguments, "--data-cache-path", str(Path(data.train_prefix).parent / "cache")]
    words += [*training_arguments(ITERATIONS, ITERATIONS), *CPU_ARGUMENTS]
    words += [*plan_arguments(plan), "--make-vocab-size-divisible-by", "128"]
    words += ["--het-plan", str(file), "--het-report", str(file.parent / "ranks")]
    return Job(
        file.parent.name,
        plan.world_size,
        tuple(words),
        file.parent / "logs",
        setup=("testing.probe:pin", {"cores": [d.core for d in devices]}),
        timeout_s=120.0,
    )


def measure_round(case: Case, folder: Path) -> dict[str, Any]:
    """Profile, then run every plan; returns the raw figures."""
    cores = available_cores()[:PROCESSES]
    if len(cores) < PROCESSES:
        raise SystemExit(f"this machine offers {len(cores)} core(s); the runs need {PROCESSES}")
    devices = [CpuDevice(f"core-{i}", "core", core) for i, core in enumerate(cores)]
    command = [sys.executable, "-m", "examples.llama.data", "--out", str(folder / "data")]
    done = subprocess.run(command, env=default_environment(), capture_output=True, text=True, check=True)
    data = DataFiles(**json.loads(done.stdout))
    profile = measured_profile(case, folder, devices)
    estimator = _prices(case, profile)
    runs = []
    with Runner() as runner:
        for i, candidate in enumerate(case.plans):
            file = folder / f"run-{i}" / "plan.json"
            predict(estimator, candidate, file)
            runner.run(job_of(case, file, devices, data))
            reports = [json.loads(p.read_text()) for p in sorted((file.parent / "ranks").glob("rank-*.json"))]
            times = [t["elapsed_s"] for t in reports[-1]["iterations"][2:] if t["elapsed_s"]]
            used = max(sum(v for k, v in r["memory"].items() if k.endswith("_bytes")) for r in reports)
            runs.append({"iterations_s": times, "bytes": used})
            print(f"  {describe(estimator, candidate)}: {median(times):.3f} s", file=sys.stderr, flush=True)
    return {"profile": json.loads((folder / "profile.json").read_text()), "runs": runs}


def median_profile(profiles: list[Profile]) -> Profile:
    """Returns a profile with the median of every time and rate."""
    first = profiles[0]
    devices = []
    for d, device in enumerate(first.devices):
        timings = []
        for t, timing in enumerate(device.timings):
            same = [p.devices[d].timings[t] for p in profiles]
            times: dict[str, Any] = {n: median(getattr(x, n) for x in same) for n in TIMES}
            timings.append(dataclasses.replace(timing, **times))
        devices.append(dataclasses.replace(device, timings=timings))
    links = [
        dataclasses.replace(
            link,
            latency_s=median(p.links[i].latency_s for p in profiles),
            bytes_per_s=median(p.links[i].bytes_per_s for p in profiles),
        )
        for i, link in enumerate(first.links)
    ]
    return dataclasses.replace(first, devices=devices, links=links)


def summary(case: Case, rounds: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Returns predicted and measured figures over all rounds."""
    profiles = []
    for i, one in enumerate(rounds):
        (folder / f"profile-{i}.json").write_text(json.dumps(one["profile"]), encoding="utf-8")
        profiles.append(load_profile(folder / f"profile-{i}.json"))
    estimator = _prices(case, median_profile(profiles))
    rows = []
    for i, candidate in enumerate(case.plans):
        row = predict(estimator, candidate, folder / f"plan-{i}.json")
        measured_s = median(t for one in rounds for t in one["runs"][i]["iterations_s"])
        measured_bytes = max(one["runs"][i]["bytes"] for one in rounds)
        rows.append(
            row
            | {
                "measured_s": measured_s,
                "time_error": row["predicted_s"] / measured_s - 1,
                "measured_s_by_round": [median(one["runs"][i]["iterations_s"]) for one in rounds],
                "measured_bytes": measured_bytes,
                "memory_error": row["predicted_bytes"] / measured_bytes - 1,
            }
        )
    return {
        "time_error": mean(abs(r["time_error"]) for r in rows),
        "memory_error": mean(abs(r["memory_error"]) for r in rows),
        "bias": mean(r["time_error"] for r in rows),
        "worst_time_error": max((r["time_error"] for r in rows), key=abs),
        "machine": machine(),
        "runs": rows,
        "rounds": rounds,
    }


def measure(case: Case, count: int, out: Path | None = None) -> dict[str, Any]:
    """Measure ``count`` more rounds; the file, if any, is written after each."""
    rounds: list[dict[str, Any]] = json.loads(out.read_text())["rounds"] if out is not None and out.exists() else []
    result: dict[str, Any] = {}
    for _ in range(max(1, count) if not rounds else count):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure_round(case, Path(os.path.realpath(folder))))
            result = summary(case, rounds, Path(folder))
        if out is not None:
            write_json(out, result)
    if not result:
        with tempfile.TemporaryDirectory() as folder:
            result = summary(case, rounds, Path(folder))
    return result


def main() -> None:
    """Measure and write JSON."""
    parser = command_line("benchmarks.planner_gloo", __doc__)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds to add (0: only compare again)")
    parser.add_argument("--model", choices=CASES, default="dense", help="the model and its plans")
    options = parser.parse_args()
    result = measure(CASES[options.model], options.rounds, options.json)
    write_json(options.json, result)
    print(json.dumps({k: result[k] for k in ("time_error", "worst_time_error", "memory_error", "bias")}))


if __name__ == "__main__":
    main()
