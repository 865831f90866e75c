"""Run one training job of the demo: ``torchrun`` over gloo, ranks pinned, progress from its log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.llama.data import DataFiles
from examples.llama.devices import PINNING_VARIABLE, CpuDevice, pinning
from megatron_het.plan import Plan
from tools.planner.emit.flags import ModelOptions, model_arguments, plan_arguments
from tools.planner.profile.command import default_environment, free_port

#: What Megatron needs on a machine without a GPU.
CPU_ARGUMENTS = (
    "--transformer-impl",
    "local",
    "--attention-backend",
    "unfused",
    "--distributed-backend",
    "gloo",
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-rope-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--num-workers",
    "0",
    "--use-cpu-initialization",
)

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|.*?lm loss: ([0-9.E+-]+)")

_ERROR = re.compile(r"^(\[rank\d+\]: )?([\w.]*(Error|Exception)\b|[Ee]rror):? ")


class JobError(RuntimeError):
    """A training job failed; the message ends with the end of its log."""


@dataclass(frozen=True, slots=True)
class Job:
    """One launch.

    Attributes:
        plan: What runs.
        plan_file: Where it is stored.
        devices: Device of every rank.
        data: The data set.
        iterations: Training iterations.
        decay_iterations: Length of the learning-rate schedule, so that short runs do the same work.
        folder: For the log and the ranks' reports.
        evaluate: Evaluate on the validation split at the end.
        timeout_s: The job is ended after this time.
    """

    plan: Plan
    plan_file: Path
    devices: Sequence[CpuDevice]
    data: DataFiles
    iterations: int
    decay_iterations: int
    folder: Path
    evaluate: bool = False
    trace: bool = False
    timeout_s: float = 1800.0


def training_arguments(iterations: int, decay_iterations: int, evaluate: bool) -> list[str]:
    """Flags of the optimization, the same for every plan."""
    return [
        "--train-iters",
        str(iterations),
        "--lr",
        "3e-3",
        "--min-lr",
        "3e-4",
        "--lr-decay-style",
        "cosine",
        "--lr-decay-iters",
        str(decay_iterations),
        "--lr-warmup-iters",
        str(max(1, decay_iterations // 10)),
        "--adam-beta2",
        "0.95",
        "--weight-decay",
        "0.1",
        "--clip-grad",
        "1.0",
        "--init-method-std",
        "0.02",
        "--seed",
        "1234",
        "--eval-iters",
        "4" if evaluate else "0",
        "--eval-interval",
        str(max(1, iterations)),
        "--log-interval",
        "1",
        "--log-throughput",
    ]


def argument_groups(job: Job) -> dict[str, list[str]]:
    """Megatron's flags by purpose, without the plan's own."""
    return {
        "MODEL": model_arguments(job.plan, ModelOptions()),
        "DATA": [*job.data.arguments, "--data-cache-path", str(Path(job.data.train_prefix).parent / "cache")],
        "TRAINING": training_arguments(job.iterations, job.decay_iterations, job.evaluate),
        "PLATFORM": list(CPU_ARGUMENTS),
    }


def run(job: Job, on_loss: Callable[[int, int, float], None] | None = None) -> list[dict[str, Any]]:
    """Train and return the ranks' reports, by rank.

    Args:
        job: What to run.
        on_loss: Called with (iteration, of how many, loss).

    Raises:
        JobError: The job failed or took longer than its limit.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    report = job.folder / "ranks"
    for old in report.glob("rank-*.json"):
        old.unlink()
    words = [w for group in argument_groups(job).values() for w in group]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(job.plan.world_size),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
        "-m",
        "examples.llama.pinned",
        "megatron_het.pretrain_gpt",
        *words,
        *plan_arguments(job.plan),
        "--het-plan",
        str(job.plan_file),
        "--het-report",
        str(report),
    ]
    if job.trace:
        command += ["--het-trace", str(job.folder / "trace")]
    environment = {**default_environment(), PINNING_VARIABLE: pinning(job.devices)}
    log = job.folder / "train.log"
    code = _follow(command, environment, log, job.timeout_s, on_loss)
    if code:
        raise JobError(f"training ended with exit code {code}; from {log}:\n{excerpt(log)}")
    return read_reports(report, job.plan.world_size)


def excerpt(log: Path) -> str:
    """The lines before and at the first error of a log, its end when no line looks like one.

    torchrun appends pages about the processes that it ended after the first failure.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 1)
    return "\n".join(lines[max(0, first - 20) : first + 1])


def read_reports(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """The reports that ``--het-report`` left, by rank.

    Raises:
        JobError: A rank's report is missing.
    """
    reports = []
    for rank in range(world_size):
        path = folder / f"rank-{rank}.json"
        if not path.is_file():
            raise JobError(f"rank {rank} left no report {path}")
        reports.append(json.loads(path.read_text(encoding="utf-8")))
    return reports


def _follow(
    command: Sequence[str],
    environment: dict[str, str],
    log: Path,
    timeout_s: float,
    on_loss: Callable[[int, int, float], None] | None,
) -> int:
    """Run a command, copy its output to a log, report iterations; its exit code."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    timer = threading.Timer(timeout_s, process.terminate)
    timer.start()
    try:
        assert process.stdout is not None
        with log.open("w", encoding="utf-8") as file:
            file.write(" ".join(command) + "\n")
            for line in process.stdout:
                file.write(line)
                match = _ITERATION.search(line)
                if match and on_loss is not None:
                    on_loss(int(match[1]), int(match[2]), float(match[3]))
        return process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
