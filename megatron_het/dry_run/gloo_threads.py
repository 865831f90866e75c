"""When the threads of gloo have let go of the tensors of work that is done.

A thread of gloo first says that its work is done and then drops the tensors.  A thread that the machine holds up
in between keeps them alive into whatever this rank does next, as nothing on a GPU or in a dry run would.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
_SLEEP_S = 0.0001
_LOOKS = 3
_BOUND_S = 1.0


def let_go() -> None:
    """Wait until no thread of gloo computes: such a thread has dropped what it held, or its work is not done.

    A thread that waits for Python's lock does not compute either.  It gets the lock while this one sleeps, hence
    several looks.  Waits for a second at most; does nothing where the system does not show its threads.
    """
    deadline_s = time.monotonic() + _BOUND_S
    quiet = 0
    while quiet < _LOOKS and time.monotonic() < deadline_s:
        time.sleep(_SLEEP_S)
        quiet = 0 if _computes() else quiet + 1


def _computes() -> bool:
    if not _TASKS.is_dir():
        return False
    for task in _TASKS.iterdir():
        try:
            name, stat = (task / "comm").read_text("utf-8"), (task / "stat").read_text("utf-8")
        except OSError:  # it has ended
            continue
        # The name stands in brackets and may itself hold one.
        if name.startswith(_NAME) and stat.rsplit(")", 1)[1].split()[0] == "R":
            return True
    return False
