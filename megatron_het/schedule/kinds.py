"""The kinds of operations: one row each, with everything that readers need to know about them.

Dependencies, validator, simulator, durations, memory, text, pictures and the command line read this table, and the
executor's handlers are checked against it.  No column has a default: a row that lacks one fails when this module is
imported, and a reader that does not know an entry of a column fails when it is imported (:func:`complete`).
So a new kind is a new row, and whatever it needs beyond the existing entries says so by itself.

Kinds are names.  They are integers only so that tables can be indexed by them; to compare them as numbers is an
error.
"""

from collections.abc import Callable, Mapping
from enum import Enum, Flag, IntEnum, StrEnum

# The columns of the table: what each of their entries can be.


class Stream(StrEnum):
    """Where an operation runs on its device.  Streams run side by side, each in the order of the list."""

    COMPUTE = "compute"
    SEND = "send"
    """Transfers have one queue per directed pair of devices."""
    RECEIVE = "receive"
    COLLECTIVE = "collective"
    """All replicas of the stage take part."""
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"


class Role(Enum):
    """Holds what a kind of operation is among the others; passes place operations by it."""

    PASS = "pass"
    """A forward or backward of a chunk, or half of a backward: the compute order that a generator decides."""
    TRANSFER = "transfer"
    """Activations or gradients between two chunks."""
    KEYS = "keys"
    """Keys and values on their way to a helper."""
    GIVE = "give"
    """The owner of a pass hands a query to a helper."""
    HELP = "help"
    """A helper attends for the owner of a pass."""
    MERGE = "merge"
    """The owner of a pass takes the result back."""
    PART = "part"
    """A part of a layer that is split over the devices of a microbatch."""
    STATE = "state"
    """Parameters, gradients and optimizer state of a chunk."""
    ACTIVATIONS = "activations"
    """Activations between device and host."""


class Direction(Enum):
    """Names the pass that an operation is part of."""

    FORWARD = "forward"
    BACKWARD = "backward"
    NEITHER = "neither"


class Work(Flag):
    """Which part of the training of a slice in a chunk an operation does."""

    NONE = 0
    FORWARD = 1
    INPUT = 2
    """Gradient of the chunk's input."""
    WEIGHTS = 4
    """Gradient of the chunk's weights."""


class Fields(Enum):
    """Which fields of an operation mean something."""

    PASS = "pass"
    """microbatch, slice and chunk, of a pass of this device."""
    TRANSFER = "transfer"
    """Those, and peer and peer_chunk."""
    UNITS = "units"
    """Those, and start and stop: exchange units of the sequence."""
    UNITS_OF_PEER = "units of peer"
    """The same, of a pass of the peer."""
    LAYERS = "layers"
    """chunk, and start and stop: layers of the chunk (-1: all)."""


class Value(IntEnum):
    """Holds what an operation leaves on its device."""

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


FOR_A_PEER = frozenset({Value.PARTIAL, Value.PARTIAL_BACKWARD, Value.KV, Value.KV_BACKWARD})
"""Values that are made for another device, or received from it."""


DELIVERED = frozenset({Value.OUTPUT, Value.GRADIENT})
"""Values that transfers of the program carry to other devices."""


class Needs(Enum):
    """Which values an operation needs before it can run; ``deps.py`` says where they are."""

    INPUT = "input"
    """Output of the chunk before (or embeddings), keys and values of the slice before."""
    OUTPUT_GRADIENT = "output gradient"
    """Own output, gradient of the chunk after (or of the logits), gradients of keys and values of the slice after."""
    OWN_OUTPUT = "own output"
    OWN_GRADIENT = "own gradient"
    LAST_OUTPUT = "last output"
    """Output of the model's last chunk."""
    ALL_LOGITS = "all logits"
    """The logits of all devices of the microbatch, and that the last stage comes to its own part."""
    TOKENS = "tokens"
    FIRST_GRADIENT = "first gradient"
    """Gradient of the input of the model's first chunk."""
    KEYS = "keys"
    """Keys and values, which may be made in the very pass that sends them."""
    KEYS_MADE = "keys made"
    QUERY = "query"
    QUERY_BACKWARD = "query backward"
    PARTIAL = "partial"
    PARTIAL_BACKWARD = "partial backward"
    OTHER_END = "other end"
    """Of a receive: its send."""
    NOTHING = "nothing"


