"""Costs of operations: durations, message sizes, links and memory.  One model for simulator and planner.

Times are per device and chunk and for one whole microbatch; a slice takes its share.  The share of
causal attention grows with the slice: slice ``i`` of ``n`` attends to ``i + diagonal`` slices of keys
and values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from megatron_het.schedule.cutting import SlicePart
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import Op, Program, Shape

PerChunk = tuple[tuple[float, ...], ...]  # ``[device][chunk]``
PerDevice = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices."""

    latency_s: float = 0.0  # added to every message; does not occupy the link
    bytes_per_s: float = math.inf  # bandwidth
    # resources that messages of other links use, too (a network card, a switch port), and their bytes per second: each
    # message gets its time on them as soon as it is ready, first come, first served
    shared: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bytes_per_s > 0:
            raise ValueError(f"link with latency_s = {self.latency_s}, bytes_per_s = {self.bytes_per_s}")


FREE = Link()
"""A link that costs nothing."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, per device and chunk where not said otherwise; activations are those of one microbatch."""

    parameter_bytes: PerChunk = ()  # full (materialised) parameters
    gradient_bytes: PerChunk = ()  # full gradients
    activation_bytes: PerChunk = ()  # kept from forward to backward, without keys, values and logits
    kv_bytes: PerChunk = ()  # keys and values kept from forward to backward
    # parameter_shard_bytes, gradient_shard_bytes, optimizer_bytes: what stays on the device besides; with
    # PARAM_PREFETCH and PARAM_OFFLOAD operations the parameter shard is on the device only in between
    parameter_shard_bytes: PerChunk = ()
    gradient_shard_bytes: PerChunk = ()
    optimizer_bytes: PerChunk = ()
    # per device and chunk: what is left of activation_bytes when activations are offloaded; ``activation_bytes`` minus
    # this leaves with ACT_OFFLOAD and returns with ACT_FETCH
    boundary_bytes: PerChunk = ()
    # temporary, while a FORWARD or BACKWARD of the chunk runs, beyond what it keeps: what a layer recomputes, gradients
    # on their way, attention matrices
    workspace_bytes: PerChunk = ()
    # per device, for one microbatch: what VOCAB_FORWARD keeps, or the last chunk's FORWARD
    logits_bytes: PerDevice = ()
    other_bytes: PerDevice = ()  # per device: context, libraries, fragmentation


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything the simulator needs besides the program.  Only the first two are required."""

    # ``[device][chunk]`` forward of one microbatch, without causal attention when ``attention_forward_s`` is given.
    # Embedding and output layer belong to the first and last chunk, unless the program has EMBED_* and VOCAB_*
    # operations.
    forward_s: PerChunk
    backward_s: PerChunk
    attention_forward_s: PerChunk = ()  # ``[device][chunk]`` causal attention of one microbatch
    attention_backward_s: PerChunk = ()
    weight_share: float = 0.5  # share of ``backward_s`` that computes weight gradients; attention has none
    vocab_forward_s: PerDevice = ()  # per device, its part of VOCAB_FORWARD of one microbatch
    vocab_backward_s: PerDevice = ()  # the same for VOCAB_BACKWARD
    # per device, its part of EMBED_FORWARD of one microbatch; on the first stage: until the tokens are on their way and
    # its own part is there
    embed_forward_s: PerDevice = ()
    embed_backward_s: PerDevice = ()  # the same for EMBED_BACKWARD
    # cost of a slice's attention to itself, in slices; 1 as in the papers, 0.5 with a kernel that skips masked blocks
    diagonal: float = 1.0
    # what slices have of a microbatch's tokens and attention, ``[microbatch][slice]``; empty for equal slices of one
    # document
    parts: tuple[tuple[SlicePart, ...], ...] = ()
    message_bytes: float = 0.0  # activations between two chunks, of one microbatch; the gradient is as large
    kv_message_bytes: PerChunk = ()  # ``[device][chunk]`` keys and values of all layers, of one microbatch
    query_message_bytes: PerChunk = ()  # ``[device][chunk]`` query plus output, of one microbatch
    link: Callable[[int, int], Link] = lambda source, target: FREE  # ``link(source device, target device)``
    # gather_s, reduce_s: ``[device][chunk]`` collectives for the whole chunk
    gather_s: PerChunk = ()
    reduce_s: PerChunk = ()
    # prefetch_s, offload_s: ``[device][chunk]`` parameter shards from and to the host
    prefetch_s: PerChunk = ()
    offload_s: PerChunk = ()
    # act_offload_s, act_fetch_s: ``[device][chunk]`` activations of one microbatch to and from the host
    act_offload_s: PerChunk = ()
    act_fetch_s: PerChunk = ()
    step_s: PerChunk = ()  # ``[device][chunk]`` optimizer step
    # per device, what follows the last operation (gradient reduction, step) when the program has no operations for it
    tail_s: PerDevice = ()
    operation_s: float = 0.0  # fixed time of every compute operation (launch, framework)
    # what was sent stays in memory until the end of the iteration (gloo: whether a send is done can only be found out
    # by waiting for it)
    keeps_sent: bool = False
    # the process posts transfers only when the compute before them in its list is done (CPU executor); else it is far
    # ahead (CUDA streams)
    host_blocks: bool = False
    # with ``host_blocks``, time that the host takes to post one transfer, during which it does not compute
    post_s: float = 0.0
    # by device and operation, durations that replace those of the tables: to replay a measured iteration
    measured_s: Mapping[tuple[int, Op], float] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)  # bytes, for the memory curves

    def check(self, shape: Shape) -> None:
        """Raises ValueError when a table does not fit the shape, naming it."""
        chunks = [len(shape.layers[d.stage]) for d in shape.devices]
        if self.parts and [len(row) for row in self.parts] != [shape.slices] * shape.microbatches:
            counts = [len(row) for row in self.parts]
            raise ValueError(f"parts: of {counts} slices for {shape.microbatches} microbatches of {shape.slices}")
        for owner, names in ((self, _PER_CHUNK), (self.memory, _MEMORY_PER_CHUNK)):
            for name in names:
                table = getattr(owner, name)
                if not table and name not in ("forward_s", "backward_s"):
                    continue
                if [len(row) for row in table] != chunks:
                    raise ValueError(f"{name}: rows of {[len(r) for r in table]} for devices with chunks {chunks}")
                if any(value < 0 or value != value for row in table for value in row):
                    raise ValueError(f"{name}: {table} has a negative entry")
        per_device: tuple[tuple[object, tuple[str, ...]], ...] = (
            (self, _PER_DEVICE),
            (self.memory, _MEMORY_PER_DEVICE),
        )
        for holder, fields_ in per_device:
            for name in fields_:
                row = getattr(holder, name)
                if row and len(row) != len(chunks):
                    raise ValueError(f"{name}: {len(row)} values for {len(chunks)} devices")

    def of_tokens(self, whole: float, op: Op, slices: int) -> float:
        """Returns what a pass has of a figure of a microbatch that is the same for all tokens."""
        return whole * self.parts[op.microbatch][op.slice].tokens if self.parts else whole / slices

    def of_attention(self, whole: float, op: Op, slices: int) -> float:
        """Returns what a pass has of a figure of the attention of a microbatch that is one document."""
        if self.parts:
            return whole * self.parts[op.microbatch][op.slice].attention
        return whole * (op.slice + self.diagonal) / self.attention_total(slices)

    @classmethod
    def of(
        cls,
        shape: Shape,
        *,
        layer_forward_s: Sequence[float],
        layer_backward_s: Sequence[float],
        attention_forward_s: Sequence[float] = (),
        attention_backward_s: Sequence[float] = (),
        **others: object,
    ) -> "Costs":
        """Every chunk costs its layers, without embedding and head.

        Args:
            shape: gives the layers per device and chunk.
            layer_forward_s: per device, one transformer layer and microbatch (without attention when that is
                given apart).
            attention_forward_s: per device, causal attention of one layer.
            **others: further attributes of :class:`Costs`.
        """
        layers = [shape.layers[device.stage] for device in shape.devices]
        times = layer_forward_s, layer_backward_s, attention_forward_s, attention_backward_s
        tables = (tuple(tuple(s * n for n in mine) for s, mine in zip(each_s, layers)) for each_s in times)
        return cls(*tables, **others)  # type: ignore[arg-type]

    @classmethod
    def uniform(cls, shape: Shape, *, forward_s: float = 1.0, backward_s: float = 2.0, **others: object) -> "Costs":
        """Every chunk of every device costs the same."""
        rows = [len(shape.layers[d.stage]) for d in shape.devices]
        return cls(
            forward_s=tuple((forward_s,) * n for n in rows),
            backward_s=tuple((backward_s,) * n for n in rows),
            **others,  # type: ignore[arg-type]
        )

    def attention_total(self, slices: int) -> float:
        """Slices of keys and values that a whole sequence's queries attend to."""
        return slices * (slices - 1) / 2 + slices * self.diagonal


