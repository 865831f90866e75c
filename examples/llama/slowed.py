"""One rank made slow on purpose, so that the machine has devices of two speeds.

``HET_DEMO_SLOWED=2`` stops the process of local rank 2 for five sixths of the time, whatever it does, and
``HET_DEMO_SLOWED=2:0.5`` for half of it.  Then ``examples.llama.pinned`` goes on as without it.
"""

from __future__ import annotations

import os
import signal
import time

from examples.llama import pinned

SLOWED_VARIABLE = "HET_DEMO_SLOWED"
# Others that share its core get what it leaves: the rank has to be far slower than that makes them faster.
_STOPPED_S, _RUNNING_S = 0.1, 0.02
# A device of another speed is stopped often and briefly, so that all its operations take longer alike.
_PERIOD_S = 0.02


def slow_down(stopped_s: float = _STOPPED_S, running_s: float = _RUNNING_S) -> None:
    """Fork a process that stops this one again and again, as long as this one lives.

    Args:
        stopped_s: How long each time.
        running_s: How long it runs in between.
    """
    me = os.getpid()
    if os.fork():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == me:
        os.kill(me, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(me, signal.SIGCONT)
        time.sleep(running_s)
    os._exit(0)


def main() -> None:
    """Slow this rank down if it is the one, then pin it and run the module."""
    rank, _, running = os.environ.get(SLOWED_VARIABLE, "").partition(":")
    if rank == os.environ.get("LOCAL_RANK", "0"):
        if running:
            slow_down(_PERIOD_S * (1 - float(running)), _PERIOD_S * float(running))
        else:
            slow_down()
    pinned.main()


if __name__ == "__main__":
    main()
