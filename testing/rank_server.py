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
import functools
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_het.store import free_port
from testing.forked import Forked
from testing.runner import Device

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


def _run_rank(rank: int, port: int, job: dict[str, Any]) -> None:
    """Set up environment and device of a rank, then run the entry of its job."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["world_size"]),
        LOCAL_WORLD_SIZE=str(job["world_size"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.update(job["environment"])
    _take_device()
    sys.argv = ["megatron_het.pretrain_gpt", *job["argv"]]
    if job["setup"] is not None:
        name, options = job["setup"]
        _resolve(name)(rank=rank, **options)
    _resolve(job["entry"])()


def _resolve(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass
class Running:
    """A job whose ranks have been forked."""

    job: dict[str, Any]
    ranks: list[Forked]
    start_s: float
    deadline_s: float
    finish_order: list[int] = field(default_factory=list)
    timed_out: bool = False

    def collect(self) -> bool:
        """Note which ranks have ended; returns whether all have."""
        for number, rank in enumerate(self.ranks):
            if number not in self.finish_order and rank.poll() is not None:
                self.finish_order.append(number)
                if rank.returncode:
                    grace = time.monotonic() + self.job["grace_s"]
                    self.deadline_s = min(self.deadline_s, grace)
        return len(self.finish_order) == len(self.ranks)

    def kill(self) -> None:
        """Kill all ranks and the processes that they have started."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.kill()

    def answer(self) -> dict[str, Any]:
        """Answer for the client when the job has ended."""
        return {
            "id": self.job["id"],
            "returncodes": [rank.returncode for rank in self.ranks],
            "finish_order": self.finish_order,
            "timed_out": self.timed_out,
            "elapsed_s": time.monotonic() - self.start_s,
            "cpu_s": sum(rank.cpu_s for rank in self.ranks),
        }


class Server:
    """Starts jobs when they arrive and answers when they end; several may run at the same time."""

    def __init__(self) -> None:
        self._running: list[Running] = []
        self._pending = b""
        self._open = True

    def serve(self) -> None:
        """Loop until standard input and all jobs have ended."""
        while self._open or self._running:
            for line in self._lines():
                self._start(json.loads(line))
            self._collect()

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

    def _start(self, job: dict[str, Any]) -> None:
        port = free_port()
        # Two workers of pytest may find the same free port, so one takes even ports and the other odd ones.
        while port % 2 != int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2:
            port = free_port()
        ranks = []
        for rank in range(job["world_size"]):
            log = Path(job["log_dir"]) / f"rank-{rank}.log"
            log.unlink(missing_ok=True)  # of an earlier job in this folder
            ranks.append(Forked(functools.partial(_run_rank, rank, port, job), log))
        now = time.monotonic()
        self._running.append(Running(job, ranks, now, now + job["timeout_s"]))

    def _collect(self) -> None:
        for running in list(self._running):
            if running.collect():
                running.kill()  # helper processes of ranks that have ended
                self._running.remove(running)
                sys.stdout.write(json.dumps(running.answer()) + "\n")
                sys.stdout.flush()
            elif time.monotonic() > running.deadline_s:
                running.timed_out = running.timed_out or not any(rank.returncode for rank in running.ranks)
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
    """Run the server."""
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
    Server().serve()


if __name__ == "__main__":
    main()
