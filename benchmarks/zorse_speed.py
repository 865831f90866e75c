"""Speed of Zorse's two ideas on processes of unequal speed.

``python -m benchmarks.zorse_speed --json OUT``: five or six ranks on two cores.  Rank 0 has a core of
its own, the others share one, so they are really slower.  Every figure is a ratio of runs that alternate.

``speedup_over_even_split``: a stage of ranks 0 to 3 and a stage of rank 4.  Microbatches in equal
shares against routes by Zorse's rule (``plan/placement.py``).  The times are measured before, on the rank
with a core of its own; the shares are those with the shortest iteration in a simulation of processes that
share a core, as in the demo (how slow the others are depends on how much they have to do).

``speedup_over_zero3``: two stages of three ranks, equal shares.  Ministages (parameters gathered once per
pass) against PP + ZeRO-3: the same window told to gather for every microbatch, as one chunk per stage
and as ministages; the faster of the two counts.  A microbatch has few tokens, because a core here does
some 50 operations in the time that the loopback moves a byte: with T tokens the gathers of ZeRO-3 take
about 50 / T of the computing time.  On the paper's A10G machines (some 60 TFLOP/s and 1.5 GB/s per GPU
between them, bf16) it is 20,000 / T, so that 16 tokens here stand for 6,400 tokens there.
"""

import json
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, scratch, write_report
from megatron_het.lowering.programs import assemble, schedule_shape
from megatron_het.plan import ModelShape, Placement, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.plan.placement import route
from megatron_het.schedule import Graph, Kind, Op, Program
from testing.cases import machine_flags
from testing.runner import Job, Runner, words

