"""Reading YAML and JSON and writing files, with the planner's error; limits are those of ``megatron_het.untrusted``."""

from __future__ import annotations

import os
from typing import Any

from megatron_het import untrusted

from .errors import PlannerError, from_file_error


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Parsed YAML, or JSON where the name ends in ``.json``.

    Raises:
        PlannerError: see ``untrusted.read_yaml``.
    """
    try:
        return untrusted.read_yaml(path)
    except untrusted.FileError as error:
        raise from_file_error(error) from None


def read_json(path: str | os.PathLike[str], hint: str = "") -> Any:
    """Parsed JSON.

    Raises:
        PlannerError: see ``untrusted.read_json``; ``hint`` says what to do.
    """
    try:
        return untrusted.read_json(path)
    except untrusted.FileError as error:
        raise from_file_error(error, hint) from None


def check_target(path: str | os.PathLike[str], option: str, endings: tuple[str, ...] = ()) -> None:
    """Before long work: whether a file can be written there.

    Raises:
        PlannerError: see ``untrusted.check_target``.
    """
    try:
        untrusted.check_target(path, endings)
    except untrusted.FileError as error:
        raise PlannerError("command line", option, str(path), error.problem, error.hint) from None


def write_text(path: str | os.PathLike[str], text: str, *, executable: bool = False) -> None:
    """Write a complete file or nothing.

    Raises:
        PlannerError: see ``untrusted.write_text``.
    """
    try:
        untrusted.write_text(path, text, executable=executable)
    except untrusted.FileError as error:
        raise from_file_error(error) from None


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write complete JSON or nothing.

    Raises:
        PlannerError: see ``untrusted.write_json``.
    """
    try:
        untrusted.write_json(path, value)
    except untrusted.FileError as error:
        raise from_file_error(error) from None
