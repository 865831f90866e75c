"""An elastic job on paced devices: a layer takes a set time, as on an accelerator that does not use its host's cores.

A pass computes, and then its process sleeps for the rest of the time (``benchmarks.drift_stand_ins.Pace``).  The
controller, agents and workers are forked from this process (``benchmarks.fault_processes``), so that a machine with few
cores does not spend them on imports.  All that they do is ``het-run``'s own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.elastic import ElasticJob, environment
from benchmarks.fault_processes import Forked, descendants, end, het_run
from megatron_het.plan import Plan

FORWARD_S, BACKWARD_S = 0.012, 0.024
"""Of one layer and microbatch."""
_END_S = 30.0


def install() -> None:
    """Make this process a paced device."""
    from benchmarks.drift_stand_ins import Pace

    Pace(FORWARD_S, BACKWARD_S).install()


class _Node(Forked):
    """A controller or an agent, with what :class:`ElasticJob` asks of a process."""

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = _END_S) -> int:
        return super().wait(timeout)


class PacedJob(ElasticJob):
    """A job whose workers are paced; this process has imported Megatron.

    Args:
        folder: An empty folder.
        iterations: Of the training.
        make: Plan by the replicas of its second stage.
    """

    def __init__(self, folder: Path, iterations: int, make: Callable[[int], Plan]) -> None:
        self._others = descendants(os.getpid())
        super().__init__(folder, iterations, "1", make)

    def _begin(self, name: str, words: list[str]) -> Any:
        return _Node(lambda: het_run(words, install), self.folder / f"{name}.txt", environment())

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        end([process for process in descendants(os.getpid()) if process not in self._others])
