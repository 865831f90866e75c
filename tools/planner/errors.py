"""The planner's one error type: which file, which key, which value, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class PlannerError(ValueError):
    """Input that cannot be planned for.

    Attributes:
        file: The file (or command-line option) the value came from.
        key: Dotted path of the key inside the file, e.g. ``nodes[1].gpu``.
        value: What was found there.
        problem: Why it is wrong.
        hint: The nearest change that would work.
    """

    def __init__(self, file: str, key: str, value: object, problem: str, hint: str = "") -> None:
        self.file = str(file)
        self.key = key
        self.value = value
        self.problem = problem
        self.hint = hint
        shown = repr(value)
        if len(shown) > 160:
            shown = shown[:157] + "..."
        text = f"{self.file}: {key} = {shown}: {problem}"
        if hint:
            text += f". {hint}"
        super().__init__(text)


def from_validation_error(file: str, errors: Sequence[Any]) -> PlannerError:
    """The first of pydantic's error records as a PlannerError that names file, key and value."""
    first = errors[0]
    key = ""
    for part in first["loc"]:
        key += f"[{part}]" if isinstance(part, int) else (f".{part}" if key else str(part))
    problem = first["msg"].removeprefix("Value error, ")
    problem = problem[0].lower() + problem[1:] if problem else "is not valid"
    value = None if first["type"] == "missing" else first.get("input")
    if first["type"] == "extra_forbidden":
        problem = "unknown key"
    more = f" ({len(errors) - 1} more problems in this file)" if len(errors) > 1 else ""
    return PlannerError(file, key or "(document)", value, problem + more)
