"""Processes forked from one that has imported everything: a log each, the end of an interpreter, and bounded waits."""

import contextlib
import functools
import logging
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import TimeoutExpired
from typing import NoReturn

from megatron_het.device import kill_with

_FIRST_POLL_S, _POLL_S = 0.002, 0.05
_KILLED_S = 30.0


class Forked:
    """A forked process, with the part of ``subprocess.Popen``'s interface that an agent uses.

    Args:
        run: What it does; its result is the exit code, None for 0.
        log: File or descriptor for what it writes; a file is appended to.
        environment: Of the process; None for that of this one.
        own_session: Whether it leads a session of its own, and ends with this process.
    """

    def __init__(
        self,
        run: Callable[[], int | None],
        log: Path | int,
        environment: Mapping[str, str] | None = None,
        *,
        own_session: bool = True,
    ) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.cpu_s = 0.0  # processor time, known once it has ended
        self.pid = os.fork()
        if self.pid == 0:
            _leave(_exit_code(functools.partial(_begin, run, log, environment, own_session)))

    def poll(self) -> int | None:
        """Returns the exit code; None while the process runs."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                found, status, usage = os.wait4(self.pid, os.WNOHANG)
                if found:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    self.cpu_s = usage.ru_utime + usage.ru_stime
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait in bounded time; returns the exit code.

        Raises:
            TimeoutExpired: It still runs.
        """
        deadline_s, pause_s = time.monotonic() + timeout, _FIRST_POLL_S
        while self.poll() is None:
            if time.monotonic() > deadline_s:
                raise TimeoutExpired("forked process", timeout)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_S)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL, if the process has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def finish(self, limit_s: float) -> bool:
        """Wait for the end, and kill the process after so many seconds; returns whether it ended by itself."""
        try:
            self.wait(limit_s)
        except TimeoutExpired:
            self.kill()
            self.wait(_KILLED_S)
            return False
        return True


def _begin(
    run: Callable[[], int | None], log: Path | int, environment: Mapping[str, str] | None, own_session: bool
) -> int | None:
    """Run the function in the new process."""
    if own_session:
        os.setsid()
        kill_with(os.getppid())
    # As multiprocessing does after its own forks: the parent's helpers are not this process's children.
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    target = log if isinstance(log, int) else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(target, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # as an interpreter's
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    return run()


def _exit_code(run: Callable[[], int | None]) -> int:
    """Run a function; returns the exit code that a separate interpreter would have."""
    try:
        return run() or 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1


def _leave(code: int) -> NoReturn:
    """End a forked process like an interpreter, but without freeing all objects.

    That would touch every imported object, and so copy the memory shared with the parent: 0.6 s of
    processor time per rank of a training, a quarter of a small case's.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # ends executors' threads first, then waits for all others
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)
