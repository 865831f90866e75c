"""A slow link on one machine: point-to-point messages that are on their way for a while.

Messages to one rank leave one after the other at a limited rate and arrive a latency later.  They wait in a thread
of the sender, and are posted to gloo when they would arrive.  Collectives are as fast as ever.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from math import inf
from typing import Any


class _OnItsWay:
    """Stands for the work of a message that has not been posted yet."""

    def __init__(self) -> None:
        self.posted = threading.Event()
        self.work: Any = None
        self.error: Exception | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the message has been posted and has arrived.

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
        """Whether it has been posted and has arrived."""
        return self.posted.is_set() and self.work is not None and self.work.is_completed()


class SlowLink:
    """The way to one rank.

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
            except Exception as error:  # the rank that waits for it says so
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

    dist.isend = isend  # type: ignore[assignment]


def slow_down(*, rank: int, latency_s: float, bytes_per_s: float) -> None:
    """From here on all point-to-point messages of this process take their time.

    Args:
        rank: This process; all ranks are slowed.
        latency_s: Seconds from the end of sending to the arrival.
        bytes_per_s: Rate at which messages to one rank leave.
    """
    del rank
    divert(functools.cache(lambda dst: SlowLink(latency_s, bytes_per_s)))
