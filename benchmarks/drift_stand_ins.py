"""Faults in the middle of a run: a process that hangs or is stopped repeatedly, a slow device, a slow link.

Functions of this module are the ``setup`` of jobs (``testing.runner``).  *Paced* devices take a set time for every
layer, as a GPU does whatever its host is busy with: a pass computes, and then sleeps for the rest of its time.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import inf
from typing import Any

_STOPPER = """
import os, signal, sys, time
pid, stopped, running = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while os.getppid() == pid:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped)
    os.kill(pid, signal.SIGCONT)
    time.sleep(running)
"""


# A slow link on one machine: point-to-point messages that are on their way for a while.
#
# Messages to one rank leave one after the other at a limited rate and arrive a latency later.  They wait in a thread
# of the sender, and are posted to gloo when they would arrive.  Collectives are as fast as ever.


class _OnItsWay:
    """Stand-in for the ``Work`` of a message that has not been posted yet."""

    def __init__(self) -> None:
        self.posted = threading.Event()
        self.work: Any = None
        self.error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has been posted and has arrived.

        Raises:
            RuntimeError: The time is over, or posting failed.
        """
        began = time.monotonic()
        bound = 600.0 if timeout is None else timeout.total_seconds()
        if not self.posted.wait(bound):
            raise RuntimeError(f"timed out after {bound:g} s on the slow link")
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
        return bool(self.work.wait(timedelta(seconds=max(0.001, bound - (time.monotonic() - began)))))

    def is_completed(self) -> bool:
        """Whether the message has been posted and has arrived."""
        return self.posted.is_set() and self.work is not None and self.work.is_completed()


class SlowLink:
    """A delayed, rate-limited link to one rank.

    Attributes:
        latency_s: Seconds from the end of sending to the arrival; may change while messages are on their way.
        bytes_per_s: Rate at which messages leave.
    """

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float = inf) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._free_s = 0.0
        self._waiting: queue.SimpleQueue[tuple[float, Callable[[], Any], _OnItsWay]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="slow link").start()

    def send(self, post: Callable[[], Any], size_bytes: int = 0) -> _OnItsWay:
        """Let a message leave after those before it, and post it when it arrives."""
        message = _OnItsWay()
        self._free_s = max(self._free_s, time.monotonic()) + size_bytes / self.bytes_per_s
        self._waiting.put((self._free_s + self.latency_s, post, message))
        return message

    def _run(self) -> None:
        while True:
            arrival_s, post, message = self._waiting.get()
            time.sleep(max(0.0, arrival_s - time.monotonic()))
            try:
                message.work = post()
            except Exception as error:  # the rank that waits for the message reports the error
                message.error = error
            message.posted.set()


def divert(link_to: Callable[[int], SlowLink | None]) -> None:
    """Send the point-to-point messages of this process over slow links.

    Args:
        link_to: The link to a rank, None for one that is as fast as ever.
    """
    import torch.distributed as dist

    original = dist.isend

    def isend(tensor: Any, dst: int, *arguments: Any, **named: Any) -> Any:
        link = link_to(dst)
        if link is None:
            return original(tensor, dst, *arguments, **named)
        size = tensor.numel() * tensor.element_size()
        return link.send(lambda: original(tensor, dst, *arguments, **named), size)

    dist.isend = isend


def at_iteration(iteration: int, action: Callable[[], Any]) -> None:
    """Call a function in this process when the given iteration of training begins, counted from 1."""
    from megatron_het.runtime.executor import Executor

    run, counted = Executor.run, [0]

    def counting(self: Executor, call: Any) -> Any:
        counted[0] += not call.forward_only
        if counted[0] == iteration and not call.forward_only:
            action()
        return run(self, call)

    Executor.run = counting


def stop_again_and_again(*, rank: int, slowed: int, iteration: int, stopped_s: float, running_s: float) -> None:
    """Stop one rank for most of the time, from an iteration on."""
    if rank == slowed:
        words = [sys.executable, "-S", "-c", _STOPPER, str(os.getpid()), str(stopped_s), str(running_s)]
        at_iteration(iteration, lambda: subprocess.Popen(words))


def hang(*, rank: int, hung: int, iteration: int, seconds: float) -> None:
    """Block the main thread of one rank for a while at an iteration; its other threads go on."""
    if rank == hung:
        at_iteration(iteration, lambda: time.sleep(seconds))


class Pace:
    """The time that layers take on this device."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        self.factor = 1.0

    def install(self) -> None:
        """Pace every forward and backward of this process from now on."""
        from megatron_het.runtime.executor import Executor

        all_handlers = Executor._all_handlers

        def paced(executor: Executor) -> Any:
            handlers = all_handlers(executor)
            for kind, handler in handlers.items():
                if kind.name in ("FORWARD", "BACKWARD"):
                    handlers[kind] = self._paced(handler, kind.name == "BACKWARD", executor.timeline)
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
        """Slow layers down by this factor from now on."""
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
    """Install paced layers, some of which slow down, and links that become slow.

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
