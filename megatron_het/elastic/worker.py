"""A worker: one rank's process.  It imports once, then goes through generations until the job is over."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_het.elastic.board import Board, BoardError
from megatron_het.elastic.boundary import ElasticBoundary, open_links
from megatron_het.elastic.copies import Copies
from megatron_het.elastic.datasets import Kept
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.sessions import Outcome, run_session
from megatron_het.elastic.severing import Severing
from megatron_het.elastic.state import give
from megatron_het.elastic.warm import warm_up

_POLL_S, _SHORTEST_POLL_S = 0.02, 0.002
_SHARE = 0.1
"""A poll comes after this share of the time that was waited so far: the next generation mostly comes at once."""
_BEAT_S = 0.5
_LOOK_S = 0.1
_AWAY_S = 5.0
ENVIRONMENT = "HET_ELASTIC_WORKER"


@dataclass(frozen=True)
class Setting:
    """What an agent tells a worker that it starts.

    Attributes:
        host, port: Of the controller.
        token: Of the job.
        process: This process's number.
        node: Name of the node.
        device: Kind of the device.
        folder: For files of its own.
        copy_every: See :class:`Copies`.
        timeout_s: Bound on every wait of a change.
        signature: What all workers of a job must have in common.
        workers: Of the node.
    """

    host: str
    port: int
    token: str
    process: int
    node: str
    device: str
    folder: str
    copy_every: int | None
    timeout_s: float
    signature: str
    workers: int = 1

    def to_text(self) -> str:
        """For an environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Setting:
        """What :meth:`to_text` wrote."""
        return Setting(**json.loads(text))


class Worker:
    """Goes through generations.

    Args:
        setting: From the agent.
        flags: Of the training, without a plan.
        entry: Runs the training.
    """

    def __init__(self, setting: Setting, flags: list[str], entry: Callable[[ElasticBoundary], None]) -> None:
        self._setting, self._flags, self._entry = setting, flags, entry
        self._board = self._connect(setting.timeout_s)
        self._copies = Copies(setting.copy_every)
        self._severing = Severing(setting.host, setting.port)
        self._datasets: Kept = {}
        self._iteration = 0
        self._ended: dict[str, Any] | None = None
        self._told_left = -1
        self._padded_vocab_size: int | None = None

    def _connect(self, patience_s: float) -> Board:
        setting = self._setting
        return Board(setting.host, setting.port, setting.token, patience_s=patience_s)

    def run(self) -> int:
        """Until the job is over; returns the exit code."""
        setting = self._setting
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._look_out, daemon=True).start()
        about = {"process": setting.process, "node": setting.node, "device": setting.device, "workers": setting.workers}
        self._board.post({"type": "ready", **about, "signature": setting.signature})
        number = -1
        while (generation := self._next(number)) is not None:
            number = generation.number
            with self._severing.during(generation.lost_key):
                self._take_part(generation)
        return 0

    def _next(self, after: int) -> Generation | None:
        """Wait for the generation after a number; None when the job is over."""
        start_s = time.monotonic()
        while True:
            if self._board.has("over"):
                return None
            latest = self._board.get("latest")
            if latest is not None and latest > after:
                return Generation.from_json(self._board.get(f"{latest}/generation"))
            time.sleep(min(max(_SHORTEST_POLL_S, _SHARE * (time.monotonic() - start_s)), _POLL_S))

    def _take_part(self, generation: Generation) -> None:
        process = self._setting.process
        if process in generation.ranks:
            outcome, boundary = self._train(generation)
            if outcome.snapshot is not None:
                self._copies.add(outcome.snapshot)
            if outcome.how != "left" or self._told_left != generation.number:
                self._tell_ended(boundary, outcome)
        elif process in generation.movers:
            try:
                links = open_links(generation, process, self._board.store, self._setting.timeout_s)
                give(links, self._copies.snapshots)
                links.close()
            except RuntimeError:
                return  # a member has gone: the next generation tries again, with what is still held here

    def _tell_ended(self, boundary: ElasticBoundary, outcome: Outcome) -> None:
        self._ended = {
            "type": "ended",
            "process": self._setting.process,
            "generation": boundary.generation.number,
            "how": outcome.how,
            "error": outcome.error[-2000:],
            "unsaved": outcome.unsaved,
            "iteration": boundary.iteration or 0,
        }
        self._board.post(self._ended)

    def _leaves(self, boundary: ElasticBoundary) -> None:
        """Say so before the session is taken down: the next one is written and newcomers build meanwhile."""
        with suppress(BoardError):
            self._tell_ended(boundary, Outcome("left"))
            self._told_left = boundary.generation.number

    def _train(self, generation: Generation) -> tuple[Outcome, ElasticBoundary]:
        setting = self._setting
        vocabulary = self._padded_vocab_size or self._board.get("padded_vocab_size")
        watch = _Watch(self._connect, generation, generation.ranks.index(setting.process) == 0)
        boundary = ElasticBoundary(
            generation,
            setting.process,
            self._board.store,
            setting.timeout_s,
            self._copies,
            watch.leaves_at,
            vocabulary,
            self._datasets,
        )
        watch.opened = lambda: self._opened(boundary)
        boundary.leaving = lambda: self._leaves(boundary)
        try:
            outcome = run_session(boundary, self._flags, Path(setting.folder), self._entry)
        finally:
            self._padded_vocab_size = boundary.padded_vocab_size
        return outcome, boundary

    def _opened(self, boundary: ElasticBoundary) -> None:
        """At every boundary: note progress; after the first iteration say how long the phases took."""
        self._iteration = boundary.iteration or 0
        if boundary.drift is not None:
            self._board.post(
                {
                    "type": "drift",
                    "generation": boundary.generation.number,
                    "measured": boundary.drift,
                    "last": self._iteration + boundary.iterations_left,
                }
            )
            boundary.drift = None
        if "first_step" in boundary.times and "told" not in boundary.times:
            boundary.times["told"] = time.time()
            restored = boundary.restored
            self._board.post(
                {
                    "type": "opened",
                    "process": self._setting.process,
                    "generation": boundary.generation.number,
                    "iteration": boundary.began or 0,
                    "last": self._iteration + boundary.iterations_left,
                    "sent_bytes": restored.sent_bytes if restored else 0,
                    "times": boundary.times,
                    "padded_vocab_size": boundary.padded_vocab_size,
                }
            )

    def _beat(self) -> None:
        """On a thread: a sign of life, over a connection of its own."""
        beats = 0
        board = None
        while True:
            beats += 1
            try:
                board = board or self._connect(1.0)
                # How the last session ended is said again: a controller that dies has not read all that was posted.
                sign = {"beats": beats, "iteration": self._iteration, "ended": self._ended}
                board.put(f"beat/{self._setting.process}", sign)
            except BoardError:
                board = None
            time.sleep(_BEAT_S)

    def _look_out(self) -> None:
        """On a thread: leave the waits of a generation once one of its processes is lost."""
        board = None
        while True:
            try:
                key = self._severing.key
                if key is not None:
                    board = board or self._connect(1.0)
                    if board.has(key):
                        self._severing.cut(key)
            except BoardError:
                board = None
            time.sleep(_LOOK_S)


