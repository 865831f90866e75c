"""What goes wrong in the middle of a run: a process that hangs or stops again and again, a slow device, a slow link.

Functions of this module are the ``setup`` of jobs (``testing.runner``).  *Paced* devices take a set time for every
layer, as a GPU does whatever its host is busy with: a pass computes, and then sleeps for the rest of its time.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.slow_links import SlowLink, divert

_STOPPER = """
import os, signal, sys, time
pid, stopped, running = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while os.getppid() == pid:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped)
    os.kill(pid, signal.SIGCONT)
    time.sleep(running)
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

    Executor.run = counting


def stop_again_and_again(*, rank: int, slowed: int, iteration: int, stopped_s: float, running_s: float) -> None:
    """From an iteration on, one rank is stopped for most of the time, whatever it does."""
    if rank == slowed:
        words = [sys.executable, "-S", "-c", _STOPPER, str(os.getpid()), str(stopped_s), str(running_s)]
        at_iteration(iteration, lambda: subprocess.Popen(words))


def hang(*, rank: int, hung: int, iteration: int, seconds: float) -> None:
    """At an iteration one rank does nothing for a while, and its other threads go on."""
    if rank == hung:
        at_iteration(iteration, lambda: time.sleep(seconds))


class Pace:
    """How long layers take on this device.

    Args:
        forward_s, backward_s: Of one layer.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        self.factor = 1.0

    def install(self) -> None:
        """Every forward and backward of this process takes its time from now on."""
        from megatron_het.runtime.executor import Executor

        all_handlers = Executor._all_handlers

        def paced(executor: Executor) -> Any:
            handlers = all_handlers(executor)
            for kind, handler in handlers.items():
                if kind.name in ("FORWARD", "BACKWARD"):
                    handlers[kind] = self._paced(handler, kind.name == "BACKWARD", executor._timeline)
            return handlers

        Executor._all_handlers = paced

    def _paced(self, handler: Callable[..., None], is_backward: bool, timeline: Any) -> Callable[..., None]:
        def run(op: Any, call: Any, state: Any) -> None:
            from megatron.core.utils import get_attr_wrapped_model

            begin = time.perf_counter()
            handler(op, call, state)
            layers = len(get_attr_wrapped_model(call.models[op.chunk], "decoder").layers)
            seconds = self.factor * layers * (self.backward_s if is_backward else self.forward_s)
            worked = time.perf_counter() - begin - timeline._waited
            time.sleep(max(0.0, seconds - worked))

        return run

    def slow_down(self, factor: float) -> None:
        """Layers take this many times as long from now on."""
        self.factor = factor


def paced(
    *,
    rank: int,
    forward_s: float,
    backward_s: float,
    slowed: list[int],
    iteration: int,
    factor: float,
    links: Mapping[str, float],
) -> None:
    """Paced devices, some of which slow down, and links that become slow.

    Args:
        rank: This rank.
        forward_s, backward_s: Of one layer.
        slowed: Ranks that slow down.
        iteration: When, counted from 1.
        factor: How many times as long their layers take then.
        links: By ``source-target``: seconds that every message of the pipeline is under way longer.
    """
    pace = Pace(forward_s, backward_s)
    pace.install()
    mine = {int(name.split("-")[1]): delay for name, delay in links.items() if int(name.split("-")[0]) == rank}
    wires = {target: SlowLink() for target in mine}
    if wires:
        divert(wires.get)

    def change() -> None:
        if rank in slowed:
            pace.slow_down(factor)
        for target, wire in wires.items():
            wire.latency_s = mine[target]

    at_iteration(iteration, change)