_PER_CHUNK = tuple(f.name for f in fields(Costs) if f.type == PerChunk)
_PER_DEVICE = tuple(f.name for f in fields(Costs) if f.type == PerDevice)
_MEMORY_PER_CHUNK = tuple(f.name for f in fields(Memory) if f.type == PerChunk)
_MEMORY_PER_DEVICE = tuple(f.name for f in fields(Memory) if f.type == PerDevice)


# Durations and message sizes of operations under a cost model.


def at(table: PerChunk, device: int, chunk: int) -> float:
    """Returns a table's entry; nothing where the table is not given."""
    return table[device][chunk] if table else 0.0


class Prices:
    """Seconds of the operations of a program; the rows of their kinds say which (``kinds.Price``)."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs, self.slices = program, costs, program.shape.slices

    def per_chunk(self, table: PerChunk) -> Callable[[int, Op], float]:
        """Seconds of a whole chunk."""
        return lambda d, op: at(table, d, op.chunk)

    def per_layer(self, table: PerChunk) -> Callable[[int, Op], float]:
        """Seconds of the layers of a chunk that an operation is about."""
        return lambda d, op: at(table, d, op.chunk) * layer_share(self.program, d, op)

    def per_slice(self, table: PerChunk) -> Callable[[int, Op], float]:
        """Seconds of a microbatch in a chunk, of which a slice has its share."""
        return lambda d, op: self.part(at(table, d, op.chunk), op)

    def per_slice_of_device(self, row: tuple[float, ...]) -> Callable[[int, Op], float]:
        """Seconds of a microbatch on a device, of which a slice has its share."""
        return lambda d, op: self.part(row[d], op) if row else 0.0

    def part(self, whole: float, op: Op) -> float:
        """Returns a slice's share of what a microbatch takes, by tokens."""
        return self.costs.of_tokens(whole, op, self.slices)

    def linear_backward(self, device: int, op: Op) -> float:
        """Seconds of a backward without attention."""
        return self.part(self.costs.backward_s[device][op.chunk], op)

    def attention(self, table: PerChunk, device: int, op: Op) -> float:
        """Seconds of attention."""
        return self.costs.of_attention(at(table, device, op.chunk), op, self.slices)

    def forward(self, device: int, op: Op) -> float:
        """Seconds of a forward."""
        attention = self.attention(self.costs.attention_forward_s, device, op)
        return self.part(self.costs.forward_s[device][op.chunk], op) + attention + self.costs.operation_s

    def backward(self, device: int, op: Op) -> float:
        """Seconds of a whole backward."""
        attention = self.attention(self.costs.attention_backward_s, device, op)
        return self.linear_backward(device, op) + attention + self.costs.operation_s


