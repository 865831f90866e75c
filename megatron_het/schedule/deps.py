"""Dependencies of operations: what each needs before it can run, in one function.

An operation *produces* values and *requires* values; a value sits on a device.  Generators, passes,
validator, simulator and the executor's checks all ask :class:`Dependencies`, so a dependency that is
written here holds everywhere:

* activations from the previous chunk, gradients from the next one,
* keys and values: the FORWARD of a slice needs the FORWARD of the slice before it (SlimPipe, section 4.1.2),
  the BACKWARD of a slice needs the BACKWARD of the slice after it (dK and dV of a slice are complete then),
* what the operations of features need, and what passes need of them (``kinds.Needs``, ``kinds.Rules``).

The table of kinds names what each kind needs; this module says where that is.  Lifetimes are states rather than
values: what a device holds at an operation, and which operation brought it there.  Activations are a state per
FORWARD: kept, and on the device or elsewhere.  Features add states of their own (:class:`State`): parameters that are
gathered and released, gradients that are reduced, keys and values of others.
"""

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from megatron_het.schedule.ir import Op, Program, Shape
from megatron_het.schedule.kinds import PARTS, RULES, Direction, Ends, Kind, Role, Rule, Value, chunk_of, where

# Lifetimes.  Operations of side streams (``Kind.is_issued``) are issued when the compute operation before them in the
# list is done; compute waits for what is brought for it.

Pass = tuple[int, int, int]  # (microbatch, slice, chunk)

_STATEFUL = where(lambda kind: kind.is_issued or (kind.role is not Role.PASS and kind.effect.lifetime is not None))
"""Kinds that change what is held beyond what the order of values says already."""


class Unfit(NamedTuple):
    """Something that does not fit what a device holds."""

    device: int
    node: int  # number of the operation in the graph, -1 for the end of the list
    reason: str  # in words


class State:
    """Holds what the operations of a feature have on one device; their effects step over it."""

    of_parameters = False
    """Whether it has to do with parameters or their gradients, which parts of shared layers have too."""

    def __init__(self, held: "Lifetimes", program: Program, kinds: Set[Kind]) -> None:
        self.held = held

    def computes(self, node: int, chunk: int, found: list[int]) -> None:
        """A pass of a chunk, or a part that uses it, comes next; what it waits for is added to ``found``."""

    def uses(self, key: Pass, found: list[int]) -> None:
        """The activations of a pass are used next."""

    def has_parameters(self, node: int, chunk: int) -> None:
        """The parameters of a chunk are used next."""

    def makes_gradients(self, node: int, chunk: int) -> None:
        """Gradients of a chunk are made next."""

    def finish(self) -> None:
        """The end of the list."""


_HOOKS = ("computes", "uses", "has_parameters", "makes_gradients")  # of states


