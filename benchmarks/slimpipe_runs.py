"""Runs of a small Llama model, stock or sliced, with a probe; their bubbles; a pipeline of unequal devices."""

import json
import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from examples.llama.pinned import slow_down
from megatron_het.features.context_exchange.passes import add_exchange
from megatron_het.lowering.programs import build
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.schedule import Costs, Kind, Op, Program, Shape, generate
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.transfers import add_transfers, post_receives_early
from testing.cases import machine_flags, plain_flags
from testing.runner import Job, Runner, words


@dataclass(frozen=True)
class Model:
    """A Llama-like model for measurements; the vocabulary is small because logits are not the point."""

    layers: int = 8
    hidden: int = 128
    ffn: int = 352
    heads: int = 8
    groups: int = 1
    vocabulary: int = 63

    def shape(self, tokens: int) -> ModelShape:
        """Returns the shape for sequences of so many tokens."""
        return ModelShape(self.layers, self.hidden, self.heads, self.groups, tokens, self.ffn)


@dataclass(frozen=True)
class Setting:
    """The settings of a run."""

    # ``stock`` for unmodified Megatron (1F1B, interleaved with several chunks), else the value of ``--het-schedule``
    schedule: str
    stages: int  # pipeline stages, one rank each
    seq_length: int  # tokens per sequence
    microbatches: int  # per iteration, of one sequence each
    slices: int = 1  # slices per sequence
    chunks: int = 1  # chunks per stage
    flags: tuple[str, ...] = ()  # more ``--het-*`` flags

    @property
    def name(self) -> str:
        """A unique name, for folders."""
        return (
            f"{self.schedule}-p{self.stages}-s{self.seq_length}-m{self.microbatches}"
            f"-n{self.slices}-v{self.chunks}{''.join(self.flags).replace('--', '-')}"
        )


def job(
    setting: Setting,
    model: Model,
    folder: Path,
    *,
    iterations: int,
    memory: bool,
    more: tuple[str, ...] = (),
    timeout_s: float = 900.0,
) -> Job:
    """Returns the job of a setting, whose ranks write ``watch-<rank>.json`` into ``folder``."""
    s = setting
    flags = [
        *plain_flags(model.shape(s.seq_length), model.vocabulary, s.microbatches, iterations),
        *machine_flags(),
        *words(
            f"--group-query-attention --num-query-groups {model.groups} --make-vocab-size-divisible-by 32 --lr 1e-4 "
            f"--split 100,0,0 --no-create-attention-mask-in-dataloader --pipeline-model-parallel-size {s.stages} "
            "--distributed-timeout-minutes 10 --seed 1"
        ),
    ]
    if s.chunks > 1:
        per_chunk = model.layers // (s.stages * s.chunks)
        flags += ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)]
    if s.schedule != "stock":
        flags += ["--het-schedule", s.schedule]
        flags += ["--het-slices", str(s.slices)] if s.schedule == "slimpipe" else []
        flags += s.flags
    watch = {"out": str(folder), "memory": memory, "fused": s.schedule != "slimpipe"}
    return Job(s.name, s.stages, (*flags, *more), folder, setup=("testing.watches:watch", watch), timeout_s=timeout_s)


