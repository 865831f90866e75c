"""The attention context exchange in a mixed pipeline: one fast and one slow process, uneven layers.

``python -m benchmarks.slimpipe_speed --mixed --json OUT`` runs it.  The process of the last stage is stopped half of
the time, so that it is half as fast, and has fewer layers.  A traced run without the exchange tells what passes take
on both; from that the plan with the exchange is made, and both are simulated.  Then runs without and with it
alternate, and each side counts by the median of its iterations.

Keys: ``speedup`` of the exchange, ``simulated_speedup``, and ``met``, whether the speedup is at least 1.05 where the
simulator says so (None where it does not).
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.slimpipe_bubble import fitted_costs
from benchmarks.slimpipe_runs import Model, Setting, job
from examples.llama.pinned import slow_down
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.simulate import simulate
from testing.runner import Runner

BAR = 1.05
LAYERS, SLICES, MICROBATCHES = (5, 3), 8, 2
_SLOW, _TRACED, _WARMUP = 1, 2, 1
_STOPPED_S = _RUNNING_S = 0.004
"""Shorter than a pass, so that every pass takes twice as long."""
_MICROSECOND = 1e-6


def slowed_watch(*, rank: int, slow: int, out: str, memory: bool, fused: bool) -> None:
    """The probe of speed runs; one rank's process is stopped half of the time (a ``Job.setup``)."""
    from testing.watches import watch

    if rank == slow:
        slow_down(_STOPPED_S, _RUNNING_S)
    watch(rank=rank, out=out, memory=memory, fused=fused)


def plan_of(model: Model, tokens: int, **parameters: Any) -> Plan:
    """Two stages of one rank; ``parameters`` are of the exchange."""
    stages = tuple(Stage((n,), (Replica((s,), tuple(range(MICROBATCHES))),)) for s, n in enumerate(LAYERS))
    shape = ModelShape(sum(LAYERS), model.hidden, model.heads, model.groups, tokens, model.ffn)
    schedule = ScheduleSpec("slimpipe", {"slices": SLICES, **parameters})
    return Plan(shape, TrainingShape(1, MICROBATCHES), stages, schedule)


def exchange_of(costs: Costs) -> dict[str, Any]:
    """The exchange's parameters, in microseconds, from what passes take without it."""
    pairs = SLICES * (SLICES - 1) / 2 + SLICES * costs.diagonal
    attention = [sum(row) / n / pairs for row, n in zip(costs.attention_forward_s, LAYERS, strict=True)]
    rest = [sum(row) / SLICES for row in costs.forward_s]
    return {
        "context_exchange": True,
        "exchange_idle": True,
        "exchange_attention": [max(1, round(seconds / _MICROSECOND)) for seconds in attention],
        "exchange_rest": [max(1, round(seconds / _MICROSECOND)) for seconds in rest],
    }


def run(
    runner: Runner, plan: Plan, model: Model, folder: Path, iterations: int, *more: str
) -> tuple[Setting, list[float]]:
    """Run a plan; the slowest rank's time of every iteration that counts, in seconds."""
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    flags = ("--het-plan", str(folder / "plan.json"))
    setting = Setting("slimpipe", len(LAYERS), plan.model.seq_length, MICROBATCHES, SLICES, flags=flags)
    made = job(setting, model, folder, iterations=iterations + _WARMUP, memory=False, more=more)
    assert made.setup is not None
    slowed = ("benchmarks.slimpipe_mixed:slowed_watch", {**made.setup[1], "slow": _SLOW})
    runner.run(replace(made, setup=slowed))
    found = [json.loads((folder / f"watch-{r}.json").read_text(encoding="utf-8")) for r in range(len(LAYERS))]
    by_rank = [watch["iterations_s"][_WARMUP:] for watch in found]
    return setting, [max(times) for times in zip(*by_rank, strict=True)]


def compare(runner: Runner, model: Model, tokens: int, rounds: int, iterations: int, folder: Path) -> dict[str, Any]:
    """The exchange on against off.

    Args:
        runner: Runs jobs.
        model: Of as many layers as the plan.
        tokens: Of a sequence.
        rounds: How often each side runs.
        iterations: That count, of each run.
        folder: For what is written.
    """
    plain, report = plan_of(model, tokens), folder / "report"
    tracing = ("--het-report", str(report), "--het-trace", str(report), "--het-trace-iteration", str(_TRACED))
    setting, _ = run(runner, plain, model, folder / "traced", _TRACED, *tracing)
    program = build(plain)[False]
    costs, _ = fitted_costs(setting, program, report)
    exchange = exchange_of(costs)
    sides = {"off": plain, "on": plan_of(model, tokens, **exchange)}
    simulated = {name: simulate(build(plan)[False], costs).makespan_s for name, plan in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        for name, plan in sides.items():
            times[name] += run(runner, plan, model, folder / f"{name}-{index}", iterations)[1]
            print(f"round {index} exchange {name}: {statistics.median(times[name]):.3f} s", flush=True)
    speedup = statistics.median(times["off"]) / statistics.median(times["on"])
    predicted = simulated["off"] / simulated["on"]
    return {
        "speedup": speedup,
        "simulated_speedup": predicted,
        "met": speedup >= BAR if predicted >= BAR else None,
        "layers": LAYERS,
        "exchange": exchange,
        "simulated_s": simulated,
        "runs_s": times,
        "tokens": tokens,
    }
