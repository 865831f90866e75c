"""YAML without its surprises: mappings, lists, texts, numbers, true, false and null, and nothing else.

What the text means follows YAML 1.2.  Where YAML 1.1 reads the same text as something else (``yes``,
``010``, ``1:30``), it is refused instead of being guessed at.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from megatron_het.safe_io.reading import MAX_DEPTH, MAX_NUMBER, FileError, parse_json, read_text, shown

MAX_YAML_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Values of one document, each counted as often as aliases repeat it."""

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
    """The value in a YAML file, or in a JSON file (``.json``).

    Args:
        path: Of the file.
        constants_as_text: See :func:`parse_json`.

    Raises:
        FileError: see :func:`read_text`, :func:`parse_yaml` and :func:`parse_json`.
    """
    text = read_text(path, MAX_YAML_BYTES)
    if not str(path).lower().endswith(".json"):
        return parse_yaml(text, path)
    return parse_json(text, path, constants_as_text=constants_as_text)


def parse_yaml(text: str, path: str | os.PathLike[str]) -> Any:
    """The value of a YAML text with one document.

    Args:
        text: The whole text.
        path: What errors name.

    Raises:
        FileError: Not YAML, several documents, a key twice in one mapping, a key that is no text, a tag,
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
    """Values from the parser's events; no recursion deeper than ``MAX_DEPTH``."""

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
