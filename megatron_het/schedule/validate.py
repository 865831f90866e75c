"""Finds everything that is wrong with a program before it runs."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from megatron_het.schedule.deps import explain
from megatron_het.schedule.graph import Graph, ScheduleError, collection_paused, describe
from megatron_het.schedule.ir import COMPUTE, TRANSFERS, Kind, Op, Program
from megatron_het.schedule.joint import stuck_events
from megatron_het.schedule.kinds import COLLECTIVES, OUTPUT_PARTS, WORD_PARTS, Direction, Fields, Work, complete
from megatron_het.schedule.transports import TRANSPORTS, deadlock, deadlock_of_collectives

RULES = ("field", "completeness", "transfer", "dependency", "lifetime", "deadlock")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        rule: one of :data:`RULES`.
        device, position: where; position -1 when it is about a whole device.
        op: the operation, if it is about one.
        message: device, position, operation with its neighbours, and what it lacks or waits for.
    """

    rule: str
    device: int
    position: int
    op: Op | None
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@collection_paused()
def validate(
    program: Program, graph: Graph | None = None, *, transports: Sequence[str] = TRANSPORTS, limit: int = 20
) -> list[Problem]:
    """Problems of a program, at most ``limit``; an empty list means that it can run.

    Later rules assume earlier ones, so they are looked at only when those found nothing.

    Args:
        program: with or without transfers; without, transports are not looked at.
        graph: of the program, when the caller has it already.
        transports: which must not deadlock.
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


_HAS_PEER = complete(
    Fields,
    {Fields.PASS: False, Fields.TRANSFER: True, Fields.UNITS: True, Fields.UNITS_OF_PEER: True, Fields.LAYERS: False},
)


def _fields(program: Program) -> Iterator[Problem]:
    """Numbers that name nothing."""
    shape = program.shape
    for d, (device, ops) in enumerate(zip(shape.devices, program.ops)):
        own = set(shape.microbatches_of(d))
        chunks, slices, microbatches = len(shape.layers[device.stage]), shape.slices, shape.microbatches
        known: dict[tuple[int, int], bool] = {}
        for i, op in enumerate(ops):
            kind, microbatch, piece, chunk, peer, peer_chunk, start, stop = op
            fields = kind.fields
            if fields is Fields.LAYERS:
                good = 0 <= chunk < chunks and (start < 0) == (stop < 0)
            elif fields is Fields.UNITS_OF_PEER:
                good = 0 <= microbatch < microbatches and 0 <= piece < slices
            else:
                good = microbatch in own and 0 <= piece < slices and 0 <= chunk < chunks
            if good and _HAS_PEER[fields]:
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
    """Every forward and backward exactly once, where it belongs."""
    shape = program.shape
    wanted = Work.FORWARD.value if program.forward_only else sum(part.value for part in _WORK_NAMES)
    parts_of = [kind.work.value for kind in Kind]
    splits_embedding = program.embedding  # looks at all operations
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
    """Yields what all devices do for every slice that they run: the parts of a split layer."""
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
    """Needs that nothing meets, transfers without their other end."""
    for node, need in graph.missing:
        device, position = graph.where(node)
        kind = graph.ops[node].kind
        remote = need is None or kind in TRANSFERS or need[0] != device
        rule = "transfer" if remote and not (need and need[1] not in graph.index[need[0]]) else "dependency"
        yield Problem(rule, device, position, graph.ops[node], graph.unmet(node, need))
    yield from _wrong_routes(graph)


_RESULTS = {kind.sent_by: kind for kind in COMPUTE if kind.sent_by is not None}
"""By kind of send: a pass whose result it takes away."""


def _wrong_routes(graph: Graph) -> Iterator[Problem]:
    """Transfers that go where the data is not wanted, or come from where it is not made."""
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
    """Yields what a device does not hold when an operation needs it, or holds at the end."""
    for device, node, reason in graph.unfit:
        if node < 0:
            text = f"device {graph.program.devices[device]}: {reason}"
            yield Problem("lifetime", device, -1, None, text)
        else:
            yield _problem(graph.program, "lifetime", *graph.where(node), reason)


def _local_order(graph: Graph) -> Iterator[Problem]:
    """Operations before something of their own device that they need."""
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
    """Replicas of a stage take part in the same collectives in the same order."""
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
    """Yields what devices do together, where they wait for each other by another way too."""
    try:
        stuck = list(stuck_events(graph, teams))
    except ValueError as error:  # no slots, or attention for a pass that is not there
        yield Problem("deadlock", -1, -1, None, str(error))
        return
    for node in stuck:
        device, position = graph.where(node)
        reason = (
            "devices that attend for each other in one slot, replicas that gather or reduce together, or their "
            "transfers, wait for each other"
        )
        yield _problem(graph.program, "deadlock", device, position, reason)


def _deadlocks(graph: Graph, transports: Sequence[str]) -> Iterator[Problem]:
    differing = list(_collectives(graph))
    if differing:
        yield from differing
        return
    teams = graph.teams()
    if graph.program.attention_units or (teams and graph.program.has_transfers):
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


__all__ = ["RULES", "Problem", "check", "validate"]