def durations(graph: Graph, costs: Costs) -> list[float]:
    """Seconds of every operation of a program; transfers are left at 0 (they depend on the link)."""
    program = graph.program
    prices = Prices(program, costs)
    seconds_of = {kind: kind.price.seconds(prices) for kind in graph.kinds if kind.price.seconds is not None}
    relief_of = {kind: kind.price.relief(prices) for kind in graph.kinds if kind.price.relief is not None}
    out: list[float] = []
    known: dict[tuple[int, int, int, int, int], float] = {}
    alike = {kind for kind in graph.kinds - relief_of.keys() if kind.fields.names_pass and not kind.fields.has_peer}
    for d, ops in enumerate(program.ops):
        given = 0.0
        for op in ops:
            kind = op.kind
            price = seconds_of.get(kind)
            if kind in alike:
                key = (d, kind, op.slice, op.chunk, op.microbatch if costs.parts else 0)
                seconds = known.get(key)
                if seconds is None:
                    seconds = known[key] = price(d, op) if price is not None else 0.0
                if given and kind.price.attends:
                    seconds, given = seconds - given, 0.0
                out.append(seconds)
            elif price is not None:
                out.append(price(d, op))
            else:
                if kind in relief_of:
                    given += relief_of[kind](d, op)
                out.append(0.0)
    if program.shape.sizes:
        _resize(graph, costs, out)
    if costs.measured_s:
        found = (costs.measured_s.get((d, op)) for d, op in zip(graph.device, graph.ops))
        out = [old if new is None else new for old, new in zip(out, found)]
    return out


def _resize(graph: Graph, costs: Costs, seconds: list[float]) -> None:
    """Gives operations of smaller microbatches their share of the time, apart from what every operation costs."""
    sizes = graph.program.shape.relative_sizes()
    for i, op in enumerate(graph.ops):
        if op.microbatch >= 0:
            fixed = costs.operation_s if op.kind.price.is_pass else 0.0
            seconds[i] = (seconds[i] - fixed) * sizes[op.microbatch] + fixed


def layer_share(program: Program, device: int, op: Op) -> float:
    """Share of a chunk that the layers ``[start, stop)`` of an operation are; all of it without a range."""
    layers = program.shape.layers[program.devices[device].stage][op.chunk]
    return (op.stop - op.start) / layers if op.start >= 0 and layers else 1.0


def message_bytes(costs: Costs, program: Program, source: int, op: Op) -> float:
    """Size of a transfer, given its receive and the device that sends."""
    shape = program.shape
    size = shape.sizes[op.microbatch] / max(shape.sizes) if shape.sizes else 1.0
    if op.kind.price.size is not None:
        return op.kind.price.size(costs, program, source, op) * size
    return costs.of_tokens(costs.message_bytes, op, shape.slices) * size
