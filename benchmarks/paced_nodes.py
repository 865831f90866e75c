"""An elastic job on paced devices: a layer takes a set time, as on an accelerator that does not use its host's cores.

A pass computes, and then its process sleeps for the rest of the time (``benchmarks.drift_stand_ins.Pace``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.elastic import ForkedJob
from megatron_het.plan import Plan

FORWARD_S, BACKWARD_S = 0.012, 0.024
"""Of one layer and microbatch."""


def install() -> None:
    """Make this process a paced device."""
    from benchmarks.drift_stand_ins import Pace

    Pace(FORWARD_S, BACKWARD_S).install()


class PacedJob(ForkedJob):
    """A job whose workers are paced; this process has imported Megatron.

    Args:
        folder: An empty folder.
        iterations: Of the training.
        make: Plan by the replicas of its second stage.
    """

    def __init__(self, folder: Path, iterations: int, make: Callable[[int], Plan]) -> None:
        super().__init__(folder, iterations, "1", make, install)
