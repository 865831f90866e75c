"""Dependencies of operations: what each needs before it can run, in one function.

An operation *produces* values and *requires* values; a value sits on a device.  Generators, passes,
validator, simulator and the executor's checks all ask :class:`Dependencies`, so a dependency that is
written here holds everywhere:

* activations from the previous chunk, gradients from the next one,
* keys and values: the FORWARD of a slice needs the FORWARD of the slice before it (SlimPipe, section 4.1.2),
  the BACKWARD of a slice needs the BACKWARD of the slice after it (dK and dV of a slice are complete then),
* the vocabulary's operations (section 4.3): all devices of a microbatch need the last chunk's output; the
  losses need all partial statistics; the last chunk's BACKWARD needs all partial gradients,
* the attention context exchange (section 4.2).

The table of kinds names what each kind needs; this module says where that is.  Lifetimes (parameters,
activations) are states rather than values; see ``lifetimes.py``.
"""

from collections.abc import Callable

from megatron_het.schedule.ir import Op, Program, Shape
from megatron_het.schedule.kinds import FOR_A_PEER, Kind, Needs, Value, complete, where

Key = tuple[int, ...]
"""(value, microbatch, slice, chunk), and the device it is for when it is made or received for another one."""
Need = tuple[int, Key]
"""(device, key): the value ``key`` of that device."""

_OUTPUT, _GRADIENT, _LOGITS_GRADIENT, _EMBEDDING = (
    Value.OUTPUT,
    Value.GRADIENT,
    Value.LOGITS_GRADIENT,
    Value.EMBEDDING,
)


OWN_VALUE = {
    kind: Value.OUTPUT if kind.needs is Needs.OWN_OUTPUT else Value.GRADIENT
    for kind in Kind
    if kind.needs in (Needs.OWN_OUTPUT, Needs.OWN_GRADIENT)
}
"""The value of their own pass that some kinds need, and nothing else."""
AFTER_BEGINNING = where(lambda kind: kind.needs is Needs.ALL_LOGITS)
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
    if value in FOR_A_PEER:
        return (value, op.microbatch, op.slice, op.chunk, op.peer)
    return (value, op.microbatch, op.slice, op.chunk)


