"""A real mixed cluster on one machine: processes that are pinned to cores, some of them slower than others.

The demo gives every process a core of its own, and lets half of them run only half of the time
(``paced_devices``).  With ``mixed_devices`` two processes share a core: each gets
half of it while both are busy.
"""

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Read by ``examples.llama.pinned``: one core list per local rank, e.g. ``0;1;1``.
PINNING_VARIABLE = "HET_DEMO_CORES"

_TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """One process of the demo's cluster."""

    name: str  # ``fast-0``, ``slow-1``, ...
    kind: str  # ``fast`` or ``slow``
    core: int  # the core that it is pinned to
    running: float = 1.0  # share of the time that it is allowed to run; below 1 it is stopped again and again


def available_cores() -> list[int]:
    """Returns the cores that this process may use: one per physical core first, then their hyper-threads."""
    allowed = sorted(os.sched_getaffinity(0))
    first: list[int] = []
    second: list[int] = []
    seen: set[int] = set()
    for core in allowed:
        (second if core in seen else first).append(core)
        seen.update(_siblings(core))
    return first + second


def _siblings(core: int) -> set[int]:
    """Returns the hyper-threads of the same physical core, this one included; only this one if unknown."""
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
    """Returns devices on the given cores: half of the cores (rounded up) for one device each, the others shared by two.

    Two cores give one fast and two slow devices, four give two and four.  One core gives two slow
    devices: both are equal, so an even split is the best split, and a plan gains nothing.

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
    devices = [CpuDevice(f"fast-{i}", "fast", core) for i, core in enumerate(used[:whole])]
    shared = [core for core in used[whole:] for _ in range(2)]
    devices += [CpuDevice(f"slow-{i}", "slow", core) for i, core in enumerate(shared)]
    return devices


def paced_devices(cores: Sequence[int], max_cores: int = 4) -> list[CpuDevice]:
    """Returns devices with a core of their own each: the first half fast, the others slow, which run half of the time.

    One core gives two slow devices that share it: a plan gains nothing there.

    Args:
        cores: Cores to use, in order of preference.
        max_cores: Use at most this many of them: every process loads its own copy of PyTorch.

    Raises:
        ValueError: No core given.
    """
    used = list(cores[:max_cores])
    if len(used) < 2:
        return mixed_devices(cores, max_cores)
    whole = (len(used) + 1) // 2
    devices = [CpuDevice(f"fast-{i}", "fast", core) for i, core in enumerate(used[:whole])]
    return devices + [CpuDevice(f"slow-{i}", "slow", core, running=0.5) for i, core in enumerate(used[whole:])]


def pinning(devices: Sequence[CpuDevice]) -> str:
    """Returns the value of the pinning variable for these devices as local ranks 0, 1, ..."""
    return ";".join(str(d.core) for d in devices)


def describe(devices: Sequence[CpuDevice]) -> str:
    """Returns a sentence that describes the devices."""
    fast = [d for d in devices if d.kind == "fast"]
    slow = [d for d in devices if d.kind == "slow"]
    cores = ", ".join(map(str, sorted({d.core for d in slow})))
    if not fast:
        return (
            f"This machine offers one core ({cores}): {len(devices)} equal devices share it. "
            "The even split is already the best one here, so expect a speedup of about 1."
        )
    whole = f"{len(fast)} fast device(s) with a core of their own ({', '.join(str(d.core) for d in fast)})"
    if slow[0].running < 1:
        share = f"on core(s) {cores}, which run {slow[0].running:.0%} of the time"
    else:
        share = f"that share core(s) {cores}"
    return f"{whole}, and {len(slow)} slow one(s) {share}."


def cluster_document(
    devices: Sequence[CpuDevice], bytes_per_s: float, latency_s: float, memory_bytes: int = 1 << 30, is_cpu: bool = True
) -> dict[str, Any]:
    """Returns the cluster file of these devices: every process is a node with one device.

    Args:
        devices: The processes.
        bytes_per_s, latency_s: Of the link between two of them.
        memory_bytes: That one of them may use.
        is_cpu: Whether they compute on the CPU.
    """
    kinds = sorted({d.kind for d in devices})
    gpus = {
        kind: {
            "flops": {"fp32": 1e10},
            "memory_bytes": memory_bytes,
            "memory_bytes_per_s": 1e10,
            "intra_node_bytes_per_s": bytes_per_s,
            "reserved_bytes": 0,
            "is_processor": is_cpu,
            "transformer_engine": not is_cpu and importlib.util.find_spec("transformer_engine") is not None,
            "source": "this machine",
        }
        for kind in kinds
    }
    nodes = [
        {
            "gpu": kind,
            "count": sum(d.kind == kind for d in devices),
            "gpus_per_node": 1,
            "network_bytes_per_s": bytes_per_s,
            "network_latency_s": latency_s,
        }
        for kind in kinds
    ]
    return {"name": "this machine", "nodes": nodes, "gpus": gpus}


def measured_link(profile: Path) -> tuple[float, float]:
    """Returns the slowest link between two devices in a profile: bytes per second, and seconds of latency."""
    found = [k for k in json.loads(profile.read_text(encoding="utf-8"))["links"] if k["operation"] == "p2p"]
    rate = min((k["bytes_per_s"] for k in found), default=1e8)
    return rate, max((k["latency_s"] for k in found), default=1e-3)


def busy_cores(seconds: float = 1.0) -> float:
    """Returns the cores that other programs and the hypervisor use at this moment; 0 if unknown."""
    before = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    """Returns the busy ticks of all cores since the start of the machine."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0
    user, nice, system, _, _, *others = map(int, words)
    return user + nice + system + sum(others)
