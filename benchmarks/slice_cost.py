"""Measures the cost of a slice besides its arithmetic: ``python -m benchmarks.slice_cost --json OUT``.

One process trains the model of ``slimpipe_speed`` on short sequences, cut into few and into many slices.  The
arithmetic is the same, except for attention to a slice's own keys.  So the added time is the fixed cost of the
further passes.  Figures are CPU time, not wall time: of every operation the least over the
iterations, because other work on the machine only ever adds to it.  ``per_slice_and_layer_ms`` is the slope, forward
and backward.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, scratch, write_report
from benchmarks.slimpipe_runs import Setting, job
from benchmarks.slimpipe_speed import MODEL
from testing.runner import Runner

_MICROBATCHES = 2
_DIRECTIONS = ("forward", "backward")


def watch(*, rank: int, out: str) -> None:
    """Keep the least processor time of every pass, as ``passes-<rank>.json`` in ``out`` (a ``Job.setup``)."""
    from megatron_het.runtime.executor import Executor

    least: dict[str, dict[str, float]] = {direction: {} for direction in _DIRECTIONS}

    def timed(method: Callable[..., None], found: dict[str, float]) -> Callable[..., None]:
        @functools.wraps(method)
        def run(self: Any, op: Any, *rest: Any) -> None:
            start_s = time.thread_time()
            method(self, op, *rest)
            seconds = time.thread_time() - start_s
            found[op.label] = min(seconds, found.get(op.label, seconds))

        return run

    for direction, found in least.items():
        setattr(Executor, f"_{direction}", timed(getattr(Executor, f"_{direction}"), found))
    iterate = Executor.run

    @functools.wraps(iterate)
    def run(self: Executor, *rest: Any) -> Any:
        result = iterate(self, *rest)
        sums = {direction: sum(found.values()) for direction, found in least.items()}
        Path(out, f"passes-{rank}.json").write_text(json.dumps(sums), encoding="utf-8")
        return result

    Executor.run = run  # type: ignore[method-assign, assignment]


def passes_s(runner: Runner, slices: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Returns the CPU seconds of all forwards and of all backwards of an iteration."""
    folder.mkdir(parents=True)
    setting = Setting("slimpipe", 1, options.tokens, _MICROBATCHES, slices)
    plain = job(setting, MODEL, folder, iterations=options.iterations, memory=False)
    runner.run(replace(plain, setup=("benchmarks.slice_cost:watch", {"out": str(folder)})))
    found: dict[str, float] = json.loads((folder / "passes-0.json").read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.slice_cost", __doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="per sequence")
    parser.add_argument("--slices", type=int, nargs=2, default=(8, 64), metavar=("FEW", "MANY"))
    parser.add_argument("--iterations", type=int, default=8, help="of each run")
    options = parser.parse_args()
    with scratch("slice-cost-") as folder, Runner() as runner:
        few, many = (passes_s(runner, n, options, folder / str(n)) for n in options.slices)
    further = (options.slices[1] - options.slices[0]) * _MICROBATCHES * MODEL.layers
    slope = {direction: (many[direction] - few[direction]) / further * 1e3 for direction in _DIRECTIONS}
    report = {
        "per_slice_and_layer_ms": sum(slope.values()),
        **{f"{direction}_ms": value for direction, value in slope.items()},
        "iterations_s": {n: sum(found.values()) for n, found in zip(options.slices, (few, many), strict=True)},
        "tokens": options.tokens,
    }
    write_report(options.json, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
