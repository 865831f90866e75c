"""Kinds of operations of the context exchange, with their dependencies, costs and rules.

The owner of a pass needs partial results in the middle of every layer, and its helper computes them in the middle of
its own layers.  Neither pass can end before the other has begun.  So all passes of a slot between which attention
moves, and the attention of devices without a pass, are one event (``schedule/joint.py``).
"""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from megatron_het.schedule.cost import Costs, PerChunk, Prices, at
from megatron_het.schedule.deps import Dependencies, Lifetimes, Need, State, shown_ranges
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import COMPUTE, Op, Program
from megatron_het.schedule.joint import aligned_slots
from megatron_het.schedule.kinds import (
    GREY,
    INPUT,
    LIGHT,
    NEITHER,
    NO_EFFECT,
    NO_NEEDS,
    OUTPUT_GRADIENT,
    RULES,
    Direction,
    Effect,
    Fields,
    Kind,
    Making,
    Needs,
    Price,
    Role,
    Rule,
    Rules,
    Stream,
    Value,
    add_kinds,
    executed_by,
    where,
)
from megatron_het.schedule.memory import Timeline

QUERY, QUERY_BACKWARD = Value("the query"), Value("the output gradient")
PARTIAL = Value("the partial attention", for_a_peer=True)
PARTIAL_BACKWARD = Value("the partial attention gradient", for_a_peer=True)
KV = Value("the keys and values", for_a_peer=True)
KV_BACKWARD = Value("the keys and values (backward)", for_a_peer=True)


def exchanged_layers(layers: Iterable[Iterable[int]]) -> int:
    """Number of layers, from a chunk's first, in which attention is exchanged: that of the smallest chunk.

    Args:
        layers: Number of layers with attention of every chunk, by stage.
    """
    return min(count for row in layers for count in row)


# Values that the operations need.


def _keys(deps: Dependencies) -> Rule:
    def needs(device: int, op: Op) -> list[Need]:
        if _newest_slice(deps, op) >= op.slice:  # the slice's own keys are computed in this very pass
            return deps.input(device, op)
        return [_newest_keys(deps, device, op)]

    return needs


