"""A program as a graph of integers: which operation waits for which.

Operations are numbered device after device, in program order.  The graph is built once per program and
shared by the passes, the validator and the simulator.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_het.schedule.deps import OVERRIDES, Dependencies, Need, Value, explain, produces
from megatron_het.schedule.ir import COMPUTE, RECEIVES, SENDS, Kind, Op, Program


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses cyclic garbage collection: it would walk millions of fresh tuples and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class ScheduleError(ValueError):
    """A program that cannot run; the message names device, position and operation."""


def describe(program: Program, device: int, position: int) -> str:
    """One operation with its neighbours, for error messages."""
    ops = program.ops[device]
    around = [
        f"[{op}]" if i == position else str(op)
        for i, op in enumerate(ops[max(0, position - 2) : position + 3], max(0, position - 2))
    ]
    left, right = "... " if position > 2 else "", " ..." if position + 3 < len(ops) else ""
    return f"device {program.devices[device]}, position {position}: {left}{' '.join(around)}{right}"


class Graph:
    """Flattened operations and what each waits for, apart from the order of its own device.

    Attributes:
        program: the program.
        ops: all operations, device after device.
        first: ``first[d]`` is the number of the first operation of device ``d``; one extra entry at the end.
        device: ``device[i]`` is the device of operation ``i``.
        waits: ``waits[i]`` are the operations whose results ``i`` needs (for a receive: its send).
        other_end: ``other_end[i]`` is the operation at the other end of a transfer, -1 for others.
        missing: (operation, need) for needs that nothing in the program produces or delivers.
    """

    __slots__ = ("program", "ops", "first", "device", "waits", "other_end", "missing", "deps", "index", "_open")

    @collection_paused()
    def __init__(self, program: Program, *, open_sends: bool = False) -> None:
        """Builds the graph.

        Args:
            program: any program.
            open_sends: the program is one whose receives are still to be added: sends have no other end,
                and values pass between devices without one.

        Raises:
            ScheduleError: an operation is there twice.
        """
        self.program = program
        self._open = open_sends
        self.deps = Dependencies(
            program.shape, program.vocabulary, program.exchange_units, program.embedding
        )
        self.ops: list[Op] = []
        self.first = [0]
        self.device: list[int] = []
        for d, ops in enumerate(program.ops):
            self.ops += ops
            self.first.append(len(self.ops))
            self.device += [d] * len(ops)
        self.index: list[dict[tuple[int, ...], int]] = []
        self.missing: list[tuple[int, Need | None]] = []
        self.other_end = [-1] * len(self.ops)
        deliveries = self._index()
        self.waits = self._edges(deliveries)

    def where(self, node: int) -> tuple[int, int]:
        """(device, position) of an operation."""
        device = self.device[node]
        return device, node - self.first[device]

    def _index(self) -> list[dict[tuple[int, ...], int]] | None:
        """Finds producers; pairs transfers.  Returns who delivers what to each device, None without transfers."""
        deliveries: list[dict[tuple[int, ...], int]] = []
        sends: dict[tuple[int, Op], int] = {}
        receives: list[int] = []
        for d in range(len(self.program.ops)):
            made: dict[tuple[int, ...], int] = {}
            delivered: dict[tuple[int, ...], int] = {}
            for i in range(self.first[d], self.first[d + 1]):
                op = self.ops[i]
                kind = op[0]
                if kind < 3:
                    key = (kind > 0, op[1], op[2], op[3])
                    if key in made:
                        raise ScheduleError(f"{describe(self.program, *self.where(i))}: this operation is there twice")
                    made[key] = i
                    continue
                if kind in SENDS:
                    if (d, op) in sends:
                        raise ScheduleError(f"{describe(self.program, *self.where(i))}: sent twice")
                    sends[d, op] = i
                    continue
                elif kind in RECEIVES:
                    receives.append(i)
                    if kind < 8:
                        delivered[kind, op[1], op[2], op[3]] = i
                        continue
                made_key = produces(op)
                if made_key is not None:
                    if made_key in made and kind not in OVERRIDES and kind not in _REPEATED:
                        raise ScheduleError(f"{describe(self.program, *self.where(i))}: this operation is there twice")
                    made[made_key] = i
            self.index.append(made)
            deliveries.append(delivered)
        self._pair(sends, receives)
        return deliveries if receives or (sends and not self._open) else None

    def _pair(self, sends: dict[tuple[int, Op], int], receives: list[int]) -> None:
        for i in receives:
            partner = self.ops[i].partner(self.device[i])
            j = sends.pop(partner, -1)
            if j < 0:
                self.missing.append((i, None))
                continue
            self.other_end[i], self.other_end[j] = j, i
        if not self._open:
            self.missing += [(j, None) for j in sends.values()]

    def _edges(self, deliveries: list[dict[tuple[int, ...], int]] | None) -> list[Sequence[int]]:
        waits: list[Sequence[int]] = []
        for d in range(len(self.program.ops)):
            state = _Scan()
            for i in range(self.first[d], self.first[d + 1]):
                op = self.ops[i]
                kind = op[0]
                if kind in RECEIVES:
                    waits.append((self.other_end[i],) if self.other_end[i] >= 0 else ())
                    continue
                if kind == 4 or kind == 6:  # SEND_FORWARD, SEND_BACKWARD
                    j = self.index[d].get((kind == 6, op[1], op[2], op[3]))
                    if j is not None:
                        waits.append((j,))
                        continue
                found = self._found(d, i, op, deliveries)
                if kind < 4:
                    state.compute(i, op, found)
                elif kind in _STATEFUL:
                    state.bookkeeping(i, op, found)
                waits.append(found)
        return waits

    def _found(self, d: int, i: int, op: Op, deliveries: list[dict[tuple[int, ...], int]] | None) -> list[int]:
        """Operations that make or deliver what an operation requires."""
        found = []
        for need in self.deps.requires(d, op):
            source, key = need
            if source != d and key[0] < 2 and deliveries is not None and op[0] not in _DIRECT:
                j = deliveries[d].get((Kind.RECV_BACKWARD if key[0] else Kind.RECV_FORWARD, op[1], op[2], op[3]))
            else:
                j = self.index[source].get(key)
            if j is None:
                self.missing.append((i, need))
            else:
                found.append(j)
        if op[0] == Kind.VOCAB_BACKWARD:
            found += self._before_loss(d, op)
        if op[0] == Kind.ATTEND_HELP or op[0] == Kind.ATTEND_HELP_BACKWARD:
            value = Value.KV if op[0] == Kind.ATTEND_HELP else Value.KV_BACKWARD
            j = self.index[d].get((value, op[1], op[2], op[3], op[4]))
            if j is not None:
                found.append(j)
        return found

    def _before_loss(self, d: int, op: Op) -> list[int]:
        """What a VOCAB_BACKWARD waits for besides values: that the last stage comes to its own one.

        There the loss is made, whose gradient all parts need.  It is sent before the last stage's own part
        is computed, so the others wait for what comes before that operation, not for its end.
        """
        last = self.deps.team(op[1])[-1]
        node = self.index[last].get((Value.LOGITS_GRADIENT, op[1], op[2], 0))
        if node is None or last == d:
            return []
        while node > self.first[last]:
            node -= 1
            if self.ops[node][0] in _ON_COMPUTE:
                return [node]
        return []

    def unmet(self, node: int, need: Need | None) -> str:
        """A missing need in words."""
        op, (device, position) = self.ops[node], self.where(node)
        place = describe(self.program, device, position)
        if need is None:
            peer = self.program.devices[op.peer] if 0 <= op.peer < len(self.program.devices) else op.peer
            expected = op.partner(device)[1]
            return f"{place}: its other end {expected} is missing on device {peer}"
        what = explain(need, op, self.program.shape, device)
        if need[0] != device and need[1] in self.index[need[0]]:
            return f"{place}: {what} is never received"
        return f"{place}: {what} is never produced"

    def check_complete(self) -> None:
        """Raises ScheduleError when something that an operation needs is not in the program at all."""
        if self.missing:
            more = f" (and {len(self.missing) - 1} more)" if len(self.missing) > 1 else ""
            raise ScheduleError(self.unmet(*self.missing[0]) + more)


class _Scan:
    """Waits that follow from the order within one device: side streams and parameters.

    Operations of side streams (gathers, copies from and to the host, reductions, keys and values sent ahead)
    are issued when the compute operation before them in the list is done; compute waits for the parameters
    and activations brought for it.  A gather with its first user right behind it is on demand: it begins when
    the user's other data is there (nothing is overlapped), except at the start of the iteration.
    """

    __slots__ = ("last", "gathers", "prefetched", "fetched", "offloaded", "backward", "reduced", "stepped", "demanded")

    def __init__(self) -> None:
        self.last = -1
        self.gathers: dict[int, list[int]] = {}
        self.prefetched: dict[int, int] = {}
        self.fetched: dict[tuple[int, int, int], int] = {}
        self.offloaded: dict[tuple[int, int, int], int] = {}
        self.backward: dict[int, int] = {}
        self.reduced: dict[int, list[int]] = {}
        self.stepped: dict[int, int] = {}
        self.demanded: list[tuple[int, list[int]]] = []

    def compute(self, i: int, op: Op, found: list[int]) -> None:
        """FORWARD and BACKWARD: wait for the chunk's gathers and the activations fetched."""
        if self.demanded:
            for chunk, gather in self.demanded:
                gather += [j for j in found if chunk == op[3]]
            self.demanded = []
        self.last = i
        if self.gathers and op[3] in self.gathers:
            found += self.gathers.pop(op[3])
        if op[0]:
            self.backward[op[3]] = i
            if self.fetched:
                j = self.fetched.pop((op[1], op[2], op[3]), None)
                if j is not None:
                    found.append(j)

    def bookkeeping(self, i: int, op: Op, found: list[int]) -> None:
        """Everything that lives on a side stream or concerns parameters."""
        chunk = op.chunk
        if op.kind not in (Kind.OPTIMIZER_STEP, Kind.ACT_OFFLOAD) and self.last >= 0:
            found.append(self.last)
        match op.kind:
            case Kind.PARAM_PREFETCH:
                self.prefetched[chunk] = i
                found += [self.stepped[chunk]] if chunk in self.stepped else []
            case Kind.PARAM_GATHER:
                found += [self.prefetched[chunk]] if chunk in self.prefetched else []
                found += [self.stepped[chunk]] if chunk in self.stepped else []
                self.gathers.setdefault(chunk, []).append(i)
                if self.last >= 0:
                    self.demanded.append((chunk, found))
            case Kind.GRAD_REDUCE:
                found += [self.backward[chunk]] if chunk in self.backward else []
                self.reduced.setdefault(chunk, []).append(i)
            case Kind.OPTIMIZER_STEP:
                found += self.reduced.pop(chunk, [])
                self.stepped[chunk] = i
            case Kind.PARAM_OFFLOAD:
                found += [self.stepped[chunk]] if chunk in self.stepped else []
            case Kind.ACT_OFFLOAD:
                self.offloaded[op[1], op[2], op[3]] = i
            case Kind.ACT_FETCH:
                found += [self.offloaded.pop((op[1], op[2], op[3]))] if (op[1], op[2], op[3]) in self.offloaded else []
                self.fetched[op[1], op[2], op[3]] = i


