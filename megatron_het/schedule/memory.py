"""Memory of a simulated iteration: every device, every category, over time."""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from megatron_het.schedule.cost import Costs, PerChunk, message_bytes
from megatron_het.schedule.graph import Graph, collection_paused
from megatron_het.schedule.ir import COMPUTE, RECEIVES, Kind, Op
from megatron_het.schedule.kinds import PARTS, Direction, Effect, Stream, Work, chunk_of, complete
from megatron_het.schedule.lifetimes import Lifetimes

# What a simulation finds: when every operation runs, and why not earlier.


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


CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "kv", "logits", "buffers", "other", "workspace")
_PARAMETERS, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _KV, _LOGITS, _BUFFERS, _OTHER, _WORKSPACE = range(len(CATEGORIES))

Change = tuple[float, float, int]
"""(time, bytes, category)"""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of one device.

    Attributes:
        peak_bytes: the most that is held at once.
        peak_at_s: when that is first so.
        at_peak_bytes: by category, at that moment.
        start_bytes: by category, at the start of the iteration.
        changes: (time in s, bytes, category index) in order.
    """

    peak_bytes: float
    peak_at_s: float
    at_peak_bytes: dict[str, float]
    start_bytes: dict[str, float]
    changes: tuple[Change, ...]

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
    return tuple(_of_device(timeline, d, kinds, consumers) for d in range(len(timeline.program.ops)))


def _of_device(timeline: Timeline, device: int, kinds: Set[Kind], consumers: dict[int, int]) -> MemoryUse:
    held = _at_start(timeline, device, kinds)
    changes = [*_Holdings(timeline, device, kinds).changes(), *_buffer_changes(timeline, device, consumers)]
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


def _at_start(timeline: Timeline, device: int, kinds: Set[Kind]) -> list[float]:
    memory, effects = timeline.costs.memory, {kind.effect for kind in kinds}
    total = lambda table: sum(table[device]) if table else 0.0  # noqa: E731
    held = [0.0] * len(CATEGORIES)
    held[_OPTIMIZER] = total(memory.optimizer_bytes)
    held[_OTHER] = memory.other_bytes[device] if memory.other_bytes else 0.0
    if Effect.GATHER not in effects:
        held[_PARAMETERS] += total(memory.parameter_bytes)
    if Effect.SHARD_FROM_HOST not in effects:
        held[_PARAMETERS] += total(memory.parameter_shard_bytes)
    if Effect.REDUCE not in effects:
        held[_GRADIENTS] += total(memory.gradient_bytes)
    held[_GRADIENTS] += total(memory.gradient_shard_bytes) if Effect.STEP not in effects else 0.0
    return held


def _row(table: PerChunk, device: int, chunks: int, slices: int) -> list[float]:
    return [value / slices for value in table[device]] if table else [0.0] * chunks


class _Holdings:
    """Changes of what one device holds: its effects (``kinds.Effect``) in bytes.

    Which layers are gathered and reduced is taken from :class:`Lifetimes`.  Keys and values of others, and messages,
    are buffers, see :func:`_buffer_changes`.
    """

    def __init__(self, timeline: Timeline, device: int, kinds: Set[Kind]) -> None:
        self.program, self.costs, self.memory = timeline.program, timeline.costs, timeline.costs.memory
        self.present = {kind.effect for kind in kinds}
        self.ops, self.first = self.program.ops[device], timeline.graph.first[device]
        self.start, self.end = timeline.start_s, timeline.end_s
        shape, memory = self.program.shape, self.memory
        self.slices, self.layers = shape.slices, shape.layers[shape.devices[device].stage]
        rows = {"chunks": len(self.layers), "device": device}
        self.kept = _row(memory.activation_bytes, slices=shape.slices, **rows)
        self.boundary = _row(memory.boundary_bytes, slices=shape.slices, **rows)
        self.kv = _row(memory.kv_bytes, slices=shape.slices, **rows)
        self.workspace = _row(memory.workspace_bytes, slices=shape.slices, **rows)
        self.full = _row(memory.parameter_bytes, slices=1, **rows)
        self.shard = _row(memory.parameter_shard_bytes, slices=1, **rows)
        self.gradient = _row(memory.gradient_bytes, slices=1, **rows)
        self.gradient_shard = _row(memory.gradient_shard_bytes, slices=1, **rows)
        self.logits = memory.logits_bytes[device] / shape.slices if memory.logits_bytes else 0.0
        stage, chunk = shape.path[-1]
        split = Effect.KEEP_LOGITS in self.present
        self.own_logits = chunk if stage == shape.devices[device].stage and not split else -1
        self.sizes = shape.relative_sizes()
        self.state = Lifetimes(self.program, device, kinds) if Lifetimes.matter(kinds) else None
        # What a gather or a copy fills is allocated when the operation is issued, in the order of the list:
        # after the compute before it, however long the collectives ahead of it take.
        self.issued = 0.0
        self.with_gradients: set[int] = set()
        self.with_shards: set[tuple[int, int]] = set()
        # Without steps in the program a chunk is updated when it is first opened, by the gradients of the
        # iteration before, which were there from the start.
        self.updated: set[int] = set()
        self.found: list[Change] = []
        self.effects: dict[Effect, Callable[[int, Op], None] | None] = complete(
            Effect,
            {
                Effect.KEEP: self._keep,
                Effect.USE: None,
                Effect.USE_UP: self._use_up,
                Effect.USE_UP_WITHOUT_PARAMETERS: self._use_up,
                Effect.KEEP_LOGITS: self._keep_logits,
                Effect.USE_UP_LOGITS: self._use_up_logits,
                Effect.TO_HOST: self._to_host,
                Effect.FROM_HOST: self._from_host,
                Effect.KEYS_ARRIVE: None,
                Effect.USE_KEYS: None,
                Effect.SHARD_FROM_HOST: self._shard_from_host,
                Effect.GATHER: self._gather,
                Effect.RELEASE: self._release,
                Effect.SHARD_TO_HOST: self._shard_to_host,
                Effect.REDUCE: self._reduce,
                Effect.STEP: self._step,
                Effect.NOTHING: None,
            },
        )

    def changes(self) -> list[Change]:
        """All changes, in the order of the list."""
        handlers = [self.effects[kind.effect] for kind in Kind]
        reduces, end = Effect.REDUCE in self.present, self.end
        with_workspace = bool(self.memory.workspace_bytes)
        for i, op in enumerate(self.ops, self.first):
            kind = op.kind
            if kind in COMPUTE:
                self.issued = end[i]
                if with_workspace:
                    workspace = self.workspace[op.chunk] * self._size(op)
                    self.found.append((self.start[i], workspace, _WORKSPACE))
                    self.found.append((self.end[i], -workspace, _WORKSPACE))
                if reduces and Work.WEIGHTS in kind.work:
                    self._open_gradients(i, op.chunk)
            elif kind in PARTS:
                self.issued = end[i] if Effect.GATHER in self.present else self.issued
                if reduces and kind.direction is Direction.BACKWARD:
                    self._open_gradients(i, chunk_of(kind, op.chunk, len(self.layers)))
            handler = handlers[kind]
            if handler is not None:
                handler(i, op)
        return self.found

    def _size(self, op: Op) -> float:
        """How many times as many tokens a pass has as an equal slice of the largest microbatch."""
        size = self.sizes[op.microbatch]
        return self.costs.of_tokens(size * self.slices, op, self.slices) if self.costs.parts else size

    def _keep(self, node: int, op: Op) -> None:
        chunk, start, size = op.chunk, self.start[node], self._size(op)
        kept, keys, logits = self.kept[chunk] * size, self.kv[chunk] * size, self.logits * size
        self.found.append((start, kept, _ACTIVATIONS))
        if self.memory.kv_bytes:
            self.found.append((start, keys, _KV))
        if logits and chunk == self.own_logits:
            self.found.append((start, logits, _LOGITS))
        if self.program.forward_only:  # nothing is kept for a backward; keys and values until the last slice
            self.found.append((self.end[node], -kept, _ACTIVATIONS))
            if logits and chunk == self.own_logits:
                self.found.append((self.end[node], -logits, _LOGITS))
            if self.memory.kv_bytes and op.slice == self.slices - 1:
                whole = self.kv[chunk] * self.sizes[op.microbatch] * self.slices
                self.found.append((self.end[node], -whole, _KV))

    def _use_up(self, node: int, op: Op) -> None:
        chunk, end, size = op.chunk, self.end[node], self._size(op)
        self.found.append((end, -self.kept[chunk] * size, _ACTIVATIONS))
        if self.memory.kv_bytes:
            self.found.append((end, -self.kv[chunk] * size, _KV))
        if self.logits and chunk == self.own_logits:
            self.found.append((end, -self.logits * size, _LOGITS))

    def _keep_logits(self, node: int, op: Op) -> None:
        if self.logits:
            logits = self.logits * self._size(op)
            self.found.append((self.start[node], logits, _LOGITS))
            if self.program.forward_only:
                self.found.append((self.end[node], -logits, _LOGITS))

    def _use_up_logits(self, node: int, op: Op) -> None:
        if self.logits:
            self.found.append((self.end[node], -self.logits * self._size(op), _LOGITS))

    def _offloaded(self, op: Op) -> float:
        return (self.kept[op.chunk] - self.boundary[op.chunk]) * self._size(op)

    def _to_host(self, node: int, op: Op) -> None:
        self.found.append((self.end[node], -self._offloaded(op), _ACTIVATIONS))

    def _from_host(self, node: int, op: Op) -> None:
        self.found.append((self.start[node], self._offloaded(op), _ACTIVATIONS))

    def _walk(self, node: int, op: Op) -> float:
        """Goes on to the operation; share of the chunk's layers that it gathers, releases or reduces."""
        assert self.state is not None
        layers = self.state.gathered
        before = len(layers[op.chunk])
        self.state.step(node, op, [])
        if op.kind.effect is Effect.REDUCE:
            return len(self.state.covered(op)) / max(self.layers[op.chunk], 1)
        return abs(len(layers[op.chunk]) - before) / max(self.layers[op.chunk], 1)

    def _gather(self, node: int, op: Op) -> None:
        chunk, at = op.chunk, min(self.start[node], self.issued)
        share = self._walk(node, op)
        if Effect.STEP not in self.present and not self.program.forward_only and chunk not in self.updated:
            self.updated.add(chunk)
            self.found.append((at, -self.gradient_shard[chunk], _GRADIENTS))
        self.found.append((at, self.full[chunk] * share, _PARAMETERS))

    def _release(self, node: int, op: Op) -> None:
        self.found.append((self.end[node], -self.full[op.chunk] * self._walk(node, op), _PARAMETERS))

    def _shard_from_host(self, node: int, op: Op) -> None:
        self.found.append((min(self.start[node], self.issued), self.shard[op.chunk], _PARAMETERS))

    def _shard_to_host(self, node: int, op: Op) -> None:
        self.found.append((self.end[node], -self.shard[op.chunk], _PARAMETERS))

    def _open_gradients(self, node: int, chunk: int) -> None:
        if chunk not in self.with_gradients:
            self.with_gradients.add(chunk)
            self.found.append((self.start[node], self.gradient[chunk], _GRADIENTS))

    def _reduce(self, node: int, op: Op) -> None:
        chunk, share = op.chunk, self._walk(node, op)
        self._open_gradients(node, chunk)  # of a pass that this replica does not have: zeros
        self.found.append((self.end[node], -self.gradient[chunk] * share, _GRADIENTS))
        # Reduced after every pass, the shards of all passes are added up in one place.
        if not self.program.forward_only and (chunk, op.start) not in self.with_shards:
            self.with_shards.add((chunk, op.start))
            self.found.append((self.start[node], self.gradient_shard[chunk] * share, _GRADIENTS))
        assert self.state is not None
        if len(self.state.reduced[chunk]) == max(self.layers[chunk], 1):
            self.with_gradients.discard(chunk)  # the next pass allocates them again

    def _step(self, node: int, op: Op) -> None:
        self.found.append((self.end[node], -self.gradient_shard[op.chunk], _GRADIENTS))


