"""The search's inner loops in C, compiled when they are first needed; without a compiler Python does the same.

``pipelines.c`` is compiled with the system's ``cc`` into the user's cache folder, under a name that says from which
text and how.  A search asks for the results of a few loops many times; compiled they take a hundredth of the time.
Results are equal to the last bit, so that a plan does not depend on whether there is a compiler.

Environment:
    MEGATRON_HET_COMPILER: the compiler in place of ``cc``; empty for none.
    XDG_CACHE_HOME: where the cache folder is (default ``~/.cache``).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("pipelines.c")
COMPILER = "MEGATRON_HET_COMPILER"
FLAGS = ("-O2", "-ffp-contract=off", "-std=c99", "-shared", "-fPIC")
"""No fused multiply-add: it rounds once where Python rounds twice."""
MOST_S = 60
"""After this long a compiler is given up."""


@cache
def loops() -> ctypes.CDLL | None:
    """The compiled loops, None where there is no compiler or no place for them."""
    compiler = shutil.which(os.environ.get(COMPILER, "cc") or "-")
    if compiler is None:
        return None
    try:
        return _declared(ctypes.CDLL(str(_built(compiler))))
    except (OSError, subprocess.SubprocessError, RuntimeError):  # RuntimeError: a user without a home
        return None


def _built(compiler: str) -> Path:
    """The library, compiled if it is not there yet.

    Raises:
        OSError: It cannot be written, or somebody else could have written it.
        subprocess.SubprocessError: It cannot be compiled.
    """
    key = b"\0".join([SOURCE.read_bytes(), repr(FLAGS).encode(), compiler.encode(), platform.machine().encode()])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_het"
    target = folder / f"pipelines-{hashlib.sha256(key).hexdigest()[:20]}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(folder)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / target.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, check=True, capture_output=True, timeout=MOST_S, stdin=subprocess.DEVNULL)
            made.replace(target)  # whole or not at all, also where several searches start at once
    _require_own(target)
    return target


def _require_own(path: Path) -> None:
    """Raises an OSError for what another user owns or may write."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others")


def _declared(found: ctypes.CDLL) -> ctypes.CDLL:
    """With the types of its functions, which C does not tell."""
    ints, doubles, octets = (
        ctypes.POINTER(ctypes.c_int32),
        ctypes.POINTER(ctypes.c_double),
        ctypes.POINTER(ctypes.c_uint8),
    )
    shape: list[Any] = [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ints, ints, ints, ints]
    found.het_merge.argtypes = [*shape, ints, doubles, doubles, ctypes.c_int32, octets, ints]
    found.het_merge.restype = ctypes.c_int
    address, count = ctypes.c_void_p, ctypes.c_int64
    found.het_elapsed.argtypes = [ctypes.c_int32, address, count, count, *[address] * 7]
    found.het_elapsed.restype = ctypes.c_double
    found.het_stages.argtypes = [ctypes.c_int32, ctypes.c_char_p, ints, ctypes.c_int32, ctypes.c_double, doubles]
    found.het_stages.restype = ctypes.c_int32
    return found
