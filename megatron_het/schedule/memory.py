"""Memory of a simulated iteration: every device, every category, over time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_het.schedule.cost import PerChunk
from megatron_het.schedule.durations import layer_share, message_bytes
from megatron_het.schedule.graph import collection_paused
from megatron_het.schedule.ir import COMPUTE, RECEIVES, Kind

if TYPE_CHECKING:
    from megatron_het.schedule.simulate import Result

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
def memory_use(result: "Result") -> tuple[MemoryUse, ...]:
    """Memory of every device."""
    kinds = {op[0] for op in result.graph.ops}
    consumers = _consumers(result)
    return tuple(_of_device(result, d, kinds, consumers) for d in range(len(result.program.ops)))


def _of_device(result: "Result", device: int, kinds: set[int], consumers: dict[int, int]) -> MemoryUse:
    held = _at_start(result, device, kinds)
    changes = [*_compute_changes(result, device, kinds), *_buffer_changes(result, device, consumers)]
    if Kind.PARAM_GATHER in kinds or Kind.GRAD_REDUCE in kinds or Kind.PARAM_PREFETCH in kinds:
        changes += _state_changes(result, device, kinds)
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


def _at_start(result: "Result", device: int, kinds: set[int]) -> list[float]:
    memory = result.costs.memory
    total = lambda table: sum(table[device]) if table else 0.0  # noqa: E731
    held = [0.0] * len(CATEGORIES)
    held[_OPTIMIZER] = total(memory.optimizer_bytes)
    held[_OTHER] = memory.other_bytes[device] if memory.other_bytes else 0.0
    if Kind.PARAM_GATHER not in kinds:
        held[_PARAMETERS] += total(memory.parameter_bytes)
    if Kind.PARAM_PREFETCH not in kinds:
        held[_PARAMETERS] += total(memory.parameter_shard_bytes)
    if Kind.GRAD_REDUCE not in kinds:
        held[_GRADIENTS] += total(memory.gradient_bytes)
    held[_GRADIENTS] += total(memory.gradient_shard_bytes) if Kind.OPTIMIZER_STEP not in kinds else 0.0
    return held


def _table(table: PerChunk, device: int, slices: int) -> Callable[[int], float]:
    row = [value / slices for value in table[device]] if table else None
    return (lambda chunk: row[chunk]) if row is not None else (lambda chunk: 0.0)


def _compute_changes(result: "Result", device: int, kinds: set[int]) -> Iterator[Change]:
    """Activations, keys and values, logits, and what is needed only while an operation runs."""
    memory, program = result.costs.memory, result.program
    slices, first = program.shape.slices, result.graph.first[device]
    start, end = result.start_s, result.end_s
    kept, kv = _table(memory.activation_bytes, device, slices), _table(memory.kv_bytes, device, slices)
    boundary = _table(memory.boundary_bytes, device, slices)
    workspace = _table(memory.workspace_bytes, device, slices)
    logits = memory.logits_bytes[device] / slices if memory.logits_bytes else 0.0
    last_chunk = program.shape.path[-1]
    last_chunk = last_chunk[1] if last_chunk[0] == program.devices[device].stage and not program.vocabulary else -1
    for i, op in enumerate(program.ops[device], first):
        kind, chunk = op[0], op[3]
        if memory.workspace_bytes and kind < 4:
            yield start[i], workspace(chunk), _WORKSPACE
            yield end[i], -workspace(chunk), _WORKSPACE
        if kind == 0:
            yield start[i], kept(chunk), _ACTIVATIONS
            if memory.kv_bytes:
                yield start[i], kv(chunk), _KV
            if logits and chunk == last_chunk:
                yield start[i], logits, _LOGITS
            if program.forward_only:  # nothing is kept for a backward; keys and values until the last slice
                yield end[i], -kept(chunk), _ACTIVATIONS
                if logits and chunk == last_chunk:
                    yield end[i], -logits, _LOGITS
                if memory.kv_bytes and op[2] == slices - 1:
                    yield end[i], -kv(chunk) * slices, _KV
        elif kind == 1 or kind == 3:
            yield end[i], -kept(chunk), _ACTIVATIONS
            if memory.kv_bytes:
                yield end[i], -kv(chunk), _KV
            if logits and chunk == last_chunk:
                yield end[i], -logits, _LOGITS
        elif kind == Kind.VOCAB_FORWARD and logits:
            yield start[i], logits, _LOGITS
            if program.forward_only:
                yield end[i], -logits, _LOGITS
        elif kind == Kind.VOCAB_BACKWARD and logits:
            yield end[i], -logits, _LOGITS
        elif kind == Kind.ACT_OFFLOAD:
            yield end[i], boundary(chunk) - kept(chunk), _ACTIVATIONS
        elif kind == Kind.ACT_FETCH:
            yield start[i], kept(chunk) - boundary(chunk), _ACTIVATIONS


def _consumers(result: "Result") -> dict[int, int]:
    """Who uses what each receive brings: the first operation that waits for it."""
    ops = result.graph.ops
    found: dict[int, int] = {}
    if not (result.costs.message_bytes or result.costs.kv_message_bytes):
        return found
    for i, waits in enumerate(result.graph.waits):
        for j in waits:
            if ops[j][0] in RECEIVES:
                found.setdefault(j, i)
    return found


def _buffer_changes(result: "Result", device: int, consumers: dict[int, int]) -> Iterator[Change]:
    """Receive buffers until the consumer starts (then they are its input); send buffers until they are sent.

    A receive buffer is there from the moment its receive is posted: in the order of the list, after the
    compute before it, however late the data comes.
    """
    if not consumers:
        return
    graph, program, costs = result.graph, result.program, result.costs
    start, end = result.start_s, result.end_s
    kept = _held_keys(result, device) if program.exchange_units else {}
    issued = 0.0
    for i, op in enumerate(program.ops[device], graph.first[device]):
        if op[0] in COMPUTE:
            issued = end[i]
        elif i in kept:
            size = message_bytes(costs, program, op.peer, op)
            last, first_backward = kept[i]
            yield start[i], size, _KV
            yield end[last], -size, _KV
            if first_backward < last:  # gradients are added up where the keys are, and return with the last pass
                yield end[first_backward], size, _KV
                yield end[last], -size, _KV
        elif op[0] in RECEIVES:
            size = message_bytes(costs, program, op.peer, op)
            yield min(start[i], issued), size, _BUFFERS
            yield (start[consumers[i]] if i in consumers else result.makespan_s), -size, _BUFFERS
        elif graph.other_end[i] >= 0:
            size = message_bytes(costs, program, device, graph.ops[graph.other_end[i]])
            produced = max((end[j] for j in graph.waits[i]), default=start[i])
            yield produced, size, _BUFFERS
            yield result.makespan_s if costs.keeps_sent else end[i], -size, _BUFFERS


def _held_keys(result: "Result", device: int) -> dict[int, tuple[int, int]]:
    """Keys and values of others: each receive with the last, and the first backward, attention that uses it here.

    Without any backward, the last one stands for the first backward too.
    """
    graph = result.graph
    newest: dict[tuple[int, int, int, int], int] = {}
    last_use: dict[int, int] = {}
    first_backward: dict[int, int] = {}
    for i, op in enumerate(result.program.ops[device], graph.first[device]):
        if op[0] in (Kind.KV_RECV, Kind.KV_RECV_BACKWARD):
            newest.update(((op.peer, op.microbatch, op.peer_chunk, unit), i) for unit in range(op.start, op.stop))
        elif op[0] in (Kind.ATTEND_HELP, Kind.ATTEND_HELP_BACKWARD):
            for unit in range(op.start, op.stop):
                receive = newest.get((op.peer, op.microbatch, op.peer_chunk, unit))
                if receive is not None:
                    last_use[receive] = i
                    if op[0] == Kind.ATTEND_HELP_BACKWARD:
                        first_backward.setdefault(receive, i)
    return {receive: (last, first_backward.get(receive, last)) for receive, last in last_use.items()}


def _state_changes(result: "Result", device: int, kinds: set[int]) -> Iterator[Change]:
    """Parameters and gradients of programs that gather, reduce and offload."""
    memory, program = result.costs.memory, result.program
    start, end = result.start_s, result.end_s
    full, shard = _table(memory.parameter_bytes, device, 1), _table(memory.parameter_shard_bytes, device, 1)
    gradient, reduced = _table(memory.gradient_bytes, device, 1), _table(memory.gradient_shard_bytes, device, 1)
    stepped = Kind.OPTIMIZER_STEP in kinds
    open_gradients: set[int] = set()
    gathered: dict[int, float] = {}
    # Without steps in the program a chunk is updated when it is first opened, by the gradients of the
    # iteration before, which were there from the start.
    updated: set[int] = set()
    # What a gather or a copy fills is allocated when the operation is issued, in the order of the list:
    # after the compute before it, however long the collectives ahead of it take.
    issued = 0.0
    for i, op in enumerate(program.ops[device], result.graph.first[device]):
        kind, chunk = op[0], op[3]
        if kind in COMPUTE:
            issued = end[i]
        match kind:
            case Kind.PARAM_GATHER:
                share = layer_share(program, device, op)
                gathered[chunk] = gathered.get(chunk, 0.0) + share
                if not stepped and not program.forward_only and chunk not in updated:
                    updated.add(chunk)
                    yield min(start[i], issued), -reduced(chunk), _GRADIENTS
                yield min(start[i], issued), full(chunk) * share, _PARAMETERS
            case Kind.PARAM_RELEASE:
                share = layer_share(program, device, op) if op.start >= 0 else gathered.get(chunk, 0.0)
                gathered[chunk] = gathered.get(chunk, 0.0) - share
                yield end[i], -full(chunk) * share, _PARAMETERS
            case Kind.PARAM_PREFETCH:
                yield min(start[i], issued), shard(chunk), _PARAMETERS
            case Kind.PARAM_OFFLOAD:
                yield end[i], -shard(chunk), _PARAMETERS
            case Kind.GRAD_REDUCE:
                share = layer_share(program, device, op)
                yield end[i], -gradient(chunk) * share, _GRADIENTS
                if not program.forward_only:
                    yield start[i], reduced(chunk) * share, _GRADIENTS
            case Kind.OPTIMIZER_STEP:
                yield end[i], -reduced(chunk), _GRADIENTS
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                if chunk not in open_gradients and Kind.GRAD_REDUCE in kinds:
                    open_gradients.add(chunk)
                    yield start[i], gradient(chunk), _GRADIENTS