class Lifetimes:
    """Walks one device's list: finds what each operation waits for, and operations that do not fit."""

    def __init__(self, program: Program, device: int, kinds: Set[Kind]) -> None:
        self.device, self.layers = device, program.shape.layers[program.devices[device].stage]
        self.problems: list[Unfit] = []  # what did not fit up to now
        self.kept: dict[Pass, bool] = {}  # passes whose activations are held, and whether they are elsewhere
        self.compute = -1  # the last operation that computed, -1 before the first
        self._program, self._kinds = program, kinds
        self._states: dict[type[State], State] = {}
        self._hooks: dict[str, list[Callable[..., None]]] = {name: [] for name in _HOOKS}  # those that do something
        self._whole = [frozenset(range(max(count, 1))) for count in self.layers]
        self._effects = {kind: kind.effect.lifetime(self) for kind in kinds if kind.effect.lifetime is not None}
        # :meth:`step`, of the kinds for which it does anything
        self.steps = self._effects | {kind: self.step for kind in kinds if kind.is_issued or kind.meets}

    @staticmethod
    def matter(kinds: Set[Kind]) -> bool:
        """Whether a program with these kinds has more states than FORWARD before BACKWARD, which values say too."""
        return not kinds.isdisjoint(_STATEFUL)

    def state[S: State](self, state: type[S]) -> S:
        """A feature's state on this device."""
        found = self._states.get(state)
        if found is None:
            found = self._states[state] = state(self, self._program, self._kinds)
            for name, hooks in self._hooks.items():
                if getattr(state, name) is not getattr(State, name):
                    hooks.append(getattr(found, name))
        assert isinstance(found, state)
        return found

    def step(self, node: int, op: Op, found: list[int]) -> None:
        """The next operation of the device.

        Args:
            node: its number.
            op: the operation.
            found: what it waits for; what it waits for because of what the device holds is added.
        """
        kind = op.kind
        if kind.is_issued and self.compute >= 0:
            found.append(self.compute)
        if kind in PARTS and any(state.of_parameters for state in self._states.values()):
            self._part(node, op, found)
        effect = self._effects.get(kind)
        if effect is not None:
            effect(node, op, found)

    def finish(self) -> None:
        """The end of the list."""
        for state in self._states.values():
            state.finish()

    def whole(self, chunk: int) -> Set[int]:
        """All layers of a chunk; one that has none counts as one."""
        return self._whole[chunk]

    def covered(self, op: Op) -> Set[int]:
        """The layers of its chunk that an operation is about; without a range all."""
        return self.whole(op.chunk) if op.start < 0 else set(range(op.start, op.stop))

    def unfit(self, node: int, reason: str) -> None:
        """Something does not fit."""
        self.problems.append(Unfit(self.device, node, reason))

    def _part(self, node: int, op: Op, found: list[int]) -> None:
        """A part of a layer that devices share uses the parameters of the chunk that has its rows."""
        chunk = chunk_of(op.kind, op.chunk, len(self.layers))
        self._computes(node, chunk, found)
        for hook in self._hooks["has_parameters"]:
            hook(node, chunk)
        for hook in self._hooks["makes_gradients"] if op.kind.direction is Direction.BACKWARD else ():
            hook(node, chunk)

    def _computes(self, node: int, chunk: int, found: list[int]) -> None:
        for hook in self._hooks["computes"]:
            hook(node, chunk, found)
        self.compute = node

    def keep(self, node: int, op: Op, found: list[int]) -> None:
        """A FORWARD leaves activations."""
        _, microbatch, piece, chunk, _, _, _, _ = op
        self._computes(node, chunk, found)
        for hook in self._hooks["has_parameters"]:
            hook(node, chunk)
        self.kept[microbatch, piece, chunk] = False

    def use_up(self, node: int, op: Op, found: list[int]) -> None:
        """A backward uses activations for the last time."""
        self.use(node, op, found)
        self.kept.pop((op.microbatch, op.slice, op.chunk), None)

    def use(self, node: int, op: Op, found: list[int], *, parameters: bool = True) -> None:
        """A backward uses activations, and parameters too or not."""
        _, microbatch, piece, chunk, _, _, _, _ = op
        key = (microbatch, piece, chunk)
        self._computes(node, chunk, found)
        for hook in self._hooks["uses"]:
            hook(key, found)
        for hook in self._hooks["has_parameters"] if parameters else ():
            hook(node, chunk)
        elsewhere = self.kept.get(key)
        if elsewhere is None:
            self.unfit(node, "its FORWARD has not run, or its activations are already released")
        elif elsewhere:
            self.unfit(node, "its activations are on the host (no fetch before it)")
        for hook in self._hooks["makes_gradients"]:
            hook(node, chunk)


def shown_ranges(numbers: Set[int]) -> str:
    """Numbers in words, a run of them by its ends."""
    ordered = sorted(numbers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))


Key = tuple[int, ...]
"""(value, microbatch, slice, chunk), and the device it is for when it is made or received for another one."""
Need = tuple[int, Key]  # (device, key): the value ``key`` of that device

_OUTPUT, _GRADIENT = Value.OUTPUT, Value.GRADIENT
AFTER_BEGINNING = where(lambda kind: kind.needs.begun is not None)
"""Kinds that wait for another operation to begin, besides values; see :meth:`Dependencies.begun`."""
HELPED_BY_RECEIVE = where(lambda kind: kind.fed_by is not None and kind.fed_by.makes is not None)
"""Kinds that may use what their own device receives; see :func:`brought`."""


def brought(op: Op) -> Key:
    """The value that an operation of :data:`HELPED_BY_RECEIVE` waits for, if its own device receives that.

    A helper may have kept keys and values from an earlier pass; then nothing is received for this one.
    """
    assert op.kind.fed_by is not None and op.kind.fed_by.makes is not None
    return (op.kind.fed_by.makes, op.microbatch, op.slice, op.chunk, op.peer)


def produces(op: Op) -> Key | None:
    """The value that an operation leaves on its device, None for transfers and bookkeeping."""
    value = op.kind.makes
    if value is None:
        return None
    if value.for_a_peer:
        return (value, op.microbatch, op.slice, op.chunk, op.peer)
    return (value, op.microbatch, op.slice, op.chunk)


