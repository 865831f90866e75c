"""Memory of a simulated iteration: every device, every category, over time."""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_het.schedule.cost import Costs, PerChunk, message_bytes
from megatron_het.schedule.deps import Lifetimes
from megatron_het.schedule.graph import Graph, collection_paused
from megatron_het.schedule.ir import COMPUTE, RECEIVES, Kind, Op, Program
from megatron_het.schedule.kinds import PARTS, RULES, Direction, Stream, Work, chunk_of

# What a simulation finds: when every operation runs, and why not earlier.


class Event(NamedTuple):
    """One operation in time."""

    device: int
    stream: str
    op: Op
    start_s: float
    end_s: float


def trace_event(name: str, pid: int, tid: int, start_s: float, end_s: float) -> dict[str, Any]:
    """An event of a Chrome trace (Perfetto): integer process and thread; times in microseconds."""
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}


def trace_name(what: str, pid: int, tid: int, **arguments: object) -> dict[str, Any]:
    """Names a process or a thread of a Chrome trace, or says where a process stands."""
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": arguments}


class Timeline:
    """When everything happens in one iteration.

    Attributes:
        graph: of the program; operation numbers below refer to it.
        costs: the cost model.
        start_s, end_s: per operation.  Both ends of a transfer have the same times.
        cause: per operation, the operation that it waited for last, -1 for none.
        posting_s: by compute operation, the time after it in which the host posts transfers.
        compute_queues: per device, the operations of its compute stream.
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
        # per device, time spent in compute operations
        self.compute_s = [sum([duration[i] for i in queue]) for queue in compute_queues]
        tails = costs.tail_s or (0.0,) * len(self.program.ops)
        firsts = graph.first
        self.device_end_s = [
            max(self.end_s[firsts[d] : firsts[d + 1]], default=0.0) + tails[d] for d in range(len(self.program.ops))
        ]
        self.makespan_s = max(self.device_end_s)  # end of the iteration, tails included

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


class Moment(NamedTuple):
    """Holds what a device keeps when an operation begins, or when the first half of a split backward ends."""

    layers: int  # whose activations are kept, counted once for every microbatch
    waiting: int  # of which only the weight gradients are to be computed
    losses: int  # microbatches for which output layer and loss keep activations
    waiting_losses: int  # and for which only the output layer's weight gradient is to be computed
    is_forward: bool
    ends: bool  # it is the end of the operation


def moments(program: Program, device: int) -> set[Moment]:
    """The moments of an iteration at which a device may hold most."""
    stage = program.shape.devices[device].stage
    layers, found = program.shape.layers[stage], set[Moment]()
    now = (0, 0, 0, 0)
    for op in program.ops[device]:
        work, loss = op.kind.work, int((stage, op.chunk) == program.shape.path[-1])
        keep = (Work.FORWARD in work) - (Work.INPUT in work)
        wait = (Work.INPUT in work) - (Work.WEIGHTS in work)
        if op.kind not in COMPUTE or not (keep or wait):
            continue
        before, each, (kept, waiting, losses, last) = now, layers[op.chunk], now
        now = kept + each * keep, waiting + each * wait, losses + loss * keep, last + loss * wait
        found.add(Moment(*(before if keep < 0 else now), keep > 0, False))
        if wait > 0:
            found.add(Moment(*now, False, True))
    return found


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "kv", "logits", "buffers", "other", "workspace")
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, KV, LOGITS, BUFFERS, OTHER, WORKSPACE = range(len(CATEGORIES))

Change = tuple[float, float, int]  # (time, bytes, category)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device."""

    peak_bytes: float  # the most that is held at once
    peak_at_s: float  # when that is first so
    at_peak_bytes: dict[str, float]  # by category, at that moment
    start_bytes: dict[str, float]  # by category, at the start of the iteration
    changes: tuple[Change, ...]  # (time in s, bytes, category index) in order

    def curve(self, category: str | None = None) -> list[tuple[float, float]]:
        """(time, bytes held from then on), of one category or of all."""
        wanted = None if category is None else CATEGORIES.index(category)
        held = sum(self.start_bytes.values()) if category is None else self.start_bytes[category]
        points = [(0.0, held)]
        for time, amount, which in self.changes:
            if wanted is None or which == wanted:
                held += amount
                if points[-1][0] == time:
                    points[-1] = (time, held)
                else:
                    points.append((time, held))
        return points

    def peak_of(self, category: str) -> float:
        """The most that one category holds at once."""
        return max(held for _, held in self.curve(category))


