"""Inserts operations that all devices of a microbatch have: at slot boundaries, or at moments of a replay."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_het.schedule.graph import Graph, replay, waits_to_leave
from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.kinds import HELPS, Direction, Role, where
from megatron_het.schedule.passes.transfers import plain_durations
from megatron_het.schedule.slots import aligned_slots

_CLOSE = 1e-9
_OWN = where(lambda kind: kind.role in (Role.PASS, Role.GIVE, Role.MERGE))

Inserts = list[dict[int, list[Op]]]
"""Per device: operations to insert before a position."""


class Moment(NamedTuple):
    """When an operation is inserted on all devices that its microbatch visits.  Ordered by time, forwards first.

    Attributes:
        time: in the replay.
        backward: a moment of the backward.
        node: the compute operation whose microbatch and slice it has.
    """

    time: float
    backward: bool
    node: int


class Place(NamedTuple):
    """Where an operation is inserted.

    Attributes:
        kind: of the operation.
        ahead: before what runs on a device at the moment; else before what starts at or after it.
        own: on the device of the moment's node: positions after the node; None: as on the others.
    """

    kind: Kind
    ahead: bool
    own: int | None


def with_inserts(program: Program, inserts: Inserts) -> Program:
    """The program with the inserts at their places."""
    out = []
    for ops, added in zip(program.ops, inserts):
        row: list[Op] = []
        for i, op in enumerate(ops):
            row += added.get(i, ())
            row.append(op)
        out.append(tuple(row + added.get(len(ops), [])))
    return replace(program, ops=tuple(out))


def timed_inserts(
    program: Program,
    speeds: Sequence[float] | None,
    moments: Callable[[Graph, Sequence[float], Sequence[float]], Iterable[Moment]],
    forward: Place,
    backward: Place,
    bounds: Sequence[tuple[int, int]] | None = None,
) -> Inserts:
    """Inserts at moments of a replay of the program with plain durations.

    On no device does an insert come before an earlier one.

    Args:
        program: without transfers.
        speeds: relative speed of each device, None for equal ones.
        moments: from the graph, and start and end of its operations.
        forward: where the inserts of forward moments go.
        backward: where those of backward moments go.
        bounds: per device, the first and the last position at which there may be one; None: anywhere.
    """
    graph = Graph(program, open_sends=True)
    graph.check_complete()
    # Earlier inserts happen at one moment, so that these come in one order with them.
    graph.waits = waits_to_leave(graph)
    start, end, _ = replay(graph, plain_durations(program, graph, speeds))
    starts = [start[a:b] for a, b in zip(graph.first, graph.first[1:])]
    ends = [end[a:b] for a, b in zip(graph.first, graph.first[1:])]
    inserts: Inserts = [{} for _ in program.ops]
    latest = [0] * len(program.ops)
    for moment in sorted(moments(graph, start, end)):
        kind, ahead, own = backward if moment.backward else forward
        op, owner = graph.ops[moment.node], graph.device[moment.node]
        for d in graph.deps.team(op.microbatch):
            if d == owner and own is not None:
                place = moment.node - graph.first[d] + own
            else:
                place = 0 if ahead else bisect_left(starts[d], moment.time - _CLOSE)
            if not ahead or d != owner or own is None:  # after inserts of that moment, on all devices alike
                place = max(place, bisect_right(ends[d], moment.time + _CLOSE))
            if bounds is not None:
                place = min(max(place, bounds[d][0]), bounds[d][1])
            latest[d] = place = max(place, latest[d])
            inserts[d].setdefault(place, []).append(Op(kind, op.microbatch, op.slice))
    return inserts


def slot_inserts(program: Program, wanted: Sequence[tuple[int, Op]]) -> Inserts:
    """Inserts of ``wanted`` operations at the starts of slots.

    Args:
        program: its passes are aligned.
        wanted: (slot, operation), in the order of slots.
    """
    slots = aligned_slots(program)
    number = {
        (d, backward, op.microbatch, op.slice, op.chunk): s
        for s, (_, backward, passes) in enumerate(slots)
        for d, op in passes.items()
    }
    inserts: Inserts = []
    for d, ops in enumerate(program.ops):
        of_op = _slot_numbers(d, ops, number, len(slots))
        row: dict[int, list[Op]] = {}
        mine = set(program.shape.microbatches_of(d))
        for slot, op in wanted:
            if op.microbatch in mine:
                row.setdefault(bisect_left(of_op, slot), []).append(op)
        inserts.append(row)
    return inserts


def _slot_numbers(
    device: int, ops: Sequence[Op], number: Mapping[tuple[int, bool, int, int, int], int], end: int
) -> list[int]:
    """Slot of every operation; what belongs to none (sends ahead of time) goes with what follows it."""
    out = [end] * len(ops)
    following = end
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        backward = op.kind.direction is Direction.BACKWARD
        if op.kind in _OWN:
            following = number[device, backward, op.microbatch, op.slice, op.chunk]
        elif op.kind in HELPS:
            following = number[op.peer, backward, op.microbatch, op.slice, op.peer_chunk]
        out[i] = following
    return out
