"""What a result must say about where it was measured."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path


def machine() -> dict[str, object]:
    """Date, processor, cores that this process may use, and library versions."""
    from importlib.metadata import version

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
        "torch": version("torch"),
        "megatron_core": version("megatron-core"),
    }


def pin(*, rank: int, cores: list[int]) -> None:
    """Keep a rank process on one core (a ``Job.setup``); ``cores`` names the core of every rank."""
    os.sched_setaffinity(0, {cores[rank]})


def pin_rank(*, rank: int) -> None:
    """Give each rank a core of its own, where there are enough (a ``Job.setup``).

    Otherwise the scheduler puts a rank that was waiting beside one that computes, until it notices.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
