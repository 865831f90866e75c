"""A worker: one rank's process.  It imports once, then goes through generations until the job is over."""

import argparse
import ast
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.elastic.copies import Copies
from megatron_het.elastic.job import Board, Generation, problems_under
from megatron_het.elastic.links import Severing
from megatron_het.elastic.sessions import ElasticBoundary, Kept, Outcome, open_links, run_session
from megatron_het.elastic.state import give
from megatron_het.plan import Plan
from megatron_het.store import StoreError

# Warm-up of a worker before it reports that it is ready.
#
# All ranks wait for a newcomer's first session, so everything that it does for the first time in a change would
# lengthen the pause.

MODULES = (
    "megatron.training",
    "megatron.training.argument_utils",
    "megatron.training.inprocess_restart",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.training.datasets.fim_dataset",
    "megatron.training.datasets.sft_dataset",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron_het.gpt_training",
    "megatron_het.arguments.hooks",
    "megatron_het.runtime.training",
    "megatron_het.checkpoint.loading",
    "torch.utils.tensorboard",
)
"""Modules that a session imports at some time; importing them starts nothing."""


_CONFIGURATION = "@dataclass"  # beginning of a configuration class's source


def warm_up() -> None:
    """Import all modules, and read and compare all sources, that every session needs; after ``activate``."""
    from megatron_het import megatron_patches as upstream

    upstream.install("stock")
    for name in MODULES:
        importlib.import_module(name)
    remember_sources()
    for patch in upstream.all_patches().values():
        upstream.moved(patch.sources)
    from megatron.training.arguments import add_megatron_arguments

    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def remember_sources() -> None:
    """Cache the sources of configuration classes, and their syntax trees, for the life of this process.

    Megatron makes the help of its flags from the sources of its configuration classes whenever it parses a
    command line, and to find one it parses the whole file.
    """
    if hasattr(inspect.getsource, "cache_info"):
        return
    found: Any = functools.cache(inspect.getsource)
    inspect.getsource = found
    parse, trees = ast.parse, dict[str, ast.Module]()

    @functools.wraps(parse)
    def parse_once(source: Any, *positional: Any, **keywords: Any) -> Any:
        """Returns a cached tree; it can be shared, because Megatron only reads it."""
        if positional or keywords or not isinstance(source, str) or not source.startswith(_CONFIGURATION):
            return parse(source, *positional, **keywords)
        if source not in trees:
            trees[source] = parse(source)
        return trees[source]

    ast.parse = parse_once


_POLL_S, _SHORTEST_POLL_S = 0.02, 0.002
_SHARE = 0.1
"""Interval of polls as a share of the time waited so far, because the next generation mostly comes at once."""
_BEAT_S = 0.5
_LOOK_S = 0.1
_LISTEN_S = 1.0
_AGREE_S, _AWAY_S = 2.0, 5.0
_TELL_S = 2.0
ENVIRONMENT = "HET_ELASTIC_WORKER"


@dataclass(frozen=True)
class Setting:
    """Configuration of a worker, from its agent."""

    host: str
    port: int
    token: str
    process: int
    node: str
    device: str
    folder: str  # folder for its own files
    copy_every: int | None  # see :class:`Copies`
    timeout_s: float  # bound on every wait of a change
    signature: str  # must be equal on all workers of a job (``job.signature_of``)
    workers: int = 1
    # random number of this process: with an outdated file a controller may give a process number twice
    identity: str = ""
    address_file: str = ""  # file with the controller's address; empty for none
    tls_ca: str = ""  # file with the authority of the controller's certificate; empty for none
    away_s: float = 1800.0  # how long a worker that needs a decision waits for a controller that does not answer

    def board(self) -> Board:
        """The job's board; raises StoreError if the file of the authority cannot be used."""
        return Board(
            self.host,
            self.port,
            self.token,
            patience_s=self.timeout_s,
            address_file=Path(self.address_file) if self.address_file else None,
            tls_ca=Path(self.tls_ca) if self.tls_ca else None,
        )


