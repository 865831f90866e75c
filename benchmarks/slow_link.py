"""A slow link on one machine: point-to-point messages that are on their way for a while (a ``Job.setup``).

Messages to one rank leave one after the other at a limited rate and arrive a latency later.  They wait in a thread
of the sender, and are posted to gloo when they would arrive.  Collectives are as fast as ever.
"""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta
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


class _Lane:
    """The way to one rank."""

    def __init__(self, post: Any, latency_s: float, bytes_per_s: float) -> None:
        self._post, self._latency_s, self._bytes_per_s = post, latency_s, bytes_per_s
        self._free_s = 0.0
        self._waiting: queue.SimpleQueue[tuple[float, Any, tuple[Any, ...], dict[str, Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: _OnItsWay, tensor: Any, *arguments: Any, **named: Any) -> None:
        """Let a message leave after those before it."""
        self._free_s = max(self._free_s, time.monotonic()) + tensor.numel() * tensor.element_size() / self._bytes_per_s
        self._waiting.put((self._free_s + self._latency_s, message, (tensor, *arguments), named))

    def _run(self) -> None:
        while True:
            arrival_s, message, arguments, named = self._waiting.get()
            time.sleep(max(0.0, arrival_s - time.monotonic()))
            try:
                message.work = self._post(*arguments, **named)
            except Exception as error:  # the rank that waits for it says so
                message.error = error
            message.posted.set()


def slow_down(*, rank: int, latency_s: float, bytes_per_s: float) -> None:
    """From here on all point-to-point messages of this process take their time.

    Args:
        rank: This process; all ranks are slowed.
        latency_s: Seconds from the end of sending to the arrival.
        bytes_per_s: Rate at which messages to one rank leave.
    """
    import torch.distributed as dist

    del rank
    original = dist.isend
    lanes: dict[int, _Lane] = {}

    def isend(tensor: Any, dst: int, *arguments: Any, **named: Any) -> _OnItsWay:
        message = _OnItsWay()
        if dst not in lanes:
            lanes[dst] = _Lane(original, latency_s, bytes_per_s)
        lanes[dst].send(message, tensor, dst, *arguments, **named)
        return message

    dist.isend = isend  # type: ignore[assignment]
