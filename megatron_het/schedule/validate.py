"""Finds the errors of a program before it runs: missing or misplaced operations, wrong lifetimes, deadlocks."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

from megatron_het.schedule.deps import explain
from megatron_het.schedule.graph import Graph, ScheduleError, collection_paused, describe, waits_to_meet
from megatron_het.schedule.ir import COMPUTE, SENDS, TRANSFERS, Kind, Op, Program
from megatron_het.schedule.joint import stuck_events
from megatron_het.schedule.kinds import COLLECTIVES, OUTPUT_PARTS, WORD_PARTS, Direction, Work

# Can a program deadlock?  Models of how transfers are executed.
#
# * ``blocking``: a send or receive returns when the transfer is done, as with plain ``send`` and ``recv``, and the
#   parts of a split vocabulary begin when all devices have reached them (``graph.meetings``).
# * ``rank``: transfers are posted without waiting and run one after the other in one queue per device (one
#   communicator for the whole pipeline).  A compute operation waits for the receives that it needs.
# * ``pair``: the same with one queue per pair of devices (NCCL's communicators for unbatched send and receive).
# * ``edge``: the same with one queue per directed pair (one process group per direction).
#
# Collectives over the replicas of a stage are checked by :func:`deadlock_of_collectives`: the models
# above consider transfers only.
#
# A transfer runs when both of its ends are at the head of their queues.  ``blocking`` is the strictest: if a
# program runs there, its lists are projections of one total order in which both ends of every transfer are
# neighbours, and the first unfinished transfer of that order can always finish, whatever the queues.

TRANSPORTS = ("blocking", "rank", "pair", "edge")


@dataclass(frozen=True, slots=True)
class Stuck:
    """One device of a deadlock."""

    # device, position, op: where it stopped
    device: int
    position: int
    op: Op
    message: str  # a description, with the neighbours and the missing dependencies


@collection_paused()
def deadlock(graph: Graph, transport: str) -> tuple[Stuck, ...]:
    """Where every device stops when a program runs on a transport; empty when it does not deadlock.

    Raises:
        ValueError: an unknown transport.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport = {transport!r}: unknown (known: {', '.join(TRANSPORTS)})")
    if transport == "blocking":
        return _blocking(graph)
    return _Queued(graph, transport, graph.waits).run()


@collection_paused()
def deadlock_of_collectives(graph: Graph) -> tuple[Stuck, ...]:
    """Where every device stops if a collective completes only when all replicas of the stage have reached it.

    Transfers have one queue per pair of devices (``pair``), as with NCCL in the executor.  Empty without collectives.
    """
    waits = graph.together()
    return _Queued(graph, "pair", waits).run() if waits is not graph.waits else ()


def deadlocks(graph: Graph) -> dict[str, tuple[Stuck, ...]]:
    """:func:`deadlock` for every transport; if ``blocking`` has none, the others have none either."""
    found = {"blocking": deadlock(graph, "blocking")}
    for name in TRANSPORTS[1:]:
        found[name] = deadlock(graph, name) if found["blocking"] else ()
    return found


def _blocking(graph: Graph) -> tuple[Stuck, ...]:
    limits, waits, other = graph.first[1:], waits_to_meet(graph), graph.other_end
    position = graph.first[:-1]
    device_of = graph.device
    is_transfer = [op.kind in TRANSFERS for op in graph.ops]
    done = bytearray(len(graph.ops))
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(limits)))[::-1]
    while ready:
        d = ready.pop()
        i, limit = position[d], limits[d]
        while i < limit:
            if done[i]:
                i += 1
                continue
            if is_transfer[i]:
                j = other[i]
                peer = device_of[j] if j >= 0 else -1
                if j < 0 or position[peer] != j:
                    break  # the peer wakes this device when it gets there
                done[i] = done[j] = 1
                if i in waiting:
                    ready += waiting.pop(i)
                if j in waiting:
                    ready += waiting.pop(j)
                ready.append(peer)
            else:
                for j in waits[i]:
                    if not done[j]:
                        waiting.setdefault(j, []).append(d)
                        break
                else:
                    done[i] = 1
                    if i in waiting:
                        ready += waiting.pop(i)
                    i += 1
                    continue
                break
            i += 1
        position[d] = i
        if i < limit and is_transfer[i] and other[i] >= 0 and position[device_of[other[i]]] == other[i]:
            ready.append(d)
    return _report(graph, waits, position, limits, done)


