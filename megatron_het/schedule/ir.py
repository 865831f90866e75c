"""The intermediate representation of a pipeline schedule: operations, shapes, programs.

A :class:`Program` holds, for every device, the ordered list of operations that the device issues in one
training iteration.  A *device* is one replica of one pipeline stage (a tensor-parallel group of ranks),
numbered stage-major.  The model is cut into *chunks*: stage ``s`` holds ``len(layers[s])`` of them, and
``placement`` says in which order a microbatch visits them.

Nothing in here knows about tensors, ranks or time.
"""

import functools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from megatron_het.safe_io import MAX_DEVICES, MAX_PASSES, shown
from megatron_het.schedule.kinds import COMPUTE, RECEIVES, WORD_PARTS, Kind, Role
from megatron_het.schedule.kinds import SENDS as SENDS  # re-exported for users of programs
from megatron_het.schedule.kinds import TRANSFERS as TRANSFERS

# In which order a microbatch visits the chunks of the stages.

PLACEMENTS = ("loop", "v")
SLICED_SCHEDULES = ("seq1f1b", "slimpipe", "terapipe")
"""Schedules that cut sequences; their plans have the schedule parameter ``slices``."""
V_SHAPED = frozenset({"v-half", "zb-v"})
"""Schedules whose second chunks go back from the last stage to the first: placement ``v``."""

Place = tuple[int, int]  # (stage, chunk)


def placement_of(schedule: str) -> str:
    """The placement of a schedule's chunks; ``loop`` for an unknown schedule."""
    return "v" if schedule in V_SHAPED else "loop"


def path_of(chunks: Sequence[int], placement: str) -> tuple[Place, ...]:
    """(stage, chunk) in the order in which a microbatch visits them.

    Args:
        chunks: Number of chunks of each stage.
        placement: ``"loop"``: chunk 0 of all stages, then chunk 1 of all stages that have one, ...; ``"v"``: the
            same with every other sweep going backwards (ZB-V, V-Half).
    """
    path: list[Place] = []
    for chunk in range(max(chunks, default=0)):
        sweep = [(stage, chunk) for stage, count in enumerate(chunks) if chunk < count]
        path += reversed(sweep) if placement == "v" and chunk % 2 else sweep
    return tuple(path)


@functools.cache
def path_of_schedule(schedule: str, stages: int, chunks: int) -> tuple[Place, ...]:
    """The path of a schedule over stages that have equally many chunks."""
    return path_of((chunks,) * stages, placement_of(schedule))


class Op(NamedTuple):
    """One operation of one device.

    ``microbatch``, ``slice`` and ``chunk`` always name the *local* compute operation that the operation
    is, feeds or follows: a SEND_FORWARD carries the output of the local FORWARD with the same three
    fields, a RECV_FORWARD brings the input of the local FORWARD with the same three fields, a
    SEND_BACKWARD carries the result of the local BACKWARD, a RECV_BACKWARD feeds it.  ``peer`` is the
    device at the other end and ``peer_chunk`` the chunk there, so the partner of a transfer is
    ``Op(kind.other_end, microbatch, slice, peer_chunk, this device, chunk, ...)`` on ``peer``.
    """

    kind: Kind  # what is done
    microbatch: int = -1  # global index of the microbatch, -1 where the operation has none
    slice: int = 0  # index of the slice of the sequence (0 in schedules without slices)
    chunk: int = 0  # index of the model chunk on this device
    peer: int = -1  # index of the other device, -1 where there is none
    peer_chunk: int = -1  # chunk on the peer, -1 where there is none
    # start, stop: half-open range of layers within the chunk (parameter operations) or of exchange units of the
    # sequence (attention exchange); -1 where the operation has none
    start: int = -1
    stop: int = -1

    def partner(self, device: int) -> tuple[int, "Op"]:
        """The other end of this transfer as (device, operation); this end is on ``device``."""
        other_end = self.kind.other_end
        assert other_end is not None  # of a transfer
        return self.peer, self._replace(kind=other_end, chunk=self.peer_chunk, peer=device, peer_chunk=self.chunk)

    def __str__(self) -> str:
        """Its text, e.g. ``SF3.0.1>2.1``."""
        out = f"{self.kind.mnemonic}{_text(self.microbatch)}.{_text(self.slice)}.{_text(self.chunk)}"
        if self.peer >= 0 or self.peer_chunk >= 0:
            out += f">{_text(self.peer)}.{_text(self.peer_chunk)}"
        if self.start >= 0 or self.stop >= 0:
            out += f"[{_text(self.start)}:{_text(self.stop)}]"
        return out


