"""Writing of files: only regular files are replaced, and after an error the target is unchanged."""

import functools
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_het.safe_io.reading import FileError, is_virtual

# /dev/shm holds ordinary files in memory; the rest of /dev does not.
_HEAD_BYTES = 1 << 16
_NO_TARGETS = ("/proc", "/sys", "/dev")
_ORDINARY = ("/dev/shm",)


def check_target(path: str | os.PathLike[str], endings: Sequence[str] = ()) -> Path:
    """The resolved path of a file that can be written; called before long work and again before writing.

    Args:
        path: The file.  Symbolic links are followed.
        endings: Allowed suffixes of the name; any if empty.

    Raises:
        FileError: A folder, device, pipe or socket, a path in /proc, /sys or /dev, a folder that
            cannot be written to, an unknown suffix, a name that is too long.
    """
    if endings and Path(path).suffix.lower() not in endings:
        raise FileError(path, "", "unknown kind of file", f"The name must end in {', '.join(endings)}")
    try:
        real = os.path.realpath(path)
        if is_virtual(real, _NO_TARGETS) and not is_virtual(real, _ORDINARY):
            raise FileError(path, "", f"{real} is no place for files", "Name a file in a folder of yours")
        _check_existing(path, real)
        parent = Path(real).parent
        while not os.path.lexists(parent):
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise FileError(path, "", f"{parent} {'cannot be written to' if parent.is_dir() else 'is no folder'}")
        longest = os.pathconf(parent, "PC_NAME_MAX")
    except OSError as error:
        raise FileError(path, "", f"cannot be written: {error.strerror or error}") from None
    except ValueError as error:  # a null byte in the name
        if isinstance(error, FileError):
            raise
        raise FileError(path, "", f"cannot be written: {error}") from None
    if any(len(os.fsencode(part)) > longest for part in Path(real).parts):
        raise FileError(path, "", f"cannot be written: a name has more than {longest} bytes")
    return Path(real)


def check_replaces(
    path: str | os.PathLike[str], inputs: Sequence[str | os.PathLike[str]], marks: Sequence[bytes] = ()
) -> None:
    """Check that an existing file may be replaced: it is not an input, and an earlier run of the command wrote it.

    Args:
        path: The file to write.
        inputs: Files that the command reads.
        marks: A file of this kind has one of these in its first 64 KiB; if empty, any file may be replaced.

    Raises:
        FileError: The file is an input or of another kind.
    """
    if not os.path.lexists(path):
        return
    if any(os.path.exists(given) and os.path.samefile(path, given) for given in inputs):
        raise FileError(path, "", "this file is read by the same command", "Give another name, or --force")
    if not marks or not os.path.isfile(path):  # ``check_target`` refuses all but files
        return
    with open(path, "rb") as stream:
        head = stream.read(_HEAD_BYTES).lower()
    if head and not any(mark.lower() in head for mark in marks):
        problem = "a file of another kind is there, which this command has not written"
        raise FileError(path, "", problem, "Give another name, or --force")


def _check_existing(path: str | os.PathLike[str], real: str) -> None:
    try:
        mode = os.lstat(real).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # the folder is checked next
    if stat.S_ISDIR(mode):
        raise FileError(path, "", "this is a folder", "Name a file in it")
    if not stat.S_ISREG(mode):
        raise FileError(path, "", "this is a device, pipe, socket or broken link", "Name a regular file")


def write_bytes(path: str | os.PathLike[str], data: bytes, *, executable: bool = False, durable: bool = True) -> None:
    """Write a temporary file beside the target and rename it.  Missing folders are created.

    Args:
        data: The file's contents.
        executable: Whether the file may be executed.
        durable: Whether to wait for the disk (``fsync``), so that the file survives a power failure.  A busy disk takes
            half a second or more for that.

    Raises:
        FileError: See :func:`check_target`.
        OSError: The disk is full or failed, with the file's name; the target is unchanged.
    """
    target = check_target(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    mask = os.umask(0o077)  # can only be read by setting another one
    os.umask(mask)
    descriptor, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), (0o777 if executable else 0o666) & ~mask)
            if durable:
                os.fsync(stream.fileno())
        os.replace(scratch, target)
    except BaseException as error:
        Path(scratch).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise


def write_text(path: str | os.PathLike[str], text: str, *, executable: bool = False, durable: bool = True) -> None:
    """Write UTF-8 text; see :func:`write_bytes`."""
    write_bytes(path, text.encode("utf-8"), executable=executable, durable=durable)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 2, *, durable: bool = True) -> None:
    """Write JSON; see :func:`write_bytes`; raises ValueError for NaN and infinity, which JSON cannot represent."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=False) + "\n", durable=durable)


def ends_with_its_reader[**Words](main: Callable[Words, int]) -> Callable[Words, int]:
    """Decorates a command so that a closed output, as after ``| head``, ends it without an error; ``--help``, too."""

    @functools.wraps(main)
    def command(*args: Words.args, **kwargs: Words.kwargs) -> int:
        code = 0
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # closed at the start; the first file to be opened gets its number
                setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        try:
            try:
                code = main(*args, **kwargs)
            finally:  # also when argparse exits after --help
                sys.stdout.flush()
        except (BrokenPipeError, SystemExit) as ended:
            if isinstance(ended, SystemExit) and not isinstance(ended.__context__, BrokenPipeError):  # rich ends so
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
        return code

    return command
