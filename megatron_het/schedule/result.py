"""The result of a simulation: its timeline, and what follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_het.schedule.ir import RECEIVES, Kind
from megatron_het.schedule.kinds import Stream, Value, where
from megatron_het.schedule.memory import Event, MemoryUse, Timeline, memory_use

# The causes of idle time in a simulated iteration.


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle time of one device's compute stream, by cause.

    Attributes:
        warmup_s: while the pipeline fills (before every device has started its first backward) or drains
            (after the first device has done its last forward), and after the device's last operation.
        imbalance_s: waiting for a slower device in between.
        communication_s: waiting for data that was under way.
        gather_s: waiting for parameters, activations or gradients to be moved or reduced.
        tail_s: time after the last operation that is not idle but not overlapped either (``Costs.tail_s``).
    """

    warmup_s: float = 0.0
    imbalance_s: float = 0.0
    communication_s: float = 0.0
    gather_s: float = 0.0
    tail_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.warmup_s + self.imbalance_s + self.communication_s + self.gather_s + self.tail_s


_GATHER = where(lambda kind: kind.stream in (Stream.COLLECTIVE, Stream.HOST_TO_DEVICE, Stream.DEVICE_TO_HOST))


def attribute_bubble(timeline: Timeline) -> tuple[Bubble, ...]:
    """Idle time of the compute stream per device, by cause."""
    queues = timeline.compute_queues
    full, drain = _steady_window(timeline, queues)
    tails = timeline.costs.tail_s or (0.0,) * len(queues)
    return tuple(_device_bubble(timeline, queue, full, drain, tail) for queue, tail in zip(queues, tails))


def _steady_window(timeline: Timeline, queues: Sequence[Sequence[int]]) -> tuple[float, float]:
    ops, start, end = timeline.graph.ops, timeline.start_s, timeline.end_s
    full, drain = 0.0, timeline.makespan_s
    for queue in queues:
        backward = next((i for i in queue if ops[i].kind.makes is Value.GRADIENT), None)
        forward = next((i for i in reversed(queue) if ops[i].kind is Kind.FORWARD), None)
        if backward is None:  # an evaluation program: full when every device has started
            backward = next(iter(queue), None)
        if backward is not None:
            full = max(full, start[backward])
        if forward is not None:
            drain = min(drain, end[forward])
    return full, max(full, drain)


def _device_bubble(timeline: Timeline, queue: Sequence[int], full: float, drain: float, tail: float) -> Bubble:
    ops, start, end, cause = timeline.graph.ops, timeline.start_s, timeline.end_s, timeline.cause
    warmup = imbalance = communication = gather = 0.0
    now, before = 0.0, -1
    for i in queue:
        gap = start[i] - now
        if gap > 0:
            j = cause[i]
            kind = ops[j].kind if j >= 0 else None
            moved = 0.0
            if kind in RECEIVES or kind in _GATHER:
                moved = min(gap, end[j] - _ready(timeline, j))
            if kind in _GATHER:
                gather += moved
            else:
                moved = max(moved, min(gap, timeline.posting_s.get(before, 0.0)))
                communication += moved
            rest_end = start[i] - moved
            steady = max(0.0, min(rest_end, drain) - max(now, full))
            imbalance += steady
            warmup += gap - moved - steady
        now, before = end[i], i
    warmup += max(0.0, timeline.makespan_s - now - tail)
    return Bubble(warmup, imbalance, communication, gather, tail)


def _ready(timeline: Timeline, node: int) -> float:
    """When the data of a transfer or copy was there: the end of the compute that it waited for.

    Following the causes through other transfers counts the time in a queue as communication.
    """
    ops, cause = timeline.graph.ops, timeline.cause
    while node >= 0 and (ops[node].kind in RECEIVES or ops[node].kind in _GATHER):
        waits = timeline.graph.waits[timeline.graph.other_end[node]] if ops[node].kind in RECEIVES else ()
        if waits:
            return max(timeline.end_s[j] for j in waits)
        node = cause[node]
    return timeline.end_s[node] if node >= 0 else 0.0


class Result(Timeline):
    """A timeline with the causes of idle time and the memory, worked out when they are first asked for."""

    @cached_property
    def bubble(self) -> tuple[Bubble, ...]:
        """Idle time of the compute stream by cause, per device."""
        return attribute_bubble(self)

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory over time and its peak, per device."""
        return memory_use(self)


__all__ = ["Bubble", "Event", "MemoryUse", "Result"]
