"""A program as a graph of integers: the operations that each operation waits for.

Operations are numbered device after device, in program order.  The graph is built once per program and
shared by the passes, the validator and the simulator.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_het.schedule import deps
from megatron_het.schedule.ir import RECEIVES, Op, Program
from megatron_het.schedule.kinds import COLLECTIVES, DELIVERED, PARTS, TOGETHER, Making, Role, Stream


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
    """All operations in one list, and the dependencies of each beyond the order of its own device."""

    __slots__ = (
        "_open",
        "deps",
        "device",
        "first",
        "index",
        "kinds",
        "missing",
        "ops",
        "other_end",
        "program",
        "unfit",
        "waits",
    )

    @collection_paused()
    def __init__(self, program: Program, *, open_sends: bool = False) -> None:
        """Builds the graph.

        Args:
            open_sends: receives are still to be added to the program: sends have no other end,
                and values reach other devices without a transfer.

        Raises:
            ScheduleError: an operation occurs twice.
        """
        self.program = program
        self._open = open_sends
        self.deps = deps.Dependencies.of(program)
        self.ops: list[Op] = []  # all operations, device after device
        self.kinds = program.kinds
        # ``first[d]`` is the number of the first operation of device ``d``; one extra entry at the end
        self.first = [0]
        self.device: list[int] = []  # ``device[i]`` is the device of operation ``i``
        for d, ops in enumerate(program.ops):
            self.ops += ops
            self.first.append(len(self.ops))
            self.device += [d] * len(ops)
        self.index: list[dict[tuple[int, ...], int]] = []
        # (operation, need) for needs that no operation of the program produces or delivers
        self.missing: list[tuple[int, deps.Need | None]] = []
        self.unfit: list[deps.Unfit] = []  # operations that do not match what their device holds (``deps.Lifetimes``)
        # ``other_end[i]`` is the operation at the other end of a transfer, -1 for others
        self.other_end = [-1] * len(self.ops)
        deliveries = self._index()
        # ``waits[i]`` are the operations whose results ``i`` needs (for a receive: its send)
        self.waits = self._edges(deliveries)

    def where(self, node: int) -> tuple[int, int]:
        """(device, position) of an operation."""
        device = self.device[node]
        return device, node - self.first[device]

    def _index(self) -> list[dict[tuple[object, ...], int]] | None:
        """Find producers and pair transfers; returns for each device the receive per value, None without transfers."""
        deliveries: list[dict[tuple[object, ...], int]] = []
        sends: dict[tuple[int, ...], int] = {}  # by their receives, as device and operation
        receives: list[int] = []
        ops, transfer, once = self.ops, Role.TRANSFER, Making.ONCE
        for d in range(len(self.program.ops)):
            made: dict[tuple[int, ...], int] = {}
            delivered: dict[tuple[object, ...], int] = {}
            for i in range(self.first[d], self.first[d + 1]):
                kind, microbatch, piece, chunk, peer, peer_chunk, start, stop = ops[i]
                value, other_end = kind.makes, kind.other_end
                if value is not None:
                    key: deps.Key = (value, microbatch, piece, chunk)
                    if value.for_a_peer:
                        key = (value, microbatch, piece, chunk, peer)
                    if key in made and kind.making is once:
                        raise ScheduleError(f"{describe(self.program, *self.where(i))}: this operation is there twice")
                    made[key] = i
                if other_end is None:
                    continue
                if kind in RECEIVES:
                    receives.append(i)
                    if kind.role is transfer:
                        delivered[kind, microbatch, piece, chunk] = i
                    continue
                receive = (peer, other_end, microbatch, piece, peer_chunk, d, chunk, start, stop)
                if receive in sends:
                    raise ScheduleError(f"{describe(self.program, *self.where(i))}: sent twice")
                sends[receive] = i
            self.index.append(made)
            deliveries.append(delivered)
        for i in receives:
            j = sends.pop((self.device[i], *self.ops[i]), -1)
            if j < 0:
                self.missing.append((i, None))
                continue
            self.other_end[i], self.other_end[j] = j, i
        unpaired = [] if self._open else [(j, None) for j in sends.values()]
        self.missing += unpaired
        return deliveries if receives or unpaired else None

    def _edges(self, deliveries: list[dict[tuple[object, ...], int]] | None) -> list[Sequence[int]]:
        """Returns the operations that each operation waits for, by values and by lifetimes (``deps.py``)."""
        waits: list[Sequence[int]] = []
        kinds, index, other_end, rules = self.kinds, self.index, self.other_end, self.deps.rules
        stateful = deps.Lifetimes.matter(kinds)
        rows = {kind: (kind.needs, kind.fed_by, kind in RECEIVES, rules[kind]) for kind in kinds}
        known: dict[tuple[int, ...], list[int]] = {}  # makers of the values that all devices of a pass need
        for d, ops in enumerate(self.program.ops):
            state = deps.Lifetimes(self.program, d, kinds) if stateful else None
            steps = {} if state is None else state.steps
            made, delivered = index[d], None if deliveries is None else deliveries[d]
            for i, op in enumerate(ops, self.first[d]):
                kind, microbatch, piece, chunk, _, _, _, _ = op
                needs, receive, is_receive, rule = rows[kind]
                maker = None if needs.own is None else made.get((needs.own, microbatch, piece, chunk))
                if is_receive:
                    found = [other_end[i]] if other_end[i] >= 0 else []
                elif maker is not None:  # a short cut: this is the only dependency
                    found = [maker]
                else:
                    found = [*known.get((kind, microbatch, piece), ())] if needs.are_shared else []
                    wanted = [] if found else rule(d, op)
                    for need in wanted:
                        source, key = need
                        if source != d and delivered is not None and receive is not None and key[0] in DELIVERED:
                            j = delivered.get((receive, microbatch, piece, chunk))
                        else:
                            j = index[source].get(key)
                        if j is None:
                            self.missing.append((i, need))
                        else:
                            found.append(j)
                    if needs.are_shared and len(found) == len(wanted):
                        known[kind, microbatch, piece] = [*found]
                    if kind in deps.AFTER_BEGINNING:
                        for source, key in self.deps.begun(d, op):
                            found += self._before(source, index[source].get(key))
                    if kind in deps.HELPED_BY_RECEIVE and (helped := made.get(deps.brought(op))) is not None:
                        found.append(helped)
                if kind in steps:
                    steps[kind](i, op, found)
                waits.append(found)
            if state is not None:
                state.finish()
                self.unfit += state.problems
        return waits

    def _before(self, device: int, node: int | None) -> list[int]:
        """The operation before a node on its device's compute stream."""
        while node is not None and node > self.first[device]:
            node -= 1
            if self.ops[node].kind.stream is Stream.COMPUTE:
                return [node]
        return []

    def teams(self) -> list[list[int]]:
        """The collectives over several replicas of a stage, each as the list of its operations.

        Raises:
            ScheduleError: not all replicas of a stage take part in one of its collectives.
        """
        if self.kinds.isdisjoint(COLLECTIVES):
            return []
        replicas, places = self.program.shape.replicas, self.program.devices
        teams: dict[tuple[object, ...], list[int]] = {}
        seen: dict[tuple[object, ...], int] = {}
        for i in [i for i, op in enumerate(self.ops) if op[0] in COLLECTIVES]:
            d, op = self.device[i], self.ops[i]
            stage = places[d].stage
            if replicas[stage] > 1:
                name = (stage, op.kind, op.chunk, op.start, op.stop)
                turn = seen[d, *name] = seen.get((d, *name), -1) + 1
                teams.setdefault((*name, turn), []).append(i)
        for team in teams.values():
            if len(team) != replicas[places[self.device[team[0]]].stage]:
                where = describe(self.program, *self.where(team[0]))
                raise ScheduleError(f"{where}: not all replicas of the stage take part in this collective")
        return list(teams.values())

    def together(self) -> list[Sequence[int]]:
        """:attr:`waits` with a wait for a collective replaced by waits for all its members; raises ScheduleError."""
        members = {i: team for team in self.teams() for i in team}
        if not members:
            return self.waits
        joined = lambda waits: [member for j in waits for member in members.get(j, (j,))]  # noqa: E731
        return [waits if members.keys().isdisjoint(waits) else joined(waits) for waits in self.waits]

    def unmet(self, node: int, need: deps.Need | None) -> str:
        """Describe a need that is not met."""
        op, (device, position) = self.ops[node], self.where(node)
        place = describe(self.program, device, position)
        if need is None:
            peer = self.program.devices[op.peer] if 0 <= op.peer < len(self.program.devices) else op.peer
            expected = op.partner(device)[1]
            return f"{place}: its other end {expected} is missing on device {peer}"
        what = deps.explain(need, op, self.program.shape, device)
        if need[0] != device and need[1] in self.index[need[0]]:
            return f"{place}: {what} is never received"
        return f"{place}: {what} is never produced"

    def check_complete(self) -> None:
        """Raises ScheduleError if a value that an operation needs is not in the program at all."""
        if self.missing:
            more = f" (and {len(self.missing) - 1} more)" if len(self.missing) > 1 else ""
            raise ScheduleError(self.unmet(*self.missing[0]) + more)


