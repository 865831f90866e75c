"""Splits the word embeddings over the devices of each microbatch (SlimPipe, section 4.3.2)."""

from collections.abc import Iterator, Sequence

from megatron_het.schedule.columns import Direction
from megatron_het.schedule.graph import Graph, collection_paused
from megatron_het.schedule.ir import COMPUTE, Kind, Op, Program
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
        return with_inserts(program, _by_slot(program))
    return with_inserts(program, timed_inserts(program, speeds, _first_chunk, _FORWARD, _BACKWARD))


# On all devices everything before a forward has ended by its moment, and everything after it has not; so
# nothing before it depends on anything after it, and the result runs.  On a backward nothing depends.
_FORWARD = Place(Kind.EMBED_FORWARD, ahead=True, own=None)
_BACKWARD = Place(Kind.EMBED_BACKWARD, ahead=False, own=1)


def _by_slot(program: Program) -> Inserts:
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
