"""Processes of an elastic job, forked from a process that has imported Megatron: controller, agents and workers.

They run the code of ``het-run``; only the start of a new interpreter and its imports are left out.  The
process that forks them adopts every process that outlives its parent, so that leftovers are detected.
"""

import contextlib
import ctypes
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, TimeoutExpired
from types import SimpleNamespace
from typing import Any

from testing.forked import Forked

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


def het_run(words: Sequence[str], setup: Callable[[], None]) -> int:
    """Run ``het-run`` in this process, with workers that are forked from it.

    Args:
        words: The command line.
        setup: Called in every worker before it begins.
    """
    from megatron_het.elastic import agent
    from megatron_het.elastic.__main__ import main

    def start(
        command: Sequence[str], *, env: Mapping[str, str], stdout: Any, preexec_fn: Any, **_unused: Any
    ) -> Forked:
        return Forked(lambda: _work(command, preexec_fn, setup), stdout, env, own_session=False)

    agent.subprocess = SimpleNamespace(Popen=start, DEVNULL=DEVNULL, STDOUT=STDOUT, TimeoutExpired=TimeoutExpired)  # type: ignore[assignment]
    return main(words)


def _work(command: Sequence[str], prepare: Any, setup: Callable[[], None]) -> int:
    """Run the worker that an agent would start with a command."""
    from megatron_het.elastic import worker

    if prepare is not None:
        prepare()
    let_go_of_connections()
    # The agent's handlers are no part of a new process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    module = list(command).index("-m") + 1
    sys.argv = list(command[module:])
    setup()
    worker.main()  # ends the process
    return 1


def let_go_of_connections() -> None:
    """Close inherited connections that a new process would not have; their descriptors stay reserved."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if number > 2 and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number)
    os.close(nothing)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent ends (subreaper).

    Raises:
        OSError: The system cannot do it.
    """
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("orphans cannot be adopted: the benchmark needs Linux")


def descendants(of: int, but: Sequence[int] = ()) -> list[int]:
    """Returns the running descendants of a process.

    Args:
        of: The process.
        but: Children that do not count, with all of theirs.
    """
    found = []
    for child in children(of):
        if child not in but:
            found += [child, *descendants(child)]
    return found


def children(process: int) -> list[int]:
    """Returns the children of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()))
    return []


def end(processes: Sequence[int]) -> None:
    """Send SIGKILL to processes, and reap those that are or become children of this one."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline_s = time.monotonic() + 10.0
    left = set(processes)
    while left and time.monotonic() < deadline_s:
        for process in list(left):
            try:
                if os.waitpid(process, os.WNOHANG)[0]:
                    left.discard(process)
            except ChildProcessError:  # of another process that reaps it
                if not Path(f"/proc/{process}").exists():
                    left.discard(process)
        time.sleep(_POLL_S)


def reap(known: Sequence[Forked]) -> None:
    """Reap adopted children that have ended; known children are left to their owners."""
    own = {process.pid for process in known if process.returncode is None}
    for child in children(os.getpid()):
        if child not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
