"""The error of a file that cannot be used, and bounded text for error messages."""

from __future__ import annotations

from collections.abc import Iterator

MAX_MESSAGE = 8000
"""Characters of one error message."""


class FileError(ValueError):
    """A file that cannot be read or written.

    Attributes:
        path: The file.
        where: Place inside the file, e.g. ``line 3``; empty when the file as a whole is meant.
        problem: What is wrong.
        hint: What to do about it.
    """

    def __init__(self, path: object, where: str, problem: str, hint: str = "") -> None:
        self.path = str(path)
        self.where = where
        self.problem = one_line(problem)
        self.hint = one_line(hint)
        place = f"{self.path}: {where}" if where else self.path
        super().__init__(one_line(f"{place}: {self.problem}" + (f". {self.hint}" if hint else "")))


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """Text for a terminal: what would control the terminal is escaped, and the end is cut off."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in cut)


def shown(value: object, limit: int = 160) -> str:
    """``repr(value)``, but at most ``limit`` characters are ever made.

    A value from a file may hold a million entries, or one string of a gigabyte.
    """
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def _pieces(value: object, limit: int, depth: int = 0) -> Iterator[str]:
    """``repr(value)`` piece by piece."""
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
