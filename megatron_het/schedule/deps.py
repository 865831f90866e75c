"""What an operation needs before it can run: the one dependency function.

An operation *produces* values and *requires* values; a value sits on a device.  Generators, passes,
validator, simulator and the executor's checks all ask :class:`Dependencies`, so a dependency that is
written here holds everywhere:

* activations from the previous chunk, gradients from the next one,
* keys and values: the FORWARD of a slice needs the FORWARD of the slice before it (SlimPipe, section 4.1.2),
  the BACKWARD of a slice needs the BACKWARD of the slice after it (dK and dV of a slice are complete then),
* the vocabulary's operations (section 4.3): all devices of a microbatch need the last chunk's output; the
  losses need all partial statistics; the last chunk's BACKWARD needs all partial gradients,
* the attention context exchange (section 4.2).

Lifetimes (parameters, activations) are states rather than values; see ``lifetimes.py``.
"""

from enum import IntEnum

from megatron_het.schedule.ir import Kind, Op, Shape


class Value(IntEnum):
    """What an operation leaves behind on its device."""

    OUTPUT = 0
    GRADIENT = 1
    """Gradient of the chunk's input."""
    WEIGHT_GRADIENT = 2
    LOGITS = 3
    LOGITS_GRADIENT = 4
    QUERY = 5
    PARTIAL = 6
    QUERY_BACKWARD = 7
    PARTIAL_BACKWARD = 8
    KV = 9
    KV_BACKWARD = 10
    EMBEDDING = 11
    """Of the first stage: the tokens; of others: their part of the embeddings."""


Key = tuple[int, ...]
"""(value, microbatch, slice, chunk), and the device it is for when it is made or received for another one."""
Need = tuple[int, Key]
"""(device, key): the value ``key`` of that device."""

_PRODUCES: dict[int, int] = {
    Kind.FORWARD: Value.OUTPUT,
    Kind.BACKWARD: Value.GRADIENT,
    Kind.BACKWARD_INPUT: Value.GRADIENT,
    Kind.BACKWARD_WEIGHT: Value.WEIGHT_GRADIENT,
    Kind.ATTEND_GIVE: Value.QUERY,
    Kind.ATTEND_HELP: Value.PARTIAL,
    Kind.ATTEND_MERGE: Value.OUTPUT,
    Kind.ATTEND_GIVE_BACKWARD: Value.QUERY_BACKWARD,
    Kind.ATTEND_HELP_BACKWARD: Value.PARTIAL_BACKWARD,
    Kind.ATTEND_MERGE_BACKWARD: Value.GRADIENT,
    Kind.VOCAB_FORWARD: Value.LOGITS,
    Kind.VOCAB_BACKWARD: Value.LOGITS_GRADIENT,
    Kind.KV_RECV: Value.KV,
    Kind.KV_RECV_BACKWARD: Value.KV_BACKWARD,
    Kind.EMBED_FORWARD: Value.EMBEDDING,
}

_FOR_A_PEER = frozenset({Value.PARTIAL, Value.PARTIAL_BACKWARD, Value.KV, Value.KV_BACKWARD})

OVERRIDES = frozenset({Kind.ATTEND_MERGE, Kind.ATTEND_MERGE_BACKWARD})
"""Kinds that complete a value which an earlier operation of the device began."""


def produces(op: Op) -> Key | None:
    """The value that an operation leaves on its device, None for transfers and bookkeeping."""
    value = _PRODUCES.get(op[0])
    if value is None:
        return None
    if value in _FOR_A_PEER:
        return (value, op[1], op[2], op[3], op[4])
    return (value, op[1], op[2], op[3])


