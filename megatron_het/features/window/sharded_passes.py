"""ZeRO-2 and 3 without a pipeline: gradients are reduced after every pass, parameters gathered for every pass.

The collectives of a pass need all replicas of the stage.  A replica with fewer passes than the others takes part
in those of the passes that it does not have, with no tokens: its gradients are zeros (Poplar, section 3.2).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_het.schedule.columns import Direction
from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.kinds import OUTPUT_PARTS, PARAMETER_KINDS, PARTS, chunk_of

STAGES = (2, 3)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A pass through one chunk that every replica has or sits out."""

    turn: int
    chunk: int
    backward: bool


def add_sharded_passes(
    program: Program,
    *,
    zero: int,
    prefetch: int = 1,
    per_layer: bool = False,
    offload: bool = False,
    keep_at_turn: bool = True,
) -> Program:
    """The program with gathers, releases and reductions.

    Args:
        program: of the generator ``data-parallel``.
        zero: 2: all parameters are gathered once and released at the end; 3: a chunk's parameters are gathered for
            its forward and again for its backward.
        prefetch: with ``zero`` 3, how many visits of chunks ahead parameters are gathered.
        per_layer: one PARAM_GATHER and one GRAD_REDUCE per layer.
        offload: parameter shards live on the host: PARAM_PREFETCH before the gather, PARAM_OFFLOAD after use.
        keep_at_turn: neighbouring passes of one chunk share a gather: the last chunk's forward and backward, and
            the first chunk's backward and its next forward.

    Raises:
        ValueError: another order, parameter operations that are there already, or an option out of range.
    """
    if zero not in STAGES or prefetch < 0:
        raise ValueError(f"zero = {zero}, prefetch = {prefetch}: zero is 2 or 3, prefetch >= 0")
    if any(op.kind in PARAMETER_KINDS for ops in program.ops for op in ops):
        raise ValueError(f"program {program.name} has parameter operations already")
    if program.shape.stages != 1:
        raise ValueError(f"program {program.name} has {program.shape.stages} stages: passes are for one")
    most = max(len(program.shape.microbatches_of(d)) for d in range(len(program.devices)))
    slots = list(_slots(program, most))
    visits = [list(range(len(slots)))] if zero == 2 else _visits(slots, keep_at_turn)
    made = _Passes(program, slots, visits, prefetch, per_layer, offload)
    return replace(program, ops=tuple(tuple(made.device(d)) for d in range(len(program.devices))))


def _slots(program: Program, most: int) -> Iterator[_Slot]:
    chunks = range(len(program.shape.layers[0]))
    for turn in range(most):
        yield from (_Slot(turn, c, False) for c in chunks)
        if not program.forward_only:
            yield from (_Slot(turn, c, True) for c in reversed(chunks))


def _visits(slots: list[_Slot], keep_at_turn: bool) -> list[list[int]]:
    """Slots between whose gather and release a chunk stays open."""
    visits: list[list[int]] = []
    for i, slot in enumerate(slots):
        if visits and keep_at_turn and slots[visits[-1][-1]].chunk == slot.chunk:
            visits[-1].append(i)
        else:
            visits.append([i])
    return visits


class _Passes:
    """Places the operations of one device after the other."""

    def __init__(
        self,
        program: Program,
        slots: list[_Slot],
        visits: list[list[int]],
        prefetch: int,
        per_layer: bool,
        offload: bool,
    ) -> None:
        self.program, self.slots, self.visits = program, slots, visits
        self.prefetch, self.per_layer, self.offload = prefetch, per_layer, offload

    def device(self, device: int) -> Iterator[Op]:
        """The device's list; collectives are in the same places of all lists."""
        own = self._own_passes(device)
        opened = 0
        is_open: set[int] = set()
        for i, visit in enumerate(self.visits):
            while opened < min(i + self.prefetch + 1, len(self.visits)):
                chunks = self._chunks(opened)
                if is_open & set(chunks):
                    break  # still open for an earlier visit: no further ahead than that
                for chunk in chunks:
                    yield from self._open(chunk)
                is_open |= set(chunks)
                opened += 1
            for place in visit:
                slot = self.slots[place]
                yield from own.get(slot, ())
                if slot.backward:
                    yield from self._ranged(Kind.GRAD_REDUCE, slot.chunk, backwards=True)
            for chunk in self._chunks(i):
                yield Op(Kind.PARAM_RELEASE, chunk=chunk)
                if self.offload:
                    yield Op(Kind.PARAM_OFFLOAD, chunk=chunk)
            is_open -= set(self._chunks(i))

    def _own_passes(self, device: int) -> dict[_Slot, list[Op]]:
        """The device's passes by slot, each with the parts of a split vocabulary that use its chunk.

        In the only stage nobody else waits for them: the output layer comes between the forward and the backward of
        the last chunk, the embeddings come before the forward and after the backward of the first one.
        """
        chunks = len(self.program.shape.layers[0])
        turns = {m: turn for turn, m in enumerate(self.program.shape.microbatches_of(device))}
        wanted = [slot for slot in self.slots if slot.turn < len(turns)]
        found: dict[_Slot, list[Op]] = {}
        parts: list[tuple[_Slot, Op]] = []
        for op in self.program.ops[device]:
            chunk = chunk_of(op.kind, op.chunk, chunks)
            slot = _Slot(turns[op.microbatch], chunk, op.kind.direction is Direction.BACKWARD)
            if op.kind in PARTS:
                parts.append((slot, op))
                continue
            if len(found) >= len(wanted) or slot != wanted[len(found)]:
                raise ValueError(f"program {self.program.name}: {op} is not in the order of passes one after the other")
            found[slot] = [op]
        for slot, op in parts:
            row, is_ahead = found[slot], slot.backward is (op.kind in OUTPUT_PARTS)
            row.insert(0 if is_ahead else len(row), op)
        return found

    def _chunks(self, visit: int) -> tuple[int, ...]:
        return tuple(sorted({self.slots[place].chunk for place in self.visits[visit]}))

    def _open(self, chunk: int) -> Iterator[Op]:
        if self.offload:
            yield Op(Kind.PARAM_PREFETCH, chunk=chunk)
        yield from self._ranged(Kind.PARAM_GATHER, chunk)

    def _ranged(self, kind: Kind, chunk: int, *, backwards: bool = False) -> Iterator[Op]:
        layers = self.program.shape.layers[0][chunk]
        ranges = [(i, i + 1) for i in range(layers)] if self.per_layer and layers else [(-1, -1)]
        for start, stop in reversed(ranges) if backwards else ranges:
            yield Op(kind, chunk=chunk, start=start, stop=stop)