def inserted(ops: Sequence[Op], before: Mapping[int, list[Op]], after: Mapping[int, list[Op]]) -> tuple[Op, ...]:
    """A device's list with operations inserted before and after the given positions."""
    out: list[Op] = []
    at = 0
    for i in sorted(before.keys() | after.keys()):  # the operations in between are copied in runs
        out += (*ops[at:i], *before.get(i, ()), ops[i], *after.get(i, ()))
        at = i + 1
    return (*out, *ops[at:])


def _text(number: int) -> str:
    return "_" if number < 0 else str(number)


class Device(NamedTuple):
    """One replica of one pipeline stage."""

    stage: int
    replica: int

    def __str__(self) -> str:
        return f"{self.stage}.{self.replica}"


@functools.lru_cache(maxsize=256)
def _shares_of(row: tuple[int, ...], replicas: int) -> tuple[tuple[int, ...], ...]:
    """The microbatches of each replica of a stage; cached, because stages and plans often divide them equally."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for microbatch, replica in enumerate(row):
        shares[replica].append(microbatch)
    return tuple(map(tuple, shares))


@dataclass(frozen=True, slots=True)
class Shape:
    """The inputs of a schedule generator: layers, routing, replicas and slices.

    Attributes:
        layers: ``layers[stage][chunk]``, the number of transformer layers.
        route: ``route[stage][microbatch]``, the replica of the stage that runs the microbatch.
        replicas: number of replicas of each stage.
        slices: slices per sequence.
        placement: ``"loop"`` or ``"v"``; see :func:`~megatron_het.schedule.ir.path_of`.
        sizes: sequences of every microbatch where they differ; costs and memory are those of the largest.
        attention: how many of the layers of every chunk have attention; empty where all have.
        companions: devices of one stage that run every pass together, because they divide experts among them.

    Raises:
        ValueError: naming the field, its value and what it should be.
    """

    layers: tuple[tuple[int, ...], ...]
    route: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    slices: int = 1
    placement: str = "loop"
    sizes: tuple[int, ...] = ()
    attention: tuple[tuple[int, ...], ...] = ()
    companions: tuple[tuple[int, ...], ...] = ()
    path: tuple[Place, ...] = field(init=False, repr=False, compare=False)
    """(stage, chunk) in the order in which a microbatch visits them."""
    positions: dict[Place, int] = field(init=False, repr=False, compare=False)
    first_device: tuple[int, ...] = field(init=False, repr=False, compare=False)
    devices: tuple[Device, ...] = field(init=False, repr=False, compare=False)
    shares: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Microbatches of each device, ascending."""

    def __post_init__(self) -> None:
        self._check()
        path = path_of([len(chunks) for chunks in self.layers], self.placement)
        first, total = [], 0
        for count in self.replicas:
            first.append(total)
            total += count
        put = object.__setattr__
        put(self, "path", path)
        put(self, "positions", {place: i for i, place in enumerate(path)})
        put(self, "first_device", tuple(first))
        put(self, "shares", tuple(chain.from_iterable(map(_shares_of, map(tuple, self.route), self.replicas))))
        put(self, "devices", tuple(Device(s, r) for s, n in enumerate(self.replicas) for r in range(n)))

    @property
    def attention_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers with attention of every chunk, by stage."""
        return self.attention or self.layers

    def _check(self) -> None:
        stages = len(self.layers)
        if stages == 0:
            raise ValueError("layers: there must be at least one stage")
        for s, chunks in enumerate(self.layers):
            if not chunks or min(chunks) < 0:
                raise ValueError(f"layers[{s}] = {chunks}: every stage needs a chunk, and no chunk negative layers")
        for name, value in (("route", self.route), ("replicas", self.replicas)):
            if len(value) != stages:
                raise ValueError(f"{name} has {len(value)} entries for {stages} stages")
        if self.slices < 1:
            raise ValueError(f"slices = {self.slices}: must be at least 1")
        if self.placement not in PLACEMENTS:
            raise ValueError(f"placement = {self.placement!r}: must be one of {', '.join(PLACEMENTS)}")
        count = len(self.route[0])
        if count == 0:
            raise ValueError("route: there must be at least one microbatch")
        passes = 2 * sum(map(len, self.layers)) * count * self.slices
        if passes > MAX_PASSES:
            raise ValueError(f"slices and microbatches make {passes} passes per iteration, more than {MAX_PASSES}")
        if sum(self.replicas) > MAX_DEVICES:
            raise ValueError(f"replicas: {sum(self.replicas)} devices are more than {MAX_DEVICES}")
        if self.sizes and (len(self.sizes) != count or min(self.sizes) < 1):
            raise ValueError(f"sizes: there must be a positive one for each of the {count} microbatches")
        together = [device for devices in self.companions for device in devices]
        if len(set(together)) < len(together) or not set(together) <= set(range(sum(self.replicas))):
            raise ValueError(f"companions = {self.companions}: each must be devices, and each device in one at most")
        for s, (row, replicas) in enumerate(zip(self.route, self.replicas)):
            if replicas < 1:
                raise ValueError(f"replicas[{s}] = {replicas}: must be at least 1")
            if len(row) != count:
                raise ValueError(f"route[{s}] has {len(row)} microbatches, route[0] has {count}")
            if min(row) < 0 or max(row) >= replicas:
                microbatch, replica = next((m, r) for m, r in enumerate(row) if not 0 <= r < replicas)
                raise ValueError(f"route[{s}][{microbatch}] = {replica}: stage {s} has {replicas} replica(s)")

    @classmethod
    def uniform(
        cls,
        stages: int,
        microbatches: int,
        *,
        slices: int = 1,
        chunks: int = 1,
        layers_per_chunk: int = 1,
        placement: str = "loop",
    ) -> "Shape":
        """A homogeneous pipeline: one replica per stage, equal chunks."""
        return cls(
            layers=((layers_per_chunk,) * chunks,) * stages,
            route=((0,) * microbatches,) * stages,
            replicas=(1,) * stages,
            slices=slices,
            placement=placement,
        )

    def relative_sizes(self) -> tuple[float, ...]:
        """Size of every microbatch, relative to the largest."""
        most = max(self.sizes, default=1)
        return tuple(size / most for size in self.sizes) or (1.0,) * self.microbatches

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def microbatches(self) -> int:
        """Number of microbatches per iteration, over all replicas."""
        return len(self.route[0])

    def device(self, stage: int, replica: int) -> int:
        """Index of a device."""
        if not (0 <= stage < len(self.replicas) and 0 <= replica < self.replicas[stage]):
            raise ValueError(f"there is no replica {replica} of stage {stage} (replicas per stage: {self.replicas})")
        return self.first_device[stage] + replica

    def runner(self, stage: int, microbatch: int) -> int:
        """Index of the device that runs ``microbatch`` in ``stage``."""
        return self.first_device[stage] + self.route[stage][microbatch]

    def pipelines(self) -> list[tuple[int, ...]] | None:
        """The devices of each separate pipeline, by stage; None if a microbatch crosses between pipelines."""
        if any(row != self.route[0] for row in self.route):
            return None
        return [tuple(first + r for first in self.first_device) for r in sorted(set(self.route[0]))]

    def microbatches_of(self, device: int) -> tuple[int, ...]:
        """Microbatches of a device, ascending."""
        return self.shares[device]

    def previous(self, stage: int, chunk: int) -> Place | None:
        """(stage, chunk) that feeds this one, None for the first of the model."""
        i = self.positions[stage, chunk]
        return self.path[i - 1] if i else None

    def next(self, stage: int, chunk: int) -> Place | None:
        """(stage, chunk) fed by this one, None for the last of the model."""
        i = self.positions[stage, chunk] + 1
        return self.path[i] if i < len(self.path) else None


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of every device in one iteration."""

    name: str  # name of the schedule
    shape: Shape  # the shape it was generated for
    ops: tuple[tuple[Op, ...], ...]  # one tuple of operations per device
    forward_only: bool = False  # an evaluation program: no backward operation is expected
    splits_output: bool = False  # the output layer is split over the devices of a microbatch (VOCAB_* operations)
    attention_units: int = 0  # units per slice in which attention moves between devices, 0 where none does
    kinds: Set[Kind] = field(init=False, repr=False, compare=False)  # the kinds of its operations

    def __post_init__(self) -> None:
        if len(self.ops) != len(self.shape.devices):
            raise ValueError(f"{len(self.ops)} operation lists for {len(self.shape.devices)} devices")
        object.__setattr__(self, "kinds", frozenset(map(itemgetter(0), chain.from_iterable(self.ops))))

    @property
    def embedding(self) -> bool:
        """Whether the word embeddings are split over the devices of a microbatch (EMBED_* operations)."""
        return not self.kinds.isdisjoint(WORD_PARTS)

    @property
    def has_transfers(self) -> bool:
        """Whether transfers were added (sends of keys and values exist before that, their receives do not)."""
        return any(kind.role is Role.TRANSFER or kind in RECEIVES for kind in self.kinds)

    @property
    def devices(self) -> tuple[Device, ...]:
        """(stage, replica) of every device, in the order of ``ops``."""
        return self.shape.devices

    def for_device(self, stage: int, replica: int) -> tuple[Op, ...]:
        """The operations of one device."""
        return self.ops[self.shape.device(stage, replica)]

    def compute(self, device: int) -> tuple[Op, ...]:
        """The device's forward and backward operations, in order."""
        return tuple(op for op in self.ops[device] if op.kind in COMPUTE)

    def __str__(self) -> str:
        """The program as text."""
        shape, yes = self.shape, ("no", "yes")
        head = _TEMPLATE.format(
            name=self.name,
            layers=_rows(shape.layers),
            route=_rows(shape.route),
            replicas=_rows((shape.replicas,)),
            slices=shape.slices,
            placement=shape.placement,
            forward_only=yes[self.forward_only],
            splits_output=yes[self.splits_output],
            attention_units=self.attention_units,
        )
        if shape.sizes:
            head += f"{SIZES_FIELD}: {_rows((shape.sizes,))}\n"
        if shape.companions:
            head += f"{COMPANIONS_FIELD}: {_rows(shape.companions)}\n"
        lists = (f"device {device}: {' '.join(map(str, ops))}\n" for device, ops in zip(self.devices, self.ops))
        return head + "".join(lists)