class Dependencies:
    """The dependency function of one shape.

    Args:
        shape: the shape of the program.
        splits_output: the output layer is split over the devices (``Program.splits_output``).
        attention_units: units per slice in which attention moves (``Program.attention_units``).
        embedding: the word embeddings are split over the devices (``Program.embedding``).

    Attributes:
        rules: :meth:`requires` by kind, for who asks for many operations.
    """

    __slots__ = (
        "_after",
        "_before",
        "_last",
        "_runner",
        "_slices",
        "embedding",
        "rules",
        "shape",
        "splits_output",
        "units",
    )

    def __init__(
        self, shape: Shape, splits_output: bool = False, attention_units: int = 0, embedding: bool = False
    ) -> None:
        self.embedding = embedding
        self.shape, self.splits_output, self.units = shape, splits_output, attention_units
        self._before = [[shape.previous(d.stage, c) for c in range(len(shape.layers[d.stage]))] for d in shape.devices]
        self._after = [[shape.next(d.stage, c) for c in range(len(shape.layers[d.stage]))] for d in shape.devices]
        self._last = shape.path[-1]
        self._runner = [[first + r for r in row] for first, row in zip(shape.first_device, shape.route)]
        self._slices = shape.slices
        rules = self._all_rules()
        self.rules = [rules[kind.needs] for kind in Kind]

    @classmethod
    def of(cls, program: Program) -> "Dependencies":
        """Returns the dependencies of a program."""
        return cls(program.shape, program.splits_output, program.attention_units, program.embedding)

    def runner(self, stage: int, microbatch: int) -> int:
        """Device that runs ``microbatch`` in ``stage``."""
        return self._runner[stage][microbatch]

    def team(self, microbatch: int) -> list[int]:
        """The devices that a microbatch visits, by stage."""
        return [row[microbatch] for row in self._runner]

    def _first(self, microbatch: int) -> int:
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
        """Values whose making must have begun before an operation of :data:`AFTER_BEGINNING` can run.

        The loss is made where the last stage comes to its own VOCAB_BACKWARD, and its gradient is sent before
        that part is computed.  So the others wait for what comes before that operation, not for its end.
        """
        last = self.team(op.microbatch)[-1]
        return [] if last == device else [(last, (_LOGITS_GRADIENT, op.microbatch, op.slice, 0))]

    def _all_rules(self) -> dict[Needs, Callable[[int, Op], list[Need]]]:
        return complete(
            Needs,
            {
                Needs.INPUT: self._input,
                Needs.OUTPUT_GRADIENT: self._output_gradient,
                Needs.OWN_OUTPUT: _own,
                Needs.OWN_GRADIENT: _own,
                Needs.LAST_OUTPUT: self._last_output,
                Needs.ALL_LOGITS: self._all_logits,
                Needs.TOKENS: self._tokens,
                Needs.FIRST_GRADIENT: self._first_gradient,
                Needs.KEYS: self._keys,
                Needs.KEYS_MADE: lambda d, op: [self._newest_keys(d, op)],
                Needs.QUERY: lambda d, op: [_of_owner(Value.QUERY, op)],
                Needs.QUERY_BACKWARD: lambda d, op: [_of_owner(Value.QUERY_BACKWARD, op)],
                Needs.PARTIAL: lambda d, op: [_of_helper(Value.PARTIAL, d, op)],
                Needs.PARTIAL_BACKWARD: lambda d, op: [_of_helper(Value.PARTIAL_BACKWARD, d, op)],
                Needs.OTHER_END: lambda d, op: [],
                Needs.NOTHING: lambda d, op: [],
            },
        )

    def _input(self, device: int, op: Op) -> list[Need]:
        _, microbatch, piece, chunk, _, _, _, _ = op
        needs: list[Need] = []
        place = self._before[device][chunk]
        if place is not None:
            needs.append((self._runner[place[0]][microbatch], (_OUTPUT, microbatch, piece, place[1])))
        elif self.embedding:
            needs += [(d, (_EMBEDDING, microbatch, piece, 0)) for d in self.team(microbatch)]
        if piece:
            needs.append((device, (_OUTPUT, microbatch, piece - 1, chunk)))
        return needs

    def _output_gradient(self, device: int, op: Op) -> list[Need]:
        _, microbatch, piece, chunk, _, _, _, _ = op
        needs: list[Need] = [(device, (_OUTPUT, microbatch, piece, chunk))]
        place = self._after[device][chunk]
        if place is not None:
            needs.append((self._runner[place[0]][microbatch], (_GRADIENT, microbatch, piece, place[1])))
        elif self.splits_output:
            needs += [(d, (_LOGITS_GRADIENT, microbatch, piece, 0)) for d in self.team(microbatch)]
        if piece < self._slices - 1:
            needs.append((device, (_GRADIENT, microbatch, piece + 1, chunk)))
        return needs

    def _last_output(self, device: int, op: Op) -> list[Need]:
        stage, last = self._last
        return [(self._runner[stage][op.microbatch], (_OUTPUT, op.microbatch, op.slice, last))]

    def _all_logits(self, device: int, op: Op) -> list[Need]:
        return [(d, (Value.LOGITS, op.microbatch, op.slice, 0)) for d in self.team(op.microbatch)]

    def _tokens(self, device: int, op: Op) -> list[Need]:
        first = self._first(op.microbatch)
        return [] if device == first else [(first, (_EMBEDDING, op.microbatch, op.slice, 0))]

    def _first_gradient(self, device: int, op: Op) -> list[Need]:
        return [(self._first(op.microbatch), (_GRADIENT, op.microbatch, op.slice, self.shape.path[0][1]))]

    def _newest_slice(self, op: Op) -> int:
        """The last of the slices whose keys and values are sent."""
        return -(-op.stop // max(self.units, 1)) - 1

    def _newest_keys(self, device: int, op: Op) -> Need:
        return (device, (_OUTPUT, op.microbatch, self._newest_slice(op), op.chunk))

    def _keys(self, device: int, op: Op) -> list[Need]:
        if self._newest_slice(op) >= op.slice:  # its own keys: made in this very pass
            return self._input(device, op)
        return [self._newest_keys(device, op)]


def _own(device: int, op: Op) -> list[Need]:
    return [(device, (OWN_VALUE[op.kind], op.microbatch, op.slice, op.chunk))]


def _of_owner(value: Value, op: Op) -> Need:
    return (op.peer, (value, op.microbatch, op.slice, op.peer_chunk))


def _of_helper(value: Value, device: int, op: Op) -> Need:
    return (op.peer, (value, op.microbatch, op.slice, op.chunk, device))


_NAMES = complete(
    Value,
    {
        Value.OUTPUT: "the output",
        Value.GRADIENT: "the gradient",
        Value.WEIGHT_GRADIENT: "the weight gradient",
        Value.LOGITS: "the vocabulary forward",
        Value.LOGITS_GRADIENT: "the vocabulary backward",
        Value.QUERY: "the query",
        Value.PARTIAL: "the partial attention",
        Value.QUERY_BACKWARD: "the output gradient",
        Value.PARTIAL_BACKWARD: "the partial attention gradient",
        Value.EMBEDDING: "the part of the embeddings",
        Value.KV: "the keys and values",
        Value.KV_BACKWARD: "the keys and values (backward)",
    },
)


def explain(need: Need, op: Op, shape: Shape, device: int) -> str:
    """A need in words, for error messages."""
    source, (value, microbatch, piece, chunk, *_) = need
    what = f"microbatch {microbatch}, slice {piece}, chunk {chunk} on device {shape.devices[source]}"
    if source == device and value == _OUTPUT and piece != op.slice:
        return f"the keys and values of {what}"
    if source == device and value == _GRADIENT and piece != op.slice:
        return f"the gradients of keys and values from {what}"
    return f"{_NAMES[Value(value)]} of {what}"