# Predict an iteration when several devices share a core.
#
# Two processes on one core slow each other down only while both are busy, so one fixed time per
# operation cannot describe them.  Here every operation is an amount of *work* (seconds on a core of
# its own) and a core divides itself equally among the processes that have something to do
# (processor sharing, which is what the kernel's fair scheduler does).  Cores share memory and caches, so that
# a core is faster while the others have nothing to do: by how much, the profile measures.  Order and dependencies
# come from the schedule library's Program, the same that the executor runs.


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated iteration.

    Attributes:
        start_s, end_s: Per operation, in the graph's numbering.
        device_end_s: Per device, when its last operation ends.
        work_s: Per device, the sum of its work.
        span_s: Per device, the time its operations took, waiting for the core included.
    """

    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    device_end_s: tuple[float, ...]
    work_s: tuple[float, ...]
    span_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """End of the last operation."""
        return max(self.device_end_s)


def simulate_shared(
    program: Program,
    work_s: Callable[[int, Op], float],
    core: Sequence[int],
    transfer_s: Callable[[int, int], float] = lambda a, b: 0.0,
    alone: Sequence[float] = (),
) -> Timeline:
    """Simulate the compute operations of a program on shared cores.

    Args:
        program: A program without transfers (its compute order).
        work_s: Seconds of an operation on a whole core while all others are busy, by device and operation.
        core: The core of each device.
        transfer_s: Time between the end of an operation on one device and the moment its result is
            on another.
        alone: By device, seconds of work while the other cores wait over those while they are busy; without, 1.

    Raises:
        ValueError: The operations wait for each other in a circle.
    """
    return _Shared(program, work_s, core, transfer_s, alone or (1.0,) * len(core)).run()


class _Shared:
    def __init__(
        self,
        program: Program,
        work_s: Callable[[int, Op], float],
        core: Sequence[int],
        transfer_s: Callable[[int, int], float],
        alone: Sequence[float],
    ) -> None:
        self.graph = Graph(program)
        self.core, self.transfer_s, self.alone = core, transfer_s, alone
        self.others = max(1, len(set(core)) - 1)
        count = len(self.graph.ops)
        self.work = [work_s(self.graph.device[i], self.graph.ops[i]) for i in range(count)]
        self.start, self.end = [math.nan] * count, [math.inf] * count
        self.devices = len(program.ops)
        self.head = list(self.graph.first[: self.devices])
        self.left: list[float | None] = [None] * self.devices
        self.now = 0.0

    def ready_s(self, node: int) -> float:
        """When the inputs of an operation are there; infinite while one has not ended."""
        here = self.graph.device[node]
        return max(
            (
                self.end[w] + (0.0 if self.graph.device[w] == here else self.transfer_s(self.graph.device[w], here))
                for w in self.graph.waits[node]
            ),
            default=0.0,
        )

    def run(self) -> Timeline:
        """Advance from one start or end to the next."""
        while any(self.head[d] < self.graph.first[d + 1] for d in range(self.devices)):
            next_start = self._start_what_can()
            active = [d for d in range(self.devices) if self.left[d] is not None]
            if not active and next_start == math.inf:
                raise ValueError("the operations wait for each other in a circle")
            self._advance(active, next_start)
        return self._result()

    def _start_what_can(self) -> float:
        """Start operations whose inputs are there; returns the next moment at which one may start."""
        upcoming = math.inf
        for d in range(self.devices):
            node = self.head[d]
            if self.left[d] is not None or node >= self.graph.first[d + 1]:
                continue
            at = self.ready_s(node)
            if at <= self.now + 1e-12:
                self.left[d], self.start[node] = self.work[node], self.now
            else:
                upcoming = min(upcoming, at)
        return upcoming

    def _advance(self, active: Sequence[int], next_start: float) -> None:
        """Move the clock to the next end or start, with every core divided among its active devices."""
        sharers: dict[int, int] = {}
        for d in active:
            sharers[self.core[d]] = sharers.get(self.core[d], 0) + 1
        beside = (len(sharers) - 1) / self.others
        slow = {d: sharers[self.core[d]] * (self.alone[d] + (1 - self.alone[d]) * beside) for d in active}
        step = next_start - self.now
        for d in active:
            step = min(step, (self.left[d] or 0.0) * slow[d])
        self.now += step
        for d in active:
            remaining = (self.left[d] or 0.0) - step / slow[d]
            if remaining <= 1e-12:
                self.end[self.head[d]] = self.now
                self.head[d] += 1
                self.left[d] = None
            else:
                self.left[d] = remaining

    def _result(self) -> Timeline:
        first = self.graph.first
        rows = [range(first[d], first[d + 1]) for d in range(self.devices)]
        return Timeline(
            tuple(self.start),
            tuple(self.end),
            tuple(max((self.end[i] for i in row), default=0.0) for row in rows),
            tuple(sum(self.work[i] for i in row) for row in rows),
            tuple(sum(self.end[i] - self.start[i] for i in row) for row in rows),
        )


LAYERS, HEADS, VOCABULARY = 8, 4, 127
HIDDEN = {"even": 256, "zero3": 512}  # the feed-forward is three times as wide
_WARMUP = 3
BAR_EVEN, BAR_ZERO3 = 1.25, 1.5
Ids = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Setting:
    """Holds what one side of a comparison runs.

    Attributes:
        name: For output.
        layers: Per stage and ministage.
        ids: Microbatches per stage and replica.
        tokens: Sequence length; a microbatch is one sequence.
        hidden: Width of the model.
        options: Of the window.
    """

    name: str
    layers: tuple[tuple[int, ...], ...]
    ids: Ids
    tokens: int
    hidden: int
    options: Mapping[str, Any]

    def plan(self) -> Plan:
        """The plan; ranks are numbered in order."""
        total = sum(len(own) for own in self.ids[0])
        stages, rank = [], 0
        for layers, owned in zip(self.layers, self.ids, strict=True):
            replicas = []
            for own in owned:
                replicas.append(Replica((rank,), tuple(own), speed=len(own) / total))
                rank += 1
            stages.append(Stage(layers, tuple(replicas)))
        return Plan(
            ModelShape(LAYERS, self.hidden, HEADS, HEADS, self.tokens, 3 * self.hidden),
            TrainingShape(1, total, recompute="full", distributed_optimizer=True),
            tuple(stages),
            ScheduleSpec("ministage", {"window": True, "update": "at-once", **self.options}),
        )


def pin(*, rank: int, cores: list[list[int]]) -> None:
    """A job's setup: this rank runs on its cores only; threads started later inherit that."""
    os.sched_setaffinity(0, set(cores[rank]))