_STATEFUL = frozenset(
    {
        Kind.PARAM_PREFETCH, Kind.PARAM_GATHER, Kind.PARAM_RELEASE, Kind.PARAM_OFFLOAD, Kind.GRAD_REDUCE,
        Kind.OPTIMIZER_STEP, Kind.ACT_OFFLOAD, Kind.ACT_FETCH, Kind.KV_SEND, Kind.KV_SEND_BACKWARD,
    }
)  # fmt: skip

_DIRECT = frozenset({Kind.VOCAB_FORWARD, Kind.EMBED_BACKWARD})
"""Kinds that get a value of another device by themselves, not by a transfer of the program."""

_ON_COMPUTE = COMPUTE | {Kind.VOCAB_FORWARD, Kind.VOCAB_BACKWARD}

_REPEATED = frozenset({Kind.ATTEND_GIVE, Kind.ATTEND_GIVE_BACKWARD, Kind.KV_RECV, Kind.KV_RECV_BACKWARD})
"""Kinds that may come several times for one value (a query for several peers, keys in several ranges)."""


def replay(graph: Graph, duration: Sequence[float]) -> tuple[list[float], list[float], list[int]]:
    """Earliest start and end of every operation when each device runs its list in order.

    The third list holds all operations in an order in which they can run (not sorted by time).

    Args:
        graph: the program.
        duration: seconds (or any unit) of every operation.

    Raises:
        ScheduleError: some operations wait for each other; the message names one per device.
    """
    count = len(graph.ops)
    start, end = [0.0] * count, [-1.0] * count
    position, limits, waits = graph.first[:-1], graph.first[1:], graph.waits
    free = [0.0] * len(position)
    waiting: dict[int, list[int]] = {}
    order: list[int] = []
    ready = list(range(len(position)))[::-1]
    while ready:
        d = ready.pop()
        i, limit, now = position[d], limits[d], free[d]
        while i < limit:
            begin = now
            for j in waits[i]:
                other = end[j]
                if other < 0:
                    waiting.setdefault(j, []).append(d)
                    break
                if other > begin:
                    begin = other
            else:
                start[i] = begin
                end[i] = now = begin + duration[i]
                order.append(i)
                if i in waiting:
                    ready += waiting.pop(i)
                i += 1
                continue
            break
        position[d], free[d] = i, now
    stuck = [d for d, i in enumerate(position) if i < limits[d]]
    if stuck:
        raise ScheduleError(_stuck_message(graph, stuck, position, end))
    return start, end, order


def _stuck_message(graph: Graph, stuck: list[int], position: list[int], end: list[float]) -> str:
    lines = ["these operations wait for each other:"]
    for d in stuck[:8]:
        node = position[d]
        blocked_by = next(j for j in graph.waits[node] if end[j] < 0)
        other, where = graph.where(blocked_by)
        lines.append(
            f"  {describe(graph.program, d, node - graph.first[d])} waits for {graph.ops[blocked_by]}, "
            f"device {graph.program.devices[other]}, position {where}"
        )
    return "\n".join(lines)
