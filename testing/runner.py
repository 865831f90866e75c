"""Runs distributed jobs with a short start: the client of :mod:`testing.rank_server`.

    with Runner() as runner:
        done = runner.run(Job("two ranks", 2, argv, log_dir))

Needs only the standard library.  Jobs run on the CPU over gloo, or with ``Runner("cuda")`` on the GPUs of this machine
over NCCL; several ranks may share a GPU.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

Device = Literal["cpu", "cuda"]
REPOSITORY = Path(__file__).resolve().parents[1]
ENTRY = "megatron_het.pretrain_gpt:main"
_START_S = 600.0  # bound on the server's imports
_TAIL_LINES = 40
_LEAVE_S = 5.0


class JobError(AssertionError):
    """A rank failed or the job took too long; the message ends with that rank's log."""


@dataclass(frozen=True)
class Job:
    """One distributed run."""

    name: str  # name in messages
    world_size: int  # number of ranks
    argv: tuple[str, ...]  # command line of every rank, without the program's name
    log_dir: Path  # folder for ``rank-<rank>.log``; created
    entry: str = ENTRY  # ``module:function`` that every rank calls without arguments
    # ``module:function`` and keyword arguments, called before the entry with ``rank=``
    setup: tuple[str, dict[str, Any]] | None = None
    environment: dict[str, str] = field(default_factory=dict)  # additional environment variables
    timeout_s: float = 300.0  # bound on the whole job
    grace_s: float = 10.0  # bound on the time from the first failure to the end of the job


@dataclass(frozen=True)
class Finished:
    """Result of a job."""

    job: Job
    returncodes: tuple[int, ...]  # exit code per rank; negative for a signal
    finish_order: tuple[int, ...]  # ranks in the order in which they ended
    timed_out: bool  # whether the job was killed before any rank had failed
    elapsed_s: float  # from the forks to the end of the last rank
    cpu_s: float  # processor time of all ranks

    @property
    def succeeded(self) -> bool:
        """Whether all ranks returned 0."""
        return not any(self.returncodes)

    def log(self, rank: int = -1) -> str:
        """Output of a rank; by default of the last one, which logs the training."""
        path = self.job.log_dir / f"rank-{rank % self.job.world_size}.log"
        return path.read_text(errors="replace")

    def check(self) -> Self:
        """Returns this object.

        Raises:
            JobError: A rank failed or the job timed out.
        """
        if self.succeeded:
            return self
        first = next(rank for rank in self.finish_order if self.returncodes[rank])
        what = f"timed out after {self.job.timeout_s} s" if self.timed_out else f"rank {first} failed first"
        tail = "\n".join(self.log(first).splitlines()[-_TAIL_LINES:])
        raise JobError(
            f"{self.job.name}: {what}; exit codes {list(self.returncodes)}\n"
            f"--- end of {self.job.log_dir}/rank-{first}.log ---\n{tail}"
        )


