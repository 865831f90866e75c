"""The planner's one error type: which file, which key, which value, and what to do."""

import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_het.plan import PlanError
from megatron_het.safe_io import FileError, one_line, shown


def command() -> str:
    """Returns ``het-plan`` if that was started, else ``python -m`` and the module, which works in a checkout."""
    return "het-plan" if Path(sys.argv[0]).stem == "het-plan" else f"python -m {__package__}"


class PlannerError(ValueError):
    """Input that cannot be planned for."""

    def __init__(self, file: str, key: str, value: object, problem: str, hint: str = "") -> None:
        self.file = str(file)  # the file (or command-line option) the value came from
        self.key = key  # dotted path of the key inside the file, e.g. ``nodes[1].gpu``
        self.value = value  # the value itself
        self.problem = problem  # why it is wrong
        self.hint = hint  # the nearest change that would work
        whole = key.startswith("(") and value is None  # ``(file)``: the file as a whole
        place = "" if whole else f": {key}" + ("" if value is None else f" = {shown(value)}")
        text = f"{self.file}{place}: {problem}"
        if hint:
            text += f". {hint}"
        super().__init__(one_line(text))


@contextmanager
def file_errors(hint: str = "", option: str = "", path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Raise the PlannerError for a file that cannot be read or written in this block.

    Args:
        option: The command-line option that names ``path``, if the error is about the option.
    """
    try:
        yield
    except FileError as error:
        if option:
            raise PlannerError("command line", option, str(path), error.problem, error.hint) from None
        raise PlannerError(error.path, error.where or "(file)", None, error.problem, error.hint or hint) from None


@contextmanager
def plan_errors(file: str = "plan") -> Iterator[None]:
    """Raise the PlannerError for an error in a plan in this block, with the name of the plan's file."""
    try:
        yield
    except PlanError as error:
        where, value = ("(file)", None) if error.where == "plan file" else (error.where, error.value)
        raise PlannerError(file, where, value, error.problem, error.hint) from None


def validated(model: type[Any], document: Any, file: str, place: tuple[str | int, ...] = ()) -> Any:
    """Returns a file's document as a ``model``; ``true`` and ``"1"`` are no numbers. Raises PlannerError.

    Args:
        model: A pydantic model, or a dataclass.
        place: Where in the file the document is.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        # From JSON, because only there pydantic takes lists for tuples when it is strict.
        return TypeAdapter(model).validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        raise _from_validation_error(file, place, error.errors(), TypeAdapter(model)) from None
    except (TypeError, ValueError) as error:
        raise PlannerError(file, _key(place) or "(document)", document, str(error)) from None


_MEMBER = re.compile(r"bool|int|float|str|tuple\[.*\]")
# What a file is that has this key, and is not the one that is needed.
_MARKS = {"stages": "a plan", "devices": "a profile", "nodes": "a cluster file", "num_layers": "a model file"}


def _from_validation_error(file: str, place: tuple[str | int, ...], errors: Sequence[Any], model: Any) -> PlannerError:
    """One of pydantic's error records as a PlannerError that names file, key and value.

    An unknown key comes first, because it is usually a key that is missing elsewhere, misspelt.
    """
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    inside = [error for error in errors if _at(error)[: len(_at(first))] == _at(first)]
    first = max(inside, key=lambda error: len(_at(error)))  # of a union's members the one that matched deepest
    key = _key((*place, *_at(first)))
    hint = ""
    told = dict.fromkeys(error["msg"] for error in inside if _at(error) == _at(first))
    problem = " or ".join(told).removeprefix("Value error, ").replace(" or Input should be", " or")
    problem = problem[0].lower() + problem[1:] if problem else "is not valid"
    problem = problem.replace("valid array", "list, like [a, b]").replace("an object", "a mapping of keys to values")
    value = first.get("input")
    if first["type"] == "missing" or (first["type"] == "value_error" and isinstance(value, dict)):
        value = None  # a rule between keys names those that it means
    if first["type"] == "missing":
        problem = "this key is required"
    elif first["type"] == "extra_forbidden":
        problem = "unknown key"
        known = _known_keys(model.json_schema(), first["loc"][:-1])
        unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden" and not place]
        if mark := next((key for key in _MARKS if (key,) in unknown), ""):
            return PlannerError(file, mark, None, f"this is the key of {_MARKS[mark]}. Here another file is needed")
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.75)
        hint = (
            f"Did you mean {_key((*place, *first['loc'][:-1], *near))}?" if near else f"Keys here: {', '.join(known)}"
        )
    elif first["type"] in ("float_type", "int_type") and isinstance(value, str):
        like = "12.5e9" if first["type"] == "float_type" else "8"
        hint = f"Write a plain number, like {like}, without quotes, sign of a currency or unit"
    # Drop the errors of lists and unions that only follow from an error inside.
    around = {_at(error)[:n] for error in errors for n in range(len(_at(error)))}
    others = len({_at(error) for error in errors} - around - {_at(first)})
    more = f" ({others} more {'problem' if others == 1 else 'problems'} in this file)" if others else ""
    return PlannerError(file, key or "(document)", value, problem + more, hint)


def _at(error: Any) -> tuple[str | int, ...]:
    """Location of an error of pydantic, without the names of a union's members (``int``, ``tuple[int, ...]``)."""
    return tuple(step for step in error["loc"] if not _MEMBER.fullmatch(str(step)))


def _known_keys(schema: dict[str, Any], location: Sequence[Any]) -> list[str]:
    """Keys that the JSON schema of a document allows at a place, in its order."""

    def alternatives(part: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in part:
            return alternatives(schema["$defs"][part["$ref"].rpartition("/")[2]])
        return [found for each in part.get("anyOf", ()) for found in alternatives(each)] or [part]

    places = alternatives(schema)
    for step in location:
        inner = [
            place.get("items")
            if isinstance(step, int)
            else place.get("properties", place).get(step) or place.get("additionalProperties")
            for place in places
        ]
        places = [found for part in inner if isinstance(part, dict) for found in alternatives(part)]
    return list(dict.fromkeys(key for place in places for key in place.get("properties", ())))


def _key(location: Sequence[Any]) -> str:
    """``nodes[1].gpu`` from ``("nodes", 1, "gpu")``."""
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else (f".{part}" if key else str(part))
    return one_line(key, 200)
