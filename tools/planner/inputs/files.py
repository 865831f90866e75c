"""Reading YAML and JSON and writing files, with the planner's error; limits are those of ``megatron_het.safe_io``."""

from __future__ import annotations

import os
from typing import Any

from megatron_het import safe_io as untrusted

from ..errors import PlannerError, from_file_error


def read_yaml(path: str | os.PathLike[str], *, constants_as_text: bool = False) -> Any:
    """Parsed YAML, or JSON where the name ends in ``.json``; see ``untrusted.read_yaml``.

    Raises:
        PlannerError: see ``untrusted.read_yaml``.
    """
    try:
        return untrusted.read_yaml(path, constants_as_text=constants_as_text)
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


_PLAN, _PAGE, _PICTURE = (b'"megatron_het.plan"',), (b"<!doctype html",), (b"<svg", b"\x89PNG", b"%PDF")
_INPUTS = ("plan", "cluster", "model", "profile", "document_lengths", "pauses", "plans")
_OUTPUTS: dict[str, dict[str, tuple[bytes, ...]]] = {
    "plan": {"out": _PLAN},
    "simulate": {"trace": (b'"traceEvents"',), "picture": _PICTURE},
    "report": {"html": _PAGE},
    "explain": {"html": _PAGE},
    "compare": {"html": _PAGE},
    "replay": {"picture": _PICTURE, "html": _PAGE},
    "rent": {"out": (b'"nodes"',), "picture": _PICTURE},
    "replan": {"out": _PLAN},
    "dry-run": {"out": (b'"kernels"',)},
    "profile": {"out": (b'"megatron_het.profile"',)},
}
_EMITTED = {"plan.json": _PLAN, "args.sh": (b"Megatron arguments of plan",)}
WRITING = frozenset({*_OUTPUTS, "emit"})
"""Commands that write files which somebody names."""


def check_outputs(command: str, options: Any) -> None:
    """Before anything is read: no file that a command writes replaces one that it reads, or one of another kind.

    Args:
        command: Its name.
        options: Its parsed options.

    Raises:
        PlannerError: Such a file is there, and ``--force`` was not given.
    """
    if command not in WRITING or options.force:
        return
    given = [getattr(options, name, None) for name in _INPUTS]
    # What replay calls a trace is a list of times that it reads.
    given += [options.trace] if command == "replay" else []
    inputs = [path for value in given for path in (value if isinstance(value, list) else [value]) if path]
    inputs += [os.path.join(options.model, "config.json")] if getattr(options, "model", None) else []
    targets = [(f"--{name}", getattr(options, name), marks) for name, marks in _OUTPUTS.get(command, {}).items()]
    if command == "emit":
        targets = [("--out", options.out / name, marks) for name, marks in _EMITTED.items()]
    for option, path, marks in targets:
        if path and str(path) not in ("", "-"):
            try:
                # A picture in text has no mark.
                is_text = option == "--picture" and str(path).endswith(".txt")
                untrusted.check_replaces(path, inputs, () if is_text else marks)
            except untrusted.FileError as error:
                raise PlannerError("command line", option, str(path), error.problem, error.hint) from None
            except (OSError, ValueError):
                pass  # check_target names what cannot be written


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
