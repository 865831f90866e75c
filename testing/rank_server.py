"""Forks the rank processes of many jobs from one process that has already imported Megatron.

``python -m testing.rank_server`` reads one job per line from standard input and answers with one
line when the job has ended (both JSON; :mod:`testing.runner` is the client).  Importing
torch and Megatron takes seconds, forking takes milliseconds, so a hundred small distributed runs
take minutes instead of an hour.  Ranks are separate operating-system processes, so a job's changes
to Megatron's global state end with it.

The server starts nothing that does not survive a fork: no threads, no process group, no autograd, and with
``--device cuda`` no CUDA, which every rank initialises for itself.
"""

import argparse
import contextlib
import gc
import importlib
import importlib.util
import json
import logging
import multiprocessing.process
import multiprocessing.util
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron_het.store import free_port
from testing.runner import Device, die_with_parent

_POLL_S = 0.01
# Modules that a training imports late.
_LATE_IMPORTS = (
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
    "megatron.core.tokenizers.text.models",
    "megatron_het.plan.run_config",
    "megatron_het.plan.validate",
    "megatron_het.runtime.session",
    "megatron_het.runtime.building",
    "torch.utils.serialization",
)


@dataclass
class Rank:
    """Task of a new forked process."""

    rank: int
    port: int
    job: dict[str, Any]

    def run(self) -> None:
        """Set up session, log file, environment and command line of the rank, then run the entry.

        Returns normally on success; exceptions and SystemExit of the entry are passed on.
        """
        job = self.job
        os.setsid()
        die_with_parent()
        # Like multiprocessing after its own forks, because the server's helper is not this rank's child.
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        self._redirect(Path(job["log_dir"]) / f"rank-{self.rank}.log")
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(job["world_size"]),
            LOCAL_WORLD_SIZE=str(job["world_size"]),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.port),
        )
        os.environ.update(job["environment"])
        _take_device()
        sys.argv = ["megatron_het.pretrain_gpt", *job["argv"]]
        if job["setup"] is not None:
            name, options = job["setup"]
            _resolve(name)(rank=self.rank, **options)
        _resolve(job["entry"])()

    @staticmethod
    def _redirect(log: Path) -> None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
        os.close(nothing)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _resolve(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass
class Running:
    """A job whose ranks have been forked."""

    job: dict[str, Any]
    pids: dict[int, int]
    start_s: float
    deadline_s: float
    codes: dict[int, int] = field(default_factory=dict)
    finish_order: list[int] = field(default_factory=list)
    timed_out: bool = False
    cpu_s: float = 0.0

    def collect(self) -> bool:
        """Note which ranks have ended; returns whether all have."""
        for rank, pid in self.pids.items():
            if rank in self.codes:
                continue
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if found:
                self.cpu_s += usage.ru_utime + usage.ru_stime
                self.codes[rank] = os.waitstatus_to_exitcode(status)
                self.finish_order.append(rank)
                if self.codes[rank]:
                    grace = time.monotonic() + self.job["grace_s"]
                    self.deadline_s = min(self.deadline_s, grace)
        return len(self.codes) == len(self.pids)

    def kill(self) -> None:
        """Kill all ranks and the processes that they have started."""
        for rank, pid in self.pids.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if rank not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def answer(self) -> dict[str, Any]:
        """Answer for the client when the job has ended."""
        return {
            "id": self.job["id"],
            "returncodes": [self.codes[rank] for rank in sorted(self.codes)],
            "finish_order": self.finish_order,
            "timed_out": self.timed_out,
            "elapsed_s": time.monotonic() - self.start_s,
            "cpu_s": self.cpu_s,
        }


class Server:
    """Starts jobs when they arrive and answers when they end; several may run at the same time."""

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._pending = b""
        self._open = True

    def serve(self) -> Rank | None:
        """Loop until standard input and all jobs have ended.

        Returns:
            In a forked process its task; in the server None.
        """
        while self._open or self._running:
            for line in self._lines():
                rank = self._start(json.loads(line))
                if rank is not None:
                    return rank
            self._collect()
        return None

    def _lines(self) -> list[bytes]:
        if not self._open:
            time.sleep(_POLL_S)
            return []
        if not select.select([0], [], [], _POLL_S)[0]:
            return []
        data = os.read(0, 1 << 20)
        if not data:  # the client has gone
            self._open = False
            for running in self._running:
                running.kill()
            return []
        *lines, self._pending = (self._pending + data).split(b"\n")
        return lines

    def _start(self, job: dict[str, Any]) -> Rank | None:
        port = free_port()
        # Two workers of pytest may find the same free port, so one takes even ports and the other odd ones.
        while port % 2 != int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
            port = free_port()
        pids: dict[int, int] = {}
        sys.stdout.flush()
        for rank in range(job["world_size"]):
            pid = os.fork()
            if pid == 0:
                return Rank(rank, port, job)
            pids[rank] = pid
        now = time.monotonic()
        self._running.append(Running(job, pids, now, now + job["timeout_s"]))
        return None

    def _collect(self) -> None:
        for running in list(self._running):
            if running.collect():
                running.kill()  # helper processes of ranks that have ended
                self._running.remove(running)
                sys.stdout.write(json.dumps(running.answer()) + "\n")
                sys.stdout.flush()
            elif time.monotonic() > running.deadline_s:
                running.timed_out = running.timed_out or not any(running.codes.values())
                running.kill()


def _take_device() -> None:
    """Activate this rank's device, which other ranks may share."""
    import torch

    from megatron_het.device import activate, share_devices

    if activate().is_cuda:
        print(share_devices(os.environ, torch.cuda.device_count()), flush=True)


def import_everything(device: Device = "cpu") -> None:
    """Import the modules of all ranks, without starting threads or CUDA.

    Raises:
        SystemExit: An import has initialised CUDA, which would make CUDA unusable in forked processes.
    """
    import torch

    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream
    from megatron_het.elastic.worker import MODULES
    from megatron_het.features import FEATURES

    if device == "cuda":
        platform.pretend(platform.Platform("cuda"))  # only the ranks query devices
        platform.provide_accumulation()
    platform.activate()
    upstream.install("stock")
    runtimes = (feature.runtime for feature in FEATURES if feature.runtime)
    for name in (*MODULES, *runtimes, *filter(_is_there, _LATE_IMPORTS), "testing.probe"):
        importlib.import_module(name)
    # Read the upstream sources, which every start compares, into the cache.
    for patch in upstream.all_patches().values():
        upstream.moved(patch.sources)
    for feature in FEATURES:
        upstream.moved(feature.upstream_names)
    if device == "cuda" and torch.cuda.is_initialized():
        raise SystemExit("an import has started CUDA; forking is not safe")


def _is_there(name: str) -> bool:
    """Whether this release of Megatron has a module."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def remember_docstrings() -> None:
    """Cache the docstrings that Megatron parses from the sources of its configuration classes for every parser.

    The result depends only on the class; parsing takes half of the time of a small run.
    """
    import argparse
    import functools

    from megatron.training import argument_utils
    from megatron.training.arguments import add_megatron_arguments

    factory = argument_utils.ArgumentGroupFactory
    original = factory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(original)
    def get_field_docstrings(self: Any, src_cfg_class: type) -> dict[str, str]:
        if src_cfg_class not in known:
            known[src_cfg_class] = original(self, src_cfg_class)
        return dict(known[src_cfg_class])

    factory._get_field_docstrings = get_field_docstrings
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def share_queue_server() -> None:
    """Serve the result queues of all checkpoint writers from one process.

    Megatron starts a helper process per rank for one queue, in a new interpreter that imports
    torch.  Here every rank still has its own queue, but in one helper of the server.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    manager = multiprocessing.get_context("spawn").Manager()
    queues: list[Any] = []

    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        if not queues:
            queues.append(manager.Queue())
        return queues[0]

    filesystem_async.get_write_results_queue = get_write_results_queue


def main() -> None:
    """Run the server, or in a forked process a rank."""
    parser = argparse.ArgumentParser(prog="python -m testing.rank_server", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what ranks compute on")
    device = parser.parse_args().device
    import_everything(device)
    remember_docstrings()
    share_queue_server()
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    if threads > 1 and device == "cpu":  # with CUDA its libraries start idle threads, which forks do not need
        raise SystemExit(f"an import has started {threads - 1} threads; forking is not safe")
    gc.collect()
    gc.freeze()
    sys.stdout.write(json.dumps({"ready": os.getpid()}) + "\n")
    sys.stdout.flush()
    rank = Server().serve()
    if rank is None:
        return
    _leave(_exit_code(rank.run))


def _exit_code(entry: Callable[[], None]) -> int:
    """Run an entry; returns the exit code that a separate interpreter would have."""
    try:
        entry()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """End a forked process like an interpreter, but without freeing all objects.

    That would touch every imported object, and so copy the memory shared with the server: 0.6 s of
    processor time per rank, a quarter of a small case's.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # ends executors' threads first, then waits for all others
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