_TEMPLATE = """\
program: {name}
layers: {layers}
route: {route}
replicas: {replicas}
slices: {slices}
placement: {placement}
forward_only: {forward_only}
vocabulary: {splits_output}
exchange_units: {attention_units}
"""
TEXT_FIELDS = tuple(line.partition(":")[0] for line in _TEMPLATE.splitlines())
"""The fields at the beginning of a program's text, one line each."""
SIZES_FIELD = "sizes"  # the field that only a program with unequal microbatches has
COMPANIONS_FIELD = "companions"  # the field that only a program with replicas that share experts has


def _rows(table: tuple[tuple[int, ...], ...]) -> str:
    return " | ".join(" ".join(map(str, row)) for row in table)


# Programs as text, exactly reversible.
#
# A file has one ``key: value`` line per field of the program and one ``device STAGE.REPLICA: OP OP ...``
# line per device.  An operation is its mnemonic and ``microbatch.slice.chunk``, then for transfers
# ``>peer.peer_chunk``, then for a range ``[start:stop]``; ``_`` stands for an unused field (-1)::
#
#     program: 1f1b
#     layers: 2 | 2
#     route: 0 0 | 0 0
#     replicas: 1 1
#     slices: 1
#     placement: loop
#     forward_only: no
#     vocabulary: no
#     exchange_units: 0
#     sizes: 4 2
#     device 0.0: F0.0.0 SF0.0.0>1.0 F1.0.0 ...
#
# The field ``sizes`` is present only if microbatches differ in size.  Empty lines and lines that begin with
# ``#`` are ignored.

