"""The agent of a node: starts one worker per device once, watches over them, and passes on what happens."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het.elastic.board import Board
from megatron_het.elastic.worker import ENVIRONMENT, Setting
from megatron_het.platform import SAME_DEVICES

_POLL_S = 0.02
_END_S = 20.0
_TELL_S = 1.0
_LOG_BYTES, _LONGEST_WORDS = 65536, 600
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Node:
    """What an agent is told about its node.

    Attributes:
        setting: Of every worker, but for its process number and folder.
        workers: How many to start.
        folder: For logs.
        flags: Of the training.
        restarts: How often a device gets another worker after one was ended by a signal.
    """

    setting: Setting
    workers: int
    folder: Path
    flags: tuple[str, ...]
    restarts: int


@dataclass
class _Worker:
    """A worker that was started.

    Attributes:
        number: Its process number.
        slot: Its device.
        process: The process.
        is_refused: Whether the controller does not take it; another one would not be taken either.
    """

    number: int
    slot: int
    process: subprocess.Popen[bytes]
    is_refused: bool = False


class Agent:
    """Runs the workers of a node.

    Args:
        node: What to start.
        say: Writes one line of progress.
    """

    def __init__(self, node: Node, say: Callable[[str], None]) -> None:
        setting = node.setting
        self._node, self._say = node, say
        self._board = Board(setting.host, setting.port, setting.token, patience_s=setting.timeout_s)
        self._workers: list[_Worker] = []
        self._restarts = [node.restarts] * node.workers
        self._asked = False
        self._stops = False
        self._told_s = 0.0

    def run(self) -> int:
        """Until the job is over or no worker is left; returns the exit code."""
        if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:  # a script may want the node to stay
            signal.signal(signal.SIGTERM, self._ask_to_leave)
        signal.signal(signal.SIGUSR1, self._ask_to_stop)
        try:
            for slot in range(self._node.workers):
                self._start(slot)
            while self._workers:
                over = self._board.get("over")
                if over is not None:
                    self._wait_for_ends()
                    if over["error"]:
                        self._say(f"the job ended: {over['error']}")
                    return 1 if over["error"] else 0
                self._look_after()
                time.sleep(_POLL_S)
        finally:
            for worker in self._workers:
                end_all(worker.process)
        self._say("no worker is left on this node")
        return 0 if self._asked else 1

    def _ask_to_leave(self, *_unused: Any) -> None:
        """SIGTERM is a notice: the node leaves when the running iteration is done, or one more."""
        self._asked = True

    def _ask_to_stop(self, *_unused: Any) -> None:
        """SIGUSR1: all ranks save and end, where the training was started with ``--exit-signal SIGUSR1``."""
        self._stops = True

    def _start(self, slot: int) -> None:
        number = self._board.count("processes")
        log_file = self._log(number)
        folder = log_file.parent
        folder.mkdir(parents=True, exist_ok=True)
        setting = replace(self._node.setting, process=number, folder=str(folder))
        environment = dict(os.environ)
        where = {"LOCAL_RANK": str(slot), "LOCAL_WORLD_SIZE": str(self._node.workers), SAME_DEVICES: "1"}
        environment.update({ENVIRONMENT: setting.to_text(), "PYTHONUNBUFFERED": "1", **where})
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "megatron_het.elastic.worker", *self._node.flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent if _LIBC else None,  # noqa: PLW1509  one prctl, no lock
                start_new_session=True,  # see end_all
            )
        self._workers.append(_Worker(number, slot, process))
        self._say(f"worker {number} started, its log is {log_file}")

    def _log(self, number: int) -> Path:
        return self._node.folder / f"worker-{number}" / "log.txt"

    def _look_after(self) -> None:
        name = self._node.setting.node
        if self._stops and time.monotonic() - self._told_s > _TELL_S:  # again and again: a session may have missed it
            self._told_s = time.monotonic()
            for worker in self._workers:
                worker.process.send_signal(signal.SIGUSR1)
        if self._asked and not self._board.has(f"asked/{name}"):
            self._board.put(f"asked/{name}", True)
            self._board.post({"type": "leave", "node": name})
        for worker in list(self._workers):
            self._obey(worker)
            code = worker.process.poll()
            if code is not None:
                _end_session(worker.process.pid)
                self._workers.remove(worker)
                why = _why(code) + _last_words(self._log(worker.number))
                self._board.post({"type": "exit", "process": worker.number, "node": name, "why": why})
                self._perhaps_restart(worker, code)

    def _obey(self, worker: _Worker) -> None:
        """What the controller wants of a worker."""
        number = worker.number
        if not worker.is_refused and self._board.has(f"refused/{number}"):
            worker.is_refused = True
            self._say(f"worker {number} was refused: {self._board.get(f'refused/{number}')}")
            worker.process.kill()
        elif self._board.has(f"kill/{number}"):
            worker.process.kill()
        elif self._board.has(f"gone/{number}"):
            self._asked = True
            worker.process.kill()

    def _perhaps_restart(self, worker: _Worker, code: int) -> None:
        """A worker that was ended by a signal comes back as a newcomer; one that ended by itself would do so again."""
        if code < 0 and not (self._asked or worker.is_refused) and self._restarts[worker.slot] > 0:
            self._restarts[worker.slot] -= 1
            self._start(worker.slot)

    def _wait_for_ends(self) -> None:
        deadline_s = time.monotonic() + _END_S
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline_s - time.monotonic()))
            end_all(worker.process)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a worker, if it has not ended, and what it has started.

    Saving a checkpoint and reading data start processes that wait for their parent for ever once it was killed.

    Args:
        process: The worker, started in a session of its own.
    """
    process.kill()
    _end_session(process.pid)


def _end_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _why(code: int) -> str:
    """An exit code in words."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def _last_words(log: Path) -> str:
    """What a worker has refused, as its log's last message of ours says; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line for line in lines if line.startswith("megatron_het: ")]
    return f": {said[-1].removeprefix('megatron_het: ')[:_LONGEST_WORDS]}" if said else ""


def _die_with_parent() -> None:
    """Have the kernel end the worker when its agent is killed: nobody would look after it."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
