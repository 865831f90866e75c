"""Compares 1F1B of the executor and of stock Megatron, two stages: ``python -m benchmarks.overhead --json OUT``.

Both use the same flags.  Runs alternate (stock, plan, stock, plan, ...), each pair starting with the other side
first, so that slow phases of the machine hit both.  A run's figure is the median of the iteration times that
Megatron itself logs, without the first iterations; a pair's figure is the ratio of its two runs.
"""

import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.machine import alternate, command_line, scratch, write_report
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from testing.cases import plain_flags, platform_words
from testing.runner import Job, Runner, words

_LAYERS, _HIDDEN, _HEADS, _SEQ, _MICROBATCHES = 4, 256, 4, 256, 8
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")


def equal_stages(model: ModelShape, microbatches: int, **parameters: Any) -> Plan:
    """Two equal stages of one rank under 1F1B, as those of ``--pipeline-model-parallel-size 2``."""
    ids = tuple(range(microbatches))
    stages = tuple(Stage((model.num_layers // 2,), (Replica((rank,), ids),)) for rank in range(2))
    return Plan(model, TrainingShape(1, microbatches), stages, ScheduleSpec("1f1b", parameters))


def iteration_s(log: str, skipped: int = 5) -> float:
    """Median of the logged iteration times in seconds, without the first ones."""
    times = [float(ms) / 1e3 for ms in _ELAPSED.findall(log)][skipped:]
    if not times:
        raise RuntimeError("the run logged no iteration times")
    return statistics.median(times)


def measure(pairs: int, iterations: int, folder: Path) -> dict[str, object]:
    """Run the pairs and return the result."""
    model = ModelShape(_LAYERS, _HIDDEN, _HEADS, _HEADS, _SEQ)
    plan, flags = equal_stages(model, _MICROBATCHES), plain_flags(model, 255, _MICROBATCHES, iterations)
    save_plan(plan, folder / "plan.json")
    common = words("--lr 1e-3 --lr-decay-style constant --clip-grad 1.0", flags, platform_words(is_cuda=False))
    sides = {"stock": "--pipeline-model-parallel-size 2", "plan": f"--het-plan {folder / 'plan.json'}"}
    with Runner() as runner:

        def run(side: str, pair: int) -> float:
            argv, where = (*common, *words(sides[side])), folder / f"{side}-{pair}"
            pinned = Job(f"{side} {pair}", 2, argv, where, setup=("testing.probe:pin_rank", {}), timeout_s=600)
            return iteration_s(runner.run(pinned).log())

        seconds = alternate(sides, pairs, run)
    ratios = [planned / stock for planned, stock in zip(seconds["plan"], seconds["stock"], strict=True)]
    return {
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "stock_iteration_s": seconds["stock"],
        "plan_iteration_s": seconds["plan"],
        "iterations_per_run": iterations,
    }


def main() -> None:
    """Command line."""
    parser = command_line("benchmarks.overhead", __doc__)
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of runs (default 7)")
    parser.add_argument("--iterations", type=int, default=30, help="iterations per run (default 30)")
    options = parser.parse_args()
    with scratch("overhead-") as folder:
        result = measure(options.pairs, options.iterations, folder)
    write_report(options.json, result)


if __name__ == "__main__":
    main()
