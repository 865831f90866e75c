"""The measured bubble of a SlimPipe run against that of the simulator with the run's own durations."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.slimpipe_runs import Model, Setting, run
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.generators import generate
from megatron_het.schedule.ir import Kind, Op, Program, Shape
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.transfers import add_transfers, post_receives_early
from testing.runner import Runner

_WARMUP = 3  # iterations that do not count; memory is metered in the second one
_DIAGONAL = 0.5  # the kernels skip the masked half of a slice's attention to itself
_KINDS = ("FORWARD", "BACKWARD")

Events = list[dict[str, Any]]


def bubble(runner: Runner, setting: Setting, model: Model, folder: Path, iterations: int) -> dict[str, Any]:
    """Run a setting once more, with a report and a trace, and compare.

    The bubble of an iteration is the longest rank's time in the schedule over the mean time that ranks
    compute, less one.  The traced iteration is simulated twice: with its own duration of every forward and
    backward (what is then left is what the simulator does not know of the execution), and with durations of
    each stage smoothed to a constant plus a part that grows with the slice's index (as the planner's are).
    Both know what posting a transfer took.  With the context exchange both are smooth.

    Returns:
        ``measured_bubble`` and ``simulated_bubble`` of the traced iteration and their relative difference
        ``bubble_error``; ``smooth_bubble``, the simulation with smooth durations, and its difference from the
        median of all iterations ``bubbles``, ``smooth_bubble_error``.
    """
    report = folder / "report"
    traced = _WARMUP + max(iterations // 2, 1)
    more = ("--het-report", str(report), "--het-trace", str(report), "--het-trace-iteration", str(traced))
    run(runner, setting, model, folder, iterations=_WARMUP + iterations, memory=False, more=more)
    ranks = [
        json.loads((report / f"rank-{r}.json").read_text(encoding="utf-8"))["iterations"] for r in range(setting.stages)
    ]
    by_iteration = [
        max(i["schedule_s"] for i in same) / statistics.mean(i["compute_s"] for i in same) - 1
        for same in zip(*ranks, strict=True)
    ]
    counted = by_iteration[_WARMUP:]
    measured, typical = by_iteration[traced - 1], statistics.median(counted)
    program = program_for(setting, model)
    smooth, own = fitted_costs(setting, program, report)
    simulated, smoothed = (simulate(program, costs).bubble_fraction for costs in (own, smooth))
    return {
        "slices": setting.slices,
        "chunks": setting.chunks,
        "measured_bubble": measured,
        "simulated_bubble": simulated,
        "bubble_error": abs(measured / simulated - 1),
        "smooth_bubble": smoothed,
        "smooth_bubble_error": abs(typical / smoothed - 1),
        "bubbles": counted,
        "post_s": own.post_s,
    }


def program_for(setting: Setting, model: Model) -> Program:
    """The program that a setting runs."""
    shape = Shape.uniform(
        setting.stages,
        setting.microbatches,
        slices=setting.slices,
        chunks=setting.chunks,
        layers_per_chunk=model.layers // (setting.stages * setting.chunks),
    )
    program = generate("slimpipe", shape)
    if "--het-context-exchange" in setting.flags:
        program = add_exchange(program, units=2, helping="--het-exchange-idle" in setting.flags)
    return post_receives_early(add_transfers(program))


def fitted_costs(setting: Setting, program: Program, report: Path) -> tuple[Costs, Costs]:
    """From the traces: smooth durations, and those with every operation's own."""
    tables: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    own: dict[tuple[int, Op], float] = {}
    posts: list[float] = []
    for rank in range(setting.stages):
        trace = json.loads((report / f"trace-rank-{rank}.json").read_text(encoding="utf-8"))["traceEvents"]
        done = [e for e in trace if "kind" in e.get("args", {})]
        for kind in _KINDS:
            fits = [_fit(done, kind, chunk, setting.slices) for chunk in range(setting.chunks)]
            tables[kind].append(tuple(linear for linear, _ in fits))
            tables["attention " + kind].append(tuple(attention for _, attention in fits))
        for e in done:
            if e["args"]["kind"] in _KINDS:
                a = e["args"]
                key = (rank, Op(Kind.rows[a["kind"]], a["microbatch"], a["slice"], a["chunk"]))
                own[key] = e["dur"] / 1e6
        posts.append(_posting_s(trace, done))
    forward, backward = _KINDS
    smooth = Costs(
        tuple(tables[forward]),
        tuple(tables[backward]),
        tuple(tables["attention " + forward]),
        tuple(tables["attention " + backward]),
        diagonal=_DIAGONAL,
        host_blocks=True,
        post_s=statistics.mean(posts),
    )
    # With the exchange a pass contains work for others, which the program has as operations of its own.
    return smooth, smooth if program.attention_units else replace(smooth, measured_s=own)


def _posting_s(trace: Events, done: Events) -> float:
    """Seconds per transfer in which a rank neither computed nor waited: mostly sockets, and Python."""
    spent = sum(e["dur"] for e in done if e["args"]["kind"] in _KINDS)
    waited = sum(e["dur"] for e in trace if e["ph"] == "X" and e["tid"] == 1)
    begin, end = min(e["ts"] for e in done), max(e["ts"] + e["dur"] for e in done)
    others = sum(e["args"]["kind"] not in _KINDS for e in done)
    return max(end - begin - spent - waited, 0.0) / 1e6 / max(others, 1)


def _fit(done: Events, kind: str, chunk: int, slices: int) -> tuple[float, float]:
    """Seconds per microbatch: what every slice takes, and what grows with its index."""
    found = [
        (e["args"]["slice"] + _DIAGONAL, e["dur"] / 1e6)
        for e in done
        if e["args"]["kind"] == kind and e["args"]["chunk"] == chunk
    ]
    weights, seconds = np.array(found).T
    slope, constant = np.polyfit(weights, seconds, 1) if slices > 1 else (0.0, seconds.mean())
    total = slices * (slices - 1) / 2 + slices * _DIAGONAL
    return max(float(constant), 0.0) * slices, max(float(slope), 0.0) * total
