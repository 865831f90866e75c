"""The agent of a node: starts one worker per device, monitors them, and reports events to the controller."""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_het.device import SAME_DEVICES, kill_with
from megatron_het.elastic.worker import ENVIRONMENT, Setting
from megatron_het.store import StoreError, TokenError

_POLL_S, _MEET_S = 0.02, 0.1
_GLANCE_S, _QUIET_S = 0.5, 2.0
_END_S, _LOG_END_S = 20.0, 2.0
_TELL_S = 1.0
_LAST_WORDS_S = 0.5
_LOG_BYTES, _LONGEST_WORDS = 65536, 600
MAX_LOG_BYTES = 16 * 2**20
_KEPT_LOGS = 4  # ended workers of each device whose logs stay
_PIPE_BYTES = 2**20


@dataclass(frozen=True)
class Node:
    """Configuration of an agent's node."""

    setting: Setting  # setting of every worker, except its process number and folder
    workers: int  # number of workers to start
    folder: Path  # folder for logs
    flags: tuple[str, ...]
    restarts: int  # how often a device gets another worker after a signal has ended one

    def device(self, slot: int) -> str:
        """Kind of a device; a node with several kinds has a text like ``A100*4,V100*2``, in the order of devices."""
        runs = [re.fullmatch(r"(.+)\*([0-9]{1,4})", run) for run in self.setting.device.split(",")]
        kinds = [run[1] for run in runs if run is not None for _ in range(int(run[2]))]
        return kinds[slot] if all(runs) and slot < len(kinds) else self.setting.device


class Log:
    """A worker's log: output from a pipe is written to a file of bounded size, as long as the disk has room.

    A full file is renamed to ``NAME.1`` and replaces the earlier one.  The worker writes into the pipe, so
    that a full disk does not make its own writes fail.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._older = file, file.with_name(f"{file.name}.1")
        self._ending = b""
        self._source, self.pipe = os.pipe()
        with contextlib.suppress(OSError):  # a larger pipe lets workers of an agent that hangs go on for longer
            fcntl.fcntl(self.pipe, getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_BYTES)
        self._thread = threading.Thread(target=self._pass_on, name=f"log {file}", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Close this process's writing end of the pipe, which the started worker has inherited."""
        os.close(self.pipe)

    def ended(self) -> bytes:
        """Returns the end of the output, after the worker has ended."""
        self._thread.join(_LOG_END_S)
        return self._ending

    def _pass_on(self) -> None:
        while part := os.read(self._source, 65536):
            self._ending = (self._ending + part)[-_LOG_BYTES:]
            with contextlib.suppress(OSError):  # the disk is full or gone: only this output is lost
                self._write(part)
        os.close(self._source)

    def _write(self, part: bytes) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(part)
            size = file.tell()
        if size > MAX_LOG_BYTES // 2:
            self._file.replace(self._older)


@dataclass
class _Worker:
    """A worker that was started."""

    number: int  # process number
    slot: int  # index of its device on the node
    process: subprocess.Popen[bytes]
    log: Log
    identity: str = ""  # random number of the process
    is_refused: bool = False  # whether the controller has refused it, as it would refuse another worker
    # whether its number belongs to another process, so that a worker with a new number replaces it
    comes_again: bool = False


