"""What a slice costs besides its arithmetic: ``python -m benchmarks.slice_cost --json OUT``.

One process trains the model of ``slimpipe_speed`` on short sequences, cut into few and into many slices.  The
arithmetic is the same but for attention to a slice's own keys, so what the further passes add is what a pass costs
however short it is.  Figures are processor time, not time on the clock: of every operation the least over the
iterations, because other work on the machine only ever adds to it.  ``per_slice_and_layer_ms`` is the slope, forward
and backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.runner import Runner
from benchmarks.slimpipe_runs import Setting, job
from benchmarks.slimpipe_speed import MODEL

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
    """Processor seconds of all forwards and of all backwards of an iteration."""
    folder.mkdir(parents=True)
    setting = Setting("slimpipe", 1, options.tokens, _MICROBATCHES, slices)
    plain = job(setting, MODEL, folder, iterations=options.iterations, memory=False)
    runner.run(replace(plain, setup=("benchmarks.slice_cost:watch", {"out": str(folder)})))
    found: dict[str, float] = json.loads((folder / "passes-0.json").read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slice_cost", description=__doc__)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--tokens", type=int, default=1024, help="per sequence")
    parser.add_argument("--slices", type=int, nargs=2, default=(8, 64), metavar=("FEW", "MANY"))
    parser.add_argument("--iterations", type=int, default=8, help="of each run")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slice-cost-"))
    try:
        with Runner() as runner:
            few, many = (passes_s(runner, n, options, folder / str(n)) for n in options.slices)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    further = (options.slices[1] - options.slices[0]) * _MICROBATCHES * MODEL.layers
    slope = {direction: (many[direction] - few[direction]) / further * 1e3 for direction in _DIRECTIONS}
    report = {
        "per_slice_and_layer_ms": sum(slope.values()),
        **{f"{direction}_ms": value for direction, value in slope.items()},
        "iterations_s": {n: sum(found.values()) for n, found in zip(options.slices, (few, many), strict=True)},
        "tokens": options.tokens,
        "machine": machine(),
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
