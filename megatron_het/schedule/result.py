"""Reading a simulation: events and the causes of idle time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_het.schedule.ir import COMPUTE, RECEIVES, Kind, Op

if TYPE_CHECKING:
    from megatron_het.schedule.simulate import Result


class Event(NamedTuple):
    """One operation in time."""

    device: int
    stream: str
    op: Op
    start_s: float
    end_s: float


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


_GATHER = frozenset(
    {Kind.PARAM_GATHER, Kind.PARAM_PREFETCH, Kind.PARAM_OFFLOAD, Kind.GRAD_REDUCE, Kind.ACT_FETCH, Kind.ACT_OFFLOAD}
)


def attribute_bubble(result: "Result", queues: Sequence[Sequence[int]]) -> tuple[Bubble, ...]:
    """Idle time per device by cause; ``queues`` are the operations of the compute streams."""
    full, drain = _steady_window(result, queues)
    tails = result.costs.tail_s or (0.0,) * len(queues)
    return tuple(_device_bubble(result, queue, full, drain, tail) for queue, tail in zip(queues, tails))


def _steady_window(result: "Result", queues: Sequence[Sequence[int]]) -> tuple[float, float]:
    ops, start, end = result.graph.ops, result.start_s, result.end_s
    full, drain = 0.0, result.makespan_s
    for queue in queues:
        backward = next((i for i in queue if ops[i][0] in (1, 2)), None)
        forward = next((i for i in reversed(queue) if ops[i][0] == 0), None)
        if backward is None:  # an evaluation program: full when every device has started
            backward = next(iter(queue), None)
        if backward is not None:
            full = max(full, start[backward])
        if forward is not None:
            drain = min(drain, end[forward])
    return full, max(full, drain)


def _device_bubble(result: "Result", queue: Sequence[int], full: float, drain: float, tail: float) -> Bubble:
    ops, start, end, cause = result.graph.ops, result.start_s, result.end_s, result.cause
    warmup = imbalance = communication = gather = 0.0
    now, before = 0.0, -1
    for i in queue:
        gap = start[i] - now
        if gap > 0:
            j = cause[i]
            kind = ops[j][0] if j >= 0 else None
            moved = 0.0
            if kind in RECEIVES or kind in _GATHER:
                moved = min(gap, end[j] - _ready(result, j))
            if kind in _GATHER:
                gather += moved
            else:
                moved = max(moved, min(gap, result.posting_s.get(before, 0.0)))
                communication += moved
            rest_end = start[i] - moved
            steady = max(0.0, min(rest_end, drain) - max(now, full))
            imbalance += steady
            warmup += gap - moved - steady
        now, before = end[i], i
    warmup += max(0.0, result.makespan_s - now - tail)
    return Bubble(warmup, imbalance, communication, gather, tail)


def _ready(result: "Result", node: int) -> float:
    """When the data of a transfer or copy was there: the end of the compute that it waited for.

    Following the causes through other transfers counts the time in a queue as communication.
    """
    ops, cause = result.graph.ops, result.cause
    while node >= 0 and ops[node][0] not in COMPUTE and (ops[node][0] in RECEIVES or ops[node][0] in _GATHER):
        waits = result.graph.waits[result.graph.other_end[node]] if ops[node][0] in RECEIVES else ()
        if waits:
            return max(result.end_s[j] for j in waits)
        node = cause[node]
    return result.end_s[node] if node >= 0 else 0.0
