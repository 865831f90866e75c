"""``--limit-s``: what of it is left for a search, and how a search is kept to it that does not look at the clock."""

from __future__ import annotations

import argparse
import gc
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import PlannerError
from .outcome import Progress

# Python's collector of reference cycles, out of the way of a search.


@contextmanager
def collector_paused() -> Iterator[None]:
    """No look for reference cycles in this block.

    A search makes many small objects, keeps most of them, and ties next to none into cycles.  Looking through all of
    them again and again takes a quarter of its time.  The same goes for making and writing a plan of many ranks.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # what has been made counts as old at once, so that nothing is looked through now
            gc.enable()
            gc.unfreeze()


_GRACE_S = 0.3
"""How long after its limit a search is interrupted: it notices by itself almost always."""
AT_LEAST_S = 1.0
"""So much of the limit a search has at least, however long the command took to start and to read."""
WRITING_S = 2.4e-5
"""CPU seconds per GPU of the cluster that the last finalist and the plan take when the search is over, about."""


def left_s(options: argparse.Namespace, used_s: float = 0.0) -> float:
    """CPU seconds that are left of ``--limit-s``, which count from the start of the command.

    Args:
        options: ``limit_s``, and ``began_s``: this process's CPU time when the command began.
        used_s: What the search before has had.  :data:`AT_LEAST_S` is for both together.
    """
    spent_s = time.process_time() - options.began_s
    return max(options.limit_s - spent_s, min(options.limit_s, AT_LEAST_S) - used_s, 0.0)


def searching_s(options: argparse.Namespace, gpus: int) -> float:
    """Returns the seconds for ``plan``'s search: a third of it at least, less what putting the plan together takes.

    Args:
        gpus: Of the cluster.
    """
    left = left_s(options)
    return max(left / 3, min(left, AT_LEAST_S), left - WRITING_S * gpus)


def each_s(options: argparse.Namespace, searches: int) -> float:
    """The CPU time of each of several searches, which divide what is left of ``--limit-s``."""
    return max(left_s(options) / searches, min(options.limit_s, AT_LEAST_S))


def nothing_found(limit_s: float) -> PlannerError:
    """No plan in this time."""
    return PlannerError(
        "command line",
        "--limit-s",
        limit_s,
        "no plan was found in this time",
        "Allow more CPU seconds (they count from the start of the command), or describe equal nodes by one entry "
        "with a count",
    )


@contextmanager
def cpu_limit(progress: Progress, given_s: float | None = None) -> Iterator[None]:
    """Interrupt the search of this block, as Ctrl-C does, when its CPU time is over.

    A search that is already putting its results together gets a quarter as long again.

    Args:
        progress: Of the search, with its limit.
        given_s: ``--limit-s``, for the error; of which ``progress`` has what was left.

    Raises:
        PlannerError: Nothing was found in that time.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    fired = 0

    def interrupt(*_: object) -> None:
        nonlocal fired
        if progress.is_over:
            return
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
        raise nothing_found(progress.limit_s if given_s is None else given_s) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
