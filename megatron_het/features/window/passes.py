"""Adds parameter gathers, gradient reductions and optimizer steps to programs (Zorse, sections 4.1.1 and 4.1.2)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_het.features.window.kinds import PARAMETER_KINDS, ZERO_STAGES
from megatron_het.schedule.graph import Graph, ScheduleError, replay
from megatron_het.schedule.ir import COMPUTE, RECEIVES, TRANSFERS, Kind, Op, Place, Program, inserted
from megatron_het.schedule.joint import event_places, stuck_events
from megatron_het.schedule.kinds import COLLECTIVES, OUTPUT_PARTS, PARTS, Direction, Role, chunk_of, where
from megatron_het.schedule.transfers import add_transfers, plain_durations

# ZeRO-2 and 3 without a pipeline: gradients are reduced after every pass, parameters gathered for every pass.
#
# The collectives of a pass need all replicas of the stage.  A replica with fewer passes than the others also joins
# the collectives of the passes that it does not have: its gradients are zeros there (Poplar, section 3.2).


@dataclass(frozen=True, slots=True)
class _Slot:
    """A pass through one chunk, which a replica runs or only joins with its collectives."""

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
        program: a program of the generator ``data-parallel``.
        zero: 2: all parameters are gathered once and released at the end; 3: a chunk's parameters are gathered for
            its forward and again for its backward.
        prefetch: with ``zero`` 3, how many visits of chunks ahead parameters are gathered.
        per_layer: one PARAM_GATHER and one GRAD_REDUCE per layer.
        offload: parameter shards live on the host: PARAM_PREFETCH before the gather, PARAM_OFFLOAD after use.
        keep_at_turn: neighbouring passes of one chunk share a gather: the last chunk's forward and backward, and
            the first chunk's backward and its next forward.

    Raises:
        ValueError: another order, existing parameter operations, or an option out of range.
    """
    if zero not in ZERO_STAGES or prefetch < 0:
        raise ValueError(f"zero = {zero}, prefetch = {prefetch}: zero is 2 or 3, prefetch >= 0")
    if not program.kinds.isdisjoint(PARAMETER_KINDS):
        raise ValueError(f"program {program.name} has parameter operations already")
    if program.shape.stages != 1:
        raise ValueError(f"program {program.name} has {program.shape.stages} stages: passes are for one")
    most = max(len(program.shape.microbatches_of(d)) for d in range(len(program.devices)))
    slots = list(_slots(program, most))
    visits = [list(range(len(slots)))] if zero == 2 else _sharded_visits(slots, keep_at_turn)
    made = _Passes(program, slots, visits, prefetch, per_layer, offload)
    return replace(program, ops=tuple(tuple(made.device(d)) for d in range(len(program.devices))))


def _slots(program: Program, most: int) -> Iterator[_Slot]:
    chunks = range(len(program.shape.layers[0]))
    for turn in range(most):
        yield from (_Slot(turn, c, False) for c in chunks)
        if not program.forward_only:
            yield from (_Slot(turn, c, True) for c in reversed(chunks))


def _sharded_visits(slots: list[_Slot], keep_at_turn: bool) -> list[list[int]]:
    """Runs of slots during which a chunk stays open, from its gather to its release."""
    visits: list[list[int]] = []
    for i, slot in enumerate(slots):
        if visits and keep_at_turn and slots[visits[-1][-1]].chunk == slot.chunk:
            visits[-1].append(i)
        else:
            visits.append([i])
    return visits


@dataclass(eq=False)
class _Passes:
    """Places the operations of one device after the other."""

    program: Program
    slots: list[_Slot]
    visits: list[list[int]]
    prefetch: int
    per_layer: bool
    offload: bool

    def device(self, device: int) -> Iterator[Op]:
        """The device's operations; collectives are at the same positions on all devices."""
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

        With one stage no other device waits for these parts: the output layer is between the forward and the backward
        of the last chunk, the embeddings are before the forward and after the backward of the first one.
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


