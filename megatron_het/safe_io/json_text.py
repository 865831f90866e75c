"""JSON as the standard means it: no NaN, no key twice, and no deeper and no longer numbers than we need."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any, NoReturn

from megatron_het.safe_io.errors import FileError, shown
from megatron_het.safe_io.reading import MAX_BYTES, read_text

MAX_DEPTH = 32
"""Lists and objects inside each other."""
MAX_NUMBER = 2**63 - 1
"""Largest absolute value of a whole number."""
# Everything but brackets outside of strings.  Possessive, so that no text makes it slow.
_NOT_BRACKETS = re.compile(r'[^\[\]{}"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        FileError: see :func:`read_text` and :func:`parse_json`.
    """
    return parse_json(read_text(path, limit), path)


def parse_json(text: str, path: str | os.PathLike[str]) -> Any:
    """The value of a JSON text.

    Args:
        text: The whole text.
        path: What errors name.

    Raises:
        FileError: Not JSON, a key twice in one object, NaN or infinity, a number of more than 64 bits,
            lists and objects more than ``MAX_DEPTH`` deep, half of a surrogate pair.
    """
    reader = _Reader(path)
    reader.check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=reader.object,
            parse_constant=reader.constant,
            parse_int=reader.integer,
            parse_float=reader.float,
        )
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 30) : error.pos + 10]
        raise FileError(
            path,
            f"line {error.lineno}, column {error.colno}",
            f"not JSON ({error.msg}, near {shown(near, 60)})",
            "Is the file truncated? Write it again",
        ) from None
    if _SURROGATE.search(text):
        reader.check_unicode(value)
    return value


class _Reader:
    """The parser's hooks, each of which refuses what JSON allows and this project does not."""

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
        # The length first: turning a long text into a number takes long.
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
