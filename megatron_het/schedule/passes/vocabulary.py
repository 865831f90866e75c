"""Splits the output layer over the devices of each microbatch (SlimPipe, section 4.3)."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from megatron_het.schedule.exchange import aligned_slots
from megatron_het.schedule.graph import Graph, collection_paused, replay
from megatron_het.schedule.ir import TRANSFERS, Kind, Op, Program
from megatron_het.schedule.passes.transfers import plain_durations

_HELPS = {Kind.ATTEND_HELP: False, Kind.ATTEND_HELP_BACKWARD: True}
_OWN = {
    Kind.FORWARD: False, Kind.ATTEND_GIVE: False, Kind.ATTEND_MERGE: False,
    Kind.BACKWARD: True, Kind.ATTEND_GIVE_BACKWARD: True, Kind.ATTEND_MERGE_BACKWARD: True,
}  # fmt: skip


@collection_paused()
def add_vocabulary(program: Program, *, speeds: Sequence[float] | None = None) -> Program:
    """The program with VOCAB_FORWARD and VOCAB_BACKWARD on every device that a microbatch visits.

    The vocabulary forward of a slice goes to the end of the slot in which the last chunk ran the slice, the
    vocabulary backward to the start of the slot of its first backward.  Where passes are not aligned in
    slots, a replay of the program with plain durations tells where these moments are.  Run this after the
    exchange and before transfers are added.

    Args:
        program: without transfers.
        speeds: relative speed of each device, for the replay.

    Raises:
        ValueError: the program has vocabulary operations or transfers already.
    """
    sends = {Kind.KV_SEND, Kind.KV_SEND_BACKWARD}
    if program.vocabulary or any(op[0] in TRANSFERS - sends for ops in program.ops for op in ops):
        raise ValueError(f"program {program.name}: the vocabulary is split once, before transfers are added")
    inserts = _by_slot(program) or _by_time(program, speeds)
    return replace(with_inserts(program, inserts), vocabulary=True)


Inserts = list[dict[int, list[Op]]]
"""Per device: operations to insert before a position."""


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


def _by_slot(program: Program) -> Inserts | None:
    """Inserts at slot boundaries; None when passes are not aligned."""
    try:
        slots = aligned_slots(program)
    except ValueError:
        return None
    stage, chunk = program.shape.path[-1]
    wanted = [
        (s + (not backward), Op(Kind.VOCAB_BACKWARD if backward else Kind.VOCAB_FORWARD, op[1], op[2]))
        for s, (_, backward, passes) in enumerate(slots)
        for d, op in passes.items()
        if program.devices[d].stage == stage and op[3] == chunk
    ]
    return slot_inserts(program, wanted)


def slot_inserts(program: Program, wanted: Sequence[tuple[int, Op]]) -> Inserts:
    """Inserts of ``wanted`` operations, on all devices that their microbatches visit, at the starts of slots.

    Args:
        program: its passes are aligned.
        wanted: (slot, operation), in the order of slots.
    """
    slots = aligned_slots(program)
    number = {
        (d, backward, op[1], op[2], op[3]): s
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


def _slot_numbers(device: int, ops: Sequence[Op], number: dict[tuple[int, ...], int], end: int) -> list[int]:
    """Slot of every operation; what belongs to none (sends ahead of time) goes with what follows it."""
    out = [end] * len(ops)
    following = end
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        if op.kind in _OWN:
            following = number[device, _OWN[op.kind], op[1], op[2], op[3]]
        elif op.kind in _HELPS:
            following = number[op.peer, _HELPS[op.kind], op[1], op[2], op.peer_chunk]
        out[i] = following
    return out


def _by_time(program: Program, speeds: Sequence[float] | None) -> Inserts:
    """Inserts at the moments when the last chunk ends its forward, or begins its backward, of a slice.

    A vocabulary forward goes before what starts at or after its moment, a backward behind what has ended
    by then, and both behind earlier inserts.  So on no device does anything before an insert depend on
    something behind the same insert on another device, and the result runs, even if the devices wait for
    each other there.
    """
    graph = Graph(program, open_sends=True)
    graph.check_complete()
    start, end, _ = replay(graph, plain_durations(program, graph, speeds))
    starts = [start[a:b] for a, b in zip(graph.first, graph.first[1:])]
    ends = [end[a:b] for a, b in zip(graph.first, graph.first[1:])]
    inserts: Inserts = [{} for _ in program.ops]
    latest = [0] * len(program.ops)
    for time, backward, node in _last_chunk(graph, start, end):
        op, owner = graph.ops[node], graph.device[node]
        kind = Kind.VOCAB_BACKWARD if backward else Kind.VOCAB_FORWARD
        for d in graph.deps.team(op[1]):
            if d == owner:
                place = node - graph.first[d] + (not backward)
            elif backward:  # before what runs at that moment, or it would come too late
                place = bisect_right(ends[d], time + 1e-9)
            else:
                place = bisect_left(starts[d], time - 1e-9)
            latest[d] = place = max(place, latest[d])
            inserts[d].setdefault(place, []).append(Op(kind, op[1], op[2]))
    return inserts


def _last_chunk(graph: Graph, start: Sequence[float], end: Sequence[float]) -> list[tuple[float, bool, int]]:
    """(moment, is it a backward, operation) of the model's last chunk, by time; forwards first."""
    stage, chunk = graph.program.shape.path[-1]
    found = []
    for d, device in enumerate(graph.program.devices):
        if device.stage == stage:
            for node in range(graph.first[d], graph.first[d + 1]):
                kind = graph.ops[node][0]
                if kind < 3 and graph.ops[node][3] == chunk:
                    found.append((start[node] if kind else end[node], kind > 0, node))
    return sorted(found)
