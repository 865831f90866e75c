"""The kinds of operations: one row each, with everything that readers need to know about them.

Dependencies, validator, simulator, durations, memory, text, pictures and the command line read this table, and the
executor's handlers are checked against it.  No column has a default: a row that lacks one fails when it is added.
Here are the passes of every schedule and the transfers between chunks.  A feature adds the rows of its own operations
(:func:`add_kinds`), and with the entries of their columns says what they need, take and hold: no reader knows them.

Kinds are names.  They are integers only so that tables can be indexed by them; to compare them as numbers is an
error.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum, Flag, StrEnum
from typing import Any, ClassVar

# The columns of the table: what each of their entries can be.


class Stream(StrEnum):
    """Where an operation runs on its device.  Streams run side by side, each in the order of the list."""

    COMPUTE = "compute"
    SEND = "send"  # transfers have one queue per directed pair of devices
    RECEIVE = "receive"
    COLLECTIVE = "collective"  # all replicas of the stage take part
    HOST_TO_DEVICE = "host_to_device"
    DEVICE_TO_HOST = "device_to_host"


STREAM_IDS: dict[str, int] = {stream: number for number, stream in enumerate(Stream)}  # rows of streams in traces


class Role(Enum):
    """Holds what a kind of operation is among the others; passes place operations by it."""

    PASS = "pass"  # a forward or backward of a chunk, or half of a backward: the compute order that a generator decides
    TRANSFER = "transfer"  # activations or gradients between two chunks
    OTHER = "other"


class Direction(Enum):
    """Names the pass that an operation is part of."""

    FORWARD = "forward"
    BACKWARD = "backward"
    NEITHER = "neither"


class Work(Flag):
    """Which part of the training of a slice in a chunk an operation does."""

    NONE = 0
    FORWARD = 1
    INPUT = 2  # gradient of the chunk's input
    WEIGHTS = 4  # gradient of the chunk's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Which fields of an operation mean something, besides its chunk."""

    # microbatch, slice and chunk are those of a pass; else layers ``[start, stop)``, -1 for all
    names_pass: bool = True
    of_peer: bool = False  # it is a pass of the peer
    has_peer: bool = False  # peer and peer_chunk too
    # start and stop too, parts of the sequence; ranks share it by the heads of attention that they have
    by_heads: bool = False


PASS_FIELDS = Fields()
TRANSFER_FIELDS = Fields(has_peer=True)


class Value(int):
    """Holds what an operation leaves on its device; a number, so that keys of values are tuples of numbers."""

    OUTPUT: ClassVar["Value"]
    GRADIENT: ClassVar["Value"]  # gradient of the chunk's input
    words: str
    for_a_peer: bool
    _made: ClassVar[list["Value"]] = []

    def __new__(cls, words: str, *, for_a_peer: bool = False) -> "Value":
        """Makes another value.

        Args:
            words: What it is, in messages.
            for_a_peer: It is made for another device, or received from it.
        """
        value = int.__new__(cls, len(cls._made))
        value.words, value.for_a_peer = words, for_a_peer
        cls._made.append(value)
        return value


Value.OUTPUT = Value("the output")
Value.GRADIENT = Value("the gradient")
DELIVERED = frozenset({Value.OUTPUT, Value.GRADIENT})  # values that transfers of the program carry to other devices

