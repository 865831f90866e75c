"""Event-driven simulation of a program: when everything happens, on several streams per device.

Streams of a device: compute, collective, host-to-device, device-to-host; transfers have one queue per
directed pair of devices (the executor's channels), and share the resources that their links name.  Every
queue works in program order; an operation starts when its queue is free and everything that it waits for
is done.
"""

import heapq
from collections.abc import Iterator, Sequence
from functools import cached_property

from megatron_het.schedule.cost import Costs
from megatron_het.schedule.durations import durations, message_bytes
from megatron_het.schedule.graph import Graph, ScheduleError, collection_paused, describe
from megatron_het.schedule.ir import COMPUTE, RECEIVES, SENDS, TRANSFERS, Kind, Op, Program
from megatron_het.schedule.memory import MemoryUse, memory_use
from megatron_het.schedule.result import Bubble, Event, attribute_bubble

STREAMS = ("compute", "collective", "host_to_device", "device_to_host")
_STREAM_OF = {
    Kind.PARAM_GATHER: 1,
    Kind.GRAD_REDUCE: 1,
    Kind.PARAM_PREFETCH: 2,
    Kind.ACT_FETCH: 2,
    Kind.PARAM_OFFLOAD: 3,
    Kind.ACT_OFFLOAD: 3,
}


class Result:
    """What a simulation found.

    Attributes:
        program: the program.
        graph: its graph; operation numbers below refer to it.
        start_s, end_s: per operation.  Both ends of a transfer have the same times.
        cause: per operation, the operation that it waited for last, -1 for none.
        posting_s: by compute operation, the time after it in which the host posts transfers.
        makespan_s: end of the iteration, tails included.
        compute_s: per device, time spent in compute operations.
    """

    def __init__(self, graph: Graph, costs: Costs, engine: "_Engine") -> None:
        self.graph, self.program, self.costs = graph, graph.program, costs
        self.start_s, self.end_s, self.cause = engine.start, engine.end, engine.cause
        self.posting_s = engine.posting
        self._compute_queues = engine.queues[: len(self.program.ops)]
        duration = engine.duration
        self.compute_s = [sum([duration[i] for i in queue]) for queue in self._compute_queues]
        tails = costs.tail_s or (0.0,) * len(self.program.ops)
        firsts = self.graph.first
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

    @cached_property
    def bubble(self) -> tuple[Bubble, ...]:
        """Idle time of the compute stream by cause, per device."""
        return attribute_bubble(self, self._compute_queues)

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Memory over time and its peak, per device."""
        return memory_use(self)

    def events(self) -> Iterator[Event]:
        """Everything that takes part in the timeline; a transfer appears at its sender and its receiver."""
        for i, op in enumerate(self.graph.ops):
            kind = op[0]
            stream = "send" if kind in SENDS else "receive" if kind in RECEIVES else STREAMS[_STREAM_OF.get(kind, 0)]
            yield Event(self.graph.device[i], stream, op, self.start_s[i], self.end_s[i])

    def critical_path(self) -> list[Event]:
        """The chain of operations that decides the makespan, first to last."""
        node = max(range(len(self.end_s)), key=self.end_s.__getitem__)
        path = []
        while node >= 0:
            op = self.graph.ops[node]
            stream = "transfer" if op[0] in RECEIVES else STREAMS[_STREAM_OF.get(op[0], 0)]
            path.append(Event(self.graph.device[node], stream, op, self.start_s[node], self.end_s[node]))
            node = self.cause[node]
        return path[::-1]


@collection_paused()
def simulate(program: Program, costs: Costs, graph: Graph | None = None) -> Result:
    """Simulates one iteration.

    Args:
        program: a complete program (with transfers, unless they should cost nothing).
        costs: durations, links, memory.
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
    return Result(graph, costs, engine)


