"""The controller's records of its job: workers, failures, measurements, and the folder with their file."""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_het.elastic.job import Generation
from megatron_het.elastic.pool import Planner, Process, read_learned
from megatron_het.elastic.worth import LEAVE, Rates, change_s, describe, standing
from megatron_het.safe_io import FileError, parse_json, read_json, write_text

# Files in a controller's folder: the job's state, for a restart, and the lock of the folder's owner.

_RESERVE_BYTES = 4 * 2**20
_RENEW_S = 1.0
_LEASE_S = 5.0
_LOCK_BYTES = 512


class StateFile:
    """A file that is written atomically, with disk space reserved for it."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._reserve = path.with_name(f".{path.name}.reserve")
        self.failure = ""
        """Why the last write failed; empty if it succeeded."""

    def write(self, text: str) -> bool:
        """Write the file; returns whether it is written.  On a full disk the reserved space is used."""
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
        before = _before(self._path)
        with contextlib.suppress(OSError):  # for a controller that finds the file damaged
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
        try:
            with os.fdopen(os.open(self._reserve, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
        except OSError:
            with contextlib.suppress(OSError):
                self._reserve.unlink()


class FolderLock:
    """Ensures a single controller per folder: a lock, and a lease for machines between which locks do not work.

    The owner renews the lease every second.  Another machine takes the folder over if the lease was not renewed for
    five seconds by its own clock.  A controller that finds another owner in the lease has lost the folder.

    Raises:
        FileError: Another controller has the folder; the message names it.
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
        """Release the folder for other controllers."""
        self._stopped.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if not self.is_lost:
                self._path.unlink()
        os.close(self._descriptor)

    def _take(self) -> bool:
        """Lock the file; returns whether the folder still has this file."""
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
        os.close(self._descriptor)  # its owner has just released the folder and removed the file
        return False

    def _lease(self) -> dict[str, Any]:
        """Returns the lease in the file; empty if there is none."""
        try:
            text = os.pread(self._descriptor, _LOCK_BYTES, 0).decode("utf-8", "replace")
            found = parse_json(text or "{}", self._path)
        except (OSError, FileError):
            return {}
        return found if isinstance(found, dict) else {}

    def _wait_for_lease(self) -> None:
        found = self._lease()
        if not found or found.get("host") == socket.gethostname():
            return  # on this machine the lock has decided
        end_s = time.monotonic() + _LEASE_S
        while time.monotonic() < end_s:
            time.sleep(_RENEW_S / 4)
            if self._lease() != found:
                self._refuse(found)

    def _refuse(self, lease: dict[str, Any]) -> None:
        os.close(self._descriptor)
        problem = f"the controller of this folder is {lease.get('owner', 'another process')}"
        raise FileError(self._path, "", problem, "Stop it first, or give another --folder")

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
    """A job as its file describes it."""

    newest: int  # the largest number of a process so far
    generation: Generation | None = None  # the last generation; None before the first
    signature: str | None = None  # signature of all nodes
    history: tuple[dict[str, Any], ...] = ()  # one entry per change
    processes: tuple[tuple[Process, str], ...] = ()  # the workers, each with the random number of its process
    leaving: frozenset[str] = frozenset()  # names of nodes that are about to leave
    corrected: Any = None  # corrections from measurements, if any


def _before(state: Path) -> Path:
    """Path of the file's previous version."""
    return state.with_name(f".{state.name}.before")