Rule = Callable[[int, Any], list[Any]]
"""From a device and one of its operations, the values that this needs (``deps.Need``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """Which values an operation needs before it can run."""

    rule: Callable[[Any], Rule]  # from the dependencies of a program (``deps.Dependencies``)
    own: Value | None = None  # the one value of its own pass that it needs, and nothing else
    begun: Callable[[Any], Rule] | None = None  # from the same, the values whose making must have begun; None for none
    are_shared: bool = False  # the rule returns the same values on all devices of a pass, and none is received


NO_NEEDS = Needs(lambda deps: deps.nothing)  # also of a receive, which is tied to its send
INPUT = Needs(lambda deps: deps.input)
"""Output of the chunk before (or embeddings), keys and values of the slice before."""
OUTPUT_GRADIENT = Needs(lambda deps: deps.output_gradient)
"""Own output, gradient of the chunk after (or of the logits), gradients of keys and values of the slice after."""
OWN_OUTPUT = Needs(lambda deps: deps.own, own=Value.OUTPUT)
OWN_GRADIENT = Needs(lambda deps: deps.own, own=Value.GRADIENT)


class Making(Enum):
    """How often a value may be made."""

    ONCE = "once"
    COMPLETED = "completed"  # an earlier operation of the device began the value
    REPEATED = "repeated"  # a query for several peers, keys in several ranges


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Effect:
    """Holds what an operation does to what its device holds."""

    # from ``lifetimes.Lifetimes``, what steps over the operation; None where values say it all
    lifetime: Callable[[Any], Callable[[int, Any, list[int]], None]] | None = None
    # from the holdings of ``memory.py``, what changes in bytes; None for nothing
    memory: Callable[[Any], Callable[[int, Any], None]] | None = None
    # fields of ``cost.Memory`` that are not on the device at the start of a program with such operations
    absent: tuple[str, ...] = ()
    updates: bool = False  # it updates parameters


NO_EFFECT = Effect()
KEEP = Effect(lifetime=lambda held: held.keep, memory=lambda bytes_: bytes_.keep)
"""Activations are kept for the backward."""
USE_UP = Effect(lifetime=lambda held: held.use_up, memory=lambda bytes_: bytes_.use_up)
"""Activations are used for the last time, by an operation that needs the parameters too."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Price:
    """How long an operation takes."""

    # from the prices of a program (``cost.Prices``); None for no time, and for transfers
    seconds: Callable[[Any], Callable[[int, Any], float]] | None = None
    is_pass: bool = False  # whether a part of its time does not depend on the operation's size
    attends: bool = False  # it has attention, and less of it where that was given away before it
    # from the prices, what the pass that follows has less; None for nothing
    relief: Callable[[Any], Callable[[int, Any], float]] | None = None
    # bytes of a receive of keys and values, from costs, program, sender and the receive; None for activations
    size: Callable[[Any, Any, int, Any], float] | None = None


FREE = Price()  # of a transfer too: there the link decides
FORWARD_PRICE = Price(seconds=lambda prices: prices.forward, is_pass=True, attends=True)
BACKWARD_PRICE = Price(seconds=lambda prices: prices.backward, is_pass=True, attends=True)
Colour = tuple[float, float, float]
"""(lightness, how much lighter the last chunk is, saturation); the hue is the microbatch's."""

LIGHT: Colour = (0.60, 0.22, 0.85)
DARK: Colour = (0.42, 0.22, 0.60)
GREY: Colour = (0.55, 0.0, 0.0)


class Columns:
    """The columns of the table."""

    mnemonic: str  # its text form
    # who executes it: ``"compute"`` and ``"transfer"`` mean the executor itself, anything else the name of a feature;
    # without a feature of this name it can be simulated only.
    executor: str
    stream: Stream  # where it runs
    role: Role  # what it is among the others
    works: bool  # whether it computes for a microbatch, so that its time means something on every device
    # whether it is a part of a layer that all devices of its microbatch share, which begins and ends when they have all
    # come to it
    meets: bool
    in_last_chunk: bool  # whether it uses parameters of its device's last chunk, even if it names another chunk
    is_issued: bool  # whether it is issued when the compute operation before it in its list is done
    direction: Direction  # the pass that it is part of
    work: Work  # what it does of the training of a slice in a chunk
    fields: Fields  # which fields of the operation mean something
    needs: Needs  # the values that it waits for
    makes: Value | None  # the value that it leaves on its device
    making: Making  # how often that value may be made
    # the kind of receive that brings what it needs from another device; None: nothing comes that way
    fed_by: "Kind | None"
    sent_by: "Kind | None"  # the kind of send that takes what it makes to another device
    other_end: "Kind | None"
    effect: Effect  # on what the device holds
    price: Price  # which of the costs it takes
    plain_s: float  # duration in a replay with plain durations, in forwards of the chunk
    colour: Colour  # in pictures


_COLUMNS = frozenset(Columns.__annotations__)
_KINDS = ("fed_by", "sent_by", "other_end")  # columns that name other rows, which are not there yet when a row is read


class _Table(type):
    """Makes ``Kind.FORWARD`` and a loop over ``Kind`` mean rows of the table."""

    rows: dict[str, "Kind"]

    def __getattr__(cls, name: str) -> "Kind":
        raise AttributeError(f"there is no kind {name}: the feature that has it is not imported, or there is none")

    def __iter__(cls) -> Iterator["Kind"]:
        return iter(tuple(cls.rows.values()))

    def __len__(cls) -> int:
        return len(cls.rows)


