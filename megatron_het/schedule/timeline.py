"""What a simulation finds: when every operation runs, and why not earlier."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_het.schedule.cost import Costs
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import Op
from megatron_het.schedule.kinds import Stream


class Event(NamedTuple):
    """One operation in time."""

    device: int
    stream: str
    op: Op
    start_s: float
    end_s: float


class Timeline:
    """When everything happens in one iteration.

    Attributes:
        graph: of the program; operation numbers below refer to it.
        program: the program.
        costs: the cost model.
        start_s, end_s: per operation.  Both ends of a transfer have the same times.
        cause: per operation, the operation that it waited for last, -1 for none.
        posting_s: by compute operation, the time after it in which the host posts transfers.
        compute_queues: per device, the operations of its compute stream.
        makespan_s: end of the iteration, tails included.
        compute_s: per device, time spent in compute operations.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        times: tuple[list[float], list[float]],
        cause: list[int],
        posting_s: dict[int, float],
        compute_queues: list[list[int]],
        duration: list[float],
    ) -> None:
        """``times`` are start and end of every operation, ``duration`` its seconds of work."""
        self.graph, self.program, self.costs = graph, graph.program, costs
        (self.start_s, self.end_s), self.cause = times, cause
        self.posting_s, self.compute_queues = posting_s, compute_queues
        self.compute_s = [sum([duration[i] for i in queue]) for queue in compute_queues]
        tails = costs.tail_s or (0.0,) * len(self.program.ops)
        firsts = graph.first
        self.device_end_s = [
            max(self.end_s[firsts[d] : firsts[d + 1]], default=0.0) + tails[d] for d in range(len(self.program.ops))
        ]
        self.makespan_s = max(self.device_end_s)

    @property
    def ideal_s(self) -> float:
        """All compute spread evenly over the devices."""
        return sum(self.compute_s) / len(self.compute_s)

    @property
    def bubble_fraction(self) -> float:
        """(makespan - ideal) / ideal."""
        return (self.makespan_s - self.ideal_s) / self.ideal_s

    def events(self) -> Iterator[Event]:
        """Everything that takes part in the timeline; a transfer appears at its sender and its receiver."""
        for i, op in enumerate(self.graph.ops):
            yield Event(self.graph.device[i], op.kind.stream, op, self.start_s[i], self.end_s[i])

    def critical_path(self) -> list[Event]:
        """The chain of operations that decides the makespan, first to last."""
        node = max(range(len(self.end_s)), key=self.end_s.__getitem__)
        path = []
        while node >= 0:
            op = self.graph.ops[node]
            stream = "transfer" if op.kind.stream is Stream.RECEIVE else str(op.kind.stream)
            path.append(Event(self.graph.device[node], stream, op, self.start_s[node], self.end_s[node]))
            node = self.cause[node]
        return path[::-1]
