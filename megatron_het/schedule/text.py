"""Programs as text, exactly reversible.

A file has one ``key: value`` line per field of the program and one ``device STAGE.REPLICA: OP OP ...``
line per device.  An operation is its mnemonic and ``microbatch.slice.chunk``, then for transfers
``>peer.peer_chunk``, then for a range ``[start:stop]``; ``_`` stands for "means nothing" (-1)::

    program: 1f1b
    layers: 2 | 2
    route: 0 0 | 0 0
    replicas: 1 1
    slices: 1
    placement: loop
    forward_only: no
    vocabulary: no
    exchange_units: 0
    sizes: 4 2
    device 0.0: F0.0.0 SF0.0.0>1.0 F1.0.0 ...

The field ``sizes`` is there where microbatches differ in size.  Empty lines and lines that begin with
``#`` are ignored.
"""

import re

from megatron_het.safe_io import shown
from megatron_het.schedule.ir import COMPANIONS_FIELD, SIZES_FIELD, TEXT_FIELDS, Op, Program, Shape
from megatron_het.schedule.kinds import Kind

_KINDS = {kind.mnemonic: kind for kind in Kind}
_NUMBER = r"([0-9]{1,9}|_)"
_OP = re.compile(rf"([A-Z]+){_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:>{_NUMBER}\.{_NUMBER})?(?:\[{_NUMBER}:{_NUMBER}\])?")
_FIELD = re.compile(r"([a-z_]+): *(.*?) *")
_DEVICE = re.compile(r"device ([0-9]{1,9})\.([0-9]{1,9}): *(.*?) *")
_TABLE = re.compile(r"[0-9]{1,9}( +[0-9]{1,9})*( *\| *[0-9]{1,9}( +[0-9]{1,9})*)*")


class ScheduleSyntaxError(ValueError):
    """Text that is not a program; the message starts with line and column (both from 1)."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line, self.column = line, column


def parse_op(text: str, line: int = 1, column: int = 1) -> Op:
    """The operation whose text this is.

    Raises:
        ScheduleSyntaxError: the text is not exactly one operation.
    """
    match = _OP.fullmatch(text)
    if match is None:
        raise ScheduleSyntaxError(line, column, f"{shown(text)} is not an operation (like F0.0.0 or SF0.0.0>1.0)")
    mnemonic, *numbers = match.groups()
    if mnemonic not in _KINDS:
        raise ScheduleSyntaxError(line, column, f"unknown operation {mnemonic!r} (known: {', '.join(_KINDS)})")
    return Op(_KINDS[mnemonic], *(-1 if n is None or n == "_" else int(n) for n in numbers))


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
        elif (match := _FIELD.fullmatch(text)) is not None and match[1] in (
            *TEXT_FIELDS,
            SIZES_FIELD,
            COMPANIONS_FIELD,
        ):
            if match[1] in self.fields:
                raise ScheduleSyntaxError(number, 1, f"{match[1]} is given twice")
            self.fields[match[1]] = (match[2], number, match.start(2) + 1)
        else:
            raise ScheduleSyntaxError(number, 1, f"{text[:40]!r} is neither a field nor a device's list")

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
    """The program that :func:`dumps` wrote.

    Raises:
        ScheduleSyntaxError: with line and column.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            reader.line(number, line)
    return reader.program()
