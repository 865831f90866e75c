"""Reading of untrusted input: JSON, YAML and pickle files that may be devices, pipes or too large, and options."""

import argparse
import difflib
import io
import json
import math
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# The error of a file that cannot be used, and bounded text for error messages.

MAX_MESSAGE = 8000  # characters of one error message


class FileError(ValueError):
    """A file that cannot be read or written."""

    def __init__(self, path: object, where: str, problem: str, hint: str = "") -> None:
        self.path = str(path)
        self.where = where  # place inside the file, e.g. ``line 3``; empty when the file as a whole is meant
        self.problem = one_line(problem)  # what is wrong
        self.hint = one_line(hint)
        place = f"{self.path}: {where}" if where else self.path
        super().__init__(one_line(f"{place}: {self.problem}" + (f". {self.hint}" if hint else "")))


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """Text for a terminal: at most ``limit`` characters, with control characters except newlines escaped."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in cut)


def shown(value: object, limit: int = 160) -> str:
    """``repr(value)`` cut to ``limit`` characters, without building the whole text.

    A value from a file may have a million entries, or one string of a gigabyte.
    """
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def _pieces(value: object, limit: int, depth: int = 0) -> Iterator[str]:
    """Pieces of ``repr(value)``, in order; long strings, long numbers and deep nesting are shortened."""
    if isinstance(value, str | bytes):
        yield repr(value[: limit + 1])
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * limit:
        yield f"a number of {value.bit_length()} bits"
    elif type(value) in (list, tuple, dict):
        if depth > 8:
            yield "..."
            return
        opening, closing = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}[type(value)]  # type: ignore[index]
        yield opening
        for i, item in enumerate(value):  # type: ignore[arg-type, var-annotated]
            yield ", " if i else ""
            yield from _pieces(item, limit, depth + 1)
            if isinstance(value, dict):
                yield ": "
                yield from _pieces(value[item], limit, depth + 1)
        yield ("," if isinstance(value, tuple) and len(value) == 1 else "") + closing
    else:
        yield repr(value)


# Types of command-line options: numbers within bounds, with an error that states the bounds.


def split_words(words: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """The words of a command line before ``--``, and those after it (None if there is no ``--``)."""
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :]) if at < len(words) else None


def add_options(parser: argparse._ActionsContainer, rows: Mapping[str, tuple[Any, ...]]) -> None:
    """Adds options by name: default, metavar ("" for argparse's own), help, further arguments of ``add_argument``.

    False as default makes a switch.  A number or path as default sets the type; else the further arguments may.
    """
    for name, (default, metavar, text, *more) in rows.items():
        told: dict[str, Any] = {"default": default, "help": text} | ({"metavar": metavar} if metavar else {})
        if default is False:
            told["action"] = "store_true"
        elif isinstance(default, (int, float, Path)) and default is not True:
            told["type"] = type(default) if isinstance(default, (int, float)) else Path
        for further in more:
            told |= further
        parser.add_argument(name, **told)


def count(least: int, most: int, before: str = "") -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` to ``most``; ``before`` begins that error text."""
    return _number(int, 20, least, most, f"{before}a whole number from {least} to {most}")


def amount(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that is a finite number from ``least`` to ``most``."""
    return _number(float, 40, least, most, f"a number from {least:g} to {most:g}")


def _number[N: float](kind: Callable[[str], N], longest: int, least: N, most: N, needed: str) -> Callable[[str], N]:
    def convert(text: str) -> N:
        try:
            value = kind(text) if len(text) <= longest else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:  # for NaN too
            raise argparse.ArgumentTypeError(f"{shown(text, 40)}: {needed} is needed")
        return value

    return convert


class LineParser(argparse.ArgumentParser):
    """Parser with one-line errors, which reports an unknown option before a missing one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, after a check that ends the program at an unknown option."""
        for word in () if self._subparsers or args is None else (w.partition("=")[0] for w in args):
            if word.startswith("--") and not any(name.startswith(word) for name in self._option_string_actions):
                near = difflib.get_close_matches(word, self._option_string_actions, n=1)
                self.error(f"{word} is no option of this command" + (f", {near[0]} is" if near else ""))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        self.exit(2, f"error: {message}; see '{self.prog} --help'\n")


# Bounds for all commands: a larger number is a typing error, and the program would run for hours.

MAX_PASSES = 500_000  # forward and backward passes of an iteration, over all stages: more take minutes to schedule
MAX_DEVICES = 100_000  # devices of a cluster, and pipeline devices of a schedule
MAX_BYTES = 32 << 20  # largest file that is read: ten times a plan of 1,024 ranks and 4,096 microbatches
_VIRTUAL = ("/proc", "/sys")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def read_text(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> str:
    """The text of a regular file of at most ``limit`` bytes.

    Never blocks: pipes, devices and files of the kernel are refused before they are opened.

    Raises:
        FileError: No such file, not a regular file, too large, no permission, not UTF-8.
    """
    try:
        check_regular(path, os.stat(path).st_mode)
        # A second check, of the opened file: another file may have taken the name since the first check.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            check_regular(path, os.fstat(descriptor).st_mode)
            data = _read(descriptor, limit + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise FileError(path, "", "no such file") from None
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(path, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > limit:
        raise FileError(path, "", f"larger than {limit >> 10} KiB, the most that is read")
    try:
        return data.decode("utf-8-sig")  # editors of Windows begin a file with a mark
    except UnicodeDecodeError as error:
        raise FileError(path, f"byte {error.start}", f"not UTF-8 text ({error.reason})") from None


def check_regular(path: str | os.PathLike[str], mode: int) -> None:
    """Refuse everything but regular files on real file systems."""
    for matches, name in _KINDS:
        if matches(mode):
            raise FileError(path, "", f"this is {name}, not a file", "Give the name of a regular file")
    if is_virtual(os.path.realpath(path)):
        raise FileError(path, "", "this is a file of the kernel", "Give the name of a regular file")


def is_virtual(real_path: str, roots: tuple[str, ...] = _VIRTUAL) -> bool:
    """Whether a resolved path is in one of the folders ``roots``, by default the kernel's file systems."""
    parts = Path(real_path).parts
    return any(parts[: len(Path(root).parts)] == Path(root).parts for root in roots)


def _read(descriptor: int, most: int) -> bytes:
    chunks: list[bytes] = []
    left = most
    while left > 0 and (chunk := os.read(descriptor, min(left, 1 << 20))):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


# Strict JSON: no NaN, no duplicate keys, and limits on depth and on numbers.

MAX_DEPTH = 32  # lists and objects inside each other
MAX_NUMBER = 2**63 - 1  # largest absolute value of a whole number
# Matches all text except brackets outside of strings.  Possessive quantifiers prevent slow backtracking.
_NOT_BRACKETS = re.compile(r'[^\[\]{}"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> Any:
    """The value in a JSON file; raises FileError."""
    return parse_json(read_text(path, limit), path)


def parse_json(text: str, path: str | os.PathLike[str], *, constants_as_text: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        constants_as_text: Whether ``NaN`` and ``Infinity``, which Python writes, are read as strings.

    Raises:
        FileError: Not JSON, a duplicate key in an object, NaN or infinity, a number of more than 64 bits,
            lists and objects nested more than ``MAX_DEPTH`` deep, half of a surrogate pair.
    """
    reader = _Reader(path)
    reader.check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=reader.object,
            parse_constant=str if constants_as_text else reader.constant,
            parse_int=reader.integer,
            parse_float=reader.float,
        )
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 30) : error.pos + 10]
        problem = f"not JSON ({error.msg}, near {shown(near, 60)})" if text.strip() else "not JSON: the file is empty"
        is_json = text.lstrip()[:1] in ("{", "[", "")
        hint = "Is the file truncated? Write it again" if is_json else "Is it YAML, as cluster and model files are?"
        raise FileError(path, f"line {error.lineno}, column {error.colno}", problem, hint) from None
    if _SURROGATE.search(text):
        reader.check_unicode(value)
    return value


class _Reader:
    """Hooks of the JSON parser and checks of its text; each raises FileError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path

    def _refuse(self, where: str, problem: str) -> NoReturn:
        raise FileError(self._path, where, problem)

    def check_depth(self, text: str) -> None:
        depth = 0
        for bracket in _NOT_BRACKETS.sub("", text):
            depth += 1 if bracket in "[{" else -1
            if depth > MAX_DEPTH:
                self._refuse("", f"lists and objects are more than {MAX_DEPTH} deep")

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            self._refuse(shown(twice, 80), "this key is there twice in one object: neither is known to be right")
        return found

    def constant(self, text: str) -> NoReturn:
        self._refuse("", f"{text} is not a number that can be used")

    def integer(self, text: str) -> int:
        # The length first: converting a long text to a number is slow.
        if len(text) > 20 or abs(int(text)) > MAX_NUMBER:
            self._refuse("", f"a number of {len(text)} digits ({shown(text, 30)}) is too large")
        return int(text)

    def float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self._refuse("", f"the number {shown(text, 30)} is too large")
        return value

    def check_unicode(self, value: Any) -> None:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            self._refuse("", "a text holds half of a surrogate pair, which is no character")


# Plain values from files of ``torch.save``, without running code from the file and without PyTorch.


class Inert:
    """Placeholder for every object of a pickle that is not a number, text, list, tuple, set or dictionary."""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments  # the arguments for its class; empty if the pickle has a state
        self.state: dict[Any, Any] = {}  # its attributes, if the pickle has them

    def __setstate__(self, state: Any) -> None:
        self.arguments, self.state = (), state if isinstance(state, dict) else {}

    def __call__(self, *arguments: Any, **_: Any) -> "Inert":
        return Inert(*arguments)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, items: Any) -> None:
        """Discards items, of a subclass of list or set."""

    extend = add = append


class _PlainUnpickler(pickle.Unpickler):
    """Resolves every name to :class:`Inert`, so that a pickle can call nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        return Inert

    def persistent_load(self, pid: Any) -> Any:
        """Returns None for a tensor's storage, which is another file of the archive."""
        return None


def read_pickled(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> Any:
    """The value in a file of ``torch.save``; objects of classes are :class:`Inert`, tensors' storages None.

    Raises:
        FileError: No such file, not a regular file, not an archive of ``torch.save``, too large, damaged.
    """
    try:
        check_regular(path, os.stat(path).st_mode)
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name == "data.pkl" or name.endswith("/data.pkl")]
            if len(names) != 1:
                raise FileError(path, "", "not a file of torch.save: it holds no data.pkl")
            with archive.open(names[0]) as member:
                data = member.read(limit + 1)
    except FileNotFoundError:
        raise FileError(path, "", "no such file") from None
    except FileError:
        raise
    except (OSError, ValueError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise FileError(path, "", f"cannot be read: {one_line(str(error), 200)}") from None
    if len(data) > limit:
        raise FileError(path, "data.pkl", f"larger than {limit >> 10} KiB, the most that is read")
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise FileError(path, "data.pkl", f"damaged: {one_line(str(error), 200)}") from None


# A subset of YAML: mappings, lists, texts, numbers, true, false and null.
#
# Values follow YAML 1.2.  Text that YAML 1.1 reads differently (``yes``, ``010``, ``1:30``) is refused.

MAX_YAML_BYTES = 1 << 20
MAX_VALUES = 100_000  # values of one document; each use of an alias counts all values of its anchor

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_A_NUMBER = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_AMBIGUOUS = re.compile(
    r"[yY]es|YES|[nN]o|NO|[oO]n|ON|[oO]ff|OFF"  # true and false in YAML 1.1
    r"|[-+]?0[0-9_]+|[-+]?0[xXoObB][0-9a-fA-F_]+"  # octal, hexadecimal
    r"|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"  # sexagesimal
)
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def read_yaml(path: str | os.PathLike[str], *, constants_as_text: bool = False) -> Any:
    """The value in a YAML file, or in a JSON file (``.json``), see :func:`parse_json`; raises FileError."""
    text = read_text(path, MAX_YAML_BYTES)
    if not str(path).lower().endswith(".json"):
        return parse_yaml(text, path)
    return parse_json(text, path, constants_as_text=constants_as_text)


def parse_yaml(text: str, path: str | os.PathLike[str]) -> Any:
    """The value of a YAML text with one document.

    Raises:
        FileError: Not YAML, several documents, a duplicate key in a mapping, a key that is not a text, a tag,
            a number that is not finite or has more than 64 bits, more than ``MAX_DEPTH`` levels or
            ``MAX_VALUES`` values.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is ten times as fast
    try:
        return _Composer(yaml.parse(text, loader), path).document()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        raise FileError(path, where, f"not YAML: {getattr(error, 'problem', None) or error}") from None


class _Composer:
    """Builds values from the parser's events, with a recursion of at most ``MAX_DEPTH``."""

    def __init__(self, events: Iterator[Any], path: str | os.PathLike[str]) -> None:
        self._events = events
        self._path = path
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._count = 0

    def document(self) -> Any:
        next(self._events)  # the stream starts
        event = next(self._events)
        if type(event).__name__ == "StreamEndEvent":
            return None
        value = self._value(next(self._events), 0)
        next(self._events)  # the document ends
        event = next(self._events)
        if type(event).__name__ != "StreamEndEvent":
            self._refuse(event, "a second document", "Keep one document in a file")
        return value

    def _refuse(self, event: Any, problem: str, hint: str = "") -> NoReturn:
        raise FileError(self._path, f"line {event.start_mark.line + 1}", problem, hint)

    def _grow(self, event: Any, values: int = 1) -> None:
        self._count += values
        if self._count > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES} values (aliases count as often as they are used)")

    def _value(self, event: Any, depth: int) -> Any:
        kind = type(event).__name__
        if kind == "AliasEvent":
            if event.anchor not in self._anchors:
                self._refuse(event, f"the alias {shown(event.anchor, 40)} stands for nothing, or for what it is in")
            value, size = self._anchors[event.anchor]
            self._grow(event, size)
            return value
        if event.tag is not None and not (kind == "ScalarEvent" and event.tag == "!"):
            self._refuse(event, f"the tag {shown(event.tag, 60)}", "Write the value without a tag")
        if depth > MAX_DEPTH:
            self._refuse(event, f"lists and mappings are more than {MAX_DEPTH} deep")
        before = self._count
        self._grow(event)
        if kind == "ScalarEvent":
            value = self._scalar(event)
        elif kind == "SequenceStartEvent":
            value = [self._value(item, depth + 1) for item in self._until("SequenceEndEvent")]
        else:
            value = self._mapping(depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._count - before)
        return value

    def _until(self, end: str) -> Iterator[Any]:
        while type(event := next(self._events)).__name__ != end:
            yield event

    def _mapping(self, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for event in self._until("MappingEndEvent"):
            if getattr(event, "value", None) == "<<" and event.implicit[0]:
                value = self._value(next(self._events), depth + 1)
                for part in value if isinstance(value, list) else [value]:
                    if not isinstance(part, dict):
                        self._refuse(event, f"<< needs a mapping, found {shown(part, 60)}")
                    merged = {**part, **merged}
                continue
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                self._refuse(event, f"the key {shown(key, 60)} is not a text", "Put it into quotes")
            if key in own:
                self._refuse(event, f"the key {shown(key, 60)} is there twice: neither is known to be right")
            own[key] = self._value(next(self._events), depth + 1)
        return {**merged, **own}

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if not event.implicit[0]:  # quoted, or a block
            return text
        word = text if text in _WORDS else text.lower() if text in (text.title(), text.upper()) else None
        if word in _WORDS:
            return _WORDS[word]
        if _INTEGER.fullmatch(text):
            if len(text) > 24 or abs(int(text)) > MAX_NUMBER:
                self._refuse(event, f"a number of {len(text)} digits ({shown(text, 30)}) is too large")
            return int(text)
        if _NOT_A_NUMBER.fullmatch(text):
            self._refuse(event, f"{text} is not a number that can be used")
        if _AMBIGUOUS.fullmatch(text):
            self._refuse(
                event,
                f"{shown(text, 40)} means different things in different versions of YAML",
                "Write true or false, a decimal number, or quotes around a text",
            )
        if _FLOAT.fullmatch(text):
            value = float(text)
            if not math.isfinite(value):
                self._refuse(event, f"the number {shown(text, 30)} is too large")
            return value
        return text