def _report(
    graph: Graph, waits: Sequence[Sequence[int]], position: list[int], limits: list[int], done: bytearray
) -> tuple[Stuck, ...]:
    out = []
    for d, i in enumerate(position):
        if i >= limits[d]:
            continue
        op, at = graph.ops[i], i - graph.first[d]
        blocker = next((j for j in waits[i] if not done[j]), -1)
        if op.kind in TRANSFERS:
            blocker = graph.other_end[i]
        reason = "waits for its missing other end"
        if blocker >= 0:
            other, where = graph.where(blocker)
            reason = f"waits for {graph.ops[blocker]} of device {graph.program.devices[other]}, position {where}"
            if position[other] < limits[other] and other != d and blocker > position[other]:
                reason += f", which is at {graph.ops[position[other]]}"
        out.append(Stuck(d, at, op, f"{describe(graph.program, d, at)} {reason}"))
    return tuple(out)


class _Queued:
    """Transfers in queues; see the comment on transports above."""

    def __init__(self, graph: Graph, transport: str, waits: Sequence[Sequence[int]]) -> None:
        self.graph, self.waits = graph, waits
        keys: dict[str, Callable[[int, int, bool], tuple[int, ...]]] = {
            "rank": lambda d, peer, send: (d,),
            "pair": lambda d, peer, send: (d, peer),
            "edge": lambda d, peer, send: (d, peer, send),
        }
        self.key = keys[transport]
        self.queues: dict[tuple[int, ...], deque[int]] = {}
        self.queue_of: dict[int, deque[int]] = {}
        self.done = bytearray(len(graph.ops))
        self.waiting: dict[int, list[int]] = {}
        self.ready = list(range(len(graph.first) - 1))[::-1]
        self.position = graph.first[:-1]

    def run(self) -> tuple[Stuck, ...]:
        graph, limits = self.graph, self.graph.first[1:]
        while self.ready:
            d = self.ready.pop()
            while self.position[d] < limits[d]:
                i = self.position[d]
                op = graph.ops[i]
                if op.kind in TRANSFERS:
                    self._post(d, i, op)
                else:
                    blocker = next((j for j in self.waits[i] if not self.done[j]), -1)
                    if blocker >= 0:
                        self.waiting.setdefault(blocker, []).append(d)
                        break
                    self._finish(i)
                self.position[d] += 1
        stuck = _report(graph, self.waits, self.position, limits, self.done)
        return stuck or self._unfinished()

    def _post(self, device: int, i: int, op: Op) -> None:
        queue = self.queues.setdefault(self.key(device, op.peer, op.kind in SENDS), deque())
        queue.append(i)
        self.queue_of[i] = queue
        if queue[0] == i:
            self._match(i)

    def _match(self, head: int) -> None:
        """Run a transfer whose ends are both heads of their queues, then those that become heads by it."""
        heads = [head]
        while heads:
            i = heads.pop()
            j = self.graph.other_end[i]
            if self.done[i] or j < 0 or j not in self.queue_of:
                continue
            if self.queue_of[i][0] != i or self.queue_of[j][0] != j:
                continue
            for node in (i, j):
                queue = self.queue_of[node]
                queue.popleft()
                self._finish(node)
                if queue:
                    heads.append(queue[0])

    def _finish(self, i: int) -> None:
        self.done[i] = 1
        self.ready += self.waiting.pop(i, ())

    def _unfinished(self) -> tuple[Stuck, ...]:
        """Transfers that no operation waits for but that never run: their buffers are never released."""
        out = []
        for queue in self.queues.values():
            if queue:
                d, at = self.graph.where(queue[0])
                text = f"{describe(self.graph.program, d, at)} is never matched at the head of its queue"
                out.append(Stuck(d, at, self.graph.ops[queue[0]], text))
        return tuple(out)


RULES = ("field", "completeness", "transfer", "dependency", "lifetime", "deadlock")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    rule: str  # one of :data:`RULES`
    # device, position: place of the problem; position -1 for a problem of the whole device
    device: int
    position: int
    op: Op | None  # the operation, if the problem is with one
    message: str  # device, position, operation with its neighbours, and the missing or pending dependency

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@collection_paused()
def validate(
    program: Program, graph: Graph | None = None, *, transports: Sequence[str] = TRANSPORTS, limit: int = 20
) -> list[Problem]:
    """Problems of a program, at most ``limit``; an empty list means that it can run.

    Later rules assume earlier ones, so they are checked only if the earlier ones found nothing.

    Args:
        program: with or without transfers; without them, transports are not checked.
        graph: of the program, when the caller has it already.
        transports: models on which the program must not deadlock.
        limit: stop after this many.
    """
    for rule in (_fields, _completeness):
        found = _take(rule(program), limit)
        if found:
            return found
    try:
        graph = graph or Graph(program)
    except ScheduleError as error:
        return [Problem("completeness", -1, -1, None, str(error))]
    for step in (_missing, _lifetimes, _local_order):
        found = _take(step(graph), limit)
        if found:
            return found
    return _take(_deadlocks(graph, transports), limit)


