"""Measures the time of generating, validating and simulating a schedule, by its size.

``python -m benchmarks.schedules [--json OUT]`` measures SlimPipe (by default up to 32 devices, 64 slices,
2 chunks, 16 microbatches: 131,072 compute operations and their transfers) on one core.  Seconds are CPU seconds of
the process, so that other processes on the machine do not count; wall seconds are printed beside them.
Growth is near linear when ``us_per_operation`` stays level.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.machine import save
from megatron_het.schedule import Costs, Graph, Link, Memory, Shape, add_transfers, generate
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import check

SIZES = ((4, 8, 1, 4), (8, 16, 1, 8), (8, 32, 2, 8), (16, 32, 2, 8), (16, 64, 2, 16), (32, 64, 2, 16), (32, 64, 4, 16))
"""(devices, slices, chunks, microbatches)"""
TARGET = (32, 64, 2, 16)
LIMIT_S = 5.0


class Stopwatch:
    """CPU and wall seconds of named steps."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s = 0.0

    def __call__[T](self, name: str, step: Callable[[], T]) -> T:
        """Runs and times a step."""
        cpu, wall = time.process_time(), time.perf_counter()
        result = step()
        self.cpu_s[name] = time.process_time() - cpu
        self.wall_s += time.perf_counter() - wall
        return result


def measure(devices: int, slices: int, chunks: int, microbatches: int) -> dict[str, Any]:
    """Measure one size: generate with transfers, build the graph, validate on all transports, simulate, find peaks."""
    watch = Stopwatch()
    shape = Shape.uniform(devices, microbatches, slices=slices, chunks=chunks)
    program = watch("generate", lambda: generate("slimpipe", shape))
    program = watch("transfers", lambda: add_transfers(program))
    graph = watch("graph", lambda: Graph(program))
    watch("validate", lambda: check(program, graph))
    link = Link(latency_s=0.01, bytes_per_s=1e3)
    activations = ((1.0,) * chunks,) * devices
    costs = replace(
        Costs.uniform(shape, message_bytes=1.0, link=lambda source, target: link),
        memory=Memory(activation_bytes=activations),
    )
    result = watch("simulate", lambda: simulate(program, costs, graph))
    required = sum(watch.cpu_s.values())
    watch("memory and bubble", lambda: (result.memory, result.bubble))
    operations = sum(map(len, program.ops))
    compute = sum(len(program.compute(d)) for d in range(devices))
    return {
        "devices": devices,
        "slices": slices,
        "chunks": chunks,
        "microbatches": microbatches,
        "compute_operations": compute,
        "operations": operations,
        "cpu_s": required,
        "with_memory_cpu_s": sum(watch.cpu_s.values()),
        "wall_s": watch.wall_s,
        "us_per_operation": required / operations * 1e6,
        "steps_cpu_s": watch.cpu_s,
    }


def main() -> int:
    """Measures all sizes; exit code 1 when the target size takes longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the rows to OUT")
    parser.add_argument("--repeat", type=int, default=3, help="take the fastest of this many (default %(default)s)")
    options = parser.parse_args()
    rows = []
    print("devices slices chunks microbatches | compute   all ops | CPU s   + memory   wall s | us per op")
    for size in SIZES:
        row = min((measure(*size) for _ in range(options.repeat)), key=lambda r: r["cpu_s"])
        rows.append(row)
        print(
            f"{size[0]:7} {size[1]:6} {size[2]:6} {size[3]:12} | {row['compute_operations']:7} "
            f"{row['operations']:9} | {row['cpu_s']:5.2f} {row['with_memory_cpu_s']:10.2f} {row['wall_s']:8.2f} | "
            f"{row['us_per_operation']:.2f}"
        )
    target = next(row for row in rows if (row["devices"], row["slices"], row["chunks"], row["microbatches"]) == TARGET)
    print(f"target size: {target['cpu_s']:.2f} s (limit {LIMIT_S} s): {target['steps_cpu_s']}")
    if options.json:
        save(options.json, rows)
    return 0 if float(target["cpu_s"]) <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
