"""The folder of the checkpoints: the same on all nodes, writable, with enough room, and fast enough."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat, amount, rate
from megatron_het.store import Documents

_BLOCK = 4 << 20
_WINDOW_S, _MOST_BYTES = 2.0, 256 << 20
_SEEN_S = 10.0
_KEPT = 2  # Megatron removes the old checkpoint after the new one has been written


@dataclass
class Disk(Check):
    """All ranks write at the same time, as a checkpoint does.

    Attributes:
        folder: Of the checkpoints; empty leaves the check out.
        checkpoint_bytes: Size of a checkpoint; 0 if unknown.
        most_s: A checkpoint that takes longer is a warning.
    """

    folder: str = ""
    checkpoint_bytes: int = 0
    most_s: float = 300.0
    name: str = field(default="disk", init=False)
    limit_s: float = field(default=30.0, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Bytes per second of this rank's writes, free bytes, and whether rank 0's mark is seen here."""
        if not self.folder:
            return {}
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".het-doctor-{seat.expectations.plan_hash or 'mark'}-{os.environ.get('MASTER_PORT', '')}"
        if seat.rank == 0:
            mark.write_text("doctor", encoding="ascii")
            seat.store.put("mark", True)
        written, seconds = _write(folder / f".het-doctor-rank-{seat.rank}")
        seen = _is_seen(mark, seat.store)
        seat.store.count("looked")
        if seat.rank == 0:
            _wait_for_all(seat)
            mark.unlink(missing_ok=True)
        return {"bytes": written, "seconds": seconds, "free_bytes": shutil.disk_usage(folder).free, "shared": seen}

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Rows about sharing, room and speed."""
        if not self.folder:
            return [self.warning("all ranks", "no folder was given (--checkpoints)")]
        found = []
        alone = [rank for rank, answer in answers.items() if not answer["shared"]]
        if alone:
            text = f"do not see what rank 0 writes into {self.folder}"
            found.append(self.fault(names.of(alone), text, "Checkpoints need one folder that all nodes share"))
        total = sum(answer["bytes"] for answer in answers.values())
        speed = total / max(answer["seconds"] for answer in answers.values())
        free = min(answer["free_bytes"] for answer in answers.values())
        text = f"{self.folder}: {rate(speed)} over all ranks, {amount(free)} free"
        if not self.checkpoint_bytes:
            return [*found, self.ok(names.of(answers), text)]
        seconds = self.checkpoint_bytes / speed
        text += f"; a checkpoint of {amount(self.checkpoint_bytes)} takes about {seconds:.0f} s"
        if free < _KEPT * self.checkpoint_bytes:
            found.append(self.fault(names.of(answers), text, "There is no room for two checkpoints"))
        elif seconds > self.most_s:
            found.append(self.warning(names.of(answers), text, f"That is more than {self.most_s:.0f} s"))
        else:
            found.append(self.ok(names.of(answers), text))
        return found


def _write(path: Path) -> tuple[int, float]:
    """Write for a short time, all of it down to the disk; (bytes, seconds).

    Raises:
        OSError: It cannot be written, or what is read back differs.
    """
    block = os.urandom(_BLOCK)
    start_s, written = time.perf_counter(), 0
    try:
        with path.open("wb") as file:
            while written < _MOST_BYTES and time.perf_counter() - start_s < _WINDOW_S:
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                written += _BLOCK
        seconds = time.perf_counter() - start_s
        with path.open("rb") as file:
            if file.read(_BLOCK) != block:
                raise OSError(f"{path}: what was written is not what is read")
    finally:
        path.unlink(missing_ok=True)
    return written, seconds


def _is_seen(mark: Path, store: Documents) -> bool:
    """Whether rank 0's file appears here; network file systems show it late."""
    deadline_s = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline_s:
        if store.has("mark"):
            os.listdir(mark.parent)  # refreshes what NFS remembers of the folder
            if mark.exists():
                return True
        time.sleep(0.1)
    return False


def _wait_for_all(seat: Seat) -> None:
    deadline_s = time.monotonic() + _SEEN_S
    while seat.store.count("looked", 0) < len(seat.hosts) and time.monotonic() < deadline_s:
        time.sleep(0.1)
