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
