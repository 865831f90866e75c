"""Passes that run jointly: devices that attend for each other go through a slot layer by layer together.

In the attention context exchange (:mod:`~megatron_het.schedule.exchange`) the owner of a pass needs partial
results in the middle of every layer, and its helper makes them in the middle of its own layers.  Neither pass can
end before the other has begun: all passes of a slot between which attention moves, and the attention of devices
without a pass, are one *joint event*.

Why that cannot deadlock: replace every joint event by one node, both ends of every transfer, and the parts of a
split vocabulary that meet (``meetings.py``).  If
what is left has no cycle, all lists are projections of one total order of events.  The first event of that
order that has not happened can always happen, because everybody who takes part in it has arrived.  Inside an
event all devices go through the same layers in the same order, and post what they send before they wait.
:func:`stuck_events` looks for the cycle.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_het.schedule.columns import Direction, Role
from megatron_het.schedule.graph import Graph
from megatron_het.schedule.ir import COMPUTE, Kind, Op, Program
from megatron_het.schedule.kinds import HELPS, where
from megatron_het.schedule.meetings import meetings
from megatron_het.schedule.slots import aligned_slots

_MARKS = where(lambda kind: kind.role in (Role.GIVE, Role.MERGE))


@dataclass(frozen=True, slots=True)
class JointSlot:
    """What happens in a slot.

    Attributes:
        passes: the pass of each device that has one.
        idle: the ATTEND_HELP operations of each device that has none, in list order.  The last one does the
            work of all, because the owners go on layer by layer at the same time.
        helped: (owner, helper) of every move.
    """

    passes: dict[int, Op]
    idle: dict[int, tuple[Op, ...]]
    helped: frozenset[tuple[int, int]]

    def event(self, device: int) -> Op | None:
        """The operation in which the device takes part in the joint event."""
        return self.passes.get(device) or next(reversed(self.idle.get(device, ())), None)


def joint_slots(program: Program) -> list[JointSlot]:
    """The slots of a program with exchange, in their order.

    Raises:
        ValueError: its passes are not aligned in slots, or it attends for a pass that does not exist.
    """
    slots = aligned_slots(program)
    slot_of = {(d, op): i for i, (_, _, passes) in enumerate(slots) for d, op in passes.items()}
    idle: list[dict[int, list[Op]]] = [{} for _ in slots]
    helped: list[set[tuple[int, int]]] = [set() for _ in slots]
    for d, ops in enumerate(program.ops):
        for op in ops:
            if op.kind in HELPS:
                owner = owner_pass(op)
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


def owner_pass(help_: Op) -> Op:
    """The pass of the peer that an ATTEND_HELP operation works for."""
    kind = Kind.FORWARD if help_.kind.direction is Direction.FORWARD else Kind.BACKWARD
    return Op(kind, help_.microbatch, help_.slice, help_.peer_chunk)


def unequal_layers(program: Program) -> str | None:
    """Why the passes of a joint event cannot go layer by layer, None if they can."""
    layers = program.shape.layers
    if len({n for chunks in layers for n in chunks}) > 1:
        return f"layers per chunk {layers}: devices attend for each other layer by layer, so all chunks need as many"
    return None


class _Events:
    """Operations merged into events (a union-find over the nodes of a graph)."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.parent = list(range(len(graph.ops)))
        self.skipped: set[int] = set()
        self._merge_transfers()
        self._merge_slots()
        for nodes in meetings(graph):
            for node in nodes:
                self.parent[self.of(node)] = self.of(nodes[0])

    def of(self, node: int) -> int:
        """The event of an operation."""
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def carrier(self, node: int) -> int:
        """The operation itself; for one that is not an event, the last event of its device before it."""
        first = self.graph.first[self.graph.device[node]]
        while node in self.skipped and node > first:
            node -= 1
        return node

    def _merge_transfers(self) -> None:
        for node, other in enumerate(self.graph.other_end):
            if other >= 0:
                self.parent[self.of(node)] = self.of(other)

    def _merge_slots(self) -> None:
        graph = self.graph
        nodes: dict[tuple[int, Op | None], int]
        nodes = {(d, op): i for i, (op, d) in enumerate(zip(graph.ops, graph.device)) if op.kind in COMPUTE | HELPS}
        self.skipped = {i for i, op in enumerate(graph.ops) if op.kind in _MARKS | HELPS}
        for slot in joint_slots(graph.program):
            for devices in slot.helped:
                owner, helper = ((d, slot.event(d)) for d in devices)
                for place in (owner, helper):
                    self.skipped.discard(nodes[place])
                self.parent[self.of(nodes[owner])] = self.of(nodes[helper])


def stuck_events(graph: Graph) -> Iterator[int]:
    """Nodes of events that can never happen, at most one per device; see the module's text."""
    events = _Events(graph)
    after: dict[int, set[int]] = {}
    lists: list[list[int]] = []
    for d in range(len(graph.program.ops)):
        nodes = [i for i in range(graph.first[d], graph.first[d + 1]) if i not in events.skipped]
        lists.append(nodes)
        for a, b in zip(nodes, nodes[1:]):
            after.setdefault(events.of(a), set()).add(events.of(b))
        for b in nodes:  # values that are not the pipeline's transfers, e.g. of the vocabulary
            earlier = {events.of(events.carrier(a)) for a in graph.waits[b] if graph.device[a] != d}
            for event in earlier - {events.of(b)}:
                after.setdefault(event, set()).add(events.of(b))
    count = dict.fromkeys((events.of(i) for nodes in lists for i in nodes), 0)
    for targets in after.values():
        for target in targets:
            count[target] += 1
    free, happened = [e for e, n in count.items() if n == 0], set()
    while free:
        event = free.pop()
        happened.add(event)
        for target in after.get(event, ()):
            count[target] -= 1
            if count[target] == 0:
                free.append(target)
    for nodes in lists:
        stuck = next((i for i in nodes if events.of(i) not in happened), None)
        if stuck is not None:
            yield stuck


__all__ = ["HELPS", "JointSlot", "joint_slots", "owner_pass", "stuck_events", "unequal_layers"]