STEPS = ("end", "ministage", "none")
_USERS = where(lambda kind: kind in COMPUTE or kind in PARTS)  # operations that use parameters


@dataclass(slots=True)
class _Visit:
    """A run of operations that use one chunk; ``first`` and ``last`` are positions in the device's list."""

    chunk: int
    first: int
    last: int


def add_parameters(
    program: Program,
    *,
    prefetch: int = 1,
    per_layer: bool = False,
    offload: bool = False,
    keep_at_turn: bool = True,
    per_operation: bool = False,
    step: str = "end",
    late: Sequence[Place] = (),
) -> Program:
    """The program with gathers before use, releases after use, reductions and optimizer steps.

    A *visit* is a run of operations of one chunk.  Its parameters are gathered ``prefetch`` visits ahead
    and released when it ends, so ``prefetch + 1`` chunks are materialised at most.  With the ministage
    schedule a chunk is visited once forward and once backward, whatever the number of microbatches.
    Parts of a split vocabulary are operations of the chunk that has their rows (``kinds.chunk_of``).

    Args:
        program: any; schedules that alternate between chunks gather at every change.
        prefetch: how many visits ahead parameters are gathered; 0 gathers right before use.
        per_layer: one PARAM_GATHER and one GRAD_REDUCE per layer, so that compute can start with the first.
        offload: parameter shards live on the host: PARAM_PREFETCH before the gather, PARAM_OFFLOAD after use.
        keep_at_turn: keep the chunk of the last forward visit open if it is also that of the first backward visit.
        per_operation: every operation is a visit of its own: gathers per microbatch, as in ZeRO-3.
        step: ``"ministage"``: OPTIMIZER_STEP one visit after the chunk's reduction, overlapping the next
            backward (the paper; breaks gradient clipping by the global norm and skipped steps);
            ``"end"``: all steps after all reductions (exact); ``"none"``: no OPTIMIZER_STEP.
        late: (stage, chunk) of chunks that are stepped after all others, unless ``step`` is ``"none"``: their
            gradients are summed with those of another stage.

    Raises:
        ValueError: the program has parameter operations already, an option is out of range, or the replicas of a
            stage visit chunks in different orders.
    """
    if prefetch < 0 or step not in STEPS:
        raise ValueError(f"prefetch = {prefetch}, step = {step!r}: prefetch >= 0, step one of {', '.join(STEPS)}")
    if not program.kinds.isdisjoint(PARAMETER_KINDS):
        raise ValueError(f"program {program.name} has parameter operations already")
    visits = [
        _visits(row, len(program.shape.layers[device.stage]), keep_at_turn, per_operation)
        for row, device in zip(program.ops, program.devices, strict=True)
    ]
    for d, device in enumerate(program.devices):
        first = program.shape.first_device[device.stage]
        if [v.chunk for v in visits[d]] != [v.chunk for v in visits[first]]:
            raise ValueError(
                f"program {program.name}: device {device} visits its chunks in another order than replica 0 of its "
                "stage, so they cannot gather parameters together (does every replica have microbatches?)"
            )
    window = _Window(program, prefetch, per_layer, offload, step, late)
    return replace(program, ops=tuple(window.device(d, row) for d, row in enumerate(visits)))


def _visits(ops: Sequence[Op], chunks: int, keep_at_turn: bool, per_operation: bool) -> list[_Visit]:
    visits: list[_Visit] = []
    backward = False
    for i, op in enumerate(ops):
        if op.kind not in _USERS:
            continue
        chunk, is_backward = chunk_of(op.kind, op.chunk, chunks), op.kind.direction is Direction.BACKWARD
        turn = is_backward and not backward
        backward = backward or is_backward
        same = visits and visits[-1].chunk == chunk and not per_operation
        if same and (keep_at_turn or not turn):
            visits[-1].last = i
        else:
            visits.append(_Visit(chunk, i, i))
    return visits


