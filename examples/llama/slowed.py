"""One rank made slow on purpose, so that it can be seen that the doctor finds it.

``HET_DEMO_SLOWED=2`` stops the process of local rank 2 for two thirds of the time, whatever it does.  Then
``examples.llama.pinned`` goes on as without it.
"""

from __future__ import annotations

import os
import signal
import time

from examples.llama import pinned

SLOWED_VARIABLE = "HET_DEMO_SLOWED"
_STOPPED_S, _RUNNING_S = 0.08, 0.04


def slow_down() -> None:
    """Fork a process that stops this one again and again, as long as this one lives."""
    me = os.getpid()
    if os.fork():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == me:
        os.kill(me, signal.SIGSTOP)
        time.sleep(_STOPPED_S)
        os.kill(me, signal.SIGCONT)
        time.sleep(_RUNNING_S)
    os._exit(0)


def main() -> None:
    """Slow this rank down if it is the one, then pin it and run the module."""
    if os.environ.get(SLOWED_VARIABLE) == os.environ.get("LOCAL_RANK", "0"):
        slow_down()
    pinned.main()


if __name__ == "__main__":
    main()