def check(program: Program, graph: Graph | None = None, *, transports: Sequence[str] = TRANSPORTS) -> None:
    """Raises ScheduleError with the problems of a program, if there are any."""
    problems = validate(program, graph, transports=transports)
    if problems:
        raise ScheduleError(f"program {program.name}:\n" + "\n".join(f"  {problem}" for problem in problems))


def _take(problems: Iterator[Problem], limit: int) -> list[Problem]:
    return [problem for _, problem in zip(range(limit), problems)]


def _problem(program: Program, rule: str, device: int, position: int, reason: str) -> Problem:
    op = program.ops[device][position]
    return Problem(rule, device, position, op, f"{describe(program, device, position)}: {reason}")


def _fields(program: Program) -> Iterator[Problem]:
    """Indices that are out of range."""
    shape = program.shape
    for d, (device, ops) in enumerate(zip(shape.devices, program.ops)):
        own = set(shape.microbatches_of(d))
        chunks, slices, microbatches = len(shape.layers[device.stage]), shape.slices, shape.microbatches
        known: dict[tuple[int, int], bool] = {}
        for i, op in enumerate(ops):
            kind, microbatch, piece, chunk, peer, peer_chunk, start, stop = op
            fields = kind.fields
            if not fields.names_pass:
                good = 0 <= chunk < chunks and (start < 0) == (stop < 0)
            elif fields.of_peer:
                good = 0 <= microbatch < microbatches and 0 <= piece < slices
            else:
                good = microbatch in own and 0 <= piece < slices and 0 <= chunk < chunks
            if good and fields.has_peer:
                edge = (peer, peer_chunk)
                if edge not in known:
                    peer_chunks = len(shape.layers[shape.devices[peer].stage]) if 0 <= peer < len(program.ops) else 0
                    known[edge] = peer != d and 0 <= peer_chunk < peer_chunks
                good = known[edge]
            if not good:
                yield _problem(program, "field", d, i, "microbatch, slice, chunk or peer does not exist here")


_WORK_NAMES = {
    Work.FORWARD: "FORWARD",
    Work.INPUT: "BACKWARD (of its input)",
    Work.WEIGHTS: "BACKWARD (of its weights)",
}


def _completeness(program: Program) -> Iterator[Problem]:
    """Every forward and backward must occur exactly once, on the right device."""
    shape = program.shape
    wanted = Work.FORWARD.value if program.forward_only else sum(part.value for part in _WORK_NAMES)
    parts_of = [kind.work.value for kind in Kind]
    splits_embedding = program.embedding  # computed once: it scans all operations
    for d, (device, ops) in enumerate(zip(shape.devices, program.ops)):
        have: dict[tuple[int, int, int], int] = {}
        for i, op in enumerate(ops):
            kind, microbatch, piece, chunk, _, _, _, _ = op
            parts = parts_of[kind]
            if parts:
                key = (microbatch, piece, chunk)
                before = have.get(key, 0)
                if before & parts:
                    yield _problem(program, "completeness", d, i, "this work is there twice")
                have[key] = before | parts
        for m in shape.microbatches_of(d):
            for piece in range(shape.slices):
                for chunk in range(len(shape.layers[device.stage])):
                    got = have.get((m, piece, chunk), 0)
                    if got != wanted:
                        lacking = [name for part, name in _WORK_NAMES.items() if wanted & ~got & part.value]
                        what = f"no {lacking[0]}" if lacking else "a backward in a forward-only program"
                        text = f"device {device}: {what} of microbatch {m}, slice {piece}, chunk {chunk}"
                        yield Problem("completeness", d, -1, None, text)
        if program.splits_output:
            yield from _split(program, d, OUTPUT_PARTS)
        if splits_embedding:
            yield from _split(program, d, WORD_PARTS)


def _split(program: Program, d: int, parts: Set[Kind]) -> Iterator[Problem]:
    """Parts of a split layer that are missing or duplicated: each device runs each part once per slice."""
    have = {(op.kind, op.microbatch, op.slice) for op in program.ops[d]}
    directions = {Direction.FORWARD} if program.forward_only else {Direction.FORWARD, Direction.BACKWARD}
    kinds = [kind for kind in Kind if kind in parts and kind.direction in directions]
    for m in program.shape.microbatches_of(d):
        for piece in range(program.shape.slices):
            for kind in kinds:
                if (kind, m, piece) not in have:
                    text = f"device {program.devices[d]}: no {kind.name} of microbatch {m}, slice {piece}"
                    yield Problem("completeness", d, -1, None, text)


