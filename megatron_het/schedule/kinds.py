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
    """The columns of the table, in the order of the rows.

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


class Kind(Columns, IntEnum):
    """Holds what an operation does: one literal per kind, with an entry for each of :class:`Columns`."""

    def __new__(cls, *row: object) -> "Kind":
        """One row."""
        if len(row) != len(_COLUMNS):
            raise TypeError(f"row {row[0]!r} has {len(row)} entries for the {len(_COLUMNS)} columns")
        kind = int.__new__(cls, len(cls.__members__))
        kind._value_ = len(cls.__members__)
        for column, entry in zip(_COLUMNS, row):
            setattr(kind, column, entry)
        return kind

    # mnemonic, executor, stream, role, direction, work, fields
    # needs, makes, making, fed by, sent by, other end
    # effect, price, plain duration, colour
    # fmt: off
    FORWARD = (
        "F", "compute", Stream.COMPUTE, Role.PASS, Direction.FORWARD, Work.FORWARD, Fields.PASS,
        Needs.INPUT, Value.OUTPUT, Making.ONCE, "RECV_FORWARD", "SEND_FORWARD", None,
        Effect.KEEP, Price.FORWARD, 1.0, _LIGHT)
    BACKWARD = (
        "B", "compute", Stream.COMPUTE, Role.PASS, Direction.BACKWARD, Work.INPUT | Work.WEIGHTS, Fields.PASS,
        Needs.OUTPUT_GRADIENT, Value.GRADIENT, Making.ONCE, "RECV_BACKWARD", "SEND_BACKWARD", None,
        Effect.USE_UP, Price.BACKWARD, 2.0, _DARK)
    """Gradients of inputs and weights together."""
    BACKWARD_INPUT = (
        "I", "compute", Stream.COMPUTE, Role.PASS, Direction.BACKWARD, Work.INPUT, Fields.PASS,
        Needs.OUTPUT_GRADIENT, Value.GRADIENT, Making.ONCE, "RECV_BACKWARD", "SEND_BACKWARD", None,
        Effect.USE, Price.INPUT_GRADIENT, 1.0, _DARK)
    """Gradient of the chunk's input only (zero-bubble schedules)."""
    BACKWARD_WEIGHT = (
        "W", "zero_bubble", Stream.COMPUTE, Role.PASS, Direction.BACKWARD, Work.WEIGHTS, Fields.PASS,
        Needs.OWN_GRADIENT, Value.WEIGHT_GRADIENT, Making.ONCE, None, None, None,
        Effect.USE_UP_WITHOUT_PARAMETERS, Price.WEIGHT_GRADIENT, 1.0, _GREYISH)
    """Gradients of the chunk's weights only."""
    SEND_FORWARD = (
        "SF", "transfer", Stream.SEND, Role.TRANSFER, Direction.FORWARD, Work.NONE, Fields.TRANSFER,
        Needs.OWN_OUTPUT, None, Making.ONCE, None, None, "RECV_FORWARD",
        Effect.NOTHING, Price.LINK, 0.0, _GREY)
    """Activations of ``chunk`` leave for ``peer_chunk`` on ``peer``."""
    RECV_FORWARD = (
        "RF", "transfer", Stream.RECEIVE, Role.TRANSFER, Direction.FORWARD, Work.NONE, Fields.TRANSFER,
        Needs.OTHER_END, None, Making.ONCE, None, None, "SEND_FORWARD",
        Effect.NOTHING, Price.LINK, 0.0, _GREY)
    """Activations for ``chunk`` arrive from ``peer_chunk`` on ``peer``."""
    SEND_BACKWARD = (
        "SB", "transfer", Stream.SEND, Role.TRANSFER, Direction.BACKWARD, Work.NONE, Fields.TRANSFER,
        Needs.OWN_GRADIENT, None, Making.ONCE, None, None, "RECV_BACKWARD",
        Effect.NOTHING, Price.LINK, 0.0, _GREY)
    """The gradient of the input of ``chunk`` leaves for ``peer_chunk`` on ``peer``."""
    RECV_BACKWARD = (
        "RB", "transfer", Stream.RECEIVE, Role.TRANSFER, Direction.BACKWARD, Work.NONE, Fields.TRANSFER,
        Needs.OTHER_END, None, Making.ONCE, None, None, "SEND_BACKWARD",
        Effect.NOTHING, Price.LINK, 0.0, _GREY)
    """The gradient of the output of ``chunk`` arrives from ``peer_chunk`` on ``peer``."""
    KV_SEND = (
        "KS", "context_exchange", Stream.SEND, Role.KEYS, Direction.FORWARD, Work.NONE, Fields.UNITS,
        Needs.KEYS, None, Making.ONCE, "RECV_FORWARD", None, "KV_RECV",
        Effect.NOTHING, Price.LINK, 0.0, _GREY)
    """Keys and values ``[start, stop)`` (exchange units) leave for ``peer``, ahead of their use."""
    KV_RECV = (
        "KR", "context_exchange", Stream.RECEIVE, Role.KEYS, Direction.FORWARD, Work.NONE, Fields.UNITS_OF_PEER,
        Needs.OTHER_END, Value.KV, Making.REPEATED, None, None, "KV_SEND",
        Effect.KEYS_ARRIVE, Price.LINK, 0.0, _GREY)
    ATTEND_GIVE = (
        "AG", "context_exchange", Stream.COMPUTE, Role.GIVE, Direction.FORWARD, Work.NONE, Fields.UNITS,
        Needs.INPUT, Value.QUERY, Making.REPEATED, "RECV_FORWARD", None, None,
        Effect.NOTHING, Price.GIVEN, 0.0, _LIGHT)
    """The query of the following FORWARD is handed to ``peer``, to attend to units ``[start, stop)``."""
    ATTEND_HELP = (
        "AH", "context_exchange", Stream.COMPUTE, Role.HELP, Direction.FORWARD, Work.NONE, Fields.UNITS_OF_PEER,
        Needs.QUERY, Value.PARTIAL, Making.ONCE, "KV_RECV", None, None,
        Effect.USE_KEYS, Price.HELPED, 0.0, _PALE)
    """Attention of ``peer``'s query over the units ``[start, stop)`` of ``peer``'s keys and values."""
    ATTEND_MERGE = (
        "AM", "context_exchange", Stream.COMPUTE, Role.MERGE, Direction.FORWARD, Work.NONE, Fields.UNITS,
        Needs.PARTIAL, Value.OUTPUT, Making.COMPLETED, None, "SEND_FORWARD", None,
        Effect.NOTHING, Price.MERGED, 0.0, _LIGHT)
    """The partial outputs given away are merged; the FORWARD before it is complete only now."""
    ATTEND_GIVE_BACKWARD = (
        "AGB", "context_exchange", Stream.COMPUTE, Role.GIVE, Direction.BACKWARD, Work.NONE, Fields.UNITS,
        Needs.OUTPUT_GRADIENT, Value.QUERY_BACKWARD, Making.REPEATED, "RECV_BACKWARD", None, None,
        Effect.NOTHING, Price.GIVEN, 0.0, _LIGHT)
    ATTEND_HELP_BACKWARD = (
        "AHB", "context_exchange", Stream.COMPUTE, Role.HELP, Direction.BACKWARD, Work.NONE, Fields.UNITS_OF_PEER,
        Needs.QUERY_BACKWARD, Value.PARTIAL_BACKWARD, Making.ONCE, "KV_RECV_BACKWARD", None, None,
        Effect.USE_KEYS, Price.HELPED, 0.0, _PALE)
    ATTEND_MERGE_BACKWARD = (
        "AMB", "context_exchange", Stream.COMPUTE, Role.MERGE, Direction.BACKWARD, Work.NONE, Fields.UNITS,
        Needs.PARTIAL_BACKWARD, Value.GRADIENT, Making.COMPLETED, None, "SEND_BACKWARD", None,
        Effect.NOTHING, Price.MERGED, 0.0, _LIGHT)
    VOCAB_FORWARD = (
        "VF", "vocabulary", Stream.COMPUTE, Role.PART, Direction.FORWARD, Work.NONE, Fields.PASS,
        Needs.LAST_OUTPUT, Value.LOGITS, Making.ONCE, None, None, None,
        Effect.KEEP_LOGITS, Price.OUTPUT_PART, 0.0, _DEEP)
    """This device's part of the output layer and of the cross entropy."""
    VOCAB_BACKWARD = (
        "VB", "vocabulary", Stream.COMPUTE, Role.PART, Direction.BACKWARD, Work.NONE, Fields.PASS,
        Needs.ALL_LOGITS, Value.LOGITS_GRADIENT, Making.ONCE, None, None, None,
        Effect.USE_UP_LOGITS, Price.OUTPUT_PART_BACKWARD, 0.0, _DEEP)
    PARAM_PREFETCH = (
        "PP", "window", Stream.HOST_TO_DEVICE, Role.STATE, Direction.NEITHER, Work.NONE, Fields.LAYERS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.SHARD_FROM_HOST, Price.PREFETCH, 0.0, _GREY)
    """Parameter shards of ``chunk`` come from the host."""
    PARAM_GATHER = (
        "PG", "window", Stream.COLLECTIVE, Role.STATE, Direction.NEITHER, Work.NONE, Fields.LAYERS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.GATHER, Price.GATHER, 0.0, _GREY)
    """All-gather of the parameters of layers ``[start, stop)`` of ``chunk``."""
    PARAM_RELEASE = (
        "PR", "window", Stream.COMPUTE, Role.STATE, Direction.NEITHER, Work.NONE, Fields.LAYERS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.RELEASE, Price.FREE, 0.0, _GREY)
    """The gathered parameters are dropped; the shards stay."""
    PARAM_OFFLOAD = (
        "PO", "window", Stream.DEVICE_TO_HOST, Role.STATE, Direction.NEITHER, Work.NONE, Fields.LAYERS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.SHARD_TO_HOST, Price.OFFLOAD, 0.0, _GREY)
    """Parameter shards go to the host."""
    GRAD_REDUCE = (
        "GR", "window", Stream.COLLECTIVE, Role.STATE, Direction.NEITHER, Work.NONE, Fields.LAYERS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.REDUCE, Price.REDUCE, 0.0, _GREY)
    """Reduce-scatter of the gradients of layers ``[start, stop)`` of ``chunk``."""
    OPTIMIZER_STEP = (
        "OS", "window", Stream.COMPUTE, Role.STATE, Direction.NEITHER, Work.NONE, Fields.LAYERS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.STEP, Price.STEP, 0.0, _GREY)
    ACT_OFFLOAD = (
        "AO", "activation_offload", Stream.DEVICE_TO_HOST, Role.ACTIVATIONS, Direction.FORWARD, Work.NONE, Fields.PASS,
        Needs.OWN_OUTPUT, None, Making.ONCE, None, None, None,
        Effect.TO_HOST, Price.ACT_OFFLOAD, 0.0, _LIGHT)
    """Activations of a FORWARD go to the host."""
    ACT_FETCH = (
        "AF", "activation_offload", Stream.HOST_TO_DEVICE, Role.ACTIVATIONS, Direction.BACKWARD, Work.NONE, Fields.PASS,
        Needs.NOTHING, None, Making.ONCE, None, None, None,
        Effect.FROM_HOST, Price.ACT_FETCH, 0.0, _LIGHT)
    """They come back ahead of the BACKWARD."""
    KV_SEND_BACKWARD = (
        "KSB", "context_exchange", Stream.SEND, Role.KEYS, Direction.BACKWARD, Work.NONE, Fields.UNITS,
        Needs.KEYS_MADE, None, Making.ONCE, None, None, "KV_RECV_BACKWARD",
        Effect.NOTHING, Price.LINK, 0.0, _GREY)
    """As KV_SEND, for the attention's backward pass (when the peer did not keep them)."""
    KV_RECV_BACKWARD = (
        "KRB", "context_exchange", Stream.RECEIVE, Role.KEYS, Direction.BACKWARD, Work.NONE, Fields.UNITS_OF_PEER,
        Needs.OTHER_END, Value.KV_BACKWARD, Making.REPEATED, None, None, "KV_SEND_BACKWARD",
        Effect.KEYS_ARRIVE, Price.LINK, 0.0, _GREY)
    EMBED_FORWARD = (
        "EF", "vocabulary", Stream.COMPUTE, Role.PART, Direction.FORWARD, Work.NONE, Fields.PASS,
        Needs.TOKENS, Value.EMBEDDING, Making.ONCE, None, None, None,
        Effect.NOTHING, Price.WORD_PART, 0.0, _DEEP)
    """This device's part of the word embeddings of a slice; on the first stage: the tokens leave."""
    EMBED_BACKWARD = (
        "EB", "vocabulary", Stream.COMPUTE, Role.PART, Direction.BACKWARD, Work.NONE, Fields.PASS,
        Needs.FIRST_GRADIENT, None, Making.ONCE, None, None, None,
        Effect.NOTHING, Price.WORD_PART_BACKWARD, 0.0, _DEEP)
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
