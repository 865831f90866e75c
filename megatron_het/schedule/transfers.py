"""Adds sends and receives so that no transport can deadlock.

All transfers of a program get one global order: that in which they happen when the program is replayed
with plain durations.  The sender's send is placed right after the operation that makes the data, and the
peer's receive at the same point of the global order, before whatever the peer completes later.  Every
device's list, compute included, is then a projection of one total order in which both ends of a transfer
are neighbours, so the first transfer that is not finished can always finish: with blocking calls, with one
queue per rank, with any other.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_het.schedule.generators.listing import Speeds
from megatron_het.schedule.graph import Graph, collection_paused, meetings, replay, waits_to_leave
from megatron_het.schedule.ir import COMPUTE, RECEIVES, SENDS, TRANSFERS, Kind, Op, Program
from megatron_het.schedule.joint import aligned_slots
from megatron_het.schedule.kinds import RULES, Direction, Role, Stream, where


def plain_durations(program: Program, graph: Graph, speeds: Sequence[float] | None = None) -> list[float]:
    """Durations by layers and device speed: backward 2, backward of inputs or weights 1, everything else 0."""
    forward_s = Speeds.of(program.shape, speeds).forward_s
    return [
        op.kind.plain_s * forward_s[d][op.chunk] if op.kind.plain_s else 0.0 for op, d in zip(graph.ops, graph.device)
    ]


@collection_paused()
def add_transfers(program: Program, *, speeds: Sequence[float] | None = None, order: str = "global") -> Program:
    """The program with SEND_* and RECV_* operations, and KV_RECV for every KV_SEND.

    Where producer and consumer are the same device (a pipeline of one stage, the turn of a V) there is no
    transfer.

    Args:
        program: without transfers.
        order: ``"global"``, see above; ``"late"`` posts every receive right before its use, as many
            implementations do: not safe on every transport, kept for comparison.

    Raises:
        ScheduleError: the compute order itself cannot run.
        ValueError: the program has transfers already, or an unknown ``order``.
    """
    if program.has_transfers:
        raise ValueError(f"program {program.name} already has transfers")
    if order not in ("global", "late"):
        raise ValueError(f"order = {order!r}: must be global or late")
    graph = Graph(program, open_sends=True)
    graph.check_complete()
    joint = program.attention_units > 0
    duration = plain_durations(program, graph, None if joint else speeds)
    for rules in RULES:
        rules.lockstep(graph, duration)
    graph.waits = graph.together()
    graph.waits = waits_to_leave(graph)
    for nodes in meetings(graph) if program.shape.companions else ():
        longest = max(duration[node] for node in nodes)
        for node in nodes:
            duration[node] = longest  # nobody goes on before all have met
    _, end, runnable = replay(graph, duration)
    runnable.sort(key=end.__getitem__)  # stable: what ends together stays in a runnable order
    if order == "late":
        return _place_late(program, graph, runnable)
    return _place_global(program, graph, runnable, duration, end)


def post_receives_early(program: Program) -> Program:
    """The program with every receive one compute operation earlier in its device's list.

    For transports where the host posts a receive and goes on, but posts the next one only when the compute
    before it is done, and where data moves once both ends are posted (gloo): a receive at its place in the
    global order is then posted up to one operation after the send, and the transfer is waited for.  Costs one
    more receive buffer.  Receives keep their order, and posting one does not block, so that a program
    without deadlock stays free of them where every directed pair has a queue of its own; not for transports
    with blocking calls or one queue for several peers.

    Args:
        program: with transfers in the global order (:func:`add_transfers`).
    """
    return replace(program, ops=tuple(_one_compute_earlier(ops) for ops in program.ops))


def _one_compute_earlier(ops: Sequence[Op]) -> tuple[Op, ...]:
    out: list[Op] = []
    since: list[Op] = []  # the last compute operation and what came after it
    for op in ops:
        if op.kind in RECEIVES:
            out.append(op)
        elif op.kind in COMPUTE:
            out += since
            since = [op]
        else:
            since.append(op)
    return (*out, *since)


def _message(graph: Graph, node: int) -> tuple[Op, int, Op] | None:
    """(send, peer, receive) for the operation's result, None when it stays on the device."""
    op, device = graph.ops[node], graph.device[node]
    kind = op.kind
    if kind in SENDS:
        peer, receive = op.partner(device)
        return op, peer, receive
    send, value = kind.sent_by, kind.makes
    if send is None or value is None:
        return None
    _, microbatch, piece, chunk, _, _, _, _ = op
    if graph.index[device][value, microbatch, piece, chunk] != node:
        return None  # a later operation completes this one
    target = graph.deps.target(device, op)
    if target is None or target[0] == device:
        return None
    peer, to = target
    receive_kind = send.other_end
    assert receive_kind is not None
    return (Op(send, microbatch, piece, chunk, peer, to), peer, Op(receive_kind, microbatch, piece, to, device, chunk))


