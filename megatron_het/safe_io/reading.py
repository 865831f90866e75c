"""Reading what may be anything: a file that is a device, a pipe or too large, and numbers on a command line."""

from __future__ import annotations

import argparse
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

from megatron_het.safe_io.errors import FileError, shown

# Types of command-line options: numbers within bounds, with an error that says which.


def count(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` to ``most``."""

    def convert(text: str) -> int:
        try:
            value = int(text) if len(text) <= 20 else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text, 40)}: a whole number from {least} to {most} is needed")
        return value

    return convert


def amount(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that is a finite number from ``least`` to ``most``."""

    def convert(text: str) -> float:
        try:
            value = float(text) if len(text) <= 40 else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # False for NaN too
            raise argparse.ArgumentTypeError(f"{shown(text, 40)}: a number from {least:g} to {most:g} is needed")
        return value

    return convert


# Bounds that hold everywhere: what is larger is a mistyped number, and would be a hang.

MAX_PASSES = 500_000
"""Forward and backward passes of one iteration, over all stages: more would take minutes to lay out."""
MAX_DEVICES = 100_000
"""Devices of a cluster, and pipeline devices of a schedule."""

MAX_BYTES = 32 << 20
"""Largest file that is read.  A plan of 1,024 ranks and 4,096 microbatches has a tenth of it."""
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

    Never waits: pipes, devices and files of the kernel are refused before they are opened.

    Raises:
        FileError: No such file, not a regular file, too large, no permission, not UTF-8.
    """
    try:
        check_regular(path, os.stat(path).st_mode)
        # A second check of what was opened: the name may have changed hands since.
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
        return data.decode("utf-8")
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
    """Whether a resolved path lies in one of the kernel's own file systems."""
    parts = Path(real_path).parts
    return any(parts[: len(Path(root).parts)] == Path(root).parts for root in roots)


def _read(descriptor: int, most: int) -> bytes:
    chunks: list[bytes] = []
    left = most
    while left > 0 and (chunk := os.read(descriptor, min(left, 1 << 20))):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)
