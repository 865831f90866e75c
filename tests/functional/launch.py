"""Starts the ranks of one functional test as local processes, and ends them all in bounded time."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_het.store import free_port
from testing.runner import die_with_parent, end_session

REPOSITORY = Path(__file__).resolve().parents[2]
_POLL_S = 0.05
_TAIL_LINES = 40


class LaunchError(AssertionError):
    """A rank failed or the launch took too long; the message ends with the log of that rank."""


@dataclass(frozen=True)
class Launch:
    """What the ranks of a finished launch left behind."""

    returncodes: tuple[int, ...]  # exit code per rank; negative for a signal
    logs: tuple[Path, ...]  # file with the standard output and error of each rank
    elapsed_s: float  # from the first start to the last end

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")


def rank_environment(rank: int, world_size: int, port: int, folder: Path = REPOSITORY) -> dict[str, str]:
    """The environment of one rank on this machine, on top of the environment of this process."""
    environment = dict(os.environ)
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        PYTHONUNBUFFERED="1",
        PYTHONPATH=os.pathsep.join(filter(None, paths)),
    )
    return environment


def launch(
    world_size: int,
    command: Sequence[str],
    log_dir: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    grace_s: float = 10.0,
    check: bool = True,
    python: str = sys.executable,
    folder: Path = REPOSITORY,
) -> Launch:
    """Run a Python command line once per rank and wait for all of them.

    When a rank fails, the others get ``grace_s`` to stop by themselves; what still runs then, or
    after ``timeout_s``, is killed together with its children.

    Args:
        world_size: Number of ranks.
        command: Arguments of the Python interpreter, such as ``["-m", "package.module", "--flag"]``.
        log_dir: Folder for ``rank-<rank>.log``; created.
        environment: More environment variables, for every rank.
        timeout_s: Bound on the whole launch.
        grace_s: Bound on what follows the first failure.
        check: Whether a rank that fails raises.
        python: The interpreter.
        folder: Where the ranks run and import from.

    Returns:
        Exit codes and logs.

    Raises:
        LaunchError: The launch timed out, or ``check`` and a rank exited with another code than 0.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    logs = tuple(log_dir / f"rank-{rank}.log" for rank in range(world_size))
    port, start_s = free_port(), time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            variables = rank_environment(rank, world_size, port, folder) | dict(environment or {})
            processes.append(_start([python, *command], folder, variables, logs[rank]))
        first_failed = _wait(processes, start_s + timeout_s, grace_s)
    finally:
        unfinished = [rank for rank, process in enumerate(processes) if process.poll() is None]
        for process in processes:
            end_session(process)
    elapsed_s = time.monotonic() - start_s
    done = Launch(tuple(process.returncode for process in processes), logs, elapsed_s)
    if unfinished and first_failed is None:
        raise LaunchError(
            f"ranks {unfinished} still ran after {timeout_s} s and were killed\n" + _tail(done, unfinished[0])
        )
    if check and first_failed is not None:
        raise LaunchError(
            f"rank {first_failed} failed first; exit codes {done.returncodes}\n" + _tail(done, first_failed)
        )
    return done


def _start(command: list[str], folder: Path, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """One rank as leader of a session of its own, which dies with this process."""
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  one prctl, no lock
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline_s: float, grace_s: float) -> int | None:
    """Wait for all processes or a deadline; returns the rank that was seen to fail first."""
    first_failed = None
    while time.monotonic() < deadline_s:
        codes = [process.poll() for process in processes]
        if first_failed is None and any(codes):
            first_failed = next(rank for rank, code in enumerate(codes) if code)
            deadline_s = min(deadline_s, time.monotonic() + grace_s)
        if None not in codes:
            break
        time.sleep(_POLL_S)
    return first_failed


def _tail(done: Launch, rank: int) -> str:
    lines = done.log(rank).splitlines()[-_TAIL_LINES:]
    return "\n".join([f"--- end of {done.logs[rank]} ---", *lines])