def _consumers(timeline: Timeline) -> dict[int, int]:
    """Who uses what each receive brings: the first operation that waits for it."""
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
    kept = _held_keys(timeline, device) if program.attention_units else {}
    issued = 0.0
    for i, op in enumerate(program.ops[device], graph.first[device]):
        if op.kind in COMPUTE:
            issued = end[i]
        elif i in kept:
            size = message_bytes(costs, program, op.peer, op)
            last, first_backward = kept[i]
            yield start[i], size, _KV
            yield end[last], -size, _KV
            if first_backward < last:  # gradients are added up where the keys are, and return with the last pass
                yield end[first_backward], size, _KV
                yield end[last], -size, _KV
        elif op.kind in RECEIVES:
            size = message_bytes(costs, program, op.peer, op)
            yield min(start[i], issued), size, _BUFFERS
            yield (start[consumers[i]] if i in consumers else timeline.makespan_s), -size, _BUFFERS
        elif graph.other_end[i] >= 0:
            size = message_bytes(costs, program, device, graph.ops[graph.other_end[i]])
            produced = max((end[j] for j in graph.waits[i]), default=start[i])
            yield produced, size, _BUFFERS
            yield timeline.makespan_s if costs.keeps_sent else end[i], -size, _BUFFERS


def _held_keys(timeline: Timeline, device: int) -> dict[int, tuple[int, int]]:
    """Keys and values of others: each receive with the last, and the first backward, attention that uses it here.

    Without any backward, the last one stands for the first backward too.
    """
    graph = timeline.graph
    newest: dict[tuple[int, int, int, int], int] = {}
    last_use: dict[int, int] = {}
    first_backward: dict[int, int] = {}
    for i, op in enumerate(timeline.program.ops[device], graph.first[device]):
        if op.kind.effect is Effect.KEYS_ARRIVE:
            newest.update(((op.peer, op.microbatch, op.peer_chunk, unit), i) for unit in range(op.start, op.stop))
        elif op.kind.effect is Effect.USE_KEYS:
            for unit in range(op.start, op.stop):
                receive = newest.get((op.peer, op.microbatch, op.peer_chunk, unit))
                if receive is not None:
                    last_use[receive] = i
                    if op.kind.direction is Direction.BACKWARD:
                        first_backward.setdefault(receive, i)
    return {receive: (last, first_backward.get(receive, last)) for receive, last in last_use.items()}