def run(runner: Runner, setting: Setting, model: Model, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Run a setting; returns the measurements of each rank's probe."""
    target = folder / setting.name
    target.mkdir(parents=True, exist_ok=True)
    runner.run(job(setting, model, target, **options))
    return [json.loads((target / f"watch-{rank}.json").read_text(encoding="utf-8")) for rank in range(setting.stages)]


# The measured bubble of a SlimPipe run against that of the simulator with the run's own durations.

_WARMUP = 3  # iterations that do not count; memory is metered in the second one
_DIAGONAL = 0.5  # the kernels skip the masked half of a slice's attention to itself
_KINDS = ("FORWARD", "BACKWARD")

Events = list[dict[str, Any]]


def bubble(runner: Runner, setting: Setting, model: Model, folder: Path, iterations: int) -> dict[str, Any]:
    """Run a setting once more, with a report and a trace, and compare.

    The bubble of an iteration is the longest rank's time in the schedule over the mean time that ranks
    compute, less one.  The traced iteration is simulated twice: with its own duration of every forward and
    backward (the remaining difference is the part of the execution that is not simulated), and with durations of
    each stage smoothed to a constant plus a part that grows with the slice's index (as the planner's are).
    Both include the measured time of posting a transfer.  With the context exchange both are smooth.

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
    """Returns the program that a setting runs."""
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
    """Returns smooth durations, and those of every single operation, from the traces."""
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
    """Returns the seconds per transfer in which a rank neither computed nor waited: mostly sockets, and Python."""
    spent = sum(e["dur"] for e in done if e["args"]["kind"] in _KINDS)
    waited = sum(e["dur"] for e in trace if e["ph"] == "X" and e["tid"] == 1)
    begin, end = min(e["ts"] for e in done), max(e["ts"] + e["dur"] for e in done)
    others = sum(e["args"]["kind"] not in _KINDS for e in done)
    return max(end - begin - spent - waited, 0.0) / 1e6 / max(others, 1)


def _fit(done: Events, kind: str, chunk: int, slices: int) -> tuple[float, float]:
    """Fits the seconds per microbatch: a constant part for every slice, and a part that grows with its index."""
    found = [
        (e["args"]["slice"] + _DIAGONAL, e["dur"] / 1e6)
        for e in done
        if e["args"]["kind"] == kind and e["args"]["chunk"] == chunk
    ]
    weights, seconds = np.array(found).T
    slope, constant = np.polyfit(weights, seconds, 1) if slices > 1 else (0.0, seconds.mean())
    total = slices * (slices - 1) / 2 + slices * _DIAGONAL
    return max(float(constant), 0.0) * slices, max(float(slope), 0.0) * total


# The attention context exchange in a mixed pipeline: one fast and one slow process, uneven layers.
#
# ``python -m benchmarks.slimpipe_speed --mixed --json OUT`` runs it.  The process of the last stage is stopped half of
# the time, so that it is half as fast, and has fewer layers.  A traced run without the exchange measures the passes
# on both.  The plan with the exchange is made from these times, and both are simulated.  Then runs without and with it
# alternate, and each side counts by the median of its iterations.
#
# Keys: ``speedup`` of the exchange, ``simulated_speedup``, and ``met``, whether the speedup is at least 1.05 where the
# simulator predicts at least that (else None).

BAR = 1.05
MIXED_LAYERS, SLICES, MICROBATCHES = (5, 3), 8, 2
_SLOW, _TRACED, _FIRST = 1, 2, 1
_STOPPED_S = _RUNNING_S = 0.004  # shorter than a pass, so that every pass takes twice as long
_MICROSECOND = 1e-6


def slowed_watch(*, rank: int, slow: int, out: str, memory: bool, fused: bool) -> None:
    """Install the probe of speed runs, with one rank's process stopped half of the time (a ``Job.setup``)."""
    from testing.watches import watch

    if rank == slow:
        slow_down(_STOPPED_S, _RUNNING_S)
    watch(rank=rank, out=out, memory=memory, fused=fused)


def plan_of(model: Model, tokens: int, **parameters: Any) -> Plan:
    """Returns a plan of two stages of one rank; ``parameters`` are those of the exchange."""
    stages = tuple(Stage((n,), (Replica((s,), tuple(range(MICROBATCHES))),)) for s, n in enumerate(MIXED_LAYERS))
    shape = replace(model, layers=sum(MIXED_LAYERS)).shape(tokens)
    schedule = ScheduleSpec("slimpipe", {"slices": SLICES, **parameters})
    return Plan(shape, TrainingShape(1, MICROBATCHES), stages, schedule)


def exchange_of(costs: Costs) -> dict[str, Any]:
    """Returns the exchange's parameters, in microseconds, from the times of passes without exchange."""
    pairs = SLICES * (SLICES - 1) / 2 + SLICES * costs.diagonal
    attention = [sum(row) / n / pairs for row, n in zip(costs.attention_forward_s, MIXED_LAYERS, strict=True)]
    rest = [sum(row) / SLICES for row in costs.forward_s]
    return {
        "context_exchange": True,
        "exchange_idle": True,
        "exchange_attention": [max(1, round(seconds / _MICROSECOND)) for seconds in attention],
        "exchange_rest": [max(1, round(seconds / _MICROSECOND)) for seconds in rest],
    }


def run_plan(
    runner: Runner, plan: Plan, model: Model, folder: Path, iterations: int, *more: str
) -> tuple[Setting, list[float]]:
    """Run a plan; returns the slowest rank's seconds of every iteration that counts."""
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    flags = ("--het-plan", str(folder / "plan.json"))
    setting = Setting("slimpipe", len(MIXED_LAYERS), plan.model.seq_length, MICROBATCHES, SLICES, flags=flags)
    made = job(setting, model, folder, iterations=iterations + _FIRST, memory=False, more=more)
    assert made.setup is not None
    slowed = ("benchmarks.slimpipe_runs:slowed_watch", {**made.setup[1], "slow": _SLOW})
    runner.run(replace(made, setup=slowed))
    found = [json.loads((folder / f"watch-{r}.json").read_text(encoding="utf-8")) for r in range(len(MIXED_LAYERS))]
    by_rank = [watch["iterations_s"][_FIRST:] for watch in found]
    return setting, [max(times) for times in zip(*by_rank, strict=True)]


def exchanged(runner: Runner, model: Model, tokens: int, rounds: int, iterations: int, folder: Path) -> dict[str, Any]:
    """Compare runs with and without the exchange."""
    plain, report = plan_of(model, tokens), folder / "report"
    tracing = ("--het-report", str(report), "--het-trace", str(report), "--het-trace-iteration", str(_TRACED))
    setting, _ = run_plan(runner, plain, model, folder / "traced", _TRACED, *tracing)
    program = build(plain)[False]
    costs, _ = fitted_costs(setting, program, report)
    exchange = exchange_of(costs)
    sides = {"off": plain, "on": plan_of(model, tokens, **exchange)}
    simulated = {name: simulate(build(plan)[False], costs).makespan_s for name, plan in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds):
        for name, plan in sides.items():
            times[name] += run_plan(runner, plan, model, folder / f"{name}-{index}", iterations)[1]
            print(f"round {index} exchange {name}: {statistics.median(times[name]):.3f} s", flush=True)
    speedup = statistics.median(times["off"]) / statistics.median(times["on"])
    predicted = simulated["off"] / simulated["on"]
    return {
        "speedup": speedup,
        "simulated_speedup": predicted,
        "met": speedup >= BAR if predicted >= BAR else None,
        "layers": MIXED_LAYERS,
        "exchange": exchange,
        "simulated_s": simulated,
        "runs_s": times,
        "tokens": tokens,
    }
