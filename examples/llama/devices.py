"""A real mixed cluster on one machine: processes with a core of their own, and processes that share one.

The kernel is what makes the devices differ: a process pinned to a core of its own gets all of it,
two processes pinned to the same core get half each while both are busy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Read by ``examples.llama.pinned``: one core list per local rank, e.g. ``0;1;1``.
PINNING_VARIABLE = "HET_DEMO_CORES"

_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """One process of the demo's cluster.

    Attributes:
        name: ``fast-0``, ``slow-1``, ...
        kind: ``fast`` (a core of its own) or ``slow`` (shares its core).
        core: The core it is pinned to.
        sharers: How many processes are pinned to that core, itself included.
    """

    name: str
    kind: str
    core: int
    sharers: int


def available_cores() -> list[int]:
    """Cores this process may use, one per physical core first, then their hyper-threads."""
    allowed = sorted(os.sched_getaffinity(0))
    first: list[int] = []
    second: list[int] = []
    seen: set[int] = set()
    for core in allowed:
        (second if core in seen else first).append(core)
        seen.update(_siblings(core))
    return first + second


def _siblings(core: int) -> set[int]:
    """Hyper-threads of the same physical core, itself included; only itself when unknown."""
    path = _TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return {core}
    found: set[int] = {core}
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found.update(range(int(low), int(high or low) + 1))
    return found


def mixed_devices(cores: Sequence[int], max_cores: int = 4) -> list[CpuDevice]:
    """Devices on the given cores: half of the cores (rounded up) whole, each other one shared by two.

    Two cores give one fast and two slow devices, four give two and four.  One core gives two slow
    devices: both are alike, so an even split is the best split and nothing is to be gained.

    Args:
        cores: Cores to use, in order of preference.
        max_cores: Use at most this many of them: every process loads its own copy of PyTorch.

    Raises:
        ValueError: No core given.
    """
    used = list(cores[:max_cores])
    if not used:
        raise ValueError("no core to run on")
    whole = (len(used) + 1) // 2 if len(used) > 1 else 0
    devices = [CpuDevice(f"fast-{i}", "fast", core, 1) for i, core in enumerate(used[:whole])]
    shared = [core for core in used[whole:] for _ in range(2)]
    devices += [CpuDevice(f"slow-{i}", "slow", core, 2) for i, core in enumerate(shared)]
    return devices


def pinning(devices: Sequence[CpuDevice]) -> str:
    """The value of the pinning variable for these devices as local ranks 0, 1, ..."""
    return ";".join(str(d.core) for d in devices)


def describe(devices: Sequence[CpuDevice]) -> str:
    """One sentence for the reader."""
    fast = [d for d in devices if d.kind == "fast"]
    slow_cores = sorted({d.core for d in devices if d.kind == "slow"})
    if not fast:
        return (
            f"This machine offers one core ({slow_cores[0]}): {len(devices)} equal devices share it. "
            "The even split is already the best one here, so expect a speedup of about 1."
        )
    return (
        f"{len(fast)} fast device(s) with a core of their own ({', '.join(str(d.core) for d in fast)}) and "
        f"{len(devices) - len(fast)} slow ones, two to a core ({', '.join(map(str, slow_cores))})."
    )