def _newest_slice(deps: Dependencies, op: Op) -> int:
    """The last of the slices whose keys and values are sent."""
    return -(-op.stop // max(deps.units, 1)) - 1


def _newest_keys(deps: Dependencies, device: int, op: Op) -> Need:
    return (device, (Value.OUTPUT, op.microbatch, _newest_slice(deps, op), op.chunk))


def _by_owner(value: Value) -> Needs:
    return Needs(lambda deps: lambda device, op: [(op.peer, (value, op.microbatch, op.slice, op.peer_chunk))])


def _by_helper(value: Value) -> Needs:
    return Needs(lambda deps: lambda device, op: [(op.peer, (value, op.microbatch, op.slice, op.chunk, device))])


# Keys and values of other devices exist from their receive on.


class Keys(State):
    """Exchange units of others' keys and values that have been received, by owner, microbatch and chunk."""

    def __init__(self, held: Lifetimes, program: Program, kinds: Set[Kind]) -> None:
        super().__init__(held, program, kinds)
        self._received: dict[tuple[int, int, int], set[int]] = {}
        self._travel = not kinds.isdisjoint(_ARRIVALS)

    def arrive(self, node: int, op: Op, found: list[int]) -> None:
        """Add received units."""
        self._received.setdefault((op.peer, op.microbatch, op.peer_chunk), set()).update(range(op.start, op.stop))

    def use(self, node: int, op: Op, found: list[int]) -> None:
        """Check that attention for others has the owner's keys, received for this pass or kept from an earlier one."""
        have = self._received.get((op.peer, op.microbatch, op.peer_chunk), set())
        lacking = set(range(op.start, op.stop)) - have
        if self._travel and lacking:
            self.held.unfit(node, f"units {shown_ranges(lacking)} of the owner's keys and values were not received")


# Seconds and bytes.


def _share_of_units(costs: Costs, whole: float, op: Op, slices: int, units: int) -> float:
    """Returns an operation's share of ``whole``, a figure of a microbatch's attention."""
    if costs.parts:
        return whole * sum(costs.parts[op.microbatch][op.slice].units[op.start : op.stop])
    return (op.stop - op.start) * whole / (units * costs.attention_total(slices))


def _key_bytes(costs: Costs, program: Program, source: int, op: Op) -> float:
    """Bytes of keys and values in one message: in proportion to its tokens."""
    whole, units = at(costs.kv_message_bytes, source, op.peer_chunk), program.attention_units
    if not costs.parts:
        return whole * (op.stop - op.start) / (units * program.shape.slices)
    row = costs.parts[op.microbatch]
    return whole * sum(row[unit // units].tokens for unit in range(op.start, op.stop)) / units


class _Attention:
    """Seconds of attention that moves between devices."""

    def __init__(self, prices: Prices) -> None:
        self._costs, self._shape, self._slices = prices.costs, prices.program.shape, prices.slices
        self._units = max(prices.program.attention_units, 1)
        self._exchanged = exchanged_layers(self._shape.attention_layers)
        for microbatch, row in enumerate(self._costs.parts):
            counts, units = [len(part.units) for part in row], self._units
            if counts != [index * units for index in range(len(row))]:
                raise ValueError(f"parts: of {counts} exchange units in microbatch {microbatch}, for {units} per slice")

    def _table(self, op: Op) -> PerChunk:
        backward = op.kind.direction is Direction.BACKWARD
        return self._costs.attention_backward_s if backward else self._costs.attention_forward_s

    def given(self, device: int, op: Op) -> float:
        """Time of attention over the units ``[start, stop)`` that this device saves."""
        layers = self._shape.attention_layers[self._shape.devices[device].stage][op.chunk]
        whole = self._exchanged / max(1, layers) * at(self._table(op), device, op.chunk)
        return _share_of_units(self._costs, whole, op, self._slices, self._units)

    def helped(self, device: int, op: Op) -> float:
        """Time that a helper spends, by its own speed of attention and the number of exchanging layers."""
        table = self._table(op)
        own_layers = sum(self._shape.attention_layers[self._shape.devices[device].stage])
        if not table or not own_layers:
            return 0.0
        whole = sum(table[device]) * self._exchanged / own_layers
        return _share_of_units(self._costs, whole, op, self._slices, self._units)


def _merged(prices: Prices) -> Callable[[int, Op], float]:
    """Time of sending the query and receiving the partial output, neither of which is hidden."""

    def seconds(device: int, op: Op) -> float:
        link = prices.costs.link(device, op.peer)
        size = prices.part(at(prices.costs.query_message_bytes, device, op.chunk), op)
        return 2 * link.latency_s + size / link.bytes_per_s

    return seconds


# The rows.

_UNITS = Fields(has_peer=True, by_heads=True)
_UNITS_OF_PEER = Fields(has_peer=True, by_heads=True, of_peer=True)
_PALE = (0.75, 0.0, 0.35)
_EXCHANGE = NEITHER | {
    "executor": "context_exchange",
    "role": Role.OTHER,
    "stream": Stream.COMPUTE,
    "fields": _UNITS,
    "effect": NO_EFFECT,
}
_SEND = _EXCHANGE | {"stream": Stream.SEND, "is_issued": True, "price": Price(size=_key_bytes), "colour": GREY}
_RECEIVE = _EXCHANGE | {
    "stream": Stream.RECEIVE,
    "fields": _UNITS_OF_PEER,
    "needs": NO_NEEDS,
    "making": Making.REPEATED,
    "effect": Effect(lifetime=lambda held: held.state(Keys).arrive),
    "price": Price(size=_key_bytes),
    "colour": GREY,
}
_GIVE = _EXCHANGE | {
    "making": Making.REPEATED,
    "price": Price(relief=lambda prices: _Attention(prices).given),
    "colour": LIGHT,
}
_HELP = _EXCHANGE | {
    "works": True,
    "fields": _UNITS_OF_PEER,
    "effect": Effect(lifetime=lambda held: held.state(Keys).use),
    "price": Price(seconds=lambda prices: _Attention(prices).helped),
    "colour": _PALE,
}
_MERGE = _EXCHANGE | {"making": Making.COMPLETED, "price": Price(seconds=_merged), "colour": LIGHT}
_FORWARD, _BACKWARD = {"direction": Direction.FORWARD}, {"direction": Direction.BACKWARD}

# fmt: off
add_kinds({
    # Keys and values ``[start, stop)`` (exchange units) leave for ``peer``, ahead of their use.
    "KV_SEND": _SEND | _FORWARD | {
        "mnemonic": "KS", "needs": Needs(_keys), "fed_by": "RECV_FORWARD", "other_end": "KV_RECV"},
    "KV_RECV": _RECEIVE | _FORWARD | {"mnemonic": "KR", "makes": KV, "other_end": "KV_SEND"},
    # The query of the following FORWARD is handed to ``peer``, to attend to units ``[start, stop)``.
    "ATTEND_GIVE": _GIVE | _FORWARD | {
        "mnemonic": "AG", "needs": INPUT, "makes": QUERY, "fed_by": "RECV_FORWARD"},
    # Attention of ``peer``'s query over the units ``[start, stop)`` of ``peer``'s keys and values.
    "ATTEND_HELP": _HELP | _FORWARD | {
        "mnemonic": "AH", "needs": _by_owner(QUERY), "makes": PARTIAL, "fed_by": "KV_RECV"},
    # The partial outputs given away are merged; the FORWARD before it is complete only now.
    "ATTEND_MERGE": _MERGE | _FORWARD | {
        "mnemonic": "AM", "needs": _by_helper(PARTIAL), "makes": Value.OUTPUT, "sent_by": "SEND_FORWARD"},
    "ATTEND_GIVE_BACKWARD": _GIVE | _BACKWARD | {
        "mnemonic": "AGB", "needs": OUTPUT_GRADIENT, "makes": QUERY_BACKWARD, "fed_by": "RECV_BACKWARD"},
    "ATTEND_HELP_BACKWARD": _HELP | _BACKWARD | {
        "mnemonic": "AHB", "needs": _by_owner(QUERY_BACKWARD), "makes": PARTIAL_BACKWARD,
        "fed_by": "KV_RECV_BACKWARD"},
    "ATTEND_MERGE_BACKWARD": _MERGE | _BACKWARD | {
        "mnemonic": "AMB", "needs": _by_helper(PARTIAL_BACKWARD), "makes": Value.GRADIENT, "sent_by": "SEND_BACKWARD"},
    # As in the forward, for the attention's backward pass (when the peer did not keep them).
    "KV_SEND_BACKWARD": _SEND | _BACKWARD | {
        "mnemonic": "KSB", "other_end": "KV_RECV_BACKWARD",
        "needs": Needs(lambda deps: lambda device, op: [_newest_keys(deps, device, op)])},
    "KV_RECV_BACKWARD": _RECEIVE | _BACKWARD | {
        "mnemonic": "KRB", "makes": KV_BACKWARD, "other_end": "KV_SEND_BACKWARD"},
})
# fmt: on

EXCHANGE = executed_by("context_exchange")
HELPS = frozenset({Kind.ATTEND_HELP, Kind.ATTEND_HELP_BACKWARD})
OWNERS = frozenset(kind for kind in EXCHANGE if not kind.fields.of_peer)
"""Kinds of the device that owns the attention; the other kinds are the helper's."""
_ARRIVALS = frozenset({Kind.KV_RECV, Kind.KV_RECV_BACKWARD})
_MARKS = EXCHANGE - HELPS - where(lambda kind: kind.stream in (Stream.SEND, Stream.RECEIVE))


@dataclass(frozen=True, slots=True)
class JointSlot:
    """Passes and helpers of a slot."""

    passes: dict[int, Op]  # the pass of each device that has one
    # the ATTEND_HELP operations of each device without a pass, in list order.  The last one computes all of them,
    # because the owners run layer by layer at the same time.
    idle: dict[int, tuple[Op, ...]]
    helped: frozenset[tuple[int, int]]  # (owner, helper) of every move

    def event(self, device: int) -> Op | None:
        """The operation in which the device takes part in the joint event."""
        return self.passes.get(device) or next(reversed(self.idle.get(device, ())), None)


def joint_slots(program: Program) -> list[JointSlot]:
    """The slots of a program with exchange, in their order.

    Raises:
        ValueError: the passes are not aligned in slots, or a device attends for a pass that does not exist.
    """
    slots = aligned_slots(program)
    slot_of = {(d, op): i for i, (_, _, passes) in enumerate(slots) for d, op in passes.items()}
    idle: list[dict[int, list[Op]]] = [{} for _ in slots]
    helped: list[set[tuple[int, int]]] = [set() for _ in slots]
    for d, ops in enumerate(program.ops):
        for op in ops:
            if op.kind in HELPS:
                kind = Kind.FORWARD if op.kind.direction is Direction.FORWARD else Kind.BACKWARD
                owner = Op(kind, op.microbatch, op.slice, op.peer_chunk)
                if (op.peer, owner) not in slot_of:
                    raise ValueError(f"program {program.name}: device {d} has {op}, but device {op.peer} no {owner}")
                i = slot_of[op.peer, owner]
                helped[i].add((op.peer, d))
                if d not in slots[i][2]:
                    idle[i].setdefault(d, []).append(op)
    return [
        JointSlot(passes, {d: tuple(ops) for d, ops in idle[i].items()}, frozenset(helped[i]))
        for i, (_, _, passes) in enumerate(slots)
    ]


def _nodes(graph: Graph) -> dict[tuple[int, Op], int]:
    return {
        (d, op): i for i, (op, d) in enumerate(zip(graph.ops, graph.device)) if op.kind in COMPUTE or op.kind in HELPS
    }


class ExchangeRules(Rules):
    """Rules for passes of a slot, which run jointly."""

    def lockstep(self, graph: Graph, duration: list[float]) -> None:
        """Make every slot wait for all of the slot before, so that transfers follow one global order, too."""
        if not graph.program.attention_units:
            return
        nodes = _nodes(graph)
        before: dict[int, list[int]] = {}  # by replica: separate pipelines are independent
        for slot in joint_slots(graph.program):
            present = [*slot.passes, *slot.idle]
            pipeline = graph.program.devices[present[0]].replica
            now = [nodes[d, op] for d in present if (op := slot.event(d)) is not None]
            longest = max(duration[node] for node in now)
            for node in now:
                graph.waits[node] = [*graph.waits[node], *before.get(pipeline, ())]
                duration[node] = longest
            before[pipeline] = now

    def joined(self, graph: Graph) -> tuple[Set[int], list[tuple[int, int]]]:
        """Joins owner and helper of every move into one event of their slot."""
        if not graph.program.attention_units:
            return frozenset(), []
        nodes, pairs = _nodes(graph), []
        skipped = {i for i, op in enumerate(graph.ops) if op.kind in _MARKS or op.kind in HELPS}
        for slot in joint_slots(graph.program):
            for devices in slot.helped:
                owner, helper = (nodes[d, event] for d in devices if (event := slot.event(d)) is not None)
                skipped -= {owner, helper}
                pairs.append((owner, helper))
        return skipped, pairs

    def busy(self, program: Program, device: int) -> Set[Op]:
        """The operations that attend for others in slots without a pass of the device's own."""
        events = (slot.event(device) for slot in (joint_slots(program) if program.attention_units else ()))
        return frozenset(op for op in events if op is not None and op.kind in HELPS)

    def kept_buffers(self, timeline: Timeline, device: int) -> dict[int, tuple[int, int]]:
        """Buffers of others' keys and values: each receive, with the last and the first backward attention that use it.

        Without a backward, the last one is also the second entry.
        """
        graph = timeline.graph
        if not graph.program.attention_units:
            return {}
        newest: dict[tuple[int, int, int, int], int] = {}
        last_use: dict[int, int] = {}
        first_backward: dict[int, int] = {}
        for i, op in enumerate(timeline.program.ops[device], graph.first[device]):
            if op.kind in _ARRIVALS:
                newest.update(((op.peer, op.microbatch, op.peer_chunk, unit), i) for unit in range(op.start, op.stop))
            elif op.kind in HELPS:
                for unit in range(op.start, op.stop):
                    receive = newest.get((op.peer, op.microbatch, op.peer_chunk, unit))
                    if receive is not None:
                        last_use[receive] = i
                        if op.kind.direction is Direction.BACKWARD:
                            first_backward.setdefault(receive, i)
        return {receive: (last, first_backward.get(receive, last)) for receive, last in last_use.items()}

    def volume(self, program: Program, device: int, op: Op) -> float:
        """Query and output (2), or keys and values (2 per slice), of every layer; twice that in the backward.

        These are, as in section 4.2.3: query, output, and their gradients; keys, values and their gradients.
        """
        if op.kind not in EXCHANGE or op.kind in (Kind.ATTEND_MERGE, Kind.ATTEND_MERGE_BACKWARD):
            return 0.0
        owner = op.peer if op.kind.fields.of_peer else device
        layers = program.shape.layers[program.shape.devices[owner].stage][op.peer_chunk]
        is_keys = op.kind.stream is not Stream.COMPUTE
        tensors = 2.0 * (op.stop - op.start) / program.attention_units if is_keys else 2.0
        return layers * tensors * (2 if op.kind.direction is Direction.BACKWARD else 1)


RULES.append(ExchangeRules())