_NUMBER = r"([0-9]{1,9}|_)"
_OP = re.compile(rf"([A-Z]+){_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:>{_NUMBER}\.{_NUMBER})?(?:\[{_NUMBER}:{_NUMBER}\])?")
_FIELDS = (*TEXT_FIELDS, SIZES_FIELD, COMPANIONS_FIELD)
_FIELD = re.compile(r"([a-z_]+): *(.*?) *")
_DEVICE = re.compile(r"device ([0-9]{1,9})\.([0-9]{1,9}): *(.*?) *")
_TABLE = re.compile(r"[0-9]{1,9}( +[0-9]{1,9})*( *\| *[0-9]{1,9}( +[0-9]{1,9})*)*")


class ScheduleSyntaxError(ValueError):
    """The text is not a valid program; the message starts with line and column (both from 1)."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line, self.column = line, column


def parse_op(text: str, line: int = 1, column: int = 1) -> Op:
    """Parse one operation; raises ScheduleSyntaxError if the text is not exactly one operation."""
    match = _OP.fullmatch(text)
    if match is None:
        raise ScheduleSyntaxError(line, column, f"{shown(text)} is not an operation (like F0.0.0 or SF0.0.0>1.0)")
    mnemonic, *numbers = match.groups()
    kind = Kind.by_mnemonic.get(mnemonic)
    if kind is None:
        raise ScheduleSyntaxError(
            line, column, f"unknown operation {mnemonic!r} (known: {', '.join(Kind.by_mnemonic)})"
        )
    return Op(kind, *(-1 if n is None or n == "_" else int(n) for n in numbers))


def dumps(program: Program) -> str:
    """Text of a program."""
    return str(program)


class _Reader:
    """Collects the fields and the operation lists of one file."""

    def __init__(self) -> None:
        self.fields: dict[str, tuple[str, int, int]] = {}
        self.devices: dict[tuple[int, int], tuple[int, tuple[Op, ...]]] = {}

    def line(self, number: int, text: str) -> None:
        if (match := _DEVICE.fullmatch(text)) is not None:
            place = (int(match[1]), int(match[2]))
            if place in self.devices:
                raise ScheduleSyntaxError(number, 1, f"device {match[1]}.{match[2]} has two lists")
            base = match.start(3) + 1
            ops = tuple(parse_op(token[0], number, base + token.start()) for token in re.finditer(r"\S+", match[3]))
            self.devices[place] = (number, ops)
        elif (match := _FIELD.fullmatch(text)) is not None and match[1] in _FIELDS:
            if match[1] in self.fields:
                raise ScheduleSyntaxError(number, 1, f"{match[1]} is given twice")
            self.fields[match[1]] = (match[2], number, match.start(2) + 1)
        else:
            problem = f"{text[:40]!r} is neither a field nor a device's list of a program (see 'show --program-text')"
            raise ScheduleSyntaxError(number, 1, problem)

    def get(self, key: str) -> tuple[str, int, int]:
        if key not in self.fields:
            raise ScheduleSyntaxError(1, 1, f"the field {key!r} is missing")
        return self.fields[key]

    def integers(self, key: str) -> tuple[tuple[int, ...], ...]:
        value, line, column = self.get(key)
        if _TABLE.fullmatch(value) is None:
            raise ScheduleSyntaxError(line, column, f"{key}: {shown(value)} is not a table of integers (like 2 2 | 1)")
        return tuple(tuple(int(n) for n in row.split()) for row in value.split("|"))

    def row(self, key: str) -> tuple[int, ...]:
        rows = self.integers(key)
        if len(rows) != 1:
            raise ScheduleSyntaxError(*self.get(key)[1:], f"{key}: one row expected")
        return rows[0]

    def integer(self, key: str) -> int:
        table = self.integers(key)
        if len(table) != 1 or len(table[0]) != 1:
            raise ScheduleSyntaxError(*self.get(key)[1:], f"{key}: one integer expected")
        return table[0][0]

    def flag(self, key: str) -> bool:
        value, line, column = self.get(key)
        if value not in ("yes", "no"):
            raise ScheduleSyntaxError(line, column, f"{key}: {value!r} is neither yes nor no")
        return value == "yes"

    def program(self) -> Program:
        for key in TEXT_FIELDS:
            self.get(key)
        replicas = self.row("replicas")
        sizes = self.row(SIZES_FIELD) if SIZES_FIELD in self.fields else ()
        try:
            shape = Shape(
                layers=self.integers("layers"),
                route=self.integers("route"),
                replicas=replicas,
                slices=self.integer("slices"),
                placement=self.get("placement")[0],
                sizes=sizes,
                companions=self.integers(COMPANIONS_FIELD) if COMPANIONS_FIELD in self.fields else (),
            )
        except ScheduleSyntaxError:
            raise
        except ValueError as error:
            named = re.match(r"[a-z]+", str(error))
            _, line, column = self.fields.get(named[0] if named else "layers", self.get("layers"))
            raise ScheduleSyntaxError(line, column, str(error)) from error
        for place, (line, _) in self.devices.items():
            if place not in shape.devices:
                raise ScheduleSyntaxError(line, 1, f"device {place[0]}.{place[1]} is not in replicas {replicas}")
        for device in shape.devices:
            if device not in self.devices:
                raise ScheduleSyntaxError(1, 1, f"device {device} has no list")
        forward_only, splits_output, attention_units = TEXT_FIELDS[6:]
        return Program(
            name=self.get("program")[0],
            shape=shape,
            ops=tuple(self.devices[device][1] for device in shape.devices),
            forward_only=self.flag(forward_only),
            splits_output=self.flag(splits_output),
            attention_units=self.integer(attention_units),
        )


def loads(text: str) -> Program:
    """Parse the text of a program as :func:`dumps` writes it.

    Raises:
        ScheduleSyntaxError: with line and column.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            reader.line(number, line)
    return reader.program()