class Dependencies:
    """The dependency function of one shape.

    Args:
        shape: the shape of the program.
        vocabulary: the output layer is split over the devices (``Program.vocabulary``).
        exchange_units: units per slice of the attention exchange (``Program.exchange_units``).
        embedding: the word embeddings are split over the devices (``Program.embedding``).
    """

    __slots__ = ("shape", "vocabulary", "units", "embedding", "_before", "_after", "_last", "_runner", "_slices")

    def __init__(
        self, shape: Shape, vocabulary: bool = False, exchange_units: int = 0, embedding: bool = False
    ) -> None:
        self.embedding = embedding
        self.shape, self.vocabulary, self.units = shape, vocabulary, exchange_units
        self._before = [
            [shape.previous(d.stage, c) for c in range(len(shape.layers[d.stage]))] for d in shape.devices
        ]
        self._after = [[shape.next(d.stage, c) for c in range(len(shape.layers[d.stage]))] for d in shape.devices]
        self._last = shape.path[-1]
        self._runner = [[first + r for r in row] for first, row in zip(shape.first_device, shape.route)]
        self._slices = shape.slices

    def runner(self, stage: int, microbatch: int) -> int:
        """Device that runs ``microbatch`` in ``stage``."""
        return self._runner[stage][microbatch]

    def team(self, microbatch: int) -> list[int]:
        """The devices that a microbatch visits, by stage."""
        return [row[microbatch] for row in self._runner]

    def _first(self, microbatch: int) -> int:
        return self._runner[self.shape.path[0][0]][microbatch]

    def source(self, device: int, op: Op) -> tuple[int, int] | None:
        """(device, chunk) whose output feeds a FORWARD, or whose gradient feeds a BACKWARD; None at the ends."""
        table = self._before if op[0] == 0 else self._after
        place = table[device][op[3]]
        return None if place is None else (self._runner[place[0]][op[1]], place[1])

    def target(self, device: int, op: Op) -> tuple[int, int] | None:
        """(device, chunk) that the result of a FORWARD or BACKWARD goes to; None at the ends."""
        table = self._after if op[0] == 0 or op[0] == Kind.ATTEND_MERGE else self._before
        place = table[device][op[3]]
        return None if place is None else (self._runner[place[0]][op[1]], place[1])

    def requires(self, device: int, op: Op) -> list[Need]:
        """Values that must exist before ``op`` can run on ``device``.

        A value on another device has to be transferred; SEND operations need their own device's value,
        receives are tied to their send by :meth:`Op.partner`.
        """
        kind, microbatch, piece, chunk = op[:4]
        if kind == 0 or kind == 10:  # FORWARD and the query that is given away before it
            needs = []
            place = self._before[device][chunk]
            if place is not None:
                needs.append((self._runner[place[0]][microbatch], (0, microbatch, piece, place[1])))
            elif self.embedding:
                needs += [(d, (11, microbatch, piece, 0)) for d in self.team(microbatch)]
            if piece:
                needs.append((device, (0, microbatch, piece - 1, chunk)))
            return needs
        if kind == 1 or kind == 2 or kind == 13:
            needs = [(device, (0, microbatch, piece, chunk))]
            place = self._after[device][chunk]
            if place is not None:
                needs.append((self._runner[place[0]][microbatch], (1, microbatch, piece, place[1])))
            elif self.vocabulary:
                needs += [(d, (4, microbatch, piece, 0)) for d in self.team(microbatch)]
            if piece < self._slices - 1:
                needs.append((device, (1, microbatch, piece + 1, chunk)))
            return needs
        return self._requires_other(device, op)

    def _requires_other(self, device: int, op: Op) -> list[Need]:
        kind, microbatch, piece, chunk = op[:4]
        match kind:
            case Kind.BACKWARD_WEIGHT | Kind.SEND_BACKWARD:
                return [(device, (Value.GRADIENT, microbatch, piece, chunk))]
            case Kind.SEND_FORWARD | Kind.ACT_OFFLOAD:
                return [(device, (Value.OUTPUT, microbatch, piece, chunk))]
            case Kind.VOCAB_FORWARD:
                stage, last = self._last
                return [(self._runner[stage][microbatch], (Value.OUTPUT, microbatch, piece, last))]
            case Kind.VOCAB_BACKWARD:
                return [(d, (Value.LOGITS, microbatch, piece, 0)) for d in self.team(microbatch)]
            case Kind.EMBED_FORWARD:
                first = self._first(microbatch)
                return [] if device == first else [(first, (Value.EMBEDDING, microbatch, piece, 0))]
            case Kind.EMBED_BACKWARD:
                return [(self._first(microbatch), (Value.GRADIENT, microbatch, piece, self.shape.path[0][1]))]
            case Kind.KV_SEND | Kind.KV_SEND_BACKWARD:
                newest = -(-op.stop // max(self.units, 1)) - 1
                if newest >= piece and kind == Kind.KV_SEND:  # its own keys: made in this very pass
                    return self.requires(device, op._replace(kind=Kind.ATTEND_GIVE))
                return [(device, (Value.OUTPUT, microbatch, newest, chunk))]
            case Kind.ATTEND_HELP:
                return [(op.peer, (Value.QUERY, microbatch, piece, op.peer_chunk))]
            case Kind.ATTEND_HELP_BACKWARD:
                return [(op.peer, (Value.QUERY_BACKWARD, microbatch, piece, op.peer_chunk))]
            case Kind.ATTEND_MERGE:
                return [(op.peer, (Value.PARTIAL, microbatch, piece, chunk, device))]
            case Kind.ATTEND_MERGE_BACKWARD:
                return [(op.peer, (Value.PARTIAL_BACKWARD, microbatch, piece, chunk, device))]
        return []


def explain(need: Need, op: Op, shape: Shape, device: int) -> str:
    """A need in words, for error messages."""
    source, (value, microbatch, piece, chunk, *_) = need
    what = f"microbatch {microbatch}, slice {piece}, chunk {chunk} on device {shape.devices[source]}"
    if source == device and value == Value.OUTPUT and piece != op.slice:
        return f"the keys and values of {what}"
    if source == device and value == Value.GRADIENT and piece != op.slice:
        return f"the gradients of keys and values from {what}"
    names = {
        Value.OUTPUT: "the output", Value.GRADIENT: "the gradient", Value.WEIGHT_GRADIENT: "the weight gradient",
        Value.LOGITS: "the vocabulary forward", Value.LOGITS_GRADIENT: "the vocabulary backward",
        Value.QUERY: "the query", Value.PARTIAL: "the partial attention",
        Value.QUERY_BACKWARD: "the output gradient", Value.PARTIAL_BACKWARD: "the partial attention gradient",
        Value.EMBEDDING: "the part of the embeddings",
        Value.KV: "the keys and values", Value.KV_BACKWARD: "the keys and values (backward)",
    }  # fmt: skip
    return f"{names[Value(value)]} of {what}"
