"""The measured bubble of a SlimPipe run against that of the simulator with the run's own durations."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Runner
from benchmarks.slimpipe_runs import Model, Setting, run
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.generators import generate
from megatron_het.schedule.ir import Shape
from megatron_het.schedule.passes import add_exchange, add_transfers
from megatron_het.schedule.simulate import simulate

_WARMUP = 3  # iterations that do not count; memory is metered in the second one
_DIAGONAL = 0.5  # the kernels skip the masked half of a slice's attention to itself
_KINDS = ("FORWARD", "BACKWARD")


def bubble(runner: Runner, setting: Setting, model: Model, folder: Path, iterations: int) -> dict[str, Any]:
    """Run a setting once more, with a report, and compare.

    The measured bubble of an iteration is the longest rank's time in the schedule over the mean time
    that ranks compute, less one; its median counts.  The simulator gets, for each stage, the forward and
    backward times of slices in the traced iteration, as a constant plus a part that grows with the
    slice's index.
    """
    report = folder / "report"
    traced = _WARMUP + max(iterations // 2, 1)
    more = ("--het-report", str(report), "--het-trace", str(report), "--het-trace-iteration", str(traced))
    run(runner, setting, model, folder, iterations=_WARMUP + iterations, memory=False, more=more)
    ranks = [
        json.loads((report / f"rank-{r}.json").read_text(encoding="utf-8"))["iterations"][_WARMUP:]
        for r in range(setting.stages)
    ]
    by_iteration = [
        max(i["schedule_s"] for i in same) / statistics.mean(i["compute_s"] for i in same) - 1
        for same in zip(*ranks, strict=True)
    ]
    measured = statistics.median(by_iteration)
    simulated = _simulated(setting, model, report)
    return {
        "measured_bubble": measured,
        "simulated_bubble": simulated,
        "bubble_error": abs(measured / simulated - 1),
        "bubbles": by_iteration,
    }


def _simulated(setting: Setting, model: Model, report: Path) -> float:
    shape = Shape.uniform(
        setting.stages,
        setting.microbatches,
        slices=setting.slices,
        chunks=setting.chunks,
        layers_per_chunk=model.layers // (setting.stages * setting.chunks),
    )
    tables: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for rank in range(setting.stages):
        trace = json.loads((report / f"trace-rank-{rank}.json").read_text(encoding="utf-8"))
        for kind in _KINDS:
            fits = [_fit(trace["traceEvents"], kind, chunk, setting.slices) for chunk in range(setting.chunks)]
            tables[kind].append(tuple(linear for linear, _ in fits))
            tables["attention " + kind].append(tuple(attention for _, attention in fits))
    costs = Costs(
        *(tuple(tables[name]) for name in (*_KINDS, *("attention " + kind for kind in _KINDS))),
        diagonal=_DIAGONAL,
        host_blocks=True,
    )
    program = generate("slimpipe", shape)
    if "--het-context-exchange" in setting.flags:
        program = add_exchange(program, units=2, helping="--het-exchange-idle" in setting.flags)
    return simulate(add_transfers(program), costs).bubble_fraction


def _fit(events: list[dict[str, Any]], kind: str, chunk: int, slices: int) -> tuple[float, float]:
    """Seconds per microbatch: what every slice takes, and what grows with its index."""
    found = [
        (e["args"]["slice"] + _DIAGONAL, e["dur"] / 1e6)
        for e in events
        if e.get("args", {}).get("kind") == kind and e["args"]["chunk"] == chunk and e["tid"] == 0
    ]
    weights, seconds = np.array(found).T
    slope, constant = np.polyfit(weights, seconds, 1) if slices > 1 else (0.0, seconds.mean())
    total = slices * (slices - 1) / 2 + slices * _DIAGONAL
    return max(float(constant), 0.0) * slices, max(float(slope), 0.0) * total