@collection_paused()
def memory_use(timeline: Timeline) -> tuple[MemoryUse, ...]:
    """Memory of every device."""
    kinds = {op.kind for op in timeline.graph.ops}
    consumers = _consumers(timeline)
    return tuple(_device_use(timeline, d, kinds, consumers) for d in range(len(timeline.program.ops)))


def _device_use(timeline: Timeline, device: int, kinds: Set[Kind], consumers: dict[int, int]) -> MemoryUse:
    held = _at_start(timeline, device, kinds)
    changes = [*Holdings(timeline, device, kinds).changes(), *_buffer_changes(timeline, device, consumers)]
    changes.sort()  # at one moment what is freed goes first
    now, peak, at, snapshot = sum(held), sum(held), 0.0, list(held)
    running = list(held)
    last = len(changes) - 1
    for i, (time, amount, category) in enumerate(changes):
        now += amount
        running[category] += amount
        if now > peak and (i == last or changes[i + 1][0] > time or changes[i + 1][1] > 0):
            peak, at, snapshot = now, time, list(running)
    return MemoryUse(peak, at, dict(zip(CATEGORIES, snapshot)), dict(zip(CATEGORIES, held)), tuple(changes))


_AT_START = {
    "optimizer_bytes": OPTIMIZER,
    "parameter_bytes": PARAMETERS,
    "parameter_shard_bytes": PARAMETERS,
    "gradient_bytes": GRADIENTS,
    "gradient_shard_bytes": GRADIENTS,
}
"""Fields of ``Memory`` that are on a device at the start, unless operations bring them (``Effect.absent``)."""


def _at_start(timeline: Timeline, device: int, kinds: Set[Kind]) -> list[float]:
    memory, absent = timeline.costs.memory, {name for kind in kinds for name in kind.effect.absent}
    held = [0.0] * len(CATEGORIES)
    held[OTHER] = memory.other_bytes[device] if memory.other_bytes else 0.0
    for name, category in _AT_START.items():
        table: PerChunk = getattr(memory, name)
        if table and name not in absent:
            held[category] += sum(table[device])
    return held


class BytesOf:
    """Bytes that a feature's operations bring and take on one device; its effects change ``held.found``."""

    def __init__(self, held: "Holdings", kinds: Set[Kind]) -> None:
        self.held = held

    def makes_gradients(self, node: int, chunk: int) -> None:
        """Gradients of a chunk are made next."""

    def computed(self, node: int) -> None:
        """A part of a layer that devices share has been computed."""


