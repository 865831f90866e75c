"""Keeps a search to its CPU time also where it does not look at the clock."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import PlannerError
from .outcome import Progress

_GRACE_S = 0.3
"""How long after its limit a search is interrupted: it notices by itself almost always."""


@contextmanager
def cpu_limit(progress: Progress) -> Iterator[None]:
    """Interrupt the search of this block, as Ctrl-C does, when its CPU time is over.

    A search that is already putting its results together gets a quarter as long again.

    Raises:
        PlannerError: Nothing was found in that time.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    fired = 0

    def interrupt(*_: object) -> None:
        nonlocal fired
        fired += 1
        if not progress.finishing or fired > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, interrupt)
    again_s = 1.0 + progress.limit_s / 4
    signal.setitimer(signal.ITIMER_PROF, progress.limit_s + _GRACE_S, again_s)
    try:
        yield
    except KeyboardInterrupt:
        if not fired:
            raise
        raise PlannerError(
            "command line",
            "--limit-s",
            progress.limit_s,
            "no plan was found in this time",
            "Allow more CPU seconds, or describe equal nodes by one entry with a count",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