class Making(Enum):
    """How often a value may be made."""

    ONCE = "once"
    COMPLETED = "completed"
    """An earlier operation of the device began the value."""
    REPEATED = "repeated"
    """A query for several peers, keys in several ranges."""


class Effect(Enum):
    """Holds what an operation does to what its device holds: lifetimes and memory."""

    KEEP = "keep"
    """Activations are kept for the backward."""
    USE = "use"
    """Activations are used and stay."""
    USE_UP = "use up"
    """Activations are used for the last time, by an operation that needs the parameters too."""
    USE_UP_WITHOUT_PARAMETERS = "use up without parameters"
    KEEP_LOGITS = "keep logits"
    USE_UP_LOGITS = "use up logits"
    TO_HOST = "to host"
    """Activations go to the host."""
    FROM_HOST = "from host"
    KEYS_ARRIVE = "keys arrive"
    USE_KEYS = "use keys"
    """Of the owner of the pass that is helped."""
    SHARD_FROM_HOST = "shard from host"
    GATHER = "gather"
    RELEASE = "release"
    SHARD_TO_HOST = "shard to host"
    REDUCE = "reduce"
    STEP = "step"
    NOTHING = "nothing"


class Price(Enum):
    """How long an operation takes; ``cost.py`` reads it from the costs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    LINK = "link"
    """Size of the message over the link between the devices."""
    GIVEN = "given"
    """Nothing; the pass that follows has that much less attention."""
    HELPED = "helped"
    MERGED = "merged"
    OUTPUT_PART = "part of the output layer"
    OUTPUT_PART_BACKWARD = "part of the output layer, backward"
    WORD_PART = "part of the word embeddings"
    WORD_PART_BACKWARD = "part of the word embeddings, backward"
    PREFETCH = "prefetch"
    GATHER = "gather"
    OFFLOAD = "offload"
    REDUCE = "reduce"
    STEP = "step"
    ACT_OFFLOAD = "activation offload"
    ACT_FETCH = "activation fetch"
    FREE = "free"


def complete[K: Enum, V](column: type[K], table: Mapping[K, V]) -> dict[K, V]:
    """A reader's table over all entries of a column.

    Raises:
        TypeError: an entry is missing; it would otherwise fall through in silence.
    """
    missing = [entry.name for entry in column if entry not in table]
    if missing:
        raise TypeError(f"{column.__name__}: no meaning here for {', '.join(missing)}")
    return dict(table)


Colour = tuple[float, float, float]
"""(lightness, how much lighter the last chunk is, saturation); the hue is the microbatch's."""

_LIGHT: Colour = (0.60, 0.22, 0.85)
_DARK: Colour = (0.42, 0.22, 0.60)
_GREYISH: Colour = (0.42, 0.22, 0.25)
_DEEP: Colour = (0.30, 0.0, 0.90)
_PALE: Colour = (0.75, 0.0, 0.35)
_GREY: Colour = (0.55, 0.0, 0.0)


class Columns:
    """The columns of the table.

    Attributes:
        mnemonic: its text form.
        executor: who executes it: ``"compute"`` and ``"transfer"`` mean the executor itself, anything else the name
            of a feature; without a feature of this name it can be simulated only.
        stream: where it runs.
        role: what it is among the others.
        direction: the pass that it is part of.
        work: what it does of the training of a slice in a chunk.
        fields: which fields of the operation mean something.
        needs: the values that it waits for.
        makes: the value that it leaves on its device.
        making: how often that value may be made.
        fed_by: the kind of receive that brings what it needs from another device; None: nothing comes that way.
        sent_by: the kind of send that takes what it makes to another device.
        other_end: of a transfer.
        effect: on what the device holds.
        price: which of the costs it takes.
        plain_s: duration in a replay with plain durations, in forwards of the chunk.
        colour: in pictures.
    """

    mnemonic: str
    executor: str
    stream: Stream
    role: Role
    direction: Direction
    work: Work
    fields: Fields
    needs: Needs
    makes: Value | None
    making: Making
    fed_by: "Kind | None"
    sent_by: "Kind | None"
    other_end: "Kind | None"
    effect: Effect
    price: Price
    plain_s: float
    colour: Colour