class _Window:
    """Places the operations of one device after the other."""

    def __init__(
        self, program: Program, prefetch: int, per_layer: bool, offload: bool, step: str, late: Sequence[Place]
    ) -> None:
        self.program, self.prefetch = program, prefetch
        self.per_layer, self.offload, self.step = per_layer, offload, step
        self.late = frozenset(late)

    def _layers(self, device: int, chunk: int) -> list[tuple[int, int]]:
        layers = self.program.shape.layers[self.program.devices[device].stage][chunk]
        return [(i, i + 1) for i in range(layers)] if self.per_layer and layers else [(-1, -1)]

    def _open(self, device: int, chunk: int, fetch: bool) -> Iterator[Op]:
        if self.offload and fetch:
            yield Op(Kind.PARAM_PREFETCH, chunk=chunk)
        for start, stop in self._layers(device, chunk):
            yield Op(Kind.PARAM_GATHER, chunk=chunk, start=start, stop=stop)

    def device(self, device: int, visits: Sequence[_Visit]) -> tuple[Op, ...]:
        """The device's list."""
        ops = self.program.ops[device]
        last_visit = {visit.chunk: i for i, visit in enumerate(visits)}
        before: dict[int, list[Op]] = {}
        after: dict[int, list[Op]] = {}
        opened: set[int] = set()
        resident: set[int] = set()

        def open_up_to(index: int, place: list[Op]) -> None:
            for j in range(index + 1):
                if j < len(visits) and j not in opened:
                    chunk = visits[j].chunk
                    if any(visits[k].chunk == chunk for k in range(j) if k in opened and k not in closed):
                        return  # it is still open for an earlier visit: no further ahead than that
                    opened.add(j)
                    place += self._open(device, chunk, chunk not in resident)
                    resident.add(chunk)

        stage = self.program.devices[device].stage
        late = [chunk for chunk in sorted(last_visit) if (stage, chunk) in self.late]
        closed: set[int] = set()
        steps: list[Op] = []
        for i, visit in enumerate(visits):
            # The first ones at the very start: parts of the vocabulary before them may wait for other replicas.
            open_up_to(i + self.prefetch, before.setdefault(visit.first if i else 0, []))
            place = after.setdefault(visit.last, [])
            if steps:  # of the visit before: its reduction overlapped this one
                place += steps
                steps = []
            place.append(Op(Kind.PARAM_RELEASE, chunk=visit.chunk))
            closed.add(i)
            final = last_visit[visit.chunk] == i and not self.program.forward_only
            stepping = final and self.step == "ministage" and visit.chunk not in late
            if final:
                for start, stop in reversed(self._layers(device, visit.chunk)):
                    place.append(Op(Kind.GRAD_REDUCE, chunk=visit.chunk, start=start, stop=stop))
            if stepping:
                steps.append(Op(Kind.OPTIMIZER_STEP, chunk=visit.chunk))
            ahead = {visits[j].chunk for j in opened if j > i}
            if self.offload and visit.chunk not in ahead:
                (steps if stepping else place).append(Op(Kind.PARAM_OFFLOAD, chunk=visit.chunk))
                resident.discard(visit.chunk)
        at_end = {"end": [c for c in sorted(last_visit) if c not in late] + late, "ministage": late, "none": []}
        tail = [] if self.program.forward_only else [*steps, *self._steps_at_end(at_end[self.step])]
        return (*inserted(ops, before, after), *tail)

    def _steps_at_end(self, chunks: Sequence[int]) -> Iterator[Op]:
        for chunk in chunks:
            if self.offload:
                yield Op(Kind.PARAM_PREFETCH, chunk=chunk)
            yield Op(Kind.OPTIMIZER_STEP, chunk=chunk)
            if self.offload:
                yield Op(Kind.PARAM_OFFLOAD, chunk=chunk)


_COPIES = frozenset({Kind.PARAM_PREFETCH, Kind.PARAM_OFFLOAD})
_PLACED = where(lambda kind: kind in RECEIVES or kind.role is Role.TRANSFER)  # what ``add_transfers`` adds