def _place_global(
    program: Program, graph: Graph, order: Sequence[int], duration: Sequence[float], end: Sequence[float]
) -> Program:
    """Puts computations first among what ends at one moment: their buffers are free for what is received then.

    Operations without duration keep their place among the messages, which they may depend on.
    """
    out: list[list[Op]] = [[] for _ in program.ops]
    ops, device_of = graph.ops, graph.device
    at, count = 0, len(order)
    while at < count:
        first, now = at, end[order[at]]
        while at < count and end[order[at]] == now:
            node = order[at]
            if duration[node] > 0:
                out[device_of[node]].append(ops[node])
            at += 1
        for node in order[first:at]:
            op, device = ops[node], device_of[node]
            if duration[node] <= 0 and op.kind not in TRANSFERS:
                out[device].append(op)
            message = _message(graph, node)
            if message is not None:
                send, peer, receive = message
                out[device].append(send)
                out[peer].append(receive)
    return replace(program, ops=tuple(map(tuple, out)))


def _place_late(program: Program, graph: Graph, order: Sequence[int]) -> Program:
    wanted: list[dict[tuple[object, ...], list[Op]]] = [{} for _ in program.ops]
    sends: dict[int, Op] = {}
    for node in order:
        message = _message(graph, node)
        if message is not None:
            sends[node], peer, receive = message
            rank = -1 if receive.kind.role is Role.TRANSFER else receive.peer
            user = receive.kind, receive.microbatch, receive.slice, receive.chunk, rank
            wanted[peer].setdefault(user, []).append(receive)
    out: list[list[Op]] = [[] for _ in program.ops]
    for node, (op, device) in enumerate(zip(graph.ops, graph.device)):
        fed_by = op.kind.fed_by
        rank = -1 if fed_by is None or fed_by.role is Role.TRANSFER else op.peer
        out[device] += wanted[device].pop((fed_by, op.microbatch, op.slice, op.chunk, rank), ())
        if op.kind not in TRANSFERS:
            out[device].append(op)
        if node in sends:
            out[device].append(sends[node])
    return replace(program, ops=tuple(map(tuple, out)))


# Inserts operations that all devices of a microbatch have: at slot boundaries, or at moments of a replay.

_CLOSE = 1e-9
_IN_A_SLOT = where(lambda kind: kind.stream is Stream.COMPUTE and kind.fields.names_pass and not kind.meets)
"""Kinds with a slot; parts of shared layers and early sends get the slot of the next operation with one."""

Inserts = list[dict[int, list[Op]]]  # per device: operations to insert before a position


class Moment(NamedTuple):
    """When an operation is inserted on all devices that its microbatch visits.  Ordered by time, forwards first."""

    time: float  # in the replay
    backward: bool
    node: int  # the compute operation whose microbatch and slice it has


class Place(NamedTuple):
    """Position at which an operation is inserted."""

    kind: Kind
    ahead: bool  # whether before the operation that runs at the moment; else before the first that starts then or later
    own: int | None  # on the device of the moment's node: positions after the node; None: as on the others


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
    """Slot of every operation; an operation without a slot (an early send) gets that of the next one with a slot."""
    out = [end] * len(ops)
    following = end
    for i in range(len(ops) - 1, -1, -1):
        op = ops[i]
        backward = op.kind.direction is Direction.BACKWARD
        if op.kind in _IN_A_SLOT:
            owner, chunk = (op.peer, op.peer_chunk) if op.kind.fields.of_peer else (device, op.chunk)
            following = number[owner, backward, op.microbatch, op.slice, chunk]
        out[i] = following
    return out