def _missing(graph: Graph) -> Iterator[Problem]:
    """Needs that no operation meets, and transfers without their other end."""
    for node, need in graph.missing:
        device, position = graph.where(node)
        kind = graph.ops[node].kind
        remote = need is None or kind in TRANSFERS or need[0] != device
        rule = "transfer" if remote and not (need and need[1] not in graph.index[need[0]]) else "dependency"
        yield Problem(rule, device, position, graph.ops[node], graph.unmet(node, need))
    yield from _wrong_routes(graph)


_RESULTS = {kind.sent_by: kind for kind in COMPUTE if kind.sent_by is not None}
"""Kind of the pass whose result a send transfers, by kind of send."""


def _wrong_routes(graph: Graph) -> Iterator[Problem]:
    """Transfers to a device that does not use the data, or from a device that does not make it."""
    known: dict[tuple[int, ...], bool] = {}
    for node, op in enumerate(graph.ops):
        kind, microbatch, _, chunk, peer, peer_chunk, _, _ = op
        if kind not in _RESULTS:
            continue
        device = graph.device[node]
        key = (device, kind, microbatch, chunk, peer, peer_chunk)
        if key not in known:
            known[key] = graph.deps.target(device, op._replace(kind=_RESULTS[kind])) == (peer, peer_chunk)
        if not known[key]:
            yield _problem(graph.program, "transfer", *graph.where(node), "its peer does not need this")


def _lifetimes(graph: Graph) -> Iterator[Problem]:
    """Objects that a device lacks when an operation needs them, or still holds at the end."""
    for device, node, reason in graph.unfit:
        if node < 0:
            text = f"device {graph.program.devices[device]}: {reason}"
            yield Problem("lifetime", device, -1, None, text)
        else:
            yield _problem(graph.program, "lifetime", *graph.where(node), reason)


def _local_order(graph: Graph) -> Iterator[Problem]:
    """Operations that come before a dependency on their own device."""
    device_of = graph.device
    for i, waits in enumerate(graph.waits):
        for j in waits:
            if j > i and device_of[j] == device_of[i]:
                device, position = graph.where(i)
                needs = graph.deps.requires(device, graph.ops[i])
                need = next((n for n in needs if graph.index[n[0]].get(n[1]) == j), None)
                late = f"{graph.ops[j]} comes later, at position {graph.where(j)[1]}"
                reason = f"{late}, and it needs what that brings or leaves"
                if need is not None:
                    reason = f"it needs {explain(need, graph.ops[i], graph.program.shape, device)}, but {late}"
                yield _problem(graph.program, "dependency", device, position, reason)


def _collectives(graph: Graph) -> Iterator[Problem]:
    """Replicas of a stage must take part in the same collectives in the same order."""
    program = graph.program
    if graph.kinds.isdisjoint(COLLECTIVES):
        return
    orders = [[(op.kind, op.chunk, op.start, op.stop) for op in ops if op.kind in COLLECTIVES] for ops in program.ops]
    for d, device in enumerate(program.devices):
        first = program.shape.first_device[device.stage]
        if orders[d] != orders[first]:
            text = f"the replicas of stage {device.stage} differ in their collectives: devices {device} and "
            yield Problem("deadlock", d, -1, None, text + str(program.devices[first]))


def _joint_events(graph: Graph, teams: Sequence[Sequence[int]]) -> Iterator[Problem]:
    """Meetings whose devices also wait for each other in another way."""
    try:
        stuck = list(stuck_events(graph, teams))
    except ValueError as error:  # no slots, or attention for a pass that is not there
        yield Problem("deadlock", -1, -1, None, str(error))
        return
    for node in stuck:
        device, position = graph.where(node)
        reason = (
            "devices that attend for each other in one slot, replicas that gather or reduce together or share experts, "
            "or their transfers, wait for each other"
        )
        yield _problem(graph.program, "deadlock", device, position, reason)


def _deadlocks(graph: Graph, transports: Sequence[str]) -> Iterator[Problem]:
    differing = list(_collectives(graph))
    if differing:
        yield from differing
        return
    teams = graph.teams()
    is_joint = graph.program.attention_units or graph.program.shape.companions
    if is_joint or (teams and graph.program.has_transfers):
        yield from _joint_events(graph, teams)
    for one in deadlock_of_collectives(graph):
        text = f"replicas that gather or reduce together wait for each other: {one.message}"
        yield Problem("deadlock", one.device, one.position, one.op, text)
    blocking = deadlock(graph, "blocking")
    if not blocking:
        return
    for name in transports:
        stuck = blocking if name == "blocking" else deadlock(graph, name)
        for one in stuck:
            yield Problem("deadlock", one.device, one.position, one.op, f"transport {name}: {one.message}")