class Worker:
    """Trains in one generation after the other.

    Args:
        flags: Flags of the training, without a plan.
        entry: Runs the training.
    """

    def __init__(self, setting: Setting, flags: list[str], entry: Callable[[ElasticBoundary], None]) -> None:
        self._setting, self._flags, self._entry = setting, flags, entry
        self._board = setting.board()
        self._copies = Copies(setting.copy_every)
        self._severing = Severing(setting.host, setting.port)
        self._datasets: Kept = {}
        self._iteration = 0
        self._ended: dict[str, Any] | None = None
        self._generation: Generation | None = None
        self._outbox: deque[dict[str, Any]] = deque()
        self._checked: set[str] = set()
        self._told_left = -1
        self._padded_vocab_size: int | None = None

    def run(self) -> int:
        """Run until the job is over; returns the exit code.

        Raises:
            StoreError: The controller does not answer, and a decision is needed.
        """
        self._board.post({"type": "ready", **self._about()})
        threading.Thread(target=self._beat, daemon=True).start()
        number = -1
        while (generation := self._next(number)) is not None:
            number = generation.number
            self._generation = generation
            with self._severing.during(generation.lost_key):
                self._take_part(generation)
        return 0

    def _about(self) -> dict[str, Any]:
        """Returns the description of this process for the controller."""
        names = ("process", "node", "device", "workers", "signature", "identity")
        return {name: getattr(self._setting, name) for name in names}

    def _next(self, after: int) -> Generation | None:
        """Wait for the generation after number ``after``; None if the job is over."""
        start_s = time.monotonic()
        is_done = self._ended is not None and self._ended["how"] == "finished"
        patience_s = self._setting.timeout_s if is_done else self._setting.away_s
        while True:
            try:
                keys = ("over", "latest", f"check/{self._setting.process}")
                over, latest, check = self._board.read(*keys, patience_s=patience_s)
                if over is not None:
                    return None
                if check is not None and check["id"] not in self._checked:
                    self._check(check)
                if latest is not None and latest > after:
                    return Generation.from_json(self._board.get(f"{latest}/generation", patience_s=patience_s))
            except StoreError as error:
                if is_done:  # no decision of the controller is needed
                    _say(f"the training is over, and nobody hears of it: {error}")
                    return None
                raise
            time.sleep(min(max(_SHORTEST_POLL_S, _SHARE * (time.monotonic() - start_s)), _POLL_S))

    def _check(self, asked: dict[str, Any]) -> None:
        """Report whether the training's flags are valid under a plan, before other ranks leave their session for it."""
        self._checked.add(asked["id"])
        answer = problems_under(Plan.from_json(asked["plan"]), self._flags, Path(self._setting.folder))

        def tell() -> None:
            self._outbox.append({"type": "checked", "id": asked["id"], "problems": answer()})

        threading.Thread(target=tell, name="check of a plan", daemon=True).start()

    def _take_part(self, generation: Generation) -> None:
        process = self._setting.process
        news = News(self._board, generation, process, self._severing.cut)
        threading.Thread(target=news.listen, name=f"news of {generation.number}", daemon=True).start()
        try:
            if process in generation.ranks:
                outcome, boundary = self._train(generation, news)
                if outcome.snapshot is not None:
                    self._copies.add(outcome.snapshot)
                if outcome.how != "left" or self._told_left != generation.number:
                    self._tell_ended(boundary, outcome)
            elif process in generation.movers:
                with suppress(RuntimeError):  # the next generation tries again with the copies still held here
                    links = open_links(generation, process, self._board, self._setting.timeout_s)
                    give(links, self._copies.snapshots)
                    links.close()
        finally:
            news.is_over = True

    def _tell_ended(self, boundary: ElasticBoundary, outcome: Outcome) -> None:
        self._ended = {
            "type": "ended",
            "process": self._setting.process,
            "generation": boundary.generation.number,
            "how": outcome.how,
            "error": outcome.error[-2000:],
            "unsaved": outcome.unsaved,
            "refused": outcome.is_refused,
            # Megatron ends only after an iteration, which no boundary follows.
            "iteration": 0 if boundary.iteration is None else boundary.iteration + (outcome.how == "finished"),
        }
        with suppress(StoreError):  # heartbeats repeat it
            self._board.post(self._ended, patience_s=_TELL_S)

    def _train(self, generation: Generation, news: "News") -> tuple[Outcome, ElasticBoundary]:
        setting = self._setting
        boundary = ElasticBoundary(
            generation=generation,
            process=setting.process,
            job_store=self._board,
            timeout_s=setting.timeout_s,
            copies=self._copies,
            leaves_at=news.leaves_at,
            padded_vocab_size=self._padded_vocab_size
            or self._board.get("padded_vocab_size", patience_s=setting.away_s),
            datasets=self._datasets,
        )
        news.opened = lambda: self._opened(boundary)

        def leaves() -> None:
            """Report the end before the session is torn down, so that the next generation can begin meanwhile."""
            self._tell_ended(boundary, Outcome("left"))
            self._told_left = generation.number

        boundary.leaving = leaves
        boundary.has_aborted = self._severing.has_aborted
        try:
            outcome = run_session(boundary, self._flags, Path(setting.folder), self._entry)
        finally:
            self._padded_vocab_size = boundary.padded_vocab_size
        return outcome, boundary

    def _opened(self, boundary: ElasticBoundary) -> None:
        """Note progress at every boundary; after the first iteration report the times of the phases."""
        self._iteration = boundary.iteration or 0
        if boundary.drift is not None:
            self._outbox.append(
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
            self._outbox.append(
                {
                    "type": "opened",
                    "process": self._setting.process,
                    "generation": boundary.generation.number,
                    "iteration": boundary.began or 0,
                    "last": self._iteration + boundary.iterations_left,
                    "sent_bytes": restored.sent_bytes if restored else 0,
                    "times": dict(boundary.times),
                    "padded_vocab_size": boundary.padded_vocab_size,
                }
            )

    def _beat(self) -> None:
        """Runs on a thread: send heartbeats and the training's messages, so that training need not wait for it."""
        beats = 0
        while True:
            beats += 1
            with suppress(StoreError):
                self._give_sign(beats)
            time.sleep(_BEAT_S)

    def _give_sign(self, beats: int) -> None:
        generation = self._generation
        # The end of the last session is repeated: a controller that dies may not have read the message.
        sign = {"beats": beats, "iteration": self._iteration, "ended": self._ended, **self._about()}
        sign["rates"] = self._copies.pace.rates
        self._board.put(f"beat/{self._setting.process}", sign, patience_s=_BEAT_S)
        while self._outbox:
            self._board.post(self._outbox[0], patience_s=_BEAT_S)
            self._outbox.popleft()
        latest = self._board.get("latest", patience_s=_BEAT_S)
        if generation is not None and (latest is None or latest < generation.number):
            # The controller has restarted with an outdated file.
            self._board.post({"type": "newer", "generation": generation.to_json()}, patience_s=_BEAT_S)


class News:
    """Polls the controller's orders for a generation on a thread, so that training never waits for the controller.

    Every rank acknowledges a wanted change.  Once all have, the first rank writes at a boundary that all ranks leave at
    the next one.  No rank can reach that boundary without the first rank's part in the iteration between, and all
    ranks read the board there.  So all ranks leave at the same boundary.

    Args:
        board: The job's board.
        lost: Called repeatedly with the generation's key once one of its processes is lost.
    """

    def __init__(self, board: Board, generation: Generation, process: int, lost: Callable[[str], Any]) -> None:
        self._board, self._generation, self._process, self._lost = board, generation, process, lost
        self._is_first = generation.ranks[:1] == (process,)
        self._knows = self._all_know = False
        self._away_until_s = 0.0
        self.is_over = False
        """End the thread soon, after the end of the session."""
        self.opened: Callable[[], Any] = lambda: None

    def listen(self) -> None:
        """Poll until the session is over; runs on a thread."""
        while not self.is_over:
            try:
                is_lost = self._hear() == "lost"
            except StoreError:
                is_lost = False
                time.sleep(_LOOK_S)
            if is_lost:
                self._lost(self._generation.lost_key)
                time.sleep(_LOOK_S)

    def _hear(self) -> str:
        number, lost = self._generation.number, [self._generation.lost_key]
        if not self._knows:
            found = self._board.wait([f"{number}/wanted"], lost, _LISTEN_S)
            self._knows = found == "there"
        elif self._is_first and not self._all_know:
            found = self._board.wait([f"{number}/knows/{rank}" for rank in self._generation.ranks], lost, _LISTEN_S)
            self._all_know = found == "there"
        else:
            found = "lost" if self._board.wait(lost, [], _LISTEN_S) == "there" else "late"
        if self._knows and found != "lost":  # repeated, because the controller may have been restarted
            self._board.put(f"{number}/knows/{self._process}", True, patience_s=_LISTEN_S)
        return found

    def leaves_at(self, iteration: int) -> bool:
        """Whether all ranks leave at a boundary; equal on all ranks, and False while the controller is away."""
        self.opened()
        if not self._knows or time.monotonic() < self._away_until_s:
            return False
        try:
            stop = self._board.get(self._stop, patience_s=_AGREE_S)
            if stop is None and self._is_first and self._all_know:
                self._board.put(self._stop, iteration + 1, patience_s=_AGREE_S)
            return stop is not None and iteration >= stop
        except StoreError:
            self._away_until_s = time.monotonic() + _AWAY_S
            return False

    @property
    def _stop(self) -> str:
        return f"{self._generation.number}/stop"


def main() -> None:
    """Run the worker process that an agent starts."""
    import sys

    faulthandler.enable()  # writes the stacks of all threads to the log if a signal ends this process
    faulthandler.register(signal.SIGUSR2)  # the agent sends it before it kills this process
    for notice in (signal.SIGTERM, signal.SIGUSR1):  # Slurm signals all processes of a step; the agent acts on it
        signal.signal(notice, lambda *_: None)  # not SIG_IGN, which child processes inherit
    setting = Setting(**json.loads(os.environ.pop(ENVIRONMENT)))
    # By default torch ends a process whose communicator has failed.  Before that its watchdog sleeps for four times the
    # last of these, a minute, so that all ranks can dump their state; destroying the group waits for the watchdog.
    # Here communicators are aborted, and the process goes on.
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
    from megatron_het import device as platform
    from megatron_het import gpt_training
    from megatron_het.arguments import hooks
    from megatron_het.auto_batch.measure import measured_config

    platform.activate()
    warm_up()  # takes seconds, so it is done before the worker reports that it is ready
    gc.collect()
    gc.freeze()  # garbage collections at the end of sessions skip the imported objects
    code = 1
    try:
        install = functools.partial(hooks.install, measure=measured_config)
        train = functools.partial(gpt_training.main, install=install)
        code = Worker(setting, sys.argv[1:], train).run()
    except StoreError as error:
        _say(str(error))
    sys.stdout.flush()
    os._exit(code)  # threads may wait in the store


def _say(line: str) -> None:
    """Print a line to the worker's log that its agent shows, too."""
    print(f"megatron_het: {line}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
