"""Host memory for what leaves the device: pinned on CUDA; reused, so that pinning happens once.

On a CPU "host" memory is set apart from "device" memory: the memory meter does not count its blocks.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from megatron_het.device import Platform
from megatron_het.device.memory import uncounted


class HostPool:
    """Equal blocks of host memory, by size.

    Args:
        platform: What this process computes on.

    Attributes:
        used_bytes: In use now.
        peak_bytes: The most that was in use at once since :meth:`reset_peak`.
    """

    def __init__(self, platform: Platform) -> None:
        self._pinned = platform.has_nccl
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """A block of bytes (uint8), of unknown contents."""
        self.used_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        if self._free[size_bytes]:
            return self._free[size_bytes].pop()
        with uncounted():
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, block: torch.Tensor) -> None:
        """Return a block; nothing may use it any more."""
        self.used_bytes -= block.nbytes
        self._free[block.nbytes].append(block)

    def reset_peak(self) -> None:
        """Start the next peak at what is in use now."""
        self.peak_bytes = self.used_bytes

    def clear(self) -> None:
        """Free the blocks that are not in use."""
        self._free.clear()
