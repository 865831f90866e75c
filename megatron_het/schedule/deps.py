"""Dependencies of operations: what each needs before it can run, in one function.

An operation *produces* values and *requires* values; a value sits on a device.  Generators, passes,
validator, simulator and the executor's checks all ask :class:`Dependencies`, so a dependency that is
written here holds everywhere:

* activations from the previous chunk, gradients from the next one,
* keys and values: the FORWARD of a slice needs the FORWARD of the slice before it (SlimPipe, section 4.1.2),
  the BACKWARD of a slice needs the BACKWARD of the slice after it (dK and dV of a slice are complete then),
* what the operations of features need, and what passes need of them (``kinds.Needs``, ``kinds.Rules``).

The table of kinds names what each kind needs; this module says where that is.  Lifetimes (parameters,
activations) are states rather than values; see ``lifetimes.py``.
"""

from collections.abc import Sequence

from megatron_het.schedule.ir import Op, Program, Shape
from megatron_het.schedule.kinds import RULES, Ends, Kind, Rule, Value, where

Key = tuple[int, ...]
"""(value, microbatch, slice, chunk), and the device it is for when it is made or received for another one."""
Need = tuple[int, Key]
"""(device, key): the value ``key`` of that device."""

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
        shape: the shape of the program.
        first_inputs: what features make forwards of the first chunk need (``kinds.Rules``).
        last_gradients: the same of backwards of the last chunk.
        units: units per slice in which attention moves (``Program.attention_units``).

    Attributes:
        rules: :meth:`requires` by kind, for who asks for many operations.
        shape: as given.
        units: as given.
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
    """A need in words, for error messages."""
    source, (value, microbatch, piece, chunk, *_) = need
    what = f"microbatch {microbatch}, slice {piece}, chunk {chunk} on device {shape.devices[source]}"
    if source == device and value == _OUTPUT and piece != op.slice:
        return f"the keys and values of {what}"
    if source == device and value == _GRADIENT and piece != op.slice:
        return f"the gradients of keys and values from {what}"
    assert isinstance(value, Value)
    return f"{value.words} of {what}"
