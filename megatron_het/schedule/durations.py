"""Durations and message sizes of operations under a cost model."""

from megatron_het.schedule.cost import Costs, PerChunk
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import Kind, Op, Program


def _at(table: PerChunk, device: int, chunk: int) -> float:
    return table[device][chunk] if table else 0.0


class _Compute:
    """Durations of FORWARD, BACKWARD and its halves, and of attention done for others."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs, self.slices = program, costs, program.shape.slices
        self.total = costs.attention_total(self.slices)
        self.units = max(program.exchange_units, 1)

    def of(self, device: int, op: Op) -> float:
        """The operation itself, with all of its attention."""
        costs, kind, chunk = self.costs, op.kind, op.chunk
        weight = op.slice + costs.diagonal
        if kind == Kind.FORWARD:
            attention = _at(costs.attention_forward_s, device, chunk) * weight / self.total
            return costs.forward_s[device][chunk] / self.slices + attention + costs.operation_s
        attention = _at(costs.attention_backward_s, device, chunk) * weight / self.total
        linear = costs.backward_s[device][chunk] / self.slices
        if kind == Kind.BACKWARD_WEIGHT:
            return linear * costs.weight_share + costs.operation_s
        if kind == Kind.BACKWARD_INPUT:
            return linear * (1 - costs.weight_share) + attention + costs.operation_s
        return linear + attention + costs.operation_s

    def given(self, device: int, op: Op, backward: bool) -> float:
        """Attention over the units ``[start, stop)`` that this device does not have to do itself."""
        costs = self.costs
        table = costs.attention_backward_s if backward else costs.attention_forward_s
        return (op.stop - op.start) * table[device][op.chunk] / (self.units * self.total) if table else 0.0

    def helped(self, device: int, op: Op, backward: bool) -> float:
        """Time a helper spends: its own speed for attention, times the layers of the owner's chunk."""
        shape, costs = self.program.shape, self.costs
        table = costs.attention_backward_s if backward else costs.attention_forward_s
        own_layers = sum(shape.layers[shape.devices[device].stage])
        if not table or not own_layers:
            return 0.0
        owner_layers = shape.layers[shape.devices[op.peer].stage][op.peer_chunk]
        whole = sum(table[device]) * owner_layers / own_layers
        return (op.stop - op.start) * whole / (self.units * self.total)

    def merged(self, device: int, op: Op) -> float:
        """Query out and partial output back, as far as they are not hidden: both, at full length."""
        costs = self.costs
        link = costs.link(device, op.peer)
        size = _at(costs.query_message_bytes, device, op.chunk) / self.slices
        return 2 * link.latency_s + size / link.bytes_per_s


def durations(graph: Graph, costs: Costs) -> list[float]:
    """Seconds of every operation of a program; transfers are left at 0 (they depend on the link)."""
    program = graph.program
    compute = _Compute(program, costs)
    out: list[float] = []
    known: dict[tuple[int, ...], float] = {}
    for d, ops in enumerate(program.ops):
        given = 0.0
        for op in ops:
            kind = op[0]
            if kind < 4:
                key = (d, kind, op[2], op[3])
                seconds = known.get(key)
                if seconds is None:
                    seconds = known[key] = compute.of(d, op)
                if given and kind < 3:
                    seconds, given = seconds - given, 0.0
                out.append(seconds)
            elif kind < 10 or kind > 25:
                out.append(0.0)
            elif kind == Kind.ATTEND_GIVE or kind == Kind.ATTEND_GIVE_BACKWARD:
                given += compute.given(d, op, kind == Kind.ATTEND_GIVE_BACKWARD)
                out.append(0.0)
            elif kind == Kind.ATTEND_HELP or kind == Kind.ATTEND_HELP_BACKWARD:
                out.append(compute.helped(d, op, kind == Kind.ATTEND_HELP_BACKWARD))
            elif kind == Kind.ATTEND_MERGE or kind == Kind.ATTEND_MERGE_BACKWARD:
                out.append(compute.merged(d, op))
            else:
                out.append(_other(program, costs, d, op))
    if costs.measured_s:
        found = (costs.measured_s.get((d, op)) for d, op in zip(graph.device, graph.ops))
        out = [old if new is None else new for old, new in zip(out, found)]
    return out


def _other(program: Program, costs: Costs, device: int, op: Op) -> float:
    slices, chunk = program.shape.slices, op.chunk
    match op.kind:
        case Kind.VOCAB_FORWARD:
            return costs.vocab_forward_s[device] / slices if costs.vocab_forward_s else 0.0
        case Kind.VOCAB_BACKWARD:
            return costs.vocab_backward_s[device] / slices if costs.vocab_backward_s else 0.0
        case Kind.ACT_OFFLOAD:
            return _at(costs.act_offload_s, device, chunk) / slices
        case Kind.ACT_FETCH:
            return _at(costs.act_fetch_s, device, chunk) / slices
        case Kind.PARAM_PREFETCH:
            return _at(costs.prefetch_s, device, chunk)
        case Kind.PARAM_OFFLOAD:
            return _at(costs.offload_s, device, chunk)
        case Kind.PARAM_GATHER:
            return _at(costs.gather_s, device, chunk) * layer_share(program, device, op)
        case Kind.GRAD_REDUCE:
            return _at(costs.reduce_s, device, chunk) * layer_share(program, device, op)
        case Kind.OPTIMIZER_STEP:
            return _at(costs.step_s, device, chunk)
    return 0.0


def layer_share(program: Program, device: int, op: Op) -> float:
    """Share of a chunk that the layers ``[start, stop)`` of an operation are; all of it without a range."""
    layers = program.shape.layers[program.devices[device].stage][op.chunk]
    return (op.stop - op.start) / layers if op.start >= 0 and layers else 1.0


def message_bytes(costs: Costs, program: Program, source: int, op: Op) -> float:
    """Size of a transfer, given its receive and the device that sends."""
    slices = program.shape.slices
    if op.kind in (Kind.KV_RECV, Kind.KV_RECV_BACKWARD):
        share = (op.stop - op.start) / (program.exchange_units * slices)
        return _at(costs.kv_message_bytes, source, op.peer_chunk) * share
    return costs.message_bytes / slices