_COLUMNS = tuple(Columns.__annotations__)
_KINDS = ("fed_by", "sent_by", "other_end")
"""Columns that name other rows, which are not there yet when a row is read."""


def _row(mnemonic: str, **entries: object) -> dict[str, object]:
    """Returns one row of the table.

    Raises:
        TypeError: An entry is missing; no column has a default.
    """
    row = {"mnemonic": mnemonic, **entries}
    if differing := row.keys() ^ set(_COLUMNS):
        raise TypeError(f"row {mnemonic!r} and the columns differ in {', '.join(sorted(differing))}")
    return row


class Kind(Columns, IntEnum):
    """Holds what an operation does: one literal per kind, with an entry for each of :class:`Columns`."""

    def __new__(cls, row: Mapping[str, object]) -> "Kind":
        """Makes the member of one row."""
        kind = int.__new__(cls, len(cls.__members__))
        kind._value_ = len(cls.__members__)
        for column, entry in row.items():
            setattr(kind, column, entry)
        return kind

    # fmt: off
    FORWARD = _row(
        mnemonic="F", executor="compute", stream=Stream.COMPUTE, role=Role.PASS, direction=Direction.FORWARD,
        work=Work.FORWARD, fields=Fields.PASS,
        needs=Needs.INPUT, makes=Value.OUTPUT, making=Making.ONCE, fed_by="RECV_FORWARD", sent_by="SEND_FORWARD",
        other_end=None,
        effect=Effect.KEEP, price=Price.FORWARD, plain_s=1.0, colour=_LIGHT)
    BACKWARD = _row(
        mnemonic="B", executor="compute", stream=Stream.COMPUTE, role=Role.PASS, direction=Direction.BACKWARD,
        work=Work.INPUT | Work.WEIGHTS, fields=Fields.PASS,
        needs=Needs.OUTPUT_GRADIENT, makes=Value.GRADIENT, making=Making.ONCE, fed_by="RECV_BACKWARD",
        sent_by="SEND_BACKWARD", other_end=None,
        effect=Effect.USE_UP, price=Price.BACKWARD, plain_s=2.0, colour=_DARK)
    """Gradients of inputs and weights together."""
    BACKWARD_INPUT = _row(
        mnemonic="I", executor="compute", stream=Stream.COMPUTE, role=Role.PASS, direction=Direction.BACKWARD,
        work=Work.INPUT, fields=Fields.PASS,
        needs=Needs.OUTPUT_GRADIENT, makes=Value.GRADIENT, making=Making.ONCE, fed_by="RECV_BACKWARD",
        sent_by="SEND_BACKWARD", other_end=None,
        effect=Effect.USE, price=Price.INPUT_GRADIENT, plain_s=1.0, colour=_DARK)
    """Gradient of the chunk's input only (zero-bubble schedules)."""
    BACKWARD_WEIGHT = _row(
        mnemonic="W", executor="zero_bubble", stream=Stream.COMPUTE, role=Role.PASS, direction=Direction.BACKWARD,
        work=Work.WEIGHTS, fields=Fields.PASS,
        needs=Needs.OWN_GRADIENT, makes=Value.WEIGHT_GRADIENT, making=Making.ONCE, fed_by=None, sent_by=None,
        other_end=None,
        effect=Effect.USE_UP_WITHOUT_PARAMETERS, price=Price.WEIGHT_GRADIENT, plain_s=1.0, colour=_GREYISH)
    """Gradients of the chunk's weights only."""
    SEND_FORWARD = _row(
        mnemonic="SF", executor="transfer", stream=Stream.SEND, role=Role.TRANSFER, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.TRANSFER,
        needs=Needs.OWN_OUTPUT, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end="RECV_FORWARD",
        effect=Effect.NOTHING, price=Price.LINK, plain_s=0.0, colour=_GREY)
    """Activations of ``chunk`` leave for ``peer_chunk`` on ``peer``."""
    RECV_FORWARD = _row(
        mnemonic="RF", executor="transfer", stream=Stream.RECEIVE, role=Role.TRANSFER, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.TRANSFER,
        needs=Needs.OTHER_END, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end="SEND_FORWARD",
        effect=Effect.NOTHING, price=Price.LINK, plain_s=0.0, colour=_GREY)
    """Activations for ``chunk`` arrive from ``peer_chunk`` on ``peer``."""
    SEND_BACKWARD = _row(
        mnemonic="SB", executor="transfer", stream=Stream.SEND, role=Role.TRANSFER, direction=Direction.BACKWARD,
        work=Work.NONE, fields=Fields.TRANSFER,
        needs=Needs.OWN_GRADIENT, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end="RECV_BACKWARD",
        effect=Effect.NOTHING, price=Price.LINK, plain_s=0.0, colour=_GREY)
    """The gradient of the input of ``chunk`` leaves for ``peer_chunk`` on ``peer``."""
    RECV_BACKWARD = _row(
        mnemonic="RB", executor="transfer", stream=Stream.RECEIVE, role=Role.TRANSFER, direction=Direction.BACKWARD,
        work=Work.NONE, fields=Fields.TRANSFER,
        needs=Needs.OTHER_END, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end="SEND_BACKWARD",
        effect=Effect.NOTHING, price=Price.LINK, plain_s=0.0, colour=_GREY)
    """The gradient of the output of ``chunk`` arrives from ``peer_chunk`` on ``peer``."""
    KV_SEND = _row(
        mnemonic="KS", executor="context_exchange", stream=Stream.SEND, role=Role.KEYS, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.UNITS,
        needs=Needs.KEYS, makes=None, making=Making.ONCE, fed_by="RECV_FORWARD", sent_by=None, other_end="KV_RECV",
        effect=Effect.NOTHING, price=Price.LINK, plain_s=0.0, colour=_GREY)
    """Keys and values ``[start, stop)`` (exchange units) leave for ``peer``, ahead of their use."""
    KV_RECV = _row(
        mnemonic="KR", executor="context_exchange", stream=Stream.RECEIVE, role=Role.KEYS, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.UNITS_OF_PEER,
        needs=Needs.OTHER_END, makes=Value.KV, making=Making.REPEATED, fed_by=None, sent_by=None, other_end="KV_SEND",
        effect=Effect.KEYS_ARRIVE, price=Price.LINK, plain_s=0.0, colour=_GREY)
    ATTEND_GIVE = _row(
        mnemonic="AG", executor="context_exchange", stream=Stream.COMPUTE, role=Role.GIVE, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.UNITS,
        needs=Needs.INPUT, makes=Value.QUERY, making=Making.REPEATED, fed_by="RECV_FORWARD", sent_by=None,
        other_end=None,
        effect=Effect.NOTHING, price=Price.GIVEN, plain_s=0.0, colour=_LIGHT)
    """The query of the following FORWARD is handed to ``peer``, to attend to units ``[start, stop)``."""
    ATTEND_HELP = _row(
        mnemonic="AH", executor="context_exchange", stream=Stream.COMPUTE, role=Role.HELP, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.UNITS_OF_PEER,
        needs=Needs.QUERY, makes=Value.PARTIAL, making=Making.ONCE, fed_by="KV_RECV", sent_by=None, other_end=None,
        effect=Effect.USE_KEYS, price=Price.HELPED, plain_s=0.0, colour=_PALE)
    """Attention of ``peer``'s query over the units ``[start, stop)`` of ``peer``'s keys and values."""
    ATTEND_MERGE = _row(
        mnemonic="AM", executor="context_exchange", stream=Stream.COMPUTE, role=Role.MERGE,
        direction=Direction.FORWARD, work=Work.NONE, fields=Fields.UNITS,
        needs=Needs.PARTIAL, makes=Value.OUTPUT, making=Making.COMPLETED, fed_by=None, sent_by="SEND_FORWARD",
        other_end=None,
        effect=Effect.NOTHING, price=Price.MERGED, plain_s=0.0, colour=_LIGHT)
    """The partial outputs given away are merged; the FORWARD before it is complete only now."""
    ATTEND_GIVE_BACKWARD = _row(
        mnemonic="AGB", executor="context_exchange", stream=Stream.COMPUTE, role=Role.GIVE,
        direction=Direction.BACKWARD, work=Work.NONE, fields=Fields.UNITS,
        needs=Needs.OUTPUT_GRADIENT, makes=Value.QUERY_BACKWARD, making=Making.REPEATED, fed_by="RECV_BACKWARD",
        sent_by=None, other_end=None,
        effect=Effect.NOTHING, price=Price.GIVEN, plain_s=0.0, colour=_LIGHT)
    ATTEND_HELP_BACKWARD = _row(
        mnemonic="AHB", executor="context_exchange", stream=Stream.COMPUTE, role=Role.HELP,
        direction=Direction.BACKWARD, work=Work.NONE, fields=Fields.UNITS_OF_PEER,
        needs=Needs.QUERY_BACKWARD, makes=Value.PARTIAL_BACKWARD, making=Making.ONCE, fed_by="KV_RECV_BACKWARD",
        sent_by=None, other_end=None,
        effect=Effect.USE_KEYS, price=Price.HELPED, plain_s=0.0, colour=_PALE)
    ATTEND_MERGE_BACKWARD = _row(
        mnemonic="AMB", executor="context_exchange", stream=Stream.COMPUTE, role=Role.MERGE,
        direction=Direction.BACKWARD, work=Work.NONE, fields=Fields.UNITS,
        needs=Needs.PARTIAL_BACKWARD, makes=Value.GRADIENT, making=Making.COMPLETED, fed_by=None,
        sent_by="SEND_BACKWARD", other_end=None,
        effect=Effect.NOTHING, price=Price.MERGED, plain_s=0.0, colour=_LIGHT)
    VOCAB_FORWARD = _row(
        mnemonic="VF", executor="vocabulary", stream=Stream.COMPUTE, role=Role.PART, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.PASS,
        needs=Needs.LAST_OUTPUT, makes=Value.LOGITS, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.KEEP_LOGITS, price=Price.OUTPUT_PART, plain_s=0.0, colour=_DEEP)
    """This device's part of the output layer and of the cross entropy."""
    VOCAB_BACKWARD = _row(
        mnemonic="VB", executor="vocabulary", stream=Stream.COMPUTE, role=Role.PART, direction=Direction.BACKWARD,
        work=Work.NONE, fields=Fields.PASS,
        needs=Needs.ALL_LOGITS, makes=Value.LOGITS_GRADIENT, making=Making.ONCE, fed_by=None, sent_by=None,
        other_end=None,
        effect=Effect.USE_UP_LOGITS, price=Price.OUTPUT_PART_BACKWARD, plain_s=0.0, colour=_DEEP)
    PARAM_PREFETCH = _row(
        mnemonic="PP", executor="window", stream=Stream.HOST_TO_DEVICE, role=Role.STATE, direction=Direction.NEITHER,
        work=Work.NONE, fields=Fields.LAYERS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.SHARD_FROM_HOST, price=Price.PREFETCH, plain_s=0.0, colour=_GREY)
    """Parameter shards of ``chunk`` come from the host."""
    PARAM_GATHER = _row(
        mnemonic="PG", executor="window", stream=Stream.COLLECTIVE, role=Role.STATE, direction=Direction.NEITHER,
        work=Work.NONE, fields=Fields.LAYERS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.GATHER, price=Price.GATHER, plain_s=0.0, colour=_GREY)
    """All-gather of the parameters of layers ``[start, stop)`` of ``chunk``."""
    PARAM_RELEASE = _row(
        mnemonic="PR", executor="window", stream=Stream.COMPUTE, role=Role.STATE, direction=Direction.NEITHER,
        work=Work.NONE, fields=Fields.LAYERS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.RELEASE, price=Price.FREE, plain_s=0.0, colour=_GREY)
    """The gathered parameters are dropped; the shards stay."""
    PARAM_OFFLOAD = _row(
        mnemonic="PO", executor="window", stream=Stream.DEVICE_TO_HOST, role=Role.STATE, direction=Direction.NEITHER,
        work=Work.NONE, fields=Fields.LAYERS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.SHARD_TO_HOST, price=Price.OFFLOAD, plain_s=0.0, colour=_GREY)
    """Parameter shards go to the host."""
    GRAD_REDUCE = _row(
        mnemonic="GR", executor="window", stream=Stream.COLLECTIVE, role=Role.STATE, direction=Direction.NEITHER,
        work=Work.NONE, fields=Fields.LAYERS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.REDUCE, price=Price.REDUCE, plain_s=0.0, colour=_GREY)
    """Reduce-scatter of the gradients of layers ``[start, stop)`` of ``chunk``."""
    OPTIMIZER_STEP = _row(
        mnemonic="OS", executor="window", stream=Stream.COMPUTE, role=Role.STATE, direction=Direction.NEITHER,
        work=Work.NONE, fields=Fields.LAYERS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.STEP, price=Price.STEP, plain_s=0.0, colour=_GREY)
    ACT_OFFLOAD = _row(
        mnemonic="AO", executor="activation_offload", stream=Stream.DEVICE_TO_HOST, role=Role.ACTIVATIONS,
        direction=Direction.FORWARD, work=Work.NONE, fields=Fields.PASS,
        needs=Needs.OWN_OUTPUT, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.TO_HOST, price=Price.ACT_OFFLOAD, plain_s=0.0, colour=_LIGHT)
    """Activations of a FORWARD go to the host."""
    ACT_FETCH = _row(
        mnemonic="AF", executor="activation_offload", stream=Stream.HOST_TO_DEVICE, role=Role.ACTIVATIONS,
        direction=Direction.BACKWARD, work=Work.NONE, fields=Fields.PASS,
        needs=Needs.NOTHING, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.FROM_HOST, price=Price.ACT_FETCH, plain_s=0.0, colour=_LIGHT)
    """They come back ahead of the BACKWARD."""
    KV_SEND_BACKWARD = _row(
        mnemonic="KSB", executor="context_exchange", stream=Stream.SEND, role=Role.KEYS, direction=Direction.BACKWARD,
        work=Work.NONE, fields=Fields.UNITS,
        needs=Needs.KEYS_MADE, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end="KV_RECV_BACKWARD",
        effect=Effect.NOTHING, price=Price.LINK, plain_s=0.0, colour=_GREY)
    """As KV_SEND, for the attention's backward pass (when the peer did not keep them)."""
    KV_RECV_BACKWARD = _row(
        mnemonic="KRB", executor="context_exchange", stream=Stream.RECEIVE, role=Role.KEYS,
        direction=Direction.BACKWARD, work=Work.NONE, fields=Fields.UNITS_OF_PEER,
        needs=Needs.OTHER_END, makes=Value.KV_BACKWARD, making=Making.REPEATED, fed_by=None, sent_by=None,
        other_end="KV_SEND_BACKWARD",
        effect=Effect.KEYS_ARRIVE, price=Price.LINK, plain_s=0.0, colour=_GREY)
    EMBED_FORWARD = _row(
        mnemonic="EF", executor="vocabulary", stream=Stream.COMPUTE, role=Role.PART, direction=Direction.FORWARD,
        work=Work.NONE, fields=Fields.PASS,
        needs=Needs.TOKENS, makes=Value.EMBEDDING, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.NOTHING, price=Price.WORD_PART, plain_s=0.0, colour=_DEEP)
    """This device's part of the word embeddings of a slice; on the first stage: the tokens leave."""
    EMBED_BACKWARD = _row(
        mnemonic="EB", executor="vocabulary", stream=Stream.COMPUTE, role=Role.PART, direction=Direction.BACKWARD,
        work=Work.NONE, fields=Fields.PASS,
        needs=Needs.FIRST_GRADIENT, makes=None, making=Making.ONCE, fed_by=None, sent_by=None, other_end=None,
        effect=Effect.NOTHING, price=Price.WORD_PART_BACKWARD, plain_s=0.0, colour=_DEEP)
    """Gradient of this device's part; on the first stage: the gradient of the embeddings leaves."""
    # fmt: on

    def _no_order(self, other: object) -> bool:
        raise TypeError(f"{self.name} and {other!r} have no order: ask for a column of the table of kinds")

    __lt__ = __le__ = __gt__ = __ge__ = _no_order