def recalled(state: Path, say: Callable[[str], None]) -> Recalled | None:
    """Read a controller's file; None if its job is over.

    If the file is damaged, its previous version is used: workers report later events.

    Raises:
        FileError: The file cannot be read, or no controller has written it.
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
        return None if document.get("over") else _recalled(document)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        problem = f"no state of a job that a controller has written ({type(error).__name__}: {error})"
        hint = "Give another --folder, or remove the file: the job then starts from its newest checkpoint"
        raise FileError(state, "", problem, hint) from None


def _recalled(document: dict[str, Any]) -> Recalled:
    newest = int(document.get("newest", 0))
    if document["generation"] is None:
        return Recalled(newest)
    members, corrected = document["members"], document.get("corrected")
    if corrected is not None:
        cluster, _ = read_learned(corrected)
        [str(group["gpu"]) for group in cluster["nodes"]]  # fields that the search reads
    describe({**document, **standing(document["history"], 0, 0.0)})  # fails if a field of the status is missing
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


# Counters of the controller: arrivals at the start, consecutive failures, iterations that do not end.


_MOST, _FIRST_PAUSE_S = 3, 1.0
_SETTLE_S = 30.0


class JobError(RuntimeError):
    """The job cannot go on; the message has the reason and the remedy."""


class ReplacedError(RuntimeError):
    """Another controller has taken the job over."""


class Arrivals:
    """Nodes and workers for which the first generation waits."""

    def __init__(self, nodes: int, start_s: float) -> None:
        self._nodes, self._start_s = nodes, start_s
        self._expected: dict[str, int] = {}
        self._empty: dict[str, str] = {}
        self._began_s = self._came_s = time.monotonic()

    def came(self, node: str, workers: int) -> None:
        """Note a ready worker, of ``workers`` on its node."""
        self._expected[node], self._came_s = workers, time.monotonic()
        self._empty.pop(node, None)

    def ended(self, node: str, left: int, why: str) -> None:
        """Note the end of a worker whose node has or starts ``left`` others."""
        if left > 0:
            self._expected[node] = left
        else:
            self._expected.pop(node, None)
            self._empty.setdefault(node, why)

    @property
    def nobody_is_left(self) -> bool:
        """Whether the workers of all nodes have ended and no agent starts others."""
        return not self._expected and len(self._empty) >= self._nodes

    @property
    def without_workers(self) -> str:
        """Nodes that have no worker left, with the reasons, as text; empty for none."""
        return "; ".join(f"{node} has no worker left: {why}" for node, why in sorted(self._empty.items()))

    def are_complete(self, pool: Sequence[Process]) -> bool:
        """Whether the job may begin with these workers.

        Raises:
            JobError: No node has a worker left, or too few came in time.
        """
        come, now_s = Counter(process.node for process in pool), time.monotonic()
        all_came = all(come[node] >= workers for node, workers in self._expected.items())
        if len(come) >= self._nodes and (all_came or now_s - self._came_s > _SETTLE_S):
            return True
        empty = self.without_workers
        if self.nobody_is_left:
            raise JobError(f"all workers ended before the job has begun: {empty}. The workers' logs say more")
        if now_s - self._began_s > self._start_s:
            who = f" ({', '.join(sorted(come))})" if come else ""
            raise JobError(
                f"only {len(come)} of {self._nodes} nodes came in {self._start_s:g} s{who}. "
                f"{empty}{'. ' if empty else ''}Start the agents of the others, ask for fewer with --nodes, or "
                "wait longer with --start-s"
            )
        return False


class Failures:
    """Counts consecutive failed generations, and repeated failures at the same iteration."""

    def __init__(self) -> None:
        self._in_a_row = self._repeated = 0
        self._at = -1

    def over(self) -> None:
        """Reset the count, because a generation has done an iteration."""
        self._in_a_row = 0

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next try, in which for example a shortage of memory may pass."""
        return _FIRST_PAUSE_S * 2 ** (self._in_a_row - 1) if self._in_a_row else 0.0

    def note(self, reached: int, dead: int, errors: Collection[str]) -> None:
        """Note a failed generation; raises JobError if there were too many.

        Args:
            dead: Number of its ranks that were lost.
            errors: Error messages of its other ranks.
        """
        # A failure at the same iteration without a lost rank counts as repeated, whatever happened in between.
        self._repeated = self._repeated + 1 if not dead and reached <= self._at else 0
        self._in_a_row, self._at = self._in_a_row + 1, max(reached, self._at)
        if max(self._in_a_row, self._repeated) > _MOST:
            what = f"{self._in_a_row} generations failed in a row, at iteration {reached}"
            if self._in_a_row <= _MOST:
                what = f"{self._repeated + 1} generations failed, and none has passed iteration {self._at}"
            raise JobError(f"{what}: {'; '.join(sorted(errors)) or 'workers died'}. The workers' logs say more")


class Saves:
    """Checkpoints that could not be written.

    A checkpoint is tried once more in the fallback folder if there is one, and skipped otherwise.  The last
    checkpoint of a training is tried once more in any case.

    Args:
        fallback: Fallback folder; empty for none.
    """

    def __init__(self, fallback: str) -> None:
        self._fallback = fallback
        self._failed: dict[int, set[int]] = {}
        self._unsaved: set[int] = set()
        self._elsewhere: set[int] = set()

    def note(self, generation: int, iteration: int, last: int | None) -> str:
        """Note that a rank has not written its part; returns the log message, empty if another rank was first.

        Args:
            generation: Generation of the failed save.
            last: Last iteration of the training; None if unknown.
        """
        generations = self._failed.setdefault(iteration, set())
        if generation in generations:
            return ""
        generations.add(generation)
        if self._fallback and iteration not in self._elsewhere:
            self._elsewhere.add(iteration)
            then = f"it is tried in {self._fallback}"
        elif iteration == last and len(generations) == 1:
            then = "it is the last one and tried again"
        else:
            self._unsaved.add(iteration)
            then = "it is left out"
        failed = sum(map(len, self._failed.values()))
        return (
            f"the checkpoint of iteration {iteration} is not written ({failed} failed save{'s' * (failed > 1)} so far)"
            f"; {then}"
        )

    def recall(self, generation: Generation) -> None:
        """Restore the failed saves from the running generation."""
        self._unsaved |= set(generation.unsaved)
        self._elsewhere |= set(generation.elsewhere)

    def for_generation(self) -> dict[str, Any]:
        """Returns the fields of the next :class:`Generation` about saves."""
        elsewhere = tuple(sorted(self._elsewhere - self._unsaved))
        return {"unsaved": tuple(sorted(self._unsaved)), "elsewhere": elsewhere, "fallback": self._fallback}

    def unsaved_end(self, last: int | None) -> str:
        """Why the final checkpoint of a finished training is missing; empty if it exists or none was wanted."""
        if last is None or last not in self._unsaved:
            return ""
        return (
            f"the training is over, and its last state, of iteration {last}, is not written. Make room and start it "
            "again: it goes on from the newest checkpoint"
        )


