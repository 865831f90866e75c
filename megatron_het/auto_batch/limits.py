"""How much memory this rank's device has for training, and what it is called."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HET_MEMORY_LIMIT_BYTES"
"""An artificial limit per rank, for trials without large devices: one number, or one per local rank with ``;``."""

_CUDA_SHARE = 0.92  # the rest is for NCCL's buffers and for what the allocator cannot use
_HOST_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A rank's device.

    Attributes:
        name: Of the device.
        limit_bytes: What tensors may take.
        is_artificial: Whether somebody has asked for this limit.
    """

    name: str
    limit_bytes: int
    is_artificial: bool

    def as_json(self) -> dict[str, Any]:
        """For the other ranks and for files.

        What is free on a host changes from start to start, and does not make another device of it.
        """
        found = asdict(self)
        if not self.is_artificial and self.name == "CPU":
            found["limit_bytes"] = 0
        return found


def memory_limit() -> MemoryLimit:
    """Of this rank.

    Raises:
        ValueError: The variable is malformed.
    """
    from megatron_het import device as platform

    device = platform.activate()
    given = _given(os.environ.get(VARIABLE, ""))
    if device.is_cuda:
        import torch

        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        properties = torch.cuda.get_device_properties(index)
        return MemoryLimit(properties.name, given or int(_CUDA_SHARE * properties.total_memory), bool(given))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return MemoryLimit("CPU", given or int(_HOST_SHARE * _available_bytes() / ranks), bool(given))


def _given(value: str) -> int:
    if not value:
        return 0
    entries = value.split(";")
    index = int(os.environ.get("LOCAL_RANK", "0")) if len(entries) > 1 else 0
    if index >= len(entries) or not entries[index].isdecimal() or not 0 < int(entries[index]) < 1 << 50:
        raise ValueError(f"{VARIABLE} = {value!r}: give one number of bytes, or one per local rank with ; between")
    return int(entries[index])


def _available_bytes() -> int:
    """Memory of the host that nobody uses; 4 GiB where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 4 << 30