class Agent:
    """Runs the workers of a node.

    While the controller is away, the workers go on and the agent monitors them.

    Args:
        node: Configuration of the node.
        helper: The controller's process, if this agent has started it.
    """

    def __init__(self, node: Node, say: Callable[[str], None], helper: subprocess.Popen[bytes] | None = None) -> None:
        self._node, self._say, self._helper = node, say, helper
        self._board = node.setting.board()
        # Whether the controller has ever answered; whether the wait, or the leaving, was reported to the user.
        self._has_met = self._waits = False
        self._away_since_s: float | None = None
        self._unsaid: deque[dict[str, Any]] = deque()  # messages that the controller has not received yet
        self._workers: list[_Worker] = []
        self._to_start = list(range(node.workers))
        self._restarts = [node.restarts] * node.workers
        self._codes: list[int] = []
        self._asked = self._to_leave = False
        self._stops = self._has_said = False
        self._begun_s = self._told_s = self._met_s = self._asked_s = 0.0

    def run(self) -> int:
        """Run until the job is over, or no worker is left and no controller runs here; returns the exit code.

        Raises:
            StoreError: The controller does not answer, and no worker is left.
        """
        if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:  # a script may want the node to stay
            signal.signal(signal.SIGTERM, self._ask_to_leave)
        signal.signal(signal.SIGUSR1, self._ask_to_stop)
        self._begun_s = time.monotonic()
        try:
            while self._workers or self._to_start or self._unsaid:
                over = self._meet()
                if over is not None:
                    self._wait_for_ends()
                    self._say(over["how"])
                    return 1 if over["error"] else 0
                self._look_after()
                time.sleep(_POLL_S)
        finally:
            for worker in self._workers:
                end_all(worker.process)
        if self._codes and not any(self._codes):
            self._say("the training is over, and nobody has said so: the controller is away")
            return 0
        self._say("no worker is left on this node")
        code = self._wait_for_controller()
        return int(not self._asked if code is None else code != 0)

    def _wait_for_controller(self) -> int | None:
        """Wait for the controller that this agent has started, which other nodes need; its exit code, None without."""
        if self._helper is None or self._to_leave:
            return None
        if self._helper.poll() is None:
            self._say("the controller goes on here until the job is over")
        while (code := self._helper.poll()) is None and not self._to_leave:
            time.sleep(_POLL_S)
        return code

    def _ask_to_leave(self, *_unused: Any) -> None:
        """SIGTERM: the node leaves at the end of the running iteration or of the next one."""
        self._asked = self._to_leave = True
        self._asked_s = self._asked_s or time.monotonic()

    def _ask_to_stop(self, *_unused: Any) -> None:
        """SIGUSR1: all ranks save and end, if the training was started with ``--exit-signal SIGUSR1``."""
        self._stops = True

    def _meet(self) -> Any:
        """Send pending messages to the controller and follow its orders; its final status if the job is over."""
        now_s, away = time.monotonic(), self._away_since_s
        if now_s - self._met_s < _MEET_S and not self._unsaid and not self._to_start:
            return None
        self._met_s = now_s
        kinds = ("refused", "kill", "gone")
        try:
            keys = [f"{kind}/{worker.number}" for worker in self._workers for kind in kinds]
            over, *found = self._board.read("over", *keys, patience_s=_GLANCE_S)
            while over is None and self._unsaid:
                self._board.post(self._unsaid[0], patience_s=_GLANCE_S)
                self._unsaid.popleft()
            while over is None and self._to_start:
                self._start(self._to_start[0], self._board.count("processes", patience_s=_GLANCE_S))
                self._to_start.pop(0)
            for worker, wants in zip(self._workers, itertools.batched(found, len(kinds)), strict=False):
                self._obey(worker, *wants)
        except TokenError:
            raise
        except StoreError as error:
            self._miss(error)
            return None
        self._has_met, self._away_since_s, self._waits = True, None, False
        if away is not None:
            self._say("the controller answers again")
        return over

    def _miss(self, error: StoreError) -> None:
        """Handle a request that the controller did not answer.

        Raises:
            StoreError: It has never answered, or nothing is left that could go on without it.
        """
        now_s, timeout_s = time.monotonic(), self._node.setting.timeout_s
        code = None if self._helper is None else self._helper.poll()
        away_s = now_s - (self._away_since_s or now_s)
        is_over = not self._workers and bool(self._codes) and not any(self._codes)
        is_over = is_over or (self._to_leave and now_s - self._asked_s > timeout_s)
        if (is_over and away_s > timeout_s) or (self._to_leave and not self._has_met):
            if self._workers and not self._waits:  # once: they take a while to end
                self._waits = True
                self._say(f"the controller has not answered for {away_s:.0f} s: this node leaves without it")
            for worker in self._workers:
                worker.process.kill()
            self._unsaid.clear()
            self._to_start.clear()
        elif not self._has_met:
            if code is not None and code > 0:
                raise StoreError(f"the controller has ended with exit code {code} before the job began; see above")
            if not self._waits and now_s - self._begun_s > _QUIET_S:
                self._waits, setting = True, self._node.setting
                self._say(f"waits up to {timeout_s:g} s for the controller at {setting.host}:{setting.port}")
            if now_s - self._begun_s > timeout_s:
                raise StoreError(f"{error}. Start the controller first, with the same --controller")
        elif self._away_since_s is None:
            self._away_since_s = now_s
            self._say(f"{error}; the workers go on as long as nothing is to be decided")
        elif not self._workers and away_s > timeout_s:
            raise error

    def _start(self, slot: int, number: int) -> None:
        file = self._log(number)
        folder, identity = file.parent, secrets.token_hex(8)
        with contextlib.suppress(OSError):  # a full disk: the log is lost
            folder.mkdir(parents=True, exist_ok=True)
            self._drop_old_logs(folder)
        setting = replace(
            self._node.setting, device=self._node.device(slot), process=number, folder=str(folder), identity=identity
        )
        environment = dict(os.environ)
        where = {"LOCAL_RANK": str(slot), "LOCAL_WORLD_SIZE": str(self._node.workers), SAME_DEVICES: "1"}
        environment.update({ENVIRONMENT: json.dumps(asdict(setting)), "PYTHONUNBUFFERED": "1", **where})
        log = Log(file)
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_het.elastic.worker", *self._node.flags],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log.pipe,
            stderr=subprocess.STDOUT,
            preexec_fn=functools.partial(kill_with, os.getpid()),  # noqa: PLW1509  no lock
            start_new_session=True,  # see end_all
        )
        log.started()
        self._workers.append(_Worker(number, slot, process, log, identity))
        self._say(f"worker {number} started, its log is {file}")

    def _log(self, number: int) -> Path:
        return self._node.folder / f"worker-{number}" / "log.txt"

    def _drop_old_logs(self, new: Path) -> None:
        """Delete all but the newest logs of a device's ended workers: each change may add another one."""
        own = {new, *(self._log(worker.number).parent for worker in self._workers)}
        ended = [folder for folder in self._node.folder.glob("worker-*") if folder not in own]
        for folder in sorted(ended, key=lambda one: one.stat().st_mtime)[: -_KEPT_LOGS * self._node.workers]:
            shutil.rmtree(folder, ignore_errors=True)

    def _look_after(self) -> None:
        name = self._node.setting.node
        if self._stops and time.monotonic() - self._told_s > _TELL_S:  # again and again: a session may have missed it
            self._told_s = time.monotonic()
            for worker in self._workers:
                worker.process.send_signal(signal.SIGUSR1)
        if self._asked:
            self._to_start.clear()
        if self._asked and not self._has_said:
            self._has_said = True
            processes = [worker.number for worker in self._workers]
            self._unsaid.append({"type": "leave", "node": name, "processes": processes})
        for worker in list(self._workers):
            code = worker.process.poll()
            if code is not None:
                end_all(worker.process)
                self._workers.remove(worker)
                self._codes.append(code)
                why = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                why += _last_words(worker.log.ended())
                if code and not (self._asked or worker.is_refused or worker.comes_again):
                    self._say(f"worker {worker.number} {why}")
                self._perhaps_restart(worker, code)
                left = len(self._workers) + len(self._to_start)
                exit_of = {"type": "exit", "process": worker.number, "node": name, "why": why, "left": left}
                self._unsaid.append(exit_of)

    def _obey(self, worker: _Worker, refused: Any, kill: Any, gone: Any) -> None:
        if not (worker.is_refused or worker.comes_again) and _is_meant(worker, refused):
            worker.is_refused, worker.comes_again = not refused["again"], refused["again"]
            self._say(f"worker {worker.number} was refused: {refused['why']}")
            worker.process.kill()
        elif _is_meant(worker, kill):
            worker.process.send_signal(signal.SIGUSR2)  # its threads write their stacks into its log
            time.sleep(_LAST_WORDS_S)
            worker.process.kill()
        elif _is_meant(worker, gone):
            self._asked = self._has_said = True
            worker.process.kill()

    def _perhaps_restart(self, worker: _Worker, code: int) -> None:
        """Start a new worker for one that a signal has ended; one that exited by itself would exit again."""
        if self._asked or worker.is_refused:
            return
        if worker.comes_again:
            self._to_start.append(worker.slot)
        elif code < 0 and self._restarts[worker.slot] > 0:
            self._restarts[worker.slot] -= 1
            self._to_start.append(worker.slot)

    def _wait_for_ends(self) -> None:
        deadline_s = time.monotonic() + _END_S
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline_s - time.monotonic()))
            end_all(worker.process)


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End a worker, if it is running, and all processes that it has started.

    Checkpoint and data processes would wait for ever for a parent that was killed.

    Args:
        process: The worker, started in a session of its own.
    """
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_words(said: bytes) -> str:
    """Returns the last message of megatron_het or of a parser in a worker's output, like a refusal; empty for none."""
    lines = said.decode(errors="replace").splitlines()
    own = [line for line in lines if line.startswith("megatron_het: ") or ": error: " in line]
    return f": {own[-1].removeprefix('megatron_het: ')[:_LONGEST_WORDS]}" if own else ""


def _is_meant(worker: _Worker, document: Any) -> bool:
    """Whether a document about a process number belongs to this worker's process."""
    return document is not None and document["identity"] in ("", worker.identity)