def unequal_cores(ranks: int) -> list[list[int]]:
    """Rank 0 has the first core for itself, all others share the second."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        sys.exit("error: this benchmark needs two cores, so that one process has one of its own")
    return [available[:1], *([available[1:2]] * (ranks - 1))]


@dataclass(frozen=True)
class Measured:
    """One run: seconds per iteration, and of rank 0's forwards and backwards per microbatch and layer."""

    iteration_s: float
    forward_s: float
    backward_s: float


def run(runner: Runner, setting: Setting, folder: Path, iterations: int) -> Measured:
    """Train and read the reports of the ranks."""
    plan = setting.plan()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    flags = words(
        f"""
        --num-layers {LAYERS} --hidden-size {setting.hidden} --ffn-hidden-size {3 * setting.hidden}
        --num-attention-heads {HEADS} --seq-length {setting.tokens}
        --max-position-embeddings {setting.tokens}
        --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32
        --mock-data --split 90,10,0 --micro-batch-size 1 --global-batch-size {plan.num_microbatches}
        --calculate-per-token-loss --clip-grad 0 --train-iters {_WARMUP + iterations}
        --lr 1e-3 --eval-iters 0 --eval-interval 1000 --log-interval 1000
        --distributed-timeout-minutes 2 --rerun-mode disabled
        """
    )
    argv = (
        *flags,
        *machine_flags(),
        "--het-plan",
        str(folder / "plan.json"),
        "--het-report",
        str(folder),
        "--het-transport",
        "gloo",
    )
    setup = ("benchmarks.zorse_speed:pin", {"cores": unequal_cores(plan.world_size)})
    runner.run(Job(setting.name, plan.world_size, argv, folder, setup=setup, timeout_s=300.0))
    reports = [json.loads((folder / f"rank-{r}.json").read_text("utf-8")) for r in range(plan.world_size)]
    rows = [[i for i in r["iterations"] if not i["metered"] and i["elapsed_s"]][_WARMUP - 1 :] for r in reports]
    pieces = len(plan.stages[0].replicas[0].microbatches) * sum(plan.stages[0].layers)
    return Measured(
        statistics.median(max(i["elapsed_s"] for i in row) for row in zip(*rows, strict=True)),
        statistics.median(i["forward_s"] for i in rows[0]) / pieces,
        statistics.median(i["backward_s"] for i in rows[0]) / pieces,
    )


def simulated_s(setting: Setting, profile: Measured) -> float:
    """Forward and backward part of an iteration when processes divide their core equally."""
    placement = Placement(setting.plan())
    program = assemble(schedule_shape(placement.plan), "ministage", transfers="none")
    cores = [core[0] for core in unequal_cores(placement.world_size)]

    def work_s(device: int, op: Op) -> float:
        layers = setting.layers[program.devices[device].stage][op.chunk]
        return layers * (profile.forward_s if op.kind == Kind.FORWARD else profile.backward_s)

    return simulate_shared(program, work_s, cores).makespan_s


