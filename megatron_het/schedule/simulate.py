"""Event-driven simulation of a program: start and end of every operation, on several streams per device.

Streams of a device: compute, collective, host-to-device, device-to-host; transfers have one queue per
directed pair of devices (the executor's channels), and share the resources that their links name.  Every
queue works in program order; an operation starts when its queue is free and all its dependencies
are done.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from megatron_het.schedule.cost import Costs, durations, message_bytes
from megatron_het.schedule.graph import Graph, ScheduleError, collection_paused, describe, passes_together
from megatron_het.schedule.ir import COMPUTE, RECEIVES, SENDS, TRANSFERS, Kind, Program
from megatron_het.schedule.kinds import Stream, Value, where
from megatron_het.schedule.memory import MemoryUse, Timeline, memory_use

# The causes of idle time in a simulated iteration.


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle time of one device's compute stream, by cause."""

    # while the pipeline fills (before every device has started its first backward) or drains (after the first device
    # has done its last forward), and after the device's last operation
    warmup_s: float = 0.0
    imbalance_s: float = 0.0  # waiting for a slower device in between
    communication_s: float = 0.0  # waiting for data in transfer
    gather_s: float = 0.0  # waiting for parameters, activations or gradients to be moved or reduced
    tail_s: float = 0.0  # time after the last operation that is not idle but not overlapped either (``Costs.tail_s``)

    @property
    def total_s(self) -> float:
        """Sum over all causes."""
        return self.warmup_s + self.imbalance_s + self.communication_s + self.gather_s + self.tail_s


_GATHER = where(lambda kind: kind.stream not in (Stream.COMPUTE, Stream.SEND, Stream.RECEIVE))
"""Kinds that move parameters, gradients or activations, or reduce them."""


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
    """When the data of a transfer or copy was ready: the end of the compute that produced it.

    The causes are followed through other transfers, so that time in a queue counts as communication.
    """
    ops, cause = timeline.graph.ops, timeline.cause
    while node >= 0 and (ops[node].kind in RECEIVES or ops[node].kind in _GATHER):
        waits = timeline.graph.waits[timeline.graph.other_end[node]] if ops[node].kind in RECEIVES else ()
        if waits:
            return max(timeline.end_s[j] for j in waits)
        node = cause[node]
    return timeline.end_s[node] if node >= 0 else 0.0