def server_environment(device: Device, outer: Mapping[str, str], *, compiles: bool = False) -> dict[str, str]:
    """Environment of the rank server, and of the ranks that it forks.

    Args:
        device: Device of the ranks.
        outer: Initial variables.
        compiles: Whether ranks on a GPU compile kernels like a training; each rank compiles its own.
    """
    environment = dict(outer)
    environment.update(
        PYTHONPATH=os.pathsep.join(filter(None, [str(REPOSITORY), outer.get("PYTHONPATH", "")])),
        PYTHONWARNINGS="ignore",
        GLOO_SOCKET_IFNAME="lo",
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    )
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # After a fork CUDA works only if the parent has not initialised it, so torch checks for a GPU with NVML.
        # (On a machine without a GPU this variable makes torch report one.)  A worker pool of Inductor prevents forks.
        environment |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment |= {"HET_SAME_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        environment |= {} if compiles else {"TORCHDYNAMO_DISABLE": "1"}
    return environment


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU; does not initialise CUDA, so that the process may fork."""
    return bool(list(Path("/dev").glob("nvidia[0-9]*"))) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") != ""


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``, which refuses ``cuda`` on a machine without a GPU."""

    def device(text: str) -> str:
        if text == "cuda" and not has_gpu():
            raise argparse.ArgumentTypeError("cuda: there is no NVIDIA GPU here; leave --device out to run on the CPU")
        return text

    text = "what ranks compute on; on a GPU over NCCL, several ranks on one (default: %(default)s)"
    parser.add_argument("--device", choices=("cpu", "cuda"), type=device, default="cpu", help=text)


class Runner:
    """Owns one server process; use as a context manager.

    Args:
        device: Device of the ranks.
        has_te: Whether the models of its cases use layers of Transformer Engine.
        compiles: See :func:`server_environment`.
    """

    def __init__(self, device: Device = "cpu", *, has_te: bool = False, compiles: bool = False) -> None:
        self.device, self.has_te = device, has_te
        environment = server_environment(device, os.environ, compiles=compiles)
        self._server = subprocess.Popen(
            [sys.executable, "-m", "testing.rank_server", "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=environment,
        )
        self._pending = b""
        self._unclaimed: dict[int, dict[str, Any]] = {}
        self._is_ready = False
        self._next_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and all running jobs."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()

    def run(self, job: Job, *, check: bool = True) -> Finished:
        """Run one job and wait for it; with ``check`` a failure raises JobError."""
        finished = next(iter(self.run_all([job])))
        return finished.check() if check else finished

    def run_all(self, jobs: Iterable[Job], *, at_once: int = 1) -> Iterator[Finished]:
        """Run jobs, at most ``at_once`` at the same time; yields results in the order in which jobs end."""
        waiting, running = iter(jobs), dict[int, tuple[Job, float]]()
        self._wait_ready()
        exhausted = False
        while running or not exhausted:
            while not exhausted and len(running) < at_once:
                job = next(waiting, None)
                if job is None:
                    exhausted = True
                else:
                    running[self._submit(job)] = job, time.monotonic()
            if not running:
                break
            limit = max(s + j.timeout_s + j.grace_s + 30 for j, s in running.values())
            answer = self._answer_for(running, limit)
            job, _ = running.pop(answer["id"])
            codes, order = tuple(answer["returncodes"]), tuple(answer["finish_order"])
            yield Finished(job, codes, order, answer["timed_out"], answer["elapsed_s"], answer["cpu_s"])

    def _answer_for(self, wanted: Collection[int], limit_s: float) -> dict[str, Any]:
        """The next answer to one of the wanted jobs; answers to other jobs are kept for their callers."""
        while True:
            for identity in wanted:
                if identity in self._unclaimed:
                    return self._unclaimed.pop(identity)
            answer = self._read(limit_s)
            self._unclaimed[answer["id"]] = answer

    def _submit(self, job: Job) -> int:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        self._next_id += 1
        names = ("world_size", "entry", "setup", "environment", "timeout_s", "grace_s")
        line = {name: getattr(job, name) for name in names} | {"id": self._next_id}
        line |= {"argv": [str(word) for word in job.argv], "log_dir": str(job.log_dir.resolve())}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(line).encode() + b"\n")
        self._server.stdin.flush()
        return self._next_id

    def _wait_ready(self) -> None:
        if not self._is_ready:
            answer = self._read(time.monotonic() + _START_S)
            if "ready" not in answer:
                raise JobError(f"unexpected first answer of the rank server: {answer}")
            self._is_ready = True

    def _read(self, limit_s: float) -> dict[str, Any]:
        """The server's next answer; ``limit_s`` is a deadline on the monotonic clock."""
        assert self._server.stdout is not None
        descriptor = self._server.stdout.fileno()
        while b"\n" not in self._pending:
            left_s = limit_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                self._server.kill()
                raise JobError("the rank server does not answer and was killed")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise JobError(f"the rank server ended with exit code {self._server.wait()}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)


def run_in_session(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str], folder: Path = REPOSITORY
) -> int | None:
    """Run a command in a new session, and kill all processes of the session at the end.

    Args:
        command: Words of the command.
        log: File for the output; its folder is created.
        limit_s: Time limit.
        folder: Where it runs.

    Returns:
        The exit code; None after the time limit.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, cwd=folder, env=environment, **streams, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks, which lead sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVE_S)
        return None
    finally:
        end_session(process)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the leader of a session and the processes in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30.0)  # a process that waits for a disk or a device does not end at once


def words(text: str, *more: Sequence[str] | str) -> tuple[str, ...]:
    """A command line from text, split at white space, and further words."""
    found = text.split()
    for part in more:
        found.extend(part.split() if isinstance(part, str) else part)
    return tuple(found)