class Kind(Columns, int, metaclass=_Table):
    """Holds what an operation does: one literal per kind, with an entry for each of :class:`Columns`."""

    rows: ClassVar[dict[str, "Kind"]] = {}
    by_mnemonic: ClassVar[dict[str, "Kind"]] = {}
    name: str

    def _no_order(self, other: object) -> bool:
        raise TypeError(f"{self.name} and {other!r} have no order: ask for a column of the table of kinds")

    __lt__ = __le__ = __gt__ = __ge__ = _no_order

    def __repr__(self) -> str:
        return f"Kind.{self.name}"

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns its name: a number means another kind where other features are imported."""
        return getattr, (Kind, self.name)


def add_kinds(rows: Mapping[str, Mapping[str, object]]) -> None:
    """Adds rows to the table, in :data:`SETS` too; columns that name a kind have its name.

    Args:
        rows: By name of the kind.

    Raises:
        TypeError: A row is there already or lacks a column, a mnemonic is taken, or the ends of a transfer do not name
            each other.
    """
    added = []
    for name, row in rows.items():
        if name in Kind.rows:
            raise TypeError(f"there are two kinds {name}")
        if differing := row.keys() ^ _COLUMNS:
            raise TypeError(f"row {row.get('mnemonic')!r} and the columns differ in {', '.join(sorted(differing))}")
        kind = int.__new__(Kind, len(Kind.rows))
        kind.name, Kind.rows[name] = name, kind
        setattr(Kind, name, kind)
        kind.__dict__ |= row
        added.append(kind)
    for kind in added:
        for column in _KINDS:
            other = getattr(kind, column)
            setattr(kind, column, None if other is None else Kind.rows[other])
    for kind in added:
        if kind.other_end is not None and kind.other_end.other_end is not kind:
            raise TypeError(f"{kind.name} and {kind.other_end.name} are not each other's other end")
    if len({kind.mnemonic for kind in Kind}) < len(Kind):
        raise TypeError("two kinds have one mnemonic")
    Kind.by_mnemonic.update({kind.mnemonic: kind for kind in added})
    for condition, found in SETS:
        found.update(filter(condition, added))


SETS: list[tuple[Callable[[Kind], bool], set[Kind]]] = []
"""Sets that :func:`where` has returned, which grow with the table."""


def where(condition: Callable[[Kind], bool]) -> Set[Kind]:
    """The kinds for which a condition holds; those that are added later too."""
    found = set(filter(condition, Kind))
    SETS.append((condition, found))
    return found


def executed_by(executor: str) -> frozenset[Kind]:
    """The kinds with an executor: ``"compute"``, ``"transfer"`` or the name of a feature."""
    return frozenset(kind for kind in Kind if kind.executor == executor)


NEITHER: dict[str, object] = {
    "works": False,
    "meets": False,
    "in_last_chunk": False,
    "is_issued": False,
    "work": Work.NONE,
    "makes": None,
    "making": Making.ONCE,
    "fed_by": None,
    "sent_by": None,
    "other_end": None,
    "plain_s": 0.0,
}
"""Entries of most rows of features, which write what differs."""
_PASS = NEITHER | {
    "executor": "compute",
    "stream": Stream.COMPUTE,
    "role": Role.PASS,
    "works": True,
    "fields": PASS_FIELDS,
}
BACKWARD_PASS: dict[str, object] = _PASS | {
    "direction": Direction.BACKWARD,
    "needs": OUTPUT_GRADIENT,
    "makes": Value.GRADIENT,
    "fed_by": "RECV_BACKWARD",
    "sent_by": "SEND_BACKWARD",
    "colour": DARK,
}
"""Properties of the kinds that compute the gradient of a chunk's input."""
_TRANSFER = NEITHER | {
    "executor": "transfer",
    "role": Role.TRANSFER,
    "fields": TRANSFER_FIELDS,
    "effect": NO_EFFECT,
    "price": FREE,
    "colour": GREY,
}
_SEND, _RECEIVE = _TRANSFER | {"stream": Stream.SEND}, _TRANSFER | {"stream": Stream.RECEIVE, "needs": NO_NEEDS}
_FORWARD, _BACKWARD = {"direction": Direction.FORWARD}, {"direction": Direction.BACKWARD}