class Progress:
    """Detects that iterations no longer end, because a rank that is stuck may still send heartbeats.

    Time counts from the first iteration of a generation, because earlier phases have bounds of their own.

    Args:
        bound_s: Longest time between two iterations.
    """

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._reached, self._moved_s = -1, float("inf")

    def begin(self) -> None:
        """Reset at the start of a generation."""
        self._reached, self._moved_s = -1, float("inf")

    def opened(self) -> None:
        """Start the clock after the first iteration of a generation."""
        self._moved_s = min(self._moved_s, time.monotonic())

    def is_stuck(self, reached: int, last: int | None) -> bool:
        """Whether the bound is exceeded; False after the training's last iteration, when a run saves and evaluates."""
        now_s = time.monotonic()
        if reached != self._reached:
            self._reached = reached
            self._moved_s = self._moved_s if self._moved_s == float("inf") else now_s
        return now_s - self._moved_s > self._bound_s and (last is None or reached < last)


# The controller's records of its workers, and the bounds on its waits.


@dataclass(frozen=True)
class Bounds:
    """Bounds on the controller's waits, in seconds."""

    lost_s: float = 30.0  # without a heartbeat a process or a node counts as lost
    leave_s: float = 30.0  # for the ranks of a session to end once one of them has died
    start_s: float = 600.0  # for the first nodes to arrive
    return_s: float = 60.0  # for lost workers to come back if there is no plan without them
    stuck_s: float = 1800.0  # for an iteration to end


@dataclass
class Member:
    """The controller's record of a worker."""

    process: Process
    iteration: int = 0  # number of iterations that are done, by its last message
    beats: int = -1  # number of its newest heartbeat
    seen_s: float = field(default_factory=time.monotonic)  # time of that heartbeat (monotonic)
    identity: str = ""  # random number of the process; empty before its first message
    # rates at which its state was copied, see :class:`megatron_het.elastic.copies.Pace`
    rates: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of the controller's document."""
        process = self.process
        return {
            "process": process.number,
            "node": process.node,
            "device": process.device,
            "iteration": self.iteration,
            "identity": self.identity,
            "rates": self.rates,
        }


class Lessons:
    """Starts a search when a run drifts from its plan, and reports when a better plan is worth a change.

    Args:
        planner: Searches for plans.
    """

    def __init__(self, planner: Planner, say: Callable[[str], None]) -> None:
        self._planner, self._say = planner, say
        self._generation, self._last = -1, 0
        self.corrected: dict[str, Any] | None = None  # the planner's corrections as JSON values; None without any

    def note(
        self,
        message: Mapping[str, Any],
        generation: Generation,
        pool: Sequence[Process],
        history: Sequence[dict[str, Any]],
        rates: Rates,
    ) -> None:
        """Begin to search a better plan for a run that drifts from its plan, while it goes on.

        Args:
            message: Message of the comparing rank: the measurements, and the last iteration of the training.
            pool: The present processes.
            rates: Rates at which state moves.
        """
        cost_s = change_s(history, generation.plan, LEAVE, rates)  # without newcomers
        if self._planner.learn(pool, generation.plan, dict(message["measured"]), cost_s):
            self._generation, self._last = generation.number, int(message["last"])

    def reason(self, generation: Generation, members: Mapping[int, Member]) -> str:
        """The reason to change now; empty if there is none.  Workers on slow devices get kinds of their own."""
        learned = self._planner.learned()
        if learned is None or self._generation != generation.number:
            return ""
        left = self._last - max((member.iteration for member in members.values()), default=0)
        gain = f"a plan with iterations {100 * learned.gain:.1f} % shorter for what was measured"
        if learned.pays_after >= left:
            self._say(f"{gain} pays after {learned.pays_after} iterations; {left} are left, so nothing changes")
            return ""
        for process, kind in zip(generation.ranks, learned.kinds, strict=True):
            if process in members:
                members[process].process = replace(members[process].process, device=kind)
        self._planner.accept(learned, [member.process for member in members.values()])
        self.corrected = learned.to_json()
        return gain

    def recall(self, document: dict[str, Any] | None) -> None:
        """Restores :attr:`corrected` after a restart of the controller."""
        self.corrected = document
        if document is not None:
            self._planner.recall(document)
