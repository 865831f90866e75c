"""Splits the word embeddings and the output layer over the devices of each microbatch (SlimPipe, section 4.3)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_het.schedule.graph import Graph, collection_paused
from megatron_het.schedule.ir import COMPUTE, Kind, Op, Program
from megatron_het.schedule.kinds import Direction
from megatron_het.schedule.passes.inserts import Inserts, Moment, Place, slot_inserts, timed_inserts, with_inserts
from megatron_het.schedule.slots import aligned_slots


@collection_paused()
def add_embedding(program: Program, *, speeds: Sequence[float] | None = None) -> Program:
    """The program with EMBED_FORWARD and EMBED_BACKWARD on every device that a microbatch visits.

    Tokens leave the first stage, and the parts of their embeddings come back, while it still runs the
    operation before the slice's first FORWARD; the gradient of the embeddings leaves it after the slice's
    last BACKWARD.  A replay of the program with plain durations tells where these moments are elsewhere.
    Run this after the vocabulary and before transfers are added.

    Args:
        program: without transfers.
        speeds: relative speed of each device, for the replay.

    Raises:
        ValueError: the program has split embeddings or transfers already.
    """
    if program.embedding or program.has_transfers:
        raise ValueError(f"program {program.name}: embeddings are split once, before transfers are added")
    if program.attention_units:
        return with_inserts(program, _embeddings_by_slot(program))
    return with_inserts(program, timed_inserts(program, speeds, _first_chunk, _EMBEDDING_FORWARD, _EMBEDDING_BACKWARD))


# On all devices everything before a forward has ended by its moment, and everything after it has not; so
# nothing before it depends on anything after it, and the result runs.  On a backward nothing depends.
_EMBEDDING_FORWARD = Place(Kind.EMBED_FORWARD, ahead=True, own=None)
_EMBEDDING_BACKWARD = Place(Kind.EMBED_BACKWARD, ahead=False, own=1)


def _embeddings_by_slot(program: Program) -> Inserts:
    """Devices that attend for each other go slot by slot: a slot ahead of the forward, and behind the backward."""
    stage, chunk = program.shape.path[0]
    wanted = []
    for s, (_, backward, passes) in enumerate(aligned_slots(program)):
        for d, op in passes.items():
            if program.devices[d].stage == stage and op.chunk == chunk:
                kind = Kind.EMBED_BACKWARD if backward else Kind.EMBED_FORWARD
                wanted.append((s + 1 if backward else max(s - 1, 0), Op(kind, op.microbatch, op.slice)))
    return slot_inserts(program, sorted(wanted, key=lambda place: place[0]))


def _first_chunk(graph: Graph, start: Sequence[float], end: Sequence[float]) -> Iterator[Moment]:
    """Of the model's first chunk: when the compute operation before a forward begins, and when a backward ends."""
    stage, chunk = graph.program.shape.path[0]
    for d, device in enumerate(graph.program.devices):
        before = 0.0  # when the compute operation before began
        for node in range(graph.first[d], graph.first[d + 1]) if device.stage == stage else ():
            op = graph.ops[node]
            if op.kind in COMPUTE:
                if op.chunk == chunk and op.kind.sent_by is not None:
                    backward = op.kind.direction is Direction.BACKWARD
                    yield Moment(end[node] if backward else before, backward, node)
                before = start[node]


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
    if program.splits_output or program.has_transfers:
        raise ValueError(f"program {program.name}: the vocabulary is split once, before transfers are added")
    inserts = _by_slot(program) or timed_inserts(
        program, speeds, _last_chunk, _FORWARD, _BACKWARD, _between_the_sweeps(program)
    )
    return replace(with_inserts(program, inserts), splits_output=True)


# A forward goes before what starts at or after the end of the last chunk's, a backward after what has ended
# when the last chunk's begins: before what runs then, or it would come too late.  Both go after earlier
# inserts.  So on no device does anything before an insert depend on something after the same insert on
# another device, and the result runs, even if the devices wait for each other there.
_FORWARD = Place(Kind.VOCAB_FORWARD, ahead=False, own=1)
_BACKWARD = Place(Kind.VOCAB_BACKWARD, ahead=True, own=0)


def _by_slot(program: Program) -> Inserts | None:
    """Inserts at slot boundaries; None when passes are not aligned."""
    try:
        slots = aligned_slots(program)
    except ValueError:
        return None
    stage, chunk = program.shape.path[-1]
    wanted = [
        (s + (not backward), Op(Kind.VOCAB_BACKWARD if backward else Kind.VOCAB_FORWARD, op.microbatch, op.slice))
        for s, (_, backward, passes) in enumerate(slots)
        for d, op in passes.items()
        if program.devices[d].stage == stage and op.chunk == chunk
    ]
    return slot_inserts(program, wanted)


def _between_the_sweeps(program: Program) -> list[tuple[int, int]] | None:
    """Where parts may be on stages that have no chunk in the last sweep, if microbatches go sweep by sweep.

    Parts are in the middle of the last sweep.  A stage that takes part in it has ended the sweeps before, and a stage
    that does not must have as well: replicas elsewhere may open the chunks of the last sweep together, and wait for all
    microbatches of the sweep before.  Likewise in the backward.
    """
    most = max(map(len, program.shape.layers))
    rows = [[op.chunk for op in ops if op.kind is Kind.FORWARD] for ops in program.ops]
    if min(map(len, program.shape.layers)) == most or any(row != sorted(row) for row in rows):
        return None
    bounds = []
    for ops, device in zip(program.ops, program.devices):
        backwards = [i for i, op in enumerate(ops) if op.kind in COMPUTE and op.kind is not Kind.FORWARD]
        forwards = [i + 1 for i, op in enumerate(ops) if op.kind is Kind.FORWARD]
        lacks = len(program.shape.layers[device.stage]) < most
        bounds.append((max(forwards, default=0), min(backwards, default=len(ops))) if lacks else (0, len(ops)))
    return bounds


def _last_chunk(graph: Graph, start: Sequence[float], end: Sequence[float]) -> Iterator[Moment]:
    """The ends of the forwards and the starts of the backwards of the model's last chunk."""
    stage, chunk = graph.program.shape.path[-1]
    for d, device in enumerate(graph.program.devices):
        for node in range(graph.first[d], graph.first[d + 1]) if device.stage == stage else ():
            op = graph.ops[node]
            if op.kind in COMPUTE and op.chunk == chunk and op.kind.sent_by is not None:
                backward = op.kind.direction is Direction.BACKWARD
                yield Moment(start[node] if backward else end[node], backward, node)