def post_together(program: Program, *, speeds: Sequence[float] | None = None) -> Program:
    """The program whose replicas post each joint gather or reduction at the same point of one global order.

    A collective is posted ahead of its use, and posting it does not block.  But the host of a replica may have to
    wait for the device before the others have posted theirs (first launch of a kernel, pinned allocation).  Until then
    the others must not depend on this replica.  So posts move among the transfers around them.  Posts of replicas that
    are ahead may move up to the use, because the collective runs only when the last replica has posted it.
    Where that does not help, transfers are placed anew, together with the collectives.

    Args:
        speeds: See :func:`~megatron_het.schedule.transfers.add_transfers`.
    """
    if not program.has_transfers or max(program.shape.replicas) == 1:
        return program
    graph = Graph(program)
    teams = graph.teams()
    if not teams or next(stuck_events(graph, teams), None) is None:
        return program
    found = _in_order(graph, teams)
    if found is None:
        kept = (tuple(op for op in ops if op.kind not in _PLACED) for ops in program.ops)
        try:
            graph = Graph(add_transfers(replace(program, ops=tuple(kept)), speeds=speeds))
        except ScheduleError:
            return program
        found = _in_order(graph, graph.teams())
    return found or program  # the validator reports the cycle


def _in_order(graph: Graph, teams: Sequence[Sequence[int]]) -> Program | None:
    """The program with its collectives in one global order; None if there is no such order."""
    program = graph.program
    try:
        _, end, _ = replay(graph, plain_durations(program, graph))
    except ScheduleError:  # operations wait for each other wherever collectives are
        return None
    latest = {node: max(end[member] for member in team) for team in teams for node in team}
    copies = (node for node, op in enumerate(graph.ops) if op.kind in _COPIES)
    spans = _spans(graph, {*latest, *copies})
    for node, at in latest.items():
        end[node] = at
    places = event_places(graph, teams, spans, end.__getitem__)
    if min(places) < 0:
        return None
    order = (sorted(range(first, stop), key=places.__getitem__) for first, stop in zip(graph.first, graph.first[1:]))
    return replace(program, ops=tuple(tuple(graph.ops[node] for node in nodes) for nodes in order))


def _spans(graph: Graph, wanted: set[int]) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
    """For every wanted collective or host copy, the operations of its device that must stay before and after it.

    It may move past transfers.  Up to the use of its parameters a collective may move past all but other collectives.
    """
    ops, spans = graph.ops, dict[int, tuple[Sequence[int], Sequence[int]]]()
    has_copies = not graph.kinds.isdisjoint(_COPIES)
    for d, (first, stop) in enumerate(pairwise(graph.first)):
        chunks = len(graph.program.shape.layers[graph.program.devices[d].stage])
        near: dict[bool, Sequence[int]] = {False: (), True: ()}  # by whether it is a collective
        for node in range(first, stop):
            kind = ops[node].kind
            if node in wanted:
                spans[node] = (near[False] if kind in _COPIES else (*near[False], *near[True])), ()
            if kind not in TRANSFERS:
                near[kind in COLLECTIVES] = (node,)
        near = {False: (), True: ()}
        # the next operation about a chunk, or that waits for operation -2 - key; copies are about parameters
        users, of_gradients = dict[int, int](), dict[int, int]()
        for node in range(stop - 1, first - 1, -1):
            kind, chunk = ops[node].kind, ops[node].chunk
            if node in wanted:
                mine = of_gradients if has_copies and kind is Kind.GRAD_REDUCE else users
                about = sorted([mine[key] for key in (chunk, -2 - node) if key in mine])[:1]
                spans[node] = spans[node][0], near[False] if kind in _COPIES else (*about, *near[True])
            if kind not in TRANSFERS:
                near[kind in COLLECTIVES] = (node,)
            if kind not in TRANSFERS and kind not in COLLECTIVES:
                for known in (users, of_gradients) if has_copies and kind not in _COPIES else (users,):
                    known[chunk_of(kind, chunk, chunks)] = node
                    for other in graph.waits[node]:
                        known[-2 - other] = node
    return spans