class Dependencies:
    """The dependency function of one shape.

    Args:
        first_inputs: what features make forwards of the first chunk need (``kinds.Rules``).
        last_gradients: the same of backwards of the last chunk.
        units: units per slice in which attention moves (``Program.attention_units``).
    """

    __slots__ = (
        "_after",
        "_before",
        "_begun",
        "_first_inputs",
        "_last_gradients",
        "_runner",
        "_slices",
        "rules",
        "shape",
        "units",
    )

    def __init__(
        self, shape: Shape, first_inputs: Sequence[Ends] = (), last_gradients: Sequence[Ends] = (), units: int = 0
    ) -> None:
        self.shape, self.units = shape, units
        self._first_inputs, self._last_gradients = first_inputs, last_gradients
        self._before = [[shape.previous(d.stage, c) for c in range(len(shape.layers[d.stage]))] for d in shape.devices]
        self._after = [[shape.next(d.stage, c) for c in range(len(shape.layers[d.stage]))] for d in shape.devices]
        self._runner = [[first + r for r in row] for first, row in zip(shape.first_device, shape.route)]
        self._slices = shape.slices
        # :meth:`requires` by kind, for who asks for many operations
        self.rules: list[Rule] = [kind.needs.rule(self) for kind in Kind]
        self._begun = {kind: kind.needs.begun(self) for kind in AFTER_BEGINNING if kind.needs.begun is not None}

    @classmethod
    def of(cls, program: Program) -> "Dependencies":
        """Returns the dependencies of a program."""
        firsts = (rules.first_input(program) for rules in RULES)
        lasts = (rules.last_gradient(program) for rules in RULES)
        return cls(
            program.shape,
            [needs for needs in firsts if needs is not None],
            [needs for needs in lasts if needs is not None],
            program.attention_units,
        )

    def runner(self, stage: int, microbatch: int) -> int:
        """Device that runs ``microbatch`` in ``stage``."""
        return self._runner[stage][microbatch]

    def team(self, microbatch: int) -> list[int]:
        """The devices that a microbatch visits, by stage."""
        return [row[microbatch] for row in self._runner]

    def first(self, microbatch: int) -> int:
        """The device with the model's first chunk."""
        return self._runner[self.shape.path[0][0]][microbatch]

    def target(self, device: int, op: Op) -> tuple[int, int] | None:
        """(device, chunk) that the result of a FORWARD or BACKWARD goes to; None at the ends."""
        table = self._after if op.kind.makes is _OUTPUT else self._before
        place = table[device][op.chunk]
        return None if place is None else (self._runner[place[0]][op.microbatch], place[1])

    def requires(self, device: int, op: Op) -> list[Need]:
        """Values that must exist before ``op`` can run on ``device``.

        A value on another device has to be transferred; SEND operations need their own device's value,
        receives are tied to their send by :meth:`Op.partner`.
        """
        return self.rules[op.kind](device, op)

    def begun(self, device: int, op: Op) -> list[Need]:
        """Values whose making must have begun before an operation of :data:`AFTER_BEGINNING` can run."""
        return self._begun[op.kind](device, op)

    def nothing(self, device: int, op: Op) -> list[Need]:
        """No values."""
        return []

    def own(self, device: int, op: Op) -> list[Need]:
        """The value of its own pass that the kind names."""
        value = op.kind.needs.own
        assert value is not None
        return [(device, (value, op.microbatch, op.slice, op.chunk))]

    def input(self, device: int, op: Op) -> list[Need]:
        """Activations of the chunk before, and of the slice before."""
        _, microbatch, piece, chunk, _, _, _, _ = op
        needs: list[Need] = []
        place = self._before[device][chunk]
        if place is not None:
            needs.append((self._runner[place[0]][microbatch], (_OUTPUT, microbatch, piece, place[1])))
        else:
            for more in self._first_inputs:
                needs += more(self, microbatch, piece)
        if piece:
            needs.append((device, (_OUTPUT, microbatch, piece - 1, chunk)))
        return needs

    def output_gradient(self, device: int, op: Op) -> list[Need]:
        """The output, and gradients of the chunk after and of the slice after."""
        _, microbatch, piece, chunk, _, _, _, _ = op
        needs: list[Need] = [(device, (_OUTPUT, microbatch, piece, chunk))]
        place = self._after[device][chunk]
        if place is not None:
            needs.append((self._runner[place[0]][microbatch], (_GRADIENT, microbatch, piece, place[1])))
        else:
            for more in self._last_gradients:
                needs += more(self, microbatch, piece)
        if piece < self._slices - 1:
            needs.append((device, (_GRADIENT, microbatch, piece + 1, chunk)))
        return needs


def explain(need: Need, op: Op, shape: Shape, device: int) -> str:
    """Text of a need, for error messages."""
    source, (value, microbatch, piece, chunk, *_) = need
    what = f"microbatch {microbatch}, slice {piece}, chunk {chunk} on device {shape.devices[source]}"
    if source == device and value == _OUTPUT and piece != op.slice:
        return f"the keys and values of {what}"
    if source == device and value == _GRADIENT and piece != op.slice:
        return f"the gradients of keys and values from {what}"
    assert isinstance(value, Value)
    return f"{value.words} of {what}"