def routed_ids(first: int, replicas: Sequence[int], total: int) -> Ids:
    """Zorse's routes when rank 0 runs ``first`` microbatches and the rest of its stage equally many."""
    others = replicas[0] - 1
    rest = [(total - first) // others + (q < (total - first) % others) for q in range(others)]
    counts = [[first, *rest], [total]]
    # Whoever finishes its share together with the others is as fast as its share is large.
    return route([[1.0 / count for count in row] for row in counts], total, counts)


def even_ids(replicas: Sequence[int], total: int) -> Ids:
    """Equal shares, dealt in turn."""
    return [[tuple(range(q, total, count)) for q in range(count)] for count in replicas]


class Bench:
    """Runs and remembers.

    Args:
        runner: Where jobs run.
        folder: For their files.
        iterations: Timed per run.
        rounds: How often each side runs.
    """

    def __init__(self, runner: Runner, folder: Path, iterations: int, rounds: int) -> None:
        self.runner, self.folder = runner, folder
        self.iterations, self.rounds = iterations, rounds

    def alternate(self, settings: Sequence[Setting]) -> dict[str, list[float]]:
        """Seconds per iteration of every run."""
        found: dict[str, list[float]] = {setting.name: [] for setting in settings}
        for turn in range(self.rounds):
            for setting in settings:
                seconds = run(self.runner, setting, self.folder / setting.name, self.iterations).iteration_s
                found[setting.name].append(seconds)
                sys.stdout.write(f"round {turn} {setting.name:24} {seconds * 1e3:8.1f} ms\n")
                sys.stdout.flush()
        return found

    def mixed_stage(self, tokens: int, total: int) -> dict[str, Any]:
        """Routed microbatches against an even split of a mixed stage."""
        layers, replicas, hidden = ((3, 3), (1, 1)), (4, 1), HIDDEN["even"]
        even = Setting("even split", layers, even_ids(replicas, total), tokens, hidden, {})
        profile = run(self.runner, even, self.folder / "profile", self.iterations)
        candidates = [
            Setting("routed", layers, routed_ids(first, replicas, total), tokens, hidden, {})
            for first in range(1, total - replicas[0] + 2)
        ]
        expected = [simulated_s(candidate, profile) for candidate in candidates]
        routed = candidates[expected.index(min(expected))]
        times = self.alternate([even, routed])
        return {
            "speedup_over_even_split": ratio(times, "even split", "routed"),
            "simulated_speedup": simulated_s(even, profile) / min(expected),
            "layer_s": [profile.forward_s, profile.backward_s],
            "routes": [[list(own) for own in stage] for stage in routed.ids],
            "tokens": tokens,
            "hidden": hidden,
            "microbatches": total,
            "layers": layers,
            "runs_s": times,
        }

    def zero3(self, tokens: int, total: int, ministages: int) -> dict[str, Any]:
        """Ministages against gathers for every microbatch."""
        ids, hidden = even_ids((3, 3), total), HIDDEN["zero3"]
        cut = ((LAYERS // 2 // ministages,) * ministages,) * 2
        whole = ((LAYERS // 2,),) * 2
        per_microbatch = {"per_microbatch": True, "keep_at_turn": False}
        zero3 = [
            Setting("ZeRO-3", whole, ids, tokens, hidden, per_microbatch),
            Setting("ZeRO-3, ministages", cut, ids, tokens, hidden, per_microbatch),
        ]
        ministages_only = Setting("ministages", cut, ids, tokens, hidden, {"keep_at_turn": False})
        times = self.alternate([ministages_only, *zero3])
        return {
            "speedup_over_zero3": min(ratio(times, side.name, "ministages") for side in zero3),
            "tokens": tokens,
            "hidden": hidden,
            "microbatches": total,
            "ministages": ministages,
            "runs_s": times,
        }


def ratio(times: Mapping[str, Sequence[float]], slower: str, faster: str) -> float:
    """Median of the ratios of neighbouring runs."""
    return statistics.median(a / b for a, b in zip(times[slower], times[faster], strict=True))


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.zorse_speed", __doc__)
    parser.add_argument("--iterations", type=int, default=6, help="timed iterations per run")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs")
    parser.add_argument("--tokens", type=int, default=16, help="per microbatch, against ZeRO-3")
    parser.add_argument("--only", choices=["even", "zero3"], help="one of the two comparisons")
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error(
            f"--iterations {options.iterations}: at least 2, because one of them counts memory and is left out"
        )
    start_s = time.monotonic()
    mixed: dict[str, Any] = {}
    zero3: dict[str, Any] = {}
    with scratch("zorse-speed-") as folder, Runner() as runner:
        bench = Bench(runner, folder, options.iterations, options.rounds)
        if options.only != "zero3":
            mixed = bench.mixed_stage(tokens=256, total=12)
        if options.only != "even":
            zero3 = bench.zero3(options.tokens, total=24, ministages=4)
    figures = {k: d[k] for d in (mixed, zero3) for k in d if k.startswith("speedup")}
    bars = {"speedup_over_even_split": BAR_EVEN, "speedup_over_zero3": BAR_ZERO3}
    passed = all(figure >= bars[name] for name, figure in figures.items())
    report = {**figures, "passed": passed, "bars": [BAR_EVEN, BAR_ZERO3], "mixed_stage": mixed, "zero3": zero3}
    write_report(options.json, report, start_s, unprinted=("mixed_stage", "zero3"))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
