"""Run a module with this rank pinned to its cores, before PyTorch is imported.

``HET_DEMO_CORES="0;1;1" torchrun --nproc-per-node 3 -m examples.llama.pinned MODULE ARGUMENTS...``
pins local rank 0 to core 0 and local ranks 1 and 2 to core 1, then runs ``python -m MODULE
ARGUMENTS...`` in the same process.  Threads that PyTorch and gloo start later inherit the pinning.

``HET_DEMO_SLOWED=2`` stops the process of local rank 2 for five sixths of the time, whatever it does, and
``HET_DEMO_SLOWED=2:0.5`` for half of it, so that the machine has devices of two speeds.
"""

import contextlib
import os
import runpy
import signal
import sys
import time

from examples.llama.devices import PINNING_VARIABLE

SLOWED_VARIABLE = "HET_DEMO_SLOWED"
# Other ranks on its core use the freed time: the rank must become far slower than these become faster.
_STOPPED_S, _RUNNING_S = 0.1, 0.02
# A device of another speed is stopped often and briefly, so that all its operations slow down equally.
_PERIOD_S = 0.02


def cores_of(local_rank: int, value: str) -> set[int]:
    """Returns the cores of one local rank from the variable's value (``;`` between ranks, ``,`` within).

    Raises:
        ValueError: The value is malformed or names no cores for this rank.
    """
    entries = value.split(";")
    if not 0 <= local_rank < len(entries):
        raise ValueError(
            f"{PINNING_VARIABLE} = {value!r} names cores for {len(entries)} local ranks, "
            f"but this is local rank {local_rank}"
        )
    try:
        cores = {int(c) for c in entries[local_rank].split(",")}
    except ValueError:
        raise ValueError(
            f"{PINNING_VARIABLE} = {value!r}: {entries[local_rank]!r} is not a list of core numbers"
        ) from None
    return cores


def pin() -> None:
    """Pin this process if the variable is set; never to cores outside of its present mask."""
    value = os.environ.get(PINNING_VARIABLE)
    if not value:
        return
    cores = cores_of(int(os.environ.get("LOCAL_RANK", "0")), value)
    outside = cores - os.sched_getaffinity(0)
    if outside:
        raise ValueError(f"{PINNING_VARIABLE} = {value!r}: core(s) {sorted(outside)} are not available here")
    os.sched_setaffinity(0, cores)


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
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == me:
            os.kill(me, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(me, signal.SIGCONT)
            time.sleep(running_s)
    os._exit(0)


def slow() -> None:
    """Slow this process down if the variable names its rank."""
    rank, _, running = os.environ.get(SLOWED_VARIABLE, "").partition(":")
    if rank != os.environ.get("LOCAL_RANK", "0"):
        return
    if running:
        slow_down(_PERIOD_S * (1 - float(running)), _PERIOD_S * float(running))
    else:
        slow_down()


def main() -> None:
    """Slow this rank down and pin it, then become ``python -m MODULE``."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m examples.llama.pinned MODULE [ARGUMENTS...]")
    try:
        slow()
        pin()
    except ValueError as error:
        sys.exit(f"error: {error}")
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
