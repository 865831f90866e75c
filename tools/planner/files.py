"""Reading YAML with errors that name the line; writing files that are either complete or absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools.planner.errors import PlannerError


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Parsed YAML (or JSON, which is YAML).

    Raises:
        PlannerError: missing, unreadable or not YAML.
    """
    import yaml

    file = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlannerError(file, "(file)", None, "no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlannerError(file, "(file)", None, f"cannot be read: {error}") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else "(document)"
        raise PlannerError(file, where, None, f"not YAML: {getattr(error, 'problem', error)}") from None


def check_target(path: str | os.PathLike[str], option: str, endings: tuple[str, ...] = ()) -> None:
    """Before long work: whether a file can be written there.

    Raises:
        PlannerError: a folder, a place inside something that is no folder, no permission, an unknown ending.
    """
    target = Path(path)
    if endings and target.suffix.lower() not in endings:
        raise PlannerError("command line", option, str(path), "unknown kind of file", f"The name must end in {', '.join(endings)}")
    if target.is_dir():
        raise PlannerError("command line", option, str(path), "this is a folder", "Name a file in it")
    parent = target.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise PlannerError("command line", option, str(path), f"{parent} cannot be written to")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write through a temporary file and a rename."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, target)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON through a temporary file and a rename."""
    write_text(path, json.dumps(value, indent=2) + "\n")