class Result(Timeline):
    """A timeline with the causes of idle time and the memory, both computed lazily."""

    @cached_property
    def bubble(self) -> tuple[Bubble, ...]:
        """Idle time of the compute stream by cause, per device."""
        queues = self.compute_queues
        full, drain = _steady_window(self, queues)
        tails = self.costs.tail_s or (0.0,) * len(queues)
        return tuple(_device_bubble(self, queue, full, drain, tail) for queue, tail in zip(queues, tails))

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory over time and its peak, per device."""
        return memory_use(self)


_QUEUES = tuple(stream for stream in Stream if stream not in (Stream.SEND, Stream.RECEIVE))
"""Streams with one queue per device, in the order of the queues."""


@collection_paused()
def simulate(program: Program, costs: Costs, graph: Graph | None = None) -> Result:
    """Simulates one iteration.

    Args:
        program: a complete program (with transfers, unless they should cost nothing).
        graph: of the program, when the caller has it already.

    Raises:
        ValueError: the costs do not fit the program's shape.
        ScheduleError: the program lacks something or its operations wait for each other.
    """
    costs.check(program.shape)
    graph = graph or Graph(program)
    graph.check_complete()
    engine = _Engine(graph, costs)
    engine.run()
    compute = engine.queues[: len(program.ops)]
    return Result(
        graph,
        costs,
        times=(engine.start, engine.end),
        cause=engine.cause,
        posting_s=engine.posting,
        compute_queues=compute,
        duration=engine.duration,
    )


class _Engine:
    """Queues of operations that work in order; see the module's docstring.

    The receive stands for the whole transfer: it has the dependencies of its send.  Where links share
    resources, transfers are served first come, first served.  Transfers whose data is ready are kept in a heap.
    The earliest starts when nothing else can move, because any that become ready later also start later.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        count = len(graph.ops)
        self.start, self.end = [0.0] * count, [-1.0] * count
        self.cause = [-1] * count
        self.duration = durations(graph, costs)
        self.queues: list[list[int]] = []
        self.link: dict[int, tuple[float, list[tuple[str, float]]]] = {}
        self.occupied: dict[int, float] = {}
        self.posting: dict[int, float] = {}
        self.waits = list(graph.waits)
        self.team_of = {i: team for team in (*graph.teams(), *passes_together(graph)) for i in team}
        self._fill_queues()
        self._fill_edges()
        self.special = self.link.keys() | self.team_of.keys()

    def _fill_queues(self) -> None:
        graph, devices = self.graph, len(self.graph.program.ops)
        streams: dict[Stream, list[list[int]]] = {stream: [[] for _ in range(devices)] for stream in _QUEUES}
        queue_of, device_of = [streams.get(kind.stream) for kind in Kind], graph.device
        for i, op in enumerate(graph.ops):
            queues = queue_of[op.kind]
            if queues is not None:  # transfers: see _fill_edges
                queues[device_of[i]].append(i)
        self.queues = [queue for stream in _QUEUES for queue in streams[stream]]

    def _fill_edges(self) -> None:
        graph, device_of, ops, other = self.graph, self.graph.device, self.graph.ops, self.graph.other_end
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        blocks = self.costs.host_blocks
        before, last = [-1] * (len(ops) if blocks else 0), -1
        for i, op in enumerate(ops) if blocks else ():
            last = i if op.kind in COMPUTE else last
            before[i] = last if last >= 0 and device_of[last] == device_of[i] else -1
        posted = self._posting() if blocks and self.costs.post_s else {}
        uneven = bool(graph.program.shape.sizes)
        for i in [i for i, j in enumerate(other) if j >= 0]:
            op = ops[i]
            if op.kind in SENDS:
                sends.setdefault((device_of[i], op.peer), []).append(other[i])
            else:
                receives.setdefault((op.peer, device_of[i]), []).append(i)
        for edge, queue in receives.items():
            if sends[edge] != queue:
                bad = next(i for i, j in zip(queue, sends[edge]) if i != j)
                raise ScheduleError(
                    f"{describe(graph.program, *graph.where(bad))}: received in another order than sent"
                )
            link = self.costs.link(*edge)
            sizes: dict[tuple[int, ...], float] = {}  # seconds that a message occupies the link
            for i in queue:
                j, (kind, microbatch, _, _, _, peer_chunk, first, stop) = other[i], ops[i]
                size_key = (kind, peer_chunk, first, stop, microbatch if uneven else -1)
                occupied = sizes.get(size_key)
                if occupied is None:
                    occupied = message_bytes(self.costs, graph.program, edge[0], ops[i]) / link.bytes_per_s
                    sizes[size_key] = occupied
                late = posted.get(j, 0.0)
                self.duration[i] = occupied + link.latency_s + late
                self.waits[i] = graph.waits[j]
                if before and (before[i] >= 0 or before[j] >= 0):
                    self.waits[i] = [*self.waits[i], *(node for node in (before[i], before[j]) if node >= 0)]
                if link.latency_s or link.shared or late:
                    self.occupied[i] = occupied
                if link.shared:
                    self.link[i] = (
                        occupied,
                        [(name, occupied * link.bytes_per_s / rate) for name, rate in link.shared],
                    )
            self.queues.append(queue)

    def _posting(self) -> dict[int, float]:
        """Delay between a computation and the posting of each transfer after it: the host posts one at a time."""
        device_of, each, last = self.graph.device, self.costs.post_s, -1
        posted: dict[int, float] = {}
        for i, op in enumerate(self.graph.ops):
            if op.kind in COMPUTE:
                last = i
            elif op.kind in TRANSFERS and last >= 0 and device_of[last] == device_of[i]:
                posted[i] = self.posting[last] = self.posting.get(last, 0.0) + each
        self.occupied |= {i: self.duration[i] + seconds for i, seconds in self.posting.items()}
        return posted

    def run(self) -> None:
        self.position = [0] * len(self.queues)
        self.free = [0.0] * len(self.queues)
        self.newest = [-1] * len(self.queues)
        self.waiting: dict[int, list[int]] = {}
        self.ready = list(range(len(self.queues)))[::-1]
        self.heap: list[tuple[float, int, int, int]] = []
        self.offered: set[int] = set()
        self.resources: dict[str, float] = {}
        self.arrived: dict[int, list[tuple[float, int, int, int]]] = {}
        while True:
            while self.ready:
                self._advance(self.ready.pop())
            if not self.heap:
                break
            self._start_shared(*heapq.heappop(self.heap))
        for i in chain.from_iterable(self.queues[len(_QUEUES) * len(self.graph.program.ops) :]):
            j = self.graph.other_end[i]  # the send of a receive
            self.start[j], self.end[j], self.cause[j] = self.start[i], self.end[i], self.cause[i]
        if min(self.end, default=0.0) < 0:
            self._stuck()

    def _advance(self, q: int) -> None:
        """Runs a queue until its head has to wait."""
        queue, start, end, waits, cause = self.queues[q], self.start, self.end, self.waits, self.cause
        duration, waiting, occupied = self.duration, self.waiting, self.occupied
        at, now, last = self.position[q], self.free[q], self.newest[q]
        special = self.special
        while at < len(queue):
            i = queue[at]
            begin, why = now, last
            for j in waits[i]:
                other = end[j]
                if other < 0:
                    waiting.setdefault(j, []).append(q)
                    break
                if other >= begin:
                    begin, why = other, j
            else:
                if i in special:
                    self.position[q], self.free[q], self.newest[q] = at, now, last
                    self._meet(q, i, begin, why)
                    return
                start[i], cause[i] = begin, why
                end[i] = begin + duration[i]
                now = begin + occupied[i] if i in occupied else end[i]
                last = i
                if i in waiting:
                    self.ready += waiting.pop(i)
                at += 1
                continue
            break
        self.position[q], self.free[q], self.newest[q] = at, now, last

    def _meet(self, q: int, i: int, begin: float, why: int) -> None:
        """Handle the head of a queue that waits only for shared links or the other members of a collective."""
        if i in self.offered:
            return
        self.offered.add(i)
        if i in self.link:
            heapq.heappush(self.heap, (max([0.0, *(self.end[j] for j in self.waits[i])]), i, q, why))
            return
        team = self.team_of[i]
        members = self.arrived.setdefault(team[0], [])
        members.append((begin, i, q, why))
        if len(members) == len(team):
            begin, _, _, why = max(members)
            length = max(self.duration[member[1]] for member in members)
            for _, node, queue, _ in members:
                self._finish(queue, node, begin, begin + length, begin + length, why)

    def _start_shared(self, begin: float, i: int, q: int, why: int) -> None:
        occupied, resources = self.link[i]
        free = until = max(begin, self.free[q]) + occupied
        for name, seconds in resources:
            self.resources[name] = max(begin, self.resources.get(name, 0.0)) + seconds
            until = max(until, self.resources[name])
        self._finish(q, i, until - occupied, until - occupied + self.duration[i], free, why)

    def _finish(self, q: int, i: int, start: float, end: float, free: float, why: int) -> None:
        self.start[i], self.end[i], self.cause[i] = start, end, why
        self.position[q] += 1
        self.free[q], self.newest[q] = free, i
        self.ready += [q, *self.waiting.pop(i, ())]

    def _stuck(self) -> None:
        lines = ["these operations wait for each other:"]
        for q, queue in enumerate(self.queues):
            if self.position[q] < len(queue) and len(lines) < 9:
                node = queue[self.position[q]]
                blockers = [j for j in self.waits[node] if self.end[j] < 0]
                reason = f"waits for {self.graph.ops[blockers[0]]}" if blockers else "waits for its other members"
                lines.append(f"  {describe(self.graph.program, *self.graph.where(node))} {reason}")
        raise ScheduleError("\n".join(lines))