class Holdings:
    """Changes of what one device holds: its effects (``kinds.Effect``) in bytes.

    Keys and values of others, and messages, are buffers, see :func:`_buffer_changes`.
    """

    def __init__(self, timeline: Timeline, device: int, kinds: Set[Kind]) -> None:
        self.program, self.costs, self.memory = timeline.program, timeline.costs, timeline.costs.memory
        self.ops, self.first = self.program.ops[device], timeline.graph.first[device]
        self.start, self.end = timeline.start_s, timeline.end_s
        shape, memory = self.program.shape, self.memory
        self.device, self.slices, self.layers = device, shape.slices, shape.layers[shape.devices[device].stage]
        self.kept = self.row(memory.activation_bytes, shape.slices)
        self.kv = self.row(memory.kv_bytes, shape.slices)
        self.workspace = self.row(memory.workspace_bytes, shape.slices)
        self.logits = memory.logits_bytes[device] / shape.slices if memory.logits_bytes else 0.0
        stage, chunk = shape.path[-1]
        has_loss = stage == shape.devices[device].stage and not self.program.splits_output
        self.own_logits = chunk if has_loss else -1
        self.sizes = shape.relative_sizes()
        # walks along where operations do more than keep and use activations
        self.lifetimes = Lifetimes(self.program, device, kinds) if Lifetimes.matter(kinds) else None
        # end of the compute operation before.  What a gather or a copy fills is allocated when the operation is issued,
        # in the order of the list: after that, however long the collectives ahead of it take.
        self.issued = 0.0
        self.found: list[Change] = []  # the changes
        self._kinds = kinds
        self._states: dict[type[BytesOf], BytesOf] = {}
        self._effects = {kind: kind.effect.memory(self) for kind in kinds if kind.effect.memory is not None}

    def row(self, table: PerChunk, slices: int = 1) -> list[float]:
        """Returns what each chunk of the device has in a table, of one slice."""
        return [value / slices for value in table[self.device]] if table else [0.0] * len(self.layers)

    def state[S: BytesOf](self, state: type[S]) -> S:
        """A feature's bytes on this device."""
        found = self._states.get(state)
        if found is None:
            found = self._states[state] = state(self, self._kinds)
        assert isinstance(found, state)
        return found

    def changes(self) -> list[Change]:
        """All changes, in the order of the list."""
        end, states = self.end, tuple(self._states.values())
        with_workspace = bool(self.memory.workspace_bytes)
        for i, op in enumerate(self.ops, self.first):
            kind = op.kind
            if kind in COMPUTE:
                self.issued = end[i]
                if with_workspace:
                    workspace = self.workspace[op.chunk] * self.size(op)
                    self.found.append((self.start[i], workspace, WORKSPACE))
                    self.found.append((self.end[i], -workspace, WORKSPACE))
                for state in states if Work.WEIGHTS in kind.work else ():
                    state.makes_gradients(i, op.chunk)
            elif kind in PARTS:
                for state in states:
                    state.computed(i)
                    if kind.direction is Direction.BACKWARD:
                        state.makes_gradients(i, chunk_of(kind, op.chunk, len(self.layers)))
            effect = self._effects.get(kind)
            if effect is not None:
                effect(i, op)
        return self.found

    def size(self, op: Op) -> float:
        """How many times as many tokens a pass has as an equal slice of the largest microbatch."""
        size = self.sizes[op.microbatch]
        return self.costs.of_tokens(size * self.slices, op, self.slices) if self.costs.parts else size

    def keep(self, node: int, op: Op) -> None:
        """A FORWARD keeps activations."""
        chunk, start, size = op.chunk, self.start[node], self.size(op)
        kept, keys, logits = self.kept[chunk] * size, self.kv[chunk] * size, self.logits * size
        self.found.append((start, kept, ACTIVATIONS))
        if self.memory.kv_bytes:
            self.found.append((start, keys, KV))
        if logits and chunk == self.own_logits:
            self.found.append((start, logits, LOGITS))
        if self.program.forward_only:  # nothing is kept for a backward; keys and values until the last slice
            self.found.append((self.end[node], -kept, ACTIVATIONS))
            if logits and chunk == self.own_logits:
                self.found.append((self.end[node], -logits, LOGITS))
            if self.memory.kv_bytes and op.slice == self.slices - 1:
                whole = self.kv[chunk] * self.sizes[op.microbatch] * self.slices
                self.found.append((self.end[node], -whole, KV))

    def use_up(self, node: int, op: Op) -> None:
        """A backward lets them go."""
        chunk, end, size = op.chunk, self.end[node], self.size(op)
        self.found.append((end, -self.kept[chunk] * size, ACTIVATIONS))
        if self.memory.kv_bytes:
            self.found.append((end, -self.kv[chunk] * size, KV))
        if self.logits and chunk == self.own_logits:
            self.found.append((end, -self.logits * size, LOGITS))


def _consumers(timeline: Timeline) -> dict[int, int]:
    """Consumer of each receive: the first operation that waits for it."""
    ops = timeline.graph.ops
    found: dict[int, int] = {}
    if not (timeline.costs.message_bytes or timeline.costs.kv_message_bytes):
        return found
    for i, waits in enumerate(timeline.graph.waits):
        for j in waits:
            if ops[j].kind in RECEIVES:
                found.setdefault(j, i)
    return found


def _buffer_changes(timeline: Timeline, device: int, consumers: dict[int, int]) -> Iterator[Change]:
    """Receive buffers until the consumer starts (then they are its input); send buffers until they are sent.

    A receive buffer is there from the moment its receive is posted: in the order of the list, after the
    compute before it, however late the data comes.
    """
    if not consumers:
        return
    graph, program, costs = timeline.graph, timeline.program, timeline.costs
    start, end = timeline.start_s, timeline.end_s
    kept: dict[int, tuple[int, int]] = {}
    for rules in RULES:
        kept |= rules.kept_buffers(timeline, device)
    issued = 0.0
    for i, op in enumerate(program.ops[device], graph.first[device]):
        if op.kind in COMPUTE:
            issued = end[i]
        elif i in kept:
            size = message_bytes(costs, program, op.peer, op)
            last, first_backward = kept[i]
            yield start[i], size, KV
            yield end[last], -size, KV
            if first_backward < last:  # gradients are added up where the keys are, and return with the last pass
                yield end[first_backward], size, KV
                yield end[last], -size, KV
        elif op.kind in RECEIVES:
            size = message_bytes(costs, program, op.peer, op)
            yield min(start[i], issued), size, BUFFERS
            yield (start[consumers[i]] if i in consumers else timeline.makespan_s), -size, BUFFERS
        elif graph.other_end[i] >= 0:
            size = message_bytes(costs, program, device, graph.ops[graph.other_end[i]])
            produced = max((end[j] for j in graph.waits[i]), default=start[i])
            yield produced, size, BUFFERS
            yield timeline.makespan_s if costs.keeps_sent else end[i], -size, BUFFERS
