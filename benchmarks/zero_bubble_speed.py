"""Compares ZB-H1 with 1F1B, two stages, few microbatches: ``python -m benchmarks.zero_bubble_speed --json OUT``.

The same model, plan and executor on both sides; stock Megatron's 1F1B runs beside them.  Runs alternate, each round
starting with another side, so that slow phases of the machine hit all.  A run's figure is the median of the iteration
times that Megatron logs, without the first iterations; a round's figure is the ratio of its runs, and the result
is the median over rounds.  ``simulated_speedup`` comes from the simulator, with the durations of forwards, input
gradients and weight gradients that the first split run measured itself.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import megatron_het.features  # noqa: F401  (the kinds of all features)
from benchmarks.machine import alternate, command_line, scratch, write_report
from benchmarks.overhead import iteration_s
from megatron_het.plan import ModelShape
from megatron_het.schedule import Costs, Kind, Shape, add_transfers, generate
from megatron_het.schedule.simulate import simulate
from testing.cases import machine_flags, plain_flags
from testing.runner import Job, Runner, words

_STAGES, _LAYERS, _HIDDEN, _SEQ = 2, 4, 512, 256
_SKIPPED = 3  # iterations that do not count
_SIDES = {"stock": (), "1f1b": ("--het-schedule", "1f1b"), "zb-h1": ("--het-schedule", "zb-h1")}
_TRACED = 4


def flags(microbatches: int, iterations: int) -> tuple[str, ...]:
    """Returns flags under which matrix products dominate; the vocabulary is small, so that the stages are equal."""
    model = ModelShape(_LAYERS, _HIDDEN, 4, 4, _SEQ, 3 * _HIDDEN)
    own = f"--pipeline-model-parallel-size {_STAGES} --lr 1e-4 --lr-decay-style constant --split 100,0,0"
    more = words(own, "--clip-grad 1.0 --distributed-timeout-minutes 10 --seed 1")
    return (*machine_flags(), *plain_flags(model, 63, microbatches, iterations), *more)


def run(runner: Runner, side: str, microbatches: int, iterations: int, folder: Path) -> float:
    """Run one side; returns its median iteration in seconds.  A plan's ranks write traces into the folder."""
    more = () if side == "stock" else ("--het-trace", str(folder), "--het-trace-iteration", str(_TRACED))
    folder.mkdir(parents=True)
    arguments = (*flags(microbatches, iterations), *_SIDES[side], *more)
    done = runner.run(Job(side, _STAGES, arguments, folder, timeout_s=600.0))
    return iteration_s(done.log(_STAGES - 1), _SKIPPED)


def durations(folder: Path, kinds: tuple[Kind, ...]) -> list[dict[Kind, float]]:
    """Returns the mean seconds of every kind of compute operation, by stage, from the traces of a run."""
    found = []
    for stage in range(_STAGES):
        events = json.loads((folder / f"trace-rank-{stage}.json").read_text(encoding="utf-8"))["traceEvents"]
        by_kind: dict[str, list[float]] = defaultdict(list)
        for event in events:
            if "kind" in event.get("args", {}):
                by_kind[event["args"]["kind"]].append(event["dur"] / 1e6)
        found.append({kind: statistics.mean(by_kind[kind.name]) for kind in kinds})
    return found


_COMPUTE = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def simulated_speedup(found: list[dict[Kind, float]], microbatches: int) -> float:
    """Returns the time of 1F1B over that of ZB-H1, simulated with measured durations and free transfers."""
    shape = Shape.uniform(_STAGES, microbatches, layers_per_chunk=_LAYERS // _STAGES)
    backward = [times[Kind.BACKWARD_INPUT] + times[Kind.BACKWARD_WEIGHT] for times in found]
    costs = Costs(
        forward_s=tuple((times[Kind.FORWARD],) for times in found),
        backward_s=tuple((seconds,) for seconds in backward),
        weight_share=sum(times[Kind.BACKWARD_WEIGHT] for times in found) / sum(backward),
    )
    plain, split = (simulate(add_transfers(generate(name, shape)), costs).makespan_s for name in ("1f1b", "zb-h1"))
    return plain / split


def measure(microbatches: int, rounds: int, iterations: int, folder: Path) -> dict[str, Any]:
    """Carry out all runs; returns the figures."""
    with Runner() as runner:
        times = alternate(
            _SIDES, rounds, lambda side, i: run(runner, side, microbatches, iterations, folder / f"{i}-{side}")
        )
    found = durations(folder / "0-zb-h1", _COMPUTE)
    ratios = {
        side: [other / split for other, split in zip(times[side], times["zb-h1"], strict=True)]
        for side in ("1f1b", "stock")
    }
    return {
        "speedup_over_1f1b": statistics.median(ratios["1f1b"]),
        "speedup_over_stock_1f1b": statistics.median(ratios["stock"]),
        "simulated_speedup": simulated_speedup(found, microbatches),
        "microbatches": microbatches,
        "ratios": ratios,
        "runs_s": times,
        "durations_s": [{kind.name: seconds for kind, seconds in times.items()} for times in found],
    }


def main() -> int:
    """Command line; exit code 1 if the simulator predicts at least 1.08 and less than 1.05 is measured."""
    parser = command_line("benchmarks.zero_bubble_speed", __doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs")
    parser.add_argument("--iterations", type=int, default=8, help="of each run; the first 3 do not count")
    options = parser.parse_args()
    with scratch("zero-bubble-speed-") as folder:
        report = measure(options.microbatches, options.rounds, options.iterations, folder)
    write_report(options.json, report)
    return 1 if report["simulated_speedup"] >= 1.08 and report["speedup_over_1f1b"] < 1.05 else 0


if __name__ == "__main__":
    raise SystemExit(main())
