"""Compares the cost model with published runs: predictions, calibration of the software constants, leave-one-out."""

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import product
from math import log
from statistics import mean
from typing import Any

from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimate, estimator_of
from tools.planner.costs.layer import Runtime
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.profile_schema import DeviceProfile, LayerTiming, Profile

# Profiles, clusters and runs of the published measurements in ``data/sailor.json``.


@cache
def reference() -> dict[str, Any]:
    """Returns the document with the published measurements."""
    text = resources.files(__package__).joinpath("data/sailor.json").read_text("utf-8")
    return json.loads(text)


def reference_model(name: str, global_batch_size: int, **changes: Any) -> Model:
    """Returns one of the measured models: fp32 with TF32, unfused attention."""
    shape = {
        **reference()["models"][name],
        "name": name,
        "global_batch_size": global_batch_size,
        "gated": False,
        "biases": True,
        "precision": "tf32",
        "attention": "unfused",
        "recompute": ("none",),
    }
    return Model(**{**shape, **changes})


@cache
def reference_profile(name: str) -> Profile:
    """Returns the measured layer times and sizes as a profile."""
    data = reference()
    model = reference_model(name, 1)
    sizes = {(kind, tp): (params, act, out) for kind, tp, params, act, out in data["sizes"][name]}
    devices = []
    for gpu, rows in data["timings"][name].items():
        timings = [
            LayerTiming(
                layer=kind,
                micro_batch_size=batch,
                tp=tp,
                slice_tokens=model.seq_length,
                forward_s=forward,
                backward_s=backward,
                update_s=update,
                parameters=sizes[kind, tp][0],
                activation_bytes=sizes[kind, tp][1] * batch,
                output_bytes=sizes[kind, tp][2] * batch,
            )
            for kind, batch, tp, forward, backward, update in rows
        ]
        node = data["nodes"][gpu]
        devices.append(DeviceProfile(gpu, node["mem_per_gpu"], node["gpus_per_node"], timings))
    return Profile(model.profiled, devices, notes=data["source"])


def reference_nodes(gpu: str, count: int, zone: str = "us-central1-a", **changes: Any) -> NodeGroup:
    """Returns nodes with the measured bandwidths and prices."""
    data = reference()
    per_node = data["nodes"][gpu]["gpus_per_node"]
    rates = data["bandwidths"]["inter"][gpu]
    fields: dict[str, Any] = {
        "gpu": gpu,
        "count": count,
        "gpus_per_node": per_node,
        "zone": zone,
        "network_bytes_per_s": rates[str(per_node)],
        "stream_bytes_per_s": rates["1"],
        "usd_per_gpu_hour": data["usd_per_gpu_hour"].get(gpu),
        "intra_node_bytes_per_s": data["bandwidths"]["intra"][gpu][str(per_node)] / (per_node / 2),
    }
    return NodeGroup(**{**fields, **changes})


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A published run with its measured time."""

    name: str
    model: str
    tp: int
    micro_batch_size: int
    global_batch_size: int
    layers: tuple[int, ...]  # Transformer layers per stage (the source counts embedding and head as layers)
    stages: tuple[tuple[str, ...], ...]  # per stage, the GPU kind of each replica
    iteration_s: float
    memory_bytes: int | None  # largest rank, None where the reading is not usable

    @property
    def site(self) -> str:
        """The cluster of the run (the first part of its name)."""
        return self.name.split("/")[0]


def measured_runs() -> list[MeasuredRun]:
    """Returns all published runs."""
    out = []
    for row in reference()["runs"]:
        layers = list(row["layers_per_stage"])
        layers[0] -= 1
        layers[-1] -= 1
        stages = []
        for text in row["gpus_per_stage"].split(" / "):
            replicas: list[str] = []
            for part in text.split("|"):
                found = re.fullmatch(r"(\d+)\*([\w-]+)x(\d+)", part)
                assert found, part
                replicas += [found[2]] * int(found[1])
            stages.append(tuple(replicas))
        out.append(
            MeasuredRun(
                name=row["run"],
                model=row["model"],
                tp=row["tp"],
                micro_batch_size=row["micro_batch_size"],
                global_batch_size=row["global_batch_size"],
                layers=tuple(layers),
                stages=tuple(stages),
                iteration_s=row["iteration_s"],
                memory_bytes=row["memory_bytes"],
            )
        )
    return out


def run_cluster(run: MeasuredRun) -> Cluster:
    """Returns the cluster of a run: one replica per node."""
    counts = Counter(gpu for stage in run.stages for gpu in stage)
    nodes = tuple(
        reference_nodes(
            gpu,
            n,
            zone=run.site,
            gpus_per_node=run.tp,
            network_bytes_per_s=_node_rate(gpu, run.tp),
            intra_node_bytes_per_s=_intra_rate(gpu, run.tp),
            measured_rates=tuple(tuple(row) for row in reference()["rates"][gpu]),
        )
        for gpu, n in counts.items()
    )
    return Cluster(name=run.name, nodes=nodes)


def _node_rate(gpu: str, tp: int) -> float:
    rates = reference()["bandwidths"]["inter"][gpu]
    return rates[str(min(tp, max(int(n) for n in rates)))]


def _intra_rate(gpu: str, tp: int) -> float:
    rates = reference()["bandwidths"]["intra"][gpu]
    count = min(max(tp, 2), max(int(n) for n in rates))
    return rates[str(count)] / (count / 2)


DEEPSPEED = Runtime(
    name="Megatron-DeepSpeed (as in the published runs)",
    transfers_in_turn=True,
    leader_transfers=True,
    transfer_latency_s=1.0e-3,
    profile_overhead_s=3.0e-4,
    collective_bytes_per_s=7.0e9,
    extra_parameter_copies=2.0,
    attention_copies=4.0,
    framework_bytes=2.85e9,
)
"""Calibrated on the 14 published runs by ``calibrate``; one set of constants for all of them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The measured and predicted figures of one run."""

    run: MeasuredRun
    iteration_s: float
    memory_bytes: float

    @property
    def time_error(self) -> float:
        """Relative, positive when the prediction is too long."""
        return self.iteration_s / self.run.iteration_s - 1

    @property
    def memory_error(self) -> float | None:
        """Relative, negative when memory is underestimated; None without a usable reading."""
        return None if self.run.memory_bytes is None else self.memory_bytes / self.run.memory_bytes - 1


def predict(run: MeasuredRun, runtime: Runtime) -> Estimate:
    """Returns the closed form of one run, with microbatches split evenly as in the run."""
    cluster = run_cluster(run)
    pools = {node.gpu: i for i, node in enumerate(cluster.nodes)}
    model = reference_model(run.model, run.global_batch_size)
    stages = []
    for layers, gpus in zip(run.layers, run.stages):
        groups = tuple(Group(pools[g], run.tp, gpus.count(g)) for g in dict.fromkeys(gpus))
        stages.append(Stage(layers, groups))
    prices = estimator_of(cluster, model, reference_profile(run.model), runtime)
    estimate = prices.estimate(Candidate(tuple(stages), run.micro_batch_size, even=True))
    assert estimate is not None, run.name
    return estimate


def compare(runtime: Runtime = DEEPSPEED, runs: list[MeasuredRun] | None = None) -> list[Comparison]:
    """Compare all runs under one set of constants."""
    out = []
    for run in runs if runs is not None else measured_runs():
        estimate = predict(run, runtime)
        out.append(Comparison(run, estimate.iteration_s, max(m.total_bytes for m in estimate.memory)))
    return out


TIME_GRID = {
    "transfer_latency_s": (5e-4, 1e-3, 1.5e-3),
    "profile_overhead_s": (1e-4, 2e-4, 3e-4, 4e-4),
    "collective_bytes_per_s": (5.0e9, 7.0e9, 1e10, 2e10),
}
MEMORY_GRID = {
    "framework_bytes": (1.8e9, 2.0e9, 2.2e9, 2.4e9, 2.6e9, 2.8e9, 3.0e9, 3.2e9),
    "attention_copies": (2.0, 3.0, 4.0, 5.0),
    "extra_parameter_copies": (0.0, 1.0, 2.0),
}
MAX_UNDERESTIMATE = 0.05
PRIOR_WEIGHT = 0.002
"""Penalty for moving a constant from the shipped one by a factor of e, as a mean error, so that a constant without
influence on the runs keeps its value."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The constants that fit all runs best, and the errors without and with leaving each run out."""

    constants: dict[str, float]
    error: float
    leave_one_out_error: float


