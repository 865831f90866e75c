"""Finds everything that is wrong with a program before it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_het.schedule.deps import Dependencies, explain
from megatron_het.schedule.graph import Graph, ScheduleError, collection_paused, describe
from megatron_het.schedule.ir import TRANSFERS, Kind, Op, Program
from megatron_het.schedule.joint import stuck_events
from megatron_het.schedule.lifetimes import Lifetimes
from megatron_het.schedule.transports import TRANSPORTS, deadlock

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


_WITHOUT_MICROBATCH = frozenset(
    {
        Kind.PARAM_PREFETCH, Kind.PARAM_GATHER, Kind.PARAM_RELEASE, Kind.PARAM_OFFLOAD, Kind.GRAD_REDUCE,
        Kind.OPTIMIZER_STEP,
    }
)  # fmt: skip
_HELPERS = frozenset({Kind.ATTEND_HELP, Kind.ATTEND_HELP_BACKWARD, Kind.KV_RECV, Kind.KV_RECV_BACKWARD})


def _fields(program: Program) -> Iterator[Problem]:
    """Numbers that name nothing."""
    shape = program.shape
    for d, (device, ops) in enumerate(zip(shape.devices, program.ops)):
        own = set(shape.microbatches_of(d))
        chunks = len(shape.layers[device.stage])
        known: dict[tuple[int, ...], bool] = {}
        for i, op in enumerate(ops):
            kind = op[0]
            if kind in _WITHOUT_MICROBATCH:
                good = 0 <= op[3] < chunks and (op[6] < 0) == (op[7] < 0)
            elif kind in _HELPERS:
                good = 0 <= op[1] < shape.microbatches and 0 <= op[2] < shape.slices
            else:
                good = op[1] in own and 0 <= op[2] < shape.slices and 0 <= op[3] < chunks
            if good and kind in TRANSFERS:
                edge = (op[4], op[5])
                if edge not in known:
                    peer_chunks = len(shape.layers[shape.devices[op[4]].stage]) if 0 <= op[4] < len(program.ops) else 0
                    known[edge] = op[4] != d and 0 <= op[5] < peer_chunks
                good = known[edge]
            if not good:
                yield _problem(program, "field", d, i, "microbatch, slice, chunk or peer does not exist here")


def _completeness(program: Program) -> Iterator[Problem]:
    """Every forward and backward exactly once, where it belongs."""
    shape = program.shape
    for d, (device, ops) in enumerate(zip(shape.devices, program.ops)):
        have: dict[tuple[int, int, int], int] = {}
        for i, op in enumerate(ops):
            kind = op[0]
            if kind < 4:
                key, bit = (op[1], op[2], op[3]), (1, 6, 2, 4)[kind]
                before = have.get(key, 0)
                if before & bit:
                    yield _problem(program, "completeness", d, i, "this work is there twice")
                have[key] = before | bit
        wanted = 1 if program.forward_only else 7
        names = {1: "FORWARD", 2: "BACKWARD (of its input)", 4: "BACKWARD (of its weights)"}
        for m in shape.microbatches_of(d):
            for piece in range(shape.slices):
                for chunk in range(len(shape.layers[device.stage])):
                    got = have.get((m, piece, chunk), 0)
                    if got != wanted:
                        lacking = next((name for bit, name in names.items() if wanted & ~got & bit), None)
                        what = f"no {lacking}" if lacking else "a backward in a forward-only program"
                        text = f"device {device}: {what} of microbatch {m}, slice {piece}, chunk {chunk}"
                        yield Problem("completeness", d, -1, None, text)
        if program.vocabulary:
            yield from _split(program, d, (Kind.VOCAB_FORWARD, Kind.VOCAB_BACKWARD))
        if program.embedding:
            yield from _split(program, d, (Kind.EMBED_FORWARD, Kind.EMBED_BACKWARD))


def _split(program: Program, d: int, kinds: tuple[Kind, Kind]) -> Iterator[Problem]:
    """What all devices do for every slice that they run: the parts of a split layer."""
    have = {(op[0], op[1], op[2]) for op in program.ops[d]}
    for m in program.shape.microbatches_of(d):
        for piece in range(program.shape.slices):
            for kind in kinds[: 1 if program.forward_only else 2]:
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


def _wrong_routes(graph: Graph) -> Iterator[Problem]:
    """Transfers that go where the data is not wanted, or come from where it is not made."""
    deps: Dependencies = graph.deps
    makers = {Kind.SEND_FORWARD: Kind.FORWARD, Kind.SEND_BACKWARD: Kind.BACKWARD}
    known: dict[tuple[int, ...], bool] = {}
    for node, op in enumerate(graph.ops):
        if op[0] not in makers:
            continue
        device = graph.device[node]
        key = (device, op[0], op[1], op[3], op[4], op[5])
        if key not in known:
            known[key] = deps.target(device, op._replace(kind=makers[op.kind])) == (op.peer, op.peer_chunk)
        if not known[key]:
            yield _problem(graph.program, "transfer", *graph.where(node), "its peer does not need this")


def _lifetimes(graph: Graph) -> Iterator[Problem]:
    program = graph.program
    simple = all(op[0] < Kind.KV_SEND for op in graph.ops)
    if simple:  # without them, only FORWARD before BACKWARD is left, which the order of values says too
        return
    for d, ops in enumerate(program.ops):
        lifetimes = Lifetimes(program, d)
        for i, op in enumerate(ops):
            for reason in lifetimes.step(op):
                yield _problem(program, "lifetime", d, i, reason)
        for reason in lifetimes.finish():
            yield Problem("lifetime", d, -1, None, f"device {program.devices[d]}: {reason}")


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
    orders = [
        [(op.kind, op.chunk, op.start, op.stop) for op in ops if op[0] in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE)]
        for ops in program.ops
    ]
    for d, device in enumerate(program.devices):
        first = program.shape.first_device[device.stage]
        if orders[d] != orders[first]:
            text = f"the replicas of stage {device.stage} differ in their collectives: devices {device} and "
            yield Problem("deadlock", d, -1, None, text + str(program.devices[first]))


def _joint_passes(graph: Graph) -> Iterator[Problem]:
    """Passes that attend for each other, and wait for each other by another way too."""
    try:
        stuck = list(stuck_events(graph))
    except ValueError as error:  # no slots, or attention for a pass that is not there
        yield Problem("deadlock", -1, -1, None, str(error))
        return
    for node in stuck:
        device, position = graph.where(node)
        reason = "devices that attend for each other in one slot, or their transfers, wait for each other"
        yield _problem(graph.program, "deadlock", device, position, reason)


def _deadlocks(graph: Graph, transports: Sequence[str]) -> Iterator[Problem]:
    if any(op[0] == Kind.PARAM_GATHER or op[0] == Kind.GRAD_REDUCE for op in graph.ops):
        yield from _collectives(graph)
    if graph.program.exchange_units:
        yield from _joint_passes(graph)
    blocking = deadlock(graph, "blocking")
    if not blocking:
        return
    for name in transports:
        stuck = blocking if name == "blocking" else deadlock(graph, name)
        for one in stuck:
            yield Problem("deadlock", one.device, one.position, one.op, f"transport {name}: {one.message}")


__all__ = ["RULES", "Problem", "check", "validate"]
