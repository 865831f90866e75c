"""What goes wrong in the middle of a run: a process that is stopped again and again, paced devices, a slow link.

Functions of this module are the ``setup`` of jobs (``benchmarks.runner``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

_STOPPER = """
import os, signal, sys, time
pid, stopped, running = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
try:
    while os.getppid() == pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped)
        os.kill(pid, signal.SIGCONT)
        time.sleep(running)
finally:
    os.kill(pid, signal.SIGCONT)
"""


def at_iteration(iteration: int, action: Callable[[], Any]) -> None:
    """Call an action in this process when an iteration of training begins, counted from 1."""
    from megatron_het.runtime.executor import Executor

    run, counted = Executor.run, [0]

    def counting(self: Executor, call: Any) -> Any:
        counted[0] += not call.forward_only
        if counted[0] == iteration and not call.forward_only:
            action()
        return run(self, call)

    Executor.run = counting  # type: ignore[method-assign]


def stop_again_and_again(*, rank: int, slowed: int, iteration: int, stopped_s: float, running_s: float) -> None:
    """From an iteration on, one rank is stopped for most of the time, whatever it does."""
    if rank == slowed:
        words = [sys.executable, "-S", "-c", _STOPPER, str(os.getpid()), str(stopped_s), str(running_s)]
        at_iteration(iteration, lambda: subprocess.Popen(words))