# fmt: off
add_kinds({
    "FORWARD": _PASS | _FORWARD | {
        "mnemonic": "F", "work": Work.FORWARD, "needs": INPUT, "makes": Value.OUTPUT, "fed_by": "RECV_FORWARD",
        "sent_by": "SEND_FORWARD", "effect": KEEP, "price": FORWARD_PRICE, "plain_s": 1.0, "colour": LIGHT},
    # Gradients of inputs and weights together.
    "BACKWARD": BACKWARD_PASS | {
        "mnemonic": "B", "work": Work.INPUT | Work.WEIGHTS, "effect": USE_UP, "price": BACKWARD_PRICE, "plain_s": 2.0},
    # Activations of ``chunk`` leave for ``peer_chunk`` on ``peer``; those for ``chunk`` arrive from there.
    "SEND_FORWARD": _SEND | _FORWARD | {"mnemonic": "SF", "needs": OWN_OUTPUT, "other_end": "RECV_FORWARD"},
    "RECV_FORWARD": _RECEIVE | _FORWARD | {"mnemonic": "RF", "other_end": "SEND_FORWARD"},
    # The gradient of the input of ``chunk`` leaves; that of its output arrives.
    "SEND_BACKWARD": _SEND | _BACKWARD | {"mnemonic": "SB", "needs": OWN_GRADIENT, "other_end": "RECV_BACKWARD"},
    "RECV_BACKWARD": _RECEIVE | _BACKWARD | {"mnemonic": "RB", "other_end": "SEND_BACKWARD"},
})
# fmt: on

COMPUTE = where(lambda kind: kind.role is Role.PASS)  # the kinds whose order a generator decides and every pass keeps
INPUT_GRADIENTS = where(lambda kind: kind.role is Role.PASS and Work.INPUT in kind.work)
"""Backward passes that make the gradient of a chunk's input, with that of its weights or without."""
WEIGHT_GRADIENTS = where(lambda kind: kind.role is Role.PASS and Work.WEIGHTS in kind.work)
TOGETHER = where(lambda kind: kind.role is Role.PASS and kind.work is not Work.WEIGHTS)
"""Passes in which layers of experts send tokens or their gradients."""
SENDS = where(lambda kind: kind.stream is Stream.SEND)
RECEIVES = where(lambda kind: kind.stream is Stream.RECEIVE)
TRANSFERS = where(lambda kind: kind.stream in (Stream.SEND, Stream.RECEIVE))
COLLECTIVES = where(lambda kind: kind.stream is Stream.COLLECTIVE)
PARTS = where(lambda kind: kind.meets)  # parts of layers that devices share
OUTPUT_PARTS = where(lambda kind: kind.meets and kind.in_last_chunk)  # parts of the output layer
WORD_PARTS = where(lambda kind: kind.meets and not kind.in_last_chunk)  # parts of the word embeddings


def chunk_of(kind: Kind, chunk: int, chunks: int) -> int:
    """The chunk of a device whose parameters an operation is about.

    Parts of layers that devices share have chunk 0 in programs.  A device's rows of the word embeddings are in its
    first chunk, those of the output layer are in its last one; tied ones have a device with one chunk only.

    Args:
        chunk: what the operation says.
        chunks: how many the device has.
    """
    return chunks - 1 if kind.in_last_chunk else chunk


Ends = Callable[[Any, int, int], list[Any]]
"""From dependencies, microbatch and slice, the values that are needed at an end of the model."""


class Rules:
    """Says what operations of a feature mean for whole programs, where rows of the table cannot say it.

    Readers of programs ask the rules of all features, whether a program has operations of theirs or not.  By default
    there is nothing to say.
    """

    def first_input(self, program: Any) -> "Ends | None":
        """Values that a forward of the model's first chunk needs; None for none."""
        return None

    def last_gradient(self, program: Any) -> "Ends | None":
        """Values that a backward of the model's last chunk needs; None for none."""
        return None

    def lockstep(self, graph: Any, duration: list[float]) -> None:
        """Changes plain durations and ``graph.waits`` to how passes wait for each other, to place transfers by."""

    def joined(self, graph: Any) -> tuple[Set[int], list[tuple[int, int]]]:
        """Nodes that are no events of their own, and pairs of nodes that are one event (``joint.py``)."""
        return frozenset(), []

    def busy(self, program: Any, device: int) -> Set[Any]:
        """Operations of a device, besides passes, in which it works for others."""
        return frozenset()

    def kept_buffers(self, timeline: Any, device: int) -> dict[int, tuple[int, int]]:
        """Receives whose buffers stay: the last operation, and the first backward, that use each of them."""
        return {}

    def volume(self, program: Any, device: int, op: Any) -> float:
        """Hidden states of a slice that an operation moves through its device's links, besides activations."""
        return 0.0


RULES: list[Rules] = []  # of the features that have some, which add them here