class _Watch:
    """Whether all ranks of a generation leave at a boundary.

    The first rank sees at a boundary that a change is wanted, and writes down that everybody leaves at the next one.
    No rank gets there without the first rank's part in the iteration between, so each of them finds it written.
    """

    def __init__(self, connect: Callable[[float], Board], generation: Generation, is_first: bool) -> None:
        self._connect, self._number, self._is_first = connect, generation.number, is_first
        self._board: Board | None = None
        self._away_until_s = 0.0
        self.opened: Callable[[], Any] = lambda: None

    def leaves_at(self, iteration: int) -> bool:
        """The same answer on all ranks; False while the controller is away."""
        if time.monotonic() < self._away_until_s:
            return False
        try:
            self.opened()
            if self._board is None:
                self._board = self._connect(0.0)
            if self._is_first and self._board.has(f"{self._number}/wanted") and not self._board.has(self._stop):
                self._board.put(self._stop, iteration + 1)
            stop = self._board.get(self._stop)
            return stop is not None and iteration >= stop
        except BoardError:
            self._board, self._away_until_s = None, time.monotonic() + _AWAY_S
            return False

    @property
    def _stop(self) -> str:
        return f"{self._number}/stop"


def main() -> None:
    """The process that an agent starts."""
    import sys

    for notice in (signal.SIGTERM, signal.SIGUSR1):  # Slurm signals all processes of a step; the agent acts on it
        signal.signal(notice, _leave_to_agent)
    setting = Setting.from_text(os.environ.pop(ENVIRONMENT))
    from megatron_het import platform
    from megatron_het.pretrain_gpt import main as train

    platform.activate()
    warm_up()  # what takes seconds is done before the worker says that it is ready
    gc.collect()
    gc.freeze()  # sessions are collected when they end; what was imported is not looked through each time
    code = 1
    with suppress(BoardError):
        code = Worker(setting, sys.argv[1:], train).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may wait in the store


def _leave_to_agent(*_unused: Any) -> None:
    """A handler, because a signal that is ignored would be ignored by processes that this one starts as well."""


if __name__ == "__main__":
    main()
