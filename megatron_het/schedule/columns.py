"""The columns of the table of operation kinds (``kinds.py``): what each of their entries can be.

Readers give every entry a meaning of their own with :func:`complete`, so that an entry that a reader does not know
fails when the reader is imported.
"""

from collections.abc import Mapping
from enum import Enum, Flag, IntEnum, StrEnum


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
    """Of which pass an operation is part."""

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
    """How long an operation takes; ``durations.py`` reads it from the costs."""

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
