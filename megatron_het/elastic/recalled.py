"""Files in a controller's folder: the job's state, for one that starts anew, and whose folder it is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.elastic.job import Generation
from megatron_het.elastic.pool import Process, read_learned
from megatron_het.elastic.worth import describe, standing
from megatron_het.safe_io import FileError, parse_json, read_json, write_text

_RESERVE_BYTES = 4 * 2**20
_RENEW_S = 1.0
_LEASE_S = 5.0
_LOCK_BYTES = 512


class StateFile:
    """A file that is written whole or not at all, with space kept free for it.

    Args:
        path: The file.
        say: Writes one line of progress.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._reserve = path.with_name(f".{path.name}.reserve")
        self.failure = ""
        """Why what was to be written last is not in the file; empty where it is."""

    def write(self, text: str) -> bool:
        """Write the file; whether it is written.  On a full disk the space that was kept free is used."""
        failure = self._try(text)
        if failure and self._reserve.exists():
            with contextlib.suppress(OSError):
                self._reserve.unlink()
            failure = self._try(text)
        else:
            self._keep_space()
        if failure and not self.failure:
            self._say(f"{failure}. The job goes on; what was decided is in memory only until the file can be written")
        elif self.failure and not failure:
            self._say(f"{self._path} is written again")
        self.failure = failure
        return not failure

    def _try(self, text: str) -> str:
        """Why the file could not be written."""
        before = _before(self._path)
        with contextlib.suppress(OSError):  # for a controller that finds the file broken
            before.unlink(missing_ok=True)
            os.link(self._path, before)
        try:
            write_text(self._path, text)
        except (OSError, ValueError) as error:
            return str(error) if isinstance(error, FileError) else f"{self._path} cannot be written: {error}"
        return ""

    def _keep_space(self) -> None:
        if self._reserve.exists():
            return
        descriptor = -1
        try:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
        except OSError:
            with contextlib.suppress(OSError):
                self._reserve.unlink()
        finally:
            if descriptor >= 0:
                os.close(descriptor)


class FolderLock:
    """A folder's one controller: a lock, and a lease for machines between which locks do not work.

    The owner renews the lease every second.  Another machine takes the folder over once nothing has been renewed for
    five seconds by its own clock; who finds the lease to be another one's has lost the folder.

    Args:
        folder: Of the job.

    Raises:
        FileError: Another controller has it; the message says which.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "controller.lock"
        self._owner = f"process {os.getpid()} on {socket.gethostname()}"
        self._own = secrets.token_hex(8)
        self._renewed = 0
        self.is_lost = False
        """Whether another controller has taken the folder over."""
        while not self._take():
            pass
        self._wait_for_lease()
        self._renew()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Leave the folder to others."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if not self.is_lost:
                self._path.unlink()
        os.close(self._descriptor)

    def _take(self) -> bool:
        """Lock the file; whether it is still the folder's."""
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FileError(self._path, "", f"cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse(self._lease())
        except OSError:
            pass  # a file system without locks: the lease decides
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
                return True
        os.close(self._descriptor)  # its owner has just left the folder, and removed it
        return False

    def _lease(self) -> dict[str, Any]:
        """Returns what the file says; empty where it says nothing."""
        try:
            found = parse_json(
                os.pread(self._descriptor, _LOCK_BYTES, 0).decode("utf-8", "replace") or "{}", self._path
            )
        except (OSError, FileError):
            return {}
        return found if isinstance(found, dict) else {}

    def _wait_for_lease(self) -> None:
        found = self._lease()
        if not found or found.get("host") == socket.gethostname():
            return  # on this machine the lock has told
        end_s = time.monotonic() + _LEASE_S
        while time.monotonic() < end_s:
            time.sleep(_RENEW_S / 4)
            if self._lease() != found:
                self._refuse(found)

    def _refuse(self, lease: dict[str, Any]) -> None:
        os.close(self._descriptor)
        raise FileError(
            self._path,
            "",
            f"the controller of this folder is {lease.get('owner', 'another process')}",
            "Stop it first, or give another --folder",
        )

    def _renew(self) -> None:
        self._renewed += 1
        lease = {"owner": self._owner, "host": socket.gethostname(), "id": self._own, "renewed": self._renewed}
        with contextlib.suppress(OSError):
            # In place and always of one length: a full disk does not matter.
            os.pwrite(self._descriptor, json.dumps(lease).encode().ljust(_LOCK_BYTES), 0)

    def _keep(self) -> None:
        while not self._stopped.wait(_RENEW_S) and not self.is_lost:
            self._keep_once()

    def _keep_once(self) -> None:
        self.is_lost = self._lease().get("id", self._own) != self._own
        if not self.is_lost:
            self._renew()


@dataclass(frozen=True)
class Recalled:
    """A job as its file describes it.

    Attributes:
        newest: The largest number of a process so far.
        generation: What ran; None where nothing did yet.
        signature: What all nodes have in common.
        history: One entry per change.
        processes: The workers, each with the random number of its process.
        leaving: Names of nodes that are to leave.
        corrected: What was learned from measurements, if anything.
    """

    newest: int
    generation: Generation | None = None
    signature: str | None = None
    history: tuple[dict[str, Any], ...] = ()
    processes: tuple[tuple[Process, str], ...] = ()
    leaving: frozenset[str] = frozenset()
    corrected: Any = None


def _before(state: Path) -> Path:
    """The file as it was before it was written last."""
    return state.with_name(f".{state.name}.before")


def recalled(state: Path, say: Callable[[str], None]) -> Recalled | None:
    """Read a controller's file; None where it is of a job that is over.

    A file that a disk has spoilt gives way to the one before it: workers know of what has happened since.

    Args:
        state: The file.
        say: Writes one line of progress.

    Raises:
        FileError: It cannot be read, or no controller has written it.
    """
    try:
        return _read(state)
    except FileError as error:
        try:
            found = _read(_before(state))
        except FileError:
            raise error from None
        say(f"{error}. The state before it is taken")
        return found


def _read(state: Path) -> Recalled | None:
    document = read_json(state)
    try:
        return None if document.get("over") else _of(document)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileError(
            state,
            "",
            f"no state of a job that a controller has written ({type(error).__name__}: {error})",
            "Give another --folder, or remove the file: the job then starts from its newest checkpoint",
        ) from None


def _of(document: dict[str, Any]) -> Recalled:
    newest = int(document.get("newest", 0))
    if document["generation"] is None:
        return Recalled(newest)
    members, corrected = document["members"], document.get("corrected")
    if corrected is not None:
        cluster, _ = read_learned(corrected)
        [str(group["gpu"]) for group in cluster["nodes"]]  # what the search reads of it
    describe({**document, **standing(document["history"], 0, 0.0)})  # everything that it shows is there
    return Recalled(
        newest=newest,
        generation=Generation.from_json(document["generation"]),
        signature=document["signature"],
        history=tuple(document["history"]),
        processes=tuple(
            (Process(int(m["process"]), str(m["node"]), str(m["device"])), str(m.get("identity", ""))) for m in members
        ),
        leaving=frozenset(document["leaving"]),
        corrected=corrected,
    )
