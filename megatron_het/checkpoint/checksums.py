"""Checksums beside the files of a checkpoint: written after a save, compared before a load.

Every rank keeps those of the files that it wrote in ``het-checksums-<rank>.json``; rank 0 those of the
checkpoint's own description too.  They are computed from the files, in a thread, while training goes on.  A
checkpoint without them, such as one of stock Megatron, is compared with its description only: which files it
must have, and how long they are at least.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.megatron_patches import torch_metadata
from megatron_het.safe_io import FileError, read_json, read_text
from megatron_het.safe_io.reading import check_regular

_PREFIX = "het-checksums-"
_DESCRIPTION = (".metadata", "metadata.json")
_BLOCK_BYTES = 8 * 2**20
_COMMON = "common.pt"
_TRACKER_BYTES, _SETTINGS_BYTES = 64, 2**16


def checksum(path: Path) -> dict[str, int]:
    """Length and CRC-32 of a file: ``{"bytes": ..., "crc32": ...}``.

    Raises:
        FileError: It is no regular file.
        OSError: It cannot be read.
    """
    value, length = 0, 0
    check_regular(path, os.stat(path).st_mode)
    block = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(memoryview(block)[:count], value)
            length += count
    return {"bytes": length, "crc32": value}


def written_by(folder: Path, rank: int) -> list[Path]:
    """Files of a checkpoint that a rank wrote: ``__<rank>_<n>.distcp``, and on rank 0 the description."""
    found = sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        found += [folder / name for name in _DESCRIPTION if (folder / name).exists()]
    return found


def write_checksums(folder: Path, rank: int) -> Path:
    """Write the checksums of a rank's files; returns where."""
    files = {path.name: checksum(path) for path in written_by(folder, rank)}
    target = folder / f"{_PREFIX}{rank}.json"
    scratch = target.with_suffix(".tmp")
    scratch.write_text(json.dumps({"version": 1, "files": files}, indent=1), encoding="utf-8")
    os.replace(scratch, target)
    return target


def remove_checksums(folder: Path) -> None:
    """Forget the checksums of a folder that is about to be written again."""
    for path in folder.glob(f"{_PREFIX}*.json"):
        path.unlink(missing_ok=True)


def read_checksums(folder: Path) -> dict[str, dict[str, int]]:
    """Checksums of a checkpoint by file name; files that nobody noted are missing."""
    found: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob(f"{_PREFIX}*.json")):
        try:
            files = read_json(path)["files"].items()
            found.update((name, {"bytes": int(noted["bytes"]), "crc32": int(noted["crc32"])}) for name, noted in files)
        except (FileError, ValueError, KeyError, TypeError, AttributeError):
            continue  # a note that was cut short: its files count as not noted
    return found


def needed_bytes(folder: Path) -> Mapping[str, int]:
    """The least length of every data file, from the description that torch writes last.

    Raises:
        Exception: Whatever reading a damaged description raises.
    """
    from torch.distributed.checkpoint import FileSystemReader

    torch_metadata.guard()
    stored: Any = FileSystemReader(folder).read_metadata().storage_data
    found: dict[str, int] = {}
    for place in stored.values():
        name = place.relative_path
        found[name] = max(found.get(name, 0), place.offset + place.length)
    return found


def problems(folder: Path, part: int = 0, parts: int = 1) -> list[str]:
    """Returns what is wrong with a checkpoint, as far as its files tell; empty when nothing is.

    Args:
        folder: Of one iteration.
        part: Which share of the checksums to compare; missing and short files are found in any.
        parts: Over how many ranks these are shared.
    """
    if not folder.is_dir():
        return [f"there is no {folder.name}"]
    missing = [name for name in _DESCRIPTION if not (folder / name).exists()]
    if missing:
        return [f"{missing[0]} is missing"]
    noted = read_checksums(folder)
    if found := _wrong_description(folder, noted):
        return found
    try:
        needed = needed_bytes(folder)
    except Exception as error:  # a damaged pickle raises anything
        return [f".metadata cannot be read ({type(error).__name__}: {error})"]
    found = [text for name, length in sorted(needed.items()) if (text := _short(folder / name, length))]
    if not found:
        names = sorted(set(needed) & set(noted))
        found = [text for name in names[part::parts] if (text := _changed(folder / name, noted[name]))]
    return found


def _wrong_description(folder: Path, noted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns what is wrong with the files that describe a checkpoint, before anything of them is believed."""
    found = []
    for name in (*_DESCRIPTION, _COMMON):
        path = folder / name
        try:
            if name in noted and (text := _changed(path, noted[name])):
                found.append(text)
            elif path.exists():
                check_regular(path, path.stat().st_mode)
        except (FileError, OSError) as error:
            found.append(f"{name} cannot be read ({getattr(error, 'problem', error)})")
    if not found:
        try:
            settings = read_json(folder / _DESCRIPTION[1], _SETTINGS_BYTES)
        except FileError as error:
            return [f"{_DESCRIPTION[1]} cannot be read ({error.problem})"]
        if not isinstance(settings, dict) or not isinstance(settings.get("sharded_backend"), str):
            found.append(f"{_DESCRIPTION[1]} names no format")
    return found


def _short(path: Path, length: int) -> str:
    try:
        check_regular(path, path.stat().st_mode)
        size = path.stat().st_size
    except FileError as error:
        return f"{path.name} cannot be read ({error.problem})"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return f"{path.name} has {size} bytes, at least {length} are needed" if size < length else ""


def _changed(path: Path, expected: Mapping[str, int]) -> str:
    try:
        now = checksum(path)
    except FileError as error:
        return f"{path.name} cannot be read ({error.problem})"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return "" if now == dict(expected) else f"{path.name} is not what was written (another checksum)"


class ChecksumWriter:
    """Notes the checksums of what this rank saves, once a save is complete.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._due: list[_Save] = []
        self._thread: threading.Thread | None = None

    def begin(self, folders: Iterable[Path], iteration: int) -> None:
        """A save into one of these folders begins.

        Args:
            folders: Where checkpoints of this run are saved, for all kinds of them.
            iteration: Of the checkpoint.
        """
        self.finish()
        for folder in folders:
            save = _Save(folder / f"iter_{iteration:07d}", iteration, _tracker(folder)[1])
            if self._rank == 0:
                remove_checksums(save.folder)
            self._due.append(save)

    def poll(self) -> None:
        """Start noting what has become complete; called between iterations."""
        if self._thread is not None and self._thread.is_alive():
            return
        complete = [save for save in self._due if save.is_complete()]
        if complete:
            self._due = []  # of several kinds of checkpoints one was written
            self._thread = threading.Thread(target=self._write, args=(complete,), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait for what is being noted."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, saves: Iterable[_Save]) -> None:
        for save in saves:
            # Deleted meanwhile, or a full disk: the checkpoint stands without checksums.
            with contextlib.suppress(OSError):
                write_checksums(save.folder, self._rank)


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that has begun: where, of which iteration, and when the folder's tracker was written before."""

    folder: Path
    iteration: int
    before_ns: int

    def is_complete(self) -> bool:
        """Whether the tracker has been written since, which is the last thing that a save does."""
        iteration, written_ns = _tracker(self.folder.parent)
        return iteration >= self.iteration and written_ns != self.before_ns


def _tracker(folder: Path) -> tuple[int, int]:
    """The iteration that a folder's tracker names and when it was written; -1 and 0 without one."""
    path = folder / "latest_checkpointed_iteration.txt"
    try:
        return int(read_text(path, _TRACKER_BYTES)), path.stat().st_mtime_ns
    except (OSError, ValueError):
        return -1, 0