def replay(graph: Graph, duration: Sequence[float]) -> tuple[list[float], list[float], list[int]]:
    """Earliest start and end of every operation when each device runs its list in order.

    The third list holds all operations in an order in which they can run (not sorted by time).

    Args:
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


# Meetings: operations that several devices run together.  These are the parts of a split vocabulary, run by all devices
# of a microbatch, and the passes of replicas that share experts, which exchange tokens in every layer.
#
# A part of a split layer sends messages to another stage and waits for messages of that stage, all inside one operation
# (``runtime.py`` and ``layers.py`` in ``features/vocab_parallel``).  NCCL runs the messages of two ranks one
# after the other, and with one hardware queue per device everything that is launched behind them waits too.  So a part
# neither begins nor ends alone: the parts of one slice, on all devices that its microbatch visits, are one event.
#
# If the order in which transfers are placed (``transfers.py``) respects that, all lists are projections
# of one total order in which a meeting is one point.  Then the first event of that order that has not happened can
# always happen.  The validator reports programs that break this.


def meetings(graph: Graph) -> list[list[int]]:
    """The nodes of every meeting, one per device that takes part.

    Raises:
        ScheduleError: replicas that share experts run different passes.
    """
    passes = passes_together(graph)
    if graph.kinds.isdisjoint(PARTS):
        return passes
    found: dict[tuple[object, ...], list[int]] = {}
    for node, op in enumerate(graph.ops):
        if op.kind in PARTS:
            found.setdefault((op.kind, op.microbatch, op.slice), []).append(node)
    return [*found.values(), *passes]


def passes_together(graph: Graph) -> list[list[int]]:
    """The passes that replicas run together because they share experts.

    Raises:
        ScheduleError: the replicas run different passes.
    """
    found: list[list[int]] = []
    for devices in graph.program.shape.companions:
        ranges = [range(graph.first[d], graph.first[d + 1]) for d in devices]
        passes = [[i for i in nodes if graph.ops[i].kind in TOGETHER] for nodes in ranges]
        names = [[(op.kind, op.slice, op.chunk) for op in map(graph.ops.__getitem__, nodes)] for nodes in passes]
        other = next((d for d, row in zip(devices, names) if row != names[0]), None)
        if other is not None:
            one, another = graph.program.devices[devices[0]], graph.program.devices[other]
            raise ScheduleError(
                f"devices {one} and {another} share experts, so they must run the same passes in the same order, which "
                "this schedule does not have for their microbatches"
            )
        found += map(list, zip(*passes))
    return found


def waits_to_meet(graph: Graph, found: Sequence[Sequence[int]] | None = None) -> list[Sequence[int]]:
    """``graph.waits`` where a meeting (of ``found``, or of all) begins only when all its devices have reached it."""
    waits = list(graph.waits)
    for nodes in meetings(graph) if found is None else found:
        before = [node - 1 for node in nodes if node > graph.first[graph.device[node]]]
        # What they need has reached them as well: without transfers it comes from other devices.
        before += [j for node in nodes for j in graph.waits[node] if graph.ops[node].kind in TOGETHER]
        for node in nodes:
            waits[node] = [*waits[node], *before]
    return waits


def waits_to_leave(graph: Graph) -> list[Sequence[int]]:
    """``waits_to_meet`` where no device continues before all devices of its meeting have reached it."""
    found = meetings(graph)
    waits = waits_to_meet(graph, found)
    for nodes in found:
        for node in nodes:
            if node + 1 < graph.first[graph.device[node] + 1]:
                waits[node + 1] = [*waits[node + 1], *nodes]
    return waits
