"""``het-plan support``: what a report of a bug needs, in one archive, without data, weights or tokens."""

from __future__ import annotations

import argparse
import json
import os
import platform
import stat
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from ..errors import PlannerError

_PACKAGES = ("megatron-het", "megatron-core", "torch", "numpy", "transformer-engine", "scipy", "pydantic", "rich")
_TEXTS = (".json", ".yaml", ".yml", ".sh", ".sbatch", ".log", ".out", ".err")
_MOST_BYTES, _MOST_FILES = 1 << 20, 500


def support(options: argparse.Namespace) -> int:
    """Write the archive."""
    kept = [file for given in options.paths for file in _texts(given)][:_MOST_FILES]
    try:
        with zipfile.ZipFile(options.out, "x", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("versions.json", json.dumps(_versions(), indent=1))
            for number, file in enumerate(kept):
                archive.writestr(f"{number:03}-{file.name}", _end(file))
    except FileExistsError:
        raise PlannerError(str(options.out), "--out", None, "the file is there", "Name another one") from None
    sys.stdout.write(f"wrote {options.out}: versions and {len(kept)} files. Look into it before you send it\n")
    return 0


def _texts(given: Path) -> Iterator[Path]:
    """Regular files with a known ending, in one folder and those below."""
    if not given.exists():
        raise PlannerError(str(given), "(file)", None, "it is not there")
    found = sorted(given.rglob("*")) if given.is_dir() else [given]
    for file in found:
        is_text = file.suffix in _TEXTS and not any(part.startswith("iter_") for part in file.parts)
        if is_text and stat.S_ISREG(os.lstat(file).st_mode):
            yield file


def _end(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _MOST_BYTES))
        return stream.read(_MOST_BYTES)


def _versions() -> dict[str, str]:
    found = {"python": sys.version, "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