def _resolve() -> None:
    """Turns the names of other rows into the rows, and checks that both ends of a transfer name each other."""
    for kind in Kind:
        for column in _KINDS:
            name = getattr(kind, column)
            setattr(kind, column, None if name is None else Kind[name])
    for kind in Kind:
        if kind.other_end is not None and kind.other_end.other_end is not kind:
            raise TypeError(f"{kind.name} and {kind.other_end.name} are not each other's other end")
    if len({kind.mnemonic for kind in Kind}) < len(Kind):
        raise TypeError("two kinds have one mnemonic")


_resolve()


def where(condition: Callable[[Kind], bool]) -> frozenset[Kind]:
    """The kinds for which a condition holds."""
    return frozenset(kind for kind in Kind if condition(kind))


def executed_by(executor: str) -> frozenset[Kind]:
    """The kinds that somebody executes: ``"compute"``, ``"transfer"`` or the name of a feature."""
    return where(lambda kind: kind.executor == executor)


COMPUTE = where(lambda kind: kind.role is Role.PASS)
"""The kinds whose order a generator decides and every pass keeps."""
INPUT_GRADIENTS = where(lambda kind: kind.role is Role.PASS and Work.INPUT in kind.work)
"""Backward passes that make the gradient of a chunk's input, with that of its weights or without."""
WEIGHT_GRADIENTS = where(lambda kind: kind.role is Role.PASS and Work.WEIGHTS in kind.work)
TOGETHER = COMPUTE - where(lambda kind: kind.work is Work.WEIGHTS)
"""Passes in which layers of experts send tokens or their gradients."""
SENDS = where(lambda kind: kind.stream is Stream.SEND)
RECEIVES = where(lambda kind: kind.stream is Stream.RECEIVE)
TRANSFERS = SENDS | RECEIVES
COLLECTIVES = where(lambda kind: kind.stream is Stream.COLLECTIVE)
EXCHANGE = executed_by("context_exchange")
"""The kinds of the attention context exchange."""
PARAMETER_KINDS = where(lambda kind: kind.role is Role.STATE)
OWNERS = where(lambda kind: kind.fields is Fields.UNITS)
"""Those of the device whose attention is exchanged; the others are the helper's."""
OUTPUT_PARTS = where(lambda kind: kind.effect in (Effect.KEEP_LOGITS, Effect.USE_UP_LOGITS))
"""Parts of the output layer."""
PARTS = where(lambda kind: kind.role is Role.PART)
WORD_PARTS = PARTS - OUTPUT_PARTS
"""Parts of the word embeddings."""
HELPS = where(lambda kind: kind.role is Role.HELP)


def chunk_of(kind: Kind, chunk: int, chunks: int) -> int:
    """The chunk of a device whose parameters an operation is about.

    Parts of layers that devices share have chunk 0 in programs.  A device's rows of the word embeddings are in its
    first chunk, those of the output layer are in its last one; tied ones have a device with one chunk only.

    Args:
        kind: of the operation.
        chunk: what the operation says.
        chunks: how many the device has.
    """
    return chunks - 1 if kind in OUTPUT_PARTS else chunk