def _grid(names: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    return [dict(zip(names, values)) for values in product(*names.values())]


def _best(points: list[dict[str, float]], errors: list[list[float]], rows: list[int], one_sided: bool) -> int:
    """Returns the index of the point with the least mean absolute error; large underestimates count first."""

    def loss(k: int) -> tuple[float, float]:
        chosen = [errors[k][i] for i in rows]
        short = sum(max(0.0, -e - MAX_UNDERESTIMATE) for e in chosen) if one_sided else 0.0
        moved = sum(abs(log((value + 1e-9) / (getattr(DEEPSPEED, n) + 1e-9))) for n, value in points[k].items())
        return (round(short, 9), mean(abs(e) for e in chosen) + PRIOR_WEIGHT * min(moved, 10.0))

    return min(range(len(points)), key=loss)


def calibrate(names: dict[str, tuple[float, ...]], memory: bool) -> Calibration:
    """Grid search over software constants on all runs, then with each run left out and predicted.

    For memory, points that underestimate a run by more than 5 % are taken only when there is no other.
    """
    points = _grid(names)
    errors: list[list[float]] = []
    for point in points:
        found = compare(replace(DEEPSPEED, **point))
        errors.append([e for c in found if (e := c.memory_error if memory else c.time_error) is not None])
    rows = list(range(len(errors[0])))
    best = _best(points, errors, rows, memory)
    left_out = [abs(errors[_best(points, errors, [r for r in rows if r != i], memory)][i]) for i in rows]
    return Calibration(points[best], mean(abs(e) for e in errors[best]), mean(left_out))


def family_errors(names: dict[str, tuple[float, ...]], memory: bool) -> dict[str, float]:
    """Returns the mean absolute error of each family (model and cluster) under constants fitted to the others.

    Families without a usable reading are left out of the result.
    """
    points = _grid(names)
    errors = [
        {c.run.name: (c.memory_error if memory else c.time_error) for c in compare(replace(DEEPSPEED, **p))}
        for p in points
    ]
    families = {r.name: f"{r.model} on {r.site}" for r in measured_runs()}
    usable = [name for name, e in errors[0].items() if e is not None]
    table = [[e[n] or 0.0 for n in usable] for e in errors]
    out = {}
    for family in sorted({families[n] for n in usable}):
        others = [i for i, n in enumerate(usable) if families[n] != family]
        if not others:
            continue
        chosen = table[_best(points, table, others, memory)]
        out[family] = mean(abs(e) for e, n in zip(chosen, usable) if families[n] == family)
    return out
