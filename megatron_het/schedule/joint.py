"""Joint work of devices: slots, in which they run in step, events, and reductions of gradients that begin early.

Some operations cannot end before others of another device have begun: passes of a slot between which attention moves
(``features/context_exchange/kinds.py``), the parts of a split vocabulary that meet (``graph.meetings``).  These are
one *joint event*.

Why that cannot deadlock: replace every joint event by one node, and both ends of every transfer.  If what is left has
no cycle, all lists are projections of one total order of events.  The first event of that order that has not happened
can always happen, because everybody who takes part in it has arrived.  Inside an event all devices go through the same
layers in the same order, and post what they send before they wait.  :func:`stuck_events` looks for the cycle.

The same holds wherever the host waits for the device, as it does when a kernel is launched for the first time: all that
it waits for was posted for earlier events.  Hence what replicas gather and reduce together is an event, too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

from megatron_het.schedule.graph import Graph, ScheduleError, meetings
from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.kinds import (
    INPUT_GRADIENTS,
    OUTPUT_PARTS,
    RULES,
    WEIGHT_GRADIENTS,
    WORD_PARTS,
    Direction,
    Work,
    where,
)

# Aligned slots: devices run their passes in step, one slot after the other.
#
# In forward slot ``k`` stage ``s`` runs its ``(k - s)``-th forward, in backward slot ``k`` its
# ``(k - (stages - 1 - s))``-th backward.


class Slot(NamedTuple):
    """One aligned slot of a pipeline."""

    # number among the forward or backward slots
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    backward: bool  # which of the two
    passes: dict[int, Op]  # the pass that each device runs; idle devices are absent


def aligned_slots(program: Program) -> list[Slot]:
    """Every slot, in the one order that all devices' lists agree with.

    Of several pipelines the slots of one come after those of another.

    Raises:
        ValueError: the lists do not agree with any order of slots, microbatches change between replicas,
            backwards are split into two operations, chunks are placed in a V, or stages have different numbers of them.
    """
    if program.shape.placement != "loop":
        raise ValueError(f"program {program.name}: its chunks are placed in a V, so its slots are not aligned")
    if len(set(map(len, program.shape.layers))) > 1:
        raise ValueError(f"program {program.name}: stages have different numbers of chunks, so slots are not aligned")
    if any((op.kind in INPUT_GRADIENTS) != (op.kind in WEIGHT_GRADIENTS) for ops in program.ops for op in ops):
        raise ValueError(f"program {program.name}: its backwards are split in two, so its slots are not aligned")
    pipelines = program.shape.pipelines()
    if pipelines is None:
        raise ValueError(f"program {program.name}: replicas are not separate pipelines, so their slots are not aligned")
    return [slot for devices in pipelines for slot in _pipeline_slots(program, devices)]


def _pipeline_slots(program: Program, devices: Sequence[int]) -> list[Slot]:
    lists = {d: program.compute(d) for d in devices}
    passes: tuple[list[dict[int, Op]], list[dict[int, Op]]] = ([], [])
    for stage, d in enumerate(devices):
        for backward in (False, True):
            shift = len(devices) - 1 - stage if backward else stage
            for i, op in enumerate(op for op in lists[d] if (op.kind is not Kind.FORWARD) == backward):
                slots = passes[backward]
                slots.extend({} for _ in range(shift + i + 1 - len(slots)))
                slots[shift + i][d] = op
    at, position = [0, 0], dict.fromkeys(devices, 0)
    out: list[Slot] = []
    while at[0] < len(passes[0]) or at[1] < len(passes[1]):
        for backward in (False, True):
            if at[backward] == len(passes[backward]):
                continue
            slot = passes[backward][at[backward]]
            if all(position[d] < len(lists[d]) and lists[d][position[d]] == op for d, op in slot.items()):
                out.append(Slot(at[backward], backward, slot))
                at[backward] += 1
                for d in slot:
                    position[d] += 1
                break
        else:
            raise ValueError(f"program {program.name}: its passes are not aligned in slots, so there is no exchange")
    return out


class _Events:
    """Operations merged into events (a union-find over the nodes of a graph)."""

    def __init__(self, graph: Graph, together: Iterable[Sequence[int]] = ()) -> None:
        self.graph = graph
        self.parent = parent = [b if b > a else a for a, b in enumerate(graph.other_end)]  # of both ends one
        self.skipped: set[int] = set()
        for rules in RULES:
            skipped, pairs = rules.joined(graph)
            self.skipped |= skipped
            for first, second in pairs:
                parent[self.of(first)] = self.of(second)
        for nodes in (*meetings(graph), *together):
            for node in nodes[1:]:
                parent[self.of(node)] = self.of(nodes[0])
        self.event_of = [up if parent[up] == up else self.of(up) for up in parent]  # by operation
        # the same, and for one that is not an event the last event of its device before it
        carriers = map(self._carrier, range(len(parent) if self.skipped else 0))
        self.carrier_of = [self.event_of[carrier] for carrier in carriers] or self.event_of

    def of(self, node: int) -> int:
        """The event of an operation."""
        parent = self.parent
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def _carrier(self, node: int) -> int:
        while node in self.skipped and node > self.graph.first[self.graph.device[node]]:
            node -= 1
        return node


def event_places(
    graph: Graph,
    together: Sequence[Sequence[int]] = (),
    spans: Mapping[int, tuple[Sequence[int], Sequence[int]]] | None = None,
    key: Callable[[int], float] = float,
    extra: Iterable[tuple[int, int]] = (),
) -> list[int]:
    """The place of every operation's event in one order of all events; -1 where it can never happen.

    Args:
        together: Operations of several devices that are one event each, besides those of the module's text.
        spans: Operations that may be anywhere after some and before others of their device.
        key: Of what can happen, that whose operation has the lowest key comes first.
        extra: Pairs of operations, the first of which comes before the second.
    """
    events, spans = _Events(graph, together), spans or {}
    skipped, event_of, carrier_of = events.skipped, events.event_of, events.carrier_of
    waits, pairs = graph.waits, list[tuple[int, int]]()
    for first, end in pairwise(graph.first):
        last = -1
        for node in range(first, end):
            if node in skipped:
                continue
            event = event_of[node]
            if node not in spans:
                if last >= 0:
                    pairs.append((last, event))
                last = event
            for other in waits[node]:  # values that are not the pipeline's transfers, e.g. of the vocabulary
                if not first <= other < end:
                    pairs.append((carrier_of[other], event))
    below = [(low, node) for node, (lows, _) in spans.items() for low in lows]
    above = [(node, high) for node, (_, highs) in spans.items() for high in highs]
    pairs += [(event_of[low], event_of[high]) for low, high in (*extra, *below, *above)]
    after: list[list[int]] = [[] for _ in event_of]
    count = [0] * len(event_of)
    for one, other in pairs:
        if one != other:
            after[one].append(other)
            count[other] += 1
    there = {event for node, event in enumerate(event_of) if node not in skipped}
    free = [(key(event), event) for event in there if count[event] == 0]
    heapify(free)
    place, turn = [-1] * len(event_of), 0
    while free:
        _, event = heappop(free)
        place[event], turn = turn, turn + 1
        for target in after[event]:
            count[target] -= 1
            if count[target] == 0:
                heappush(free, (key(target), target))
    return [place[event] for event in carrier_of]


def stuck_events(graph: Graph, together: Sequence[Sequence[int]] = ()) -> Iterator[int]:
    """Nodes of events that can never happen, at most one per device; see the module's text.

    Args:
        together: See :func:`event_places`.
    """
    events = _Events(graph, together)
    skipped, event_of, carrier_of = events.skipped, events.event_of, events.carrier_of
    left = [0] * len(event_of)  # by event, operations that have not come to it
    for node, event in enumerate(event_of):
        left[event] += node not in skipped
    bounds = list(pairwise(graph.first))
    position, newest = graph.first[:-1], [-1] * len(bounds)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(bounds)))
    while ready:
        d = ready.pop()
        (first, end), i, last = bounds[d], position[d], newest[d]
        while i < end:
            event = event_of[i]
            if i not in skipped:
                blocker = last if last not in (-1, event) and left[last] else -1
                for other in graph.waits[i] if blocker < 0 else ():
                    if not first <= other < end and carrier_of[other] != event and left[carrier_of[other]]:
                        blocker = carrier_of[other]
                if blocker >= 0:
                    waiting.setdefault(blocker, []).append(d)
                    break
                last, left[event] = event, left[event] - 1
                if left[event] == 0:
                    ready += waiting.pop(event, ())
            i += 1
        position[d], newest[d] = i, last
    for first, end in bounds:
        yield from [node for node in range(first, end) if left[carrier_of[node]]][:1]


# From where on Megatron may reduce a chunk's gradients while backward passes still run (``--overlap-grad-reduce``).
#
# Megatron's buckets of gradients count how often each parameter gets one from that point to the end of the first
# iteration, and are reduced in later ones as soon as the same counts are reached.  So the point may be early, as
# long as every parameter gets a gradient after it.  With a split vocabulary a chunk's gradients come from several
# kinds of operations, whose last ones are at different places.


# Half a backward that leaves gradients of linear layers for later makes those of norms and embeddings.
_MAKERS = where(lambda kind: kind.direction is Direction.BACKWARD and (kind.work is not Work.NONE or kind.meets))
_UPDATES = where(lambda kind: kind.effect.updates)

Maker = tuple[Kind, int]
"""(kind, chunk) of the operations that make gradients; parts of layers that devices share have chunk 0."""


def last_makers(ops: Iterable[Any]) -> dict[Maker, int]:
    """Index of a program's or rank's last operation of each kind and chunk that makes gradients, in this order."""
    found: dict[Maker, int] = {}
    for index, op in enumerate(ops):
        if op.kind in _MAKERS:
            found[op.kind, op.chunk] = index
    return dict(sorted(found.items(), key=lambda item: item[1]))


def counting_places(program: Program) -> list[int] | None:
    """How many operations of each device come before all devices add up the tokens of an iteration.

    That is one event of an order of all, after the last loss and before the first update: a device that waits for the
    sum, or whose host waits for the device, then needs nothing of another one that has not come to it.

    Returns:
        None without updates inside the iteration.  Each device's own place where receives are posted early.
    """
    if program.kinds.isdisjoint(_UPDATES):
        return None
    graph = Graph(program)
    # The last forward or part of the output layer, which counts tokens when it goes back; -1 without.  None comes after
    # an update of parameters on any device: an update waits for all microbatches.
    own = []
    for ops in program.ops:
        counting = (i for i, op in enumerate(ops) if op.kind.direction is Direction.FORWARD or op.kind in OUTPUT_PARTS)
        own.append(max(counting, default=-1))
    lasts = [first + last for first, last in zip(graph.first, own) if last >= 0]
    steps = [node for node, op in enumerate(graph.ops) if op.kind in _UPDATES]
    places = event_places(graph, graph.teams(), extra=[(last, step) for last in lasts for step in steps])
    if min(places) < 0 and min(event_places(graph, graph.teams())) < 0:
        # Receives are posted ahead of the order of all, by a host that does not wait for a device: any place will do.
        return [last + 1 for last in own]
    known = max(places[last] for last in lasts)
    if min(places) < 0 or min(places[step] for step in steps) < known:
        raise ScheduleError(f"program {program.name}: an update comes before all losses are known")
    bounds = zip(graph.first, graph.first[1:])
    return [sum(place <= known for place in places[first:end]) for first, end in bounds]


def sync_points(ops: Iterable[Any], chunks: int) -> Mapping[int, tuple[int, ...]]:
    """Chunks whose gradients may be reduced from an operation on, by its index.

    The word embeddings are in the first chunk, the output layer is in the last one, and with tied
    embeddings in the first one too.
    """
    last = last_makers(ops)
    found: dict[int, tuple[int, ...]] = {}
    for chunk in range(chunks):
        makers: list[Maker] = [(kind, chunk) for kind in INPUT_GRADIENTS]
        if chunk in (0, chunks - 1):
            makers += [(kind, 0) for kind in OUTPUT_PARTS]
        if chunk == 0:
            makers += [(kind, 0) for kind in WORD_PARTS]
        places = [last[maker] for maker in makers if maker in last]
        if places:
            found[min(places)] = (*found.get(min(places), ()), chunk)
    return found


def unequal_orders(program: Program) -> int | None:
    """The first stage whose replicas end their gradients in different orders, None if there is none.

    Their reductions would meet in different orders.
    """
    orders: dict[int, set[tuple[Maker, ...]]] = {}
    for device, ops in zip(program.devices, program.ops, strict=True):
        orders.setdefault(device.stage, set()).add(tuple(last_makers(ops)))
    return next((stage for stage, found in sorted(orders.items()) if len(found) > 1), None)