class _Engine:
    """Queues of operations that work in order; see the module's text.

    The receive stands for the whole transfer: it waits for what its send waits for.  Where links share
    resources, transfers are served first come, first served: those that could start are kept in a heap and
    the earliest starts when nothing else can move, for whatever becomes ready later starts later.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        count = len(graph.ops)
        self.start, self.end = [0.0] * count, [-1.0] * count
        self.cause = [-1] * count
        self.duration = durations(graph, costs)
        self.queues: list[list[int]] = []
        self.link: dict[int, tuple[float, tuple[str, ...]]] = {}
        self.occupied: dict[int, float] = {}
        self.posting: dict[int, float] = {}
        self.waits = list(graph.waits)
        self.teams: dict[tuple[object, ...], list[int]] = {}
        self.team_of: dict[int, tuple[object, ...]] = {}
        self._fill_queues()
        self._fill_edges()

    def _fill_queues(self) -> None:
        graph, devices = self.graph, len(self.graph.program.ops)
        streams: list[list[list[int]]] = [[[] for _ in range(devices)] for _ in STREAMS]
        seen: dict[tuple[object, ...], int] = {}
        replicas, places = graph.program.shape.replicas, graph.program.devices
        for i, op in enumerate(graph.ops):
            kind = op[0]
            if 4 <= kind <= 9 or kind >= 26:
                continue
            d = graph.device[i]
            if kind < 3 or kind not in _STREAM_OF:
                streams[0][d].append(i)
                continue
            streams[_STREAM_OF[kind]][d].append(i)
            if _STREAM_OF[kind] == 1 and replicas[places[d].stage] > 1:
                name = (places[d].stage, kind, op.chunk, op.start, op.stop)
                turn = seen[d, *name] = seen.get((d, *name), -1) + 1
                self.teams.setdefault((*name, turn), []).append(i)
                self.team_of[i] = (*name, turn)
        self.queues = [queue for stream in streams for queue in stream]
        for key, team in self.teams.items():
            if len(team) != replicas[key[0]]:  # type: ignore[index]
                where = describe(graph.program, *graph.where(team[0]))
                raise ScheduleError(f"{where}: not all replicas of the stage take part in this collective")

    def _fill_edges(self) -> None:
        graph, device_of, ops, other = self.graph, self.graph.device, self.graph.ops, self.graph.other_end
        sends: dict[tuple[int, int], list[int]] = {}
        receives: dict[tuple[int, int], list[int]] = {}
        before, last = [-1] * (len(ops) if self.costs.host_blocks else 0), -1
        posted = self._posting() if self.costs.host_blocks and self.costs.post_s else {}
        for i, op in enumerate(ops):
            if op[0] in SENDS:
                sends.setdefault((device_of[i], op[4]), []).append(other[i])
            elif op[0] in RECEIVES:
                receives.setdefault((op[4], device_of[i]), []).append(i)
            elif self.costs.host_blocks and op[0] in COMPUTE:
                last = i
            if self.costs.host_blocks:
                before[i] = last if last >= 0 and device_of[last] == device_of[i] else -1
        for edge, queue in receives.items():
            if sends[edge] != queue:
                bad = next(i for i, j in zip(queue, sends[edge]) if i != j)
                raise ScheduleError(
                    f"{describe(graph.program, *graph.where(bad))}: received in another order than sent"
                )
            link, sizes = self.costs.link(*edge), {}
            for i in queue:
                op = ops[i]
                size_key = (op[0], op[5], op[6], op[7])
                if size_key not in sizes:
                    sizes[size_key] = message_bytes(self.costs, graph.program, edge[0], op) / link.bytes_per_s
                occupied = sizes[size_key]
                late = posted.get(other[i], 0.0)
                self.duration[i] = occupied + link.latency_s + late
                self.waits[i] = graph.waits[other[i]]
                if before and (before[i] >= 0 or before[other[i]] >= 0):
                    self.waits[i] = [*self.waits[i], *(j for j in (before[i], before[other[i]]) if j >= 0)]
                if link.latency_s or link.shared or late:
                    self.occupied[i] = occupied
                if link.shared:
                    self.link[i] = (occupied, link.shared)
            self.queues.append(queue)

    def _posting(self) -> dict[int, float]:
        """Makes computations occupy the host for the transfers posted after them.

        Returns:
            For every transfer, how long after the computation before it it is posted.
        """
        device_of, each, last = self.graph.device, self.costs.post_s, -1
        posted: dict[int, float] = {}
        for i, op in enumerate(self.graph.ops):
            if op[0] in COMPUTE:
                last = i
            elif op[0] in TRANSFERS and last >= 0 and device_of[last] == device_of[i]:
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
        self.arrived: dict[tuple[object, ...], list[tuple[float, int, int, int]]] = {}
        while True:
            while self.ready:
                self._advance(self.ready.pop())
            if not self.heap:
                break
            self._start_shared(*heapq.heappop(self.heap))
        for i, j in enumerate(self.graph.other_end):
            if j >= 0 and self.graph.ops[i][0] in SENDS:
                self.start[i], self.end[i], self.cause[i] = self.start[j], self.end[j], self.cause[j]
        if min(self.end, default=0.0) < 0:
            self._stuck()

    def _advance(self, q: int) -> None:
        """Runs a queue until its head has to wait."""
        queue, start, end, waits, cause = self.queues[q], self.start, self.end, self.waits, self.cause
        duration, waiting, occupied = self.duration, self.waiting, self.occupied
        at, now, last = self.position[q], self.free[q], self.newest[q]
        special = bool(self.link or self.team_of)
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
                if special and (i in self.link or i in self.team_of):
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
        """The head of a queue could start but for shared links or the other members of a collective."""
        if i in self.link:
            if i not in self.offered:
                self.offered.add(i)
                heapq.heappush(self.heap, (begin, i, q, why))
            return
        key = self.team_of[i]
        members = self.arrived.setdefault(key, [])
        if any(member[1] == i for member in members):
            return
        members.append((begin, i, q, why))
        if len(members) == len(self.teams[key]):
            begin, _, _, why = max(members)
            length = max(self.duration[member[1]] for member in members)
            for _, node, queue, _ in members:
                self._finish(queue, node, begin, begin + length, begin + length, why)

    def _start_shared(self, begin: float, i: int, q: int, why: int) -> None:
        occupied, names = self.link[i]
        start = max([begin] + [self.resources.get(name, 0.0) for name in names])
        for name in names:
            self.resources[name] = start + occupied
        self._finish(q, i, start, start + self.duration[i], start + occupied, why)

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


def peak_memory(result: Result) -> Sequence[float]:
    """Peak bytes per device."""
    return [use.peak_bytes for use in result.memory]


__all__ = ["COMPUTE", "Event", "Op", "Result", "peak_memory", "simulate"]
