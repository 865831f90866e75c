"""Durations and message sizes of operations under a cost model."""

from collections.abc import Callable

from megatron_het.schedule.columns import Direction, Price, Role, complete
from megatron_het.schedule.cost import Costs, PerChunk
from megatron_het.schedule.exchange import exchanged_layers
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import COMPUTE, Op, Program
from megatron_het.schedule.kinds import where

_KEYS = where(lambda kind: kind.role is Role.KEYS)
_SHORTENED = where(lambda kind: kind.price in (Price.FORWARD, Price.BACKWARD, Price.INPUT_GRADIENT))
"""Kinds that have less to do when attention was given away."""
_WITH_FIXED_TIME = (Price.FORWARD, Price.BACKWARD, Price.INPUT_GRADIENT, Price.WEIGHT_GRADIENT)
_TIMELESS = where(lambda kind: kind.price in (Price.LINK, Price.FREE))


def _at(table: PerChunk, device: int, chunk: int) -> float:
    return table[device][chunk] if table else 0.0


class _Prices:
    """Seconds of an operation under each :class:`Price`."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs, self.slices = program, costs, program.shape.slices
        self.units = max(program.attention_units, 1)
        self.exchanged = exchanged_layers(program.shape.attention_layers)
        if costs.parts and program.attention_units:
            costs.check_units(self.units)
        self.of: dict[Price, Callable[[int, Op], float]] = complete(Price, self._all())

    def _all(self) -> dict[Price, Callable[[int, Op], float]]:
        costs = self.costs
        return {
            Price.FORWARD: self._forward,
            Price.BACKWARD: self._backward,
            Price.INPUT_GRADIENT: self._input_gradient,
            Price.WEIGHT_GRADIENT: self._weight_gradient,
            Price.LINK: lambda d, op: 0.0,  # depends on the link, see the simulator
            Price.GIVEN: lambda d, op: 0.0,  # see durations()
            Price.HELPED: self._helped,
            Price.MERGED: self._merged,
            Price.OUTPUT_PART: self._per_slice_of_device(costs.vocab_forward_s),
            Price.OUTPUT_PART_BACKWARD: self._per_slice_of_device(costs.vocab_backward_s),
            Price.WORD_PART: self._per_slice_of_device(costs.embed_forward_s),
            Price.WORD_PART_BACKWARD: self._per_slice_of_device(costs.embed_backward_s),
            Price.PREFETCH: lambda d, op: _at(costs.prefetch_s, d, op.chunk),
            Price.OFFLOAD: lambda d, op: _at(costs.offload_s, d, op.chunk),
            Price.STEP: lambda d, op: _at(costs.step_s, d, op.chunk),
            Price.GATHER: lambda d, op: _at(costs.gather_s, d, op.chunk) * layer_share(self.program, d, op),
            Price.REDUCE: lambda d, op: _at(costs.reduce_s, d, op.chunk) * layer_share(self.program, d, op),
            Price.ACT_OFFLOAD: lambda d, op: self._part(_at(costs.act_offload_s, d, op.chunk), op),
            Price.ACT_FETCH: lambda d, op: self._part(_at(costs.act_fetch_s, d, op.chunk), op),
            Price.FREE: lambda d, op: 0.0,
        }

    def _per_slice_of_device(self, row: tuple[float, ...]) -> Callable[[int, Op], float]:
        return lambda d, op: self._part(row[d], op) if row else 0.0

    def _part(self, whole: float, op: Op) -> float:
        return self.costs.of_tokens(whole, op, self.slices)

    def _attention(self, table: PerChunk, device: int, op: Op) -> float:
        return self.costs.of_attention(_at(table, device, op.chunk), op, self.slices)

    def _forward(self, device: int, op: Op) -> float:
        attention = self._attention(self.costs.attention_forward_s, device, op)
        return self._part(self.costs.forward_s[device][op.chunk], op) + attention + self.costs.operation_s

    def _backward(self, device: int, op: Op) -> float:
        attention = self._attention(self.costs.attention_backward_s, device, op)
        return self._part(self.costs.backward_s[device][op.chunk], op) + attention + self.costs.operation_s

    def _input_gradient(self, device: int, op: Op) -> float:
        attention = self._attention(self.costs.attention_backward_s, device, op)
        linear = self._part(self.costs.backward_s[device][op.chunk], op)
        return linear * (1 - self.costs.weight_share) + attention + self.costs.operation_s

    def _weight_gradient(self, device: int, op: Op) -> float:
        linear = self._part(self.costs.backward_s[device][op.chunk], op)
        return linear * self.costs.weight_share + self.costs.operation_s

    def _attention_table(self, op: Op) -> PerChunk:
        backward = op.kind.direction is Direction.BACKWARD
        return self.costs.attention_backward_s if backward else self.costs.attention_forward_s

    def given(self, device: int, op: Op) -> float:
        """Attention over the units ``[start, stop)`` that this device does not have to do itself."""
        table = self._attention_table(op)
        stage = self.program.shape.devices[device].stage
        share = self.exchanged / max(1, self.program.shape.attention_layers[stage][op.chunk])
        return self.costs.of_units(share * _at(table, device, op.chunk), op, self.slices, self.units)

    def _helped(self, device: int, op: Op) -> float:
        """Time a helper spends: its own speed for attention, times the layers that take part."""
        shape, table = self.program.shape, self._attention_table(op)
        own_layers = sum(shape.attention_layers[shape.devices[device].stage])
        if not table or not own_layers:
            return 0.0
        whole = sum(table[device]) * self.exchanged / own_layers
        return self.costs.of_units(whole, op, self.slices, self.units)

    def _merged(self, device: int, op: Op) -> float:
        """Query out and partial output back, as far as they are not hidden: both, at full length."""
        link = self.costs.link(device, op.peer)
        size = self._part(_at(self.costs.query_message_bytes, device, op.chunk), op)
        return 2 * link.latency_s + size / link.bytes_per_s


def durations(graph: Graph, costs: Costs) -> list[float]:
    """Seconds of every operation of a program; transfers are left at 0 (they depend on the link)."""
    program = graph.program
    prices = _Prices(program, costs)
    out: list[float] = []
    known: dict[tuple[int, int, int, int, int], float] = {}
    for d, ops in enumerate(program.ops):
        given = 0.0
        for op in ops:
            kind = op.kind
            if kind in _TIMELESS:
                out.append(0.0)
            elif kind in COMPUTE:
                key = (d, kind, op.slice, op.chunk, op.microbatch if costs.parts else 0)
                seconds = known.get(key)
                if seconds is None:
                    seconds = known[key] = prices.of[kind.price](d, op)
                if given and kind in _SHORTENED:
                    seconds, given = seconds - given, 0.0
                out.append(seconds)
            else:
                if kind.price is Price.GIVEN:
                    given += prices.given(d, op)
                out.append(prices.of[kind.price](d, op))
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
            fixed = costs.operation_s if op.kind.price in _WITH_FIXED_TIME else 0.0
            seconds[i] = (seconds[i] - fixed) * sizes[op.microbatch] + fixed


def layer_share(program: Program, device: int, op: Op) -> float:
    """Share of a chunk that the layers ``[start, stop)`` of an operation are; all of it without a range."""
    layers = program.shape.layers[program.devices[device].stage][op.chunk]
    return (op.stop - op.start) / layers if op.start >= 0 and layers else 1.0


def message_bytes(costs: Costs, program: Program, source: int, op: Op) -> float:
    """Size of a transfer, given its receive and the device that sends."""
    shape = program.shape
    size = shape.sizes[op.microbatch] / max(shape.sizes) if shape.sizes else 1.0
    if op.kind in _KEYS:
        whole = _at(costs.kv_message_bytes, source, op.peer_chunk)
        return costs.of_unit_tokens(whole, op, shape.slices, program.attention_units) * size
    return costs.of_tokens(costs.message_bytes, op, shape.slices) * size
