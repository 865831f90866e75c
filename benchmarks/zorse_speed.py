"""Measures the speed of Zorse's two ideas on processes of unequal speed.

``python -m benchmarks.zorse_speed --json OUT``: five or six ranks on two cores.  Rank 0 has a core of
its own, the others share one, so they are slower.  Every figure is a ratio of alternating runs.

``speedup_over_even_split``: a stage of ranks 0 to 3 and a stage of rank 4.  Microbatches in equal
shares against routes by Zorse's rule (``plan/placement.py``), with shares under which both cores have as much to do.
``expected_speedup`` is the work of the busier core with equal shares over that with these.

``speedup_over_zero3``: two stages of three ranks, equal shares.  Ministages (parameters gathered once per
pass) against PP + ZeRO-3: the same window told to gather for every microbatch, as one chunk per stage
and as ministages; the faster of the two counts.  A microbatch has few tokens, because a core here does
some 50 operations in the time that the loopback moves a byte: with T tokens the gathers of ZeRO-3 take
about 50 / T of the computing time.  On the paper's A10G machines (some 60 TFLOP/s and 1.5 GB/s per GPU
between them, bf16) it is 20,000 / T, so that 16 tokens here stand for 6,400 tokens there.
"""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import alternate, command_line, scratch, write_report
from benchmarks.zorse_memory import arguments
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.plan.placement import route
from testing.runner import Job, Runner

LAYERS, HEADS = 8, 4
HIDDEN = {"even": 256, "zero3": 512}  # the feed-forward is three times as wide
_WARMUP = 3
BAR_EVEN, BAR_ZERO3 = 1.25, 1.5
Ids = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Setting:
    """The settings of one side of a comparison."""

    name: str  # for output
    layers: tuple[tuple[int, ...], ...]  # per stage and ministage
    ids: Ids  # microbatches per stage and replica
    tokens: int  # sequence length; a microbatch is one sequence
    hidden: int  # width of the model
    options: Mapping[str, Any]  # of the window

    def plan(self) -> Plan:
        """Returns the plan; ranks are numbered in order."""
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


def unequal_cores(ranks: int) -> list[int]:
    """Returns the core of every rank: rank 0 has the first core alone, all others share the second."""
    available = sorted(os.sched_getaffinity(0))
    if len(available) < 2:
        sys.exit("error: this benchmark needs two cores, so that one process has one of its own")
    return [available[0], *([available[1]] * (ranks - 1))]


def run(runner: Runner, setting: Setting, folder: Path, iterations: int) -> float:
    """Train; returns the seconds per iteration from the reports of the ranks."""
    plan = setting.plan()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    argv = arguments(plan, folder, _WARMUP + iterations)
    setup = ("testing.probe:pin", {"cores": unequal_cores(plan.world_size)})
    runner.run(Job(setting.name, plan.world_size, argv, folder, setup=setup, timeout_s=300.0))
    reports = [json.loads((folder / f"rank-{r}.json").read_text("utf-8")) for r in range(plan.world_size)]
    rows = [[i for i in r["iterations"] if not i["metered"] and i["elapsed_s"]][_WARMUP - 1 :] for r in reports]
    return statistics.median(max(i["elapsed_s"] for i in row) for row in zip(*rows, strict=True))


def routed_ids(first: int, replicas: Sequence[int], total: int) -> Ids:
    """Returns Zorse's routes if rank 0 runs ``first`` microbatches, and the other ranks of its stage equal shares."""
    others = replicas[0] - 1
    rest = [(total - first) // others + (q < (total - first) % others) for q in range(others)]
    counts = [[first, *rest], [total]]
    # Replicas that finish at the same time are as fast as their shares are large.
    return route([[1.0 / count for count in row] for row in counts], total, counts)


def even_ids(replicas: Sequence[int], total: int) -> Ids:
    """Returns equal shares, dealt in turn."""
    return [[tuple(range(q, total, count)) for q in range(count)] for count in replicas]


class Bench:
    """Runs settings and caches their times."""

    def __init__(self, runner: Runner, folder: Path, iterations: int, rounds: int) -> None:
        self.runner, self.folder = runner, folder
        self.iterations, self.rounds = iterations, rounds

    def alternate(self, settings: Sequence[Setting]) -> dict[str, list[float]]:
        """Run settings in turn; returns the seconds per iteration of every run."""
        own = {setting.name: setting for setting in settings}
        return alternate(
            own, self.rounds, lambda name, _: run(self.runner, own[name], self.folder / name, self.iterations)
        )

    def mixed_stage(self, tokens: int, total: int) -> dict[str, Any]:
        """Compare routed microbatches with an even split of a mixed stage."""
        layers, replicas, hidden = ((3, 3), (1, 1)), (4, 1), HIDDEN["even"]
        even = Setting("even split", layers, even_ids(replicas, total), tokens, hidden, {})
        per_stage = [sum(row) for row in layers]
        work = total * sum(per_stage)
        # The second core runs the whole second stage, and the first stage's share of all ranks but rank 0.
        equal = work - total * per_stage[0] / replicas[0]
        first = round(work / 2 / per_stage[0])
        routed = Setting("routed", layers, routed_ids(first, replicas, total), tokens, hidden, {})
        times = self.alternate([even, routed])
        return {
            "speedup_over_even_split": ratio(times, "even split", "routed"),
            "expected_speedup": equal / (work / 2),
            "routes": [[list(own) for own in stage] for stage in routed.ids],
            "tokens": tokens,
            "hidden": hidden,
            "microbatches": total,
            "layers": layers,
            "runs_s": times,
        }

    def zero3(self, tokens: int, total: int, ministages: int) -> dict[str, Any]:
        """Compare ministages with gathers for every microbatch."""
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
    """Returns the median of the ratios of neighbouring runs."""
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
    write_report(options.json, report, unprinted=("mixed_stage", "zero3"))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
