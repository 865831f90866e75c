"""What a result must say about where it was measured."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, object]:
    """Date, processor, cores that this process may use, and versions of Python and libraries."""
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "date": datetime.date.today().isoformat(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "megatron_core": _version("megatron-core"),
    }


def _version(package: str) -> str | None:
    """None where it is not installed, which benchmarks of the planner do not need."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_report(path: Path, report: dict[str, Any], start_s: float) -> None:
    """Write and print what was measured, with where and how long.

    Args:
        path: The JSON file.
        report: The figures.
        start_s: ``time.monotonic()`` at the start.
    """
    whole = report | {"elapsed_s": time.monotonic() - start_s, "machine": machine(), "load_average": os.getloadavg()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole, indent=1))


def pin(*, rank: int, cores: list[int]) -> None:
    """Keep a rank process on one core (a ``Job.setup``); ``cores`` names the core of every rank."""
    os.sched_setaffinity(0, {cores[rank]})


def pin_rank(*, rank: int) -> None:
    """Give each rank a core of its own, where there are enough (a ``Job.setup``).

    Otherwise the scheduler puts a rank that was waiting beside one that computes, until it notices.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
