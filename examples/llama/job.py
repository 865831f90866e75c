"""Runs the files of ``emit`` on this machine: one launch script per device, as if each were a node."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.llama.devices import PINNING_VARIABLE, CpuDevice
from examples.llama.pinned import SLOWED_VARIABLE
from megatron_het.plan import Plan
from megatron_het.store import free_port
from tools.planner.inputs.model import Model
from tools.planner.profile.settings import default_environment

#: What Megatron needs on a machine without a GPU.
CPU_ARGUMENTS = shlex.split(
    "--transformer-impl local --attention-backend unfused --distributed-backend gloo --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --num-workers 0 --use-cpu-initialization"
)

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|.*?lm loss: ([0-9.E+-]+)")

_ERROR = re.compile(r"^(\[rank\d+\]: )?([\w.]*(Error|Exception)\b|[Ee]rror):? ")

_POLL_S = 0.2

_INTERPRETER = """\
#!/bin/bash
# The interpreter of one of the demo's nodes: its ranks keep to a core, and are slowed where the node is a slow one.
export PYTHONPATH={repository}${{PYTHONPATH:+:$PYTHONPATH}}
[[ "$2" == torch.distributed.run ]] && exec {python} "$@"
exec {python} -m examples.llama.pinned "${{@:2}}"
"""


class JobError(RuntimeError):
    """A training job failed; the message ends with the end of its log."""


def model_of(plan: Plan, **changes: Any) -> Model:
    """Returns the model of a plan; fields that a plan does not have get the defaults of model files."""
    given = {name: value for name, value in dataclasses.asdict(plan.model).items() if value is not None} | changes
    return Model(global_batch_size=plan.training.global_batch_size, **{"ffn_hidden_size": 4, "vocab_size": 256} | given)


def machine_arguments(is_cuda: bool) -> list[str]:
    """Returns the flags of Megatron that this machine needs.

    Args:
        is_cuda: Whether the ranks compute on GPUs.
    """
    if not is_cuda:
        return CPU_ARGUMENTS
    from megatron_het.device import platform_flags

    return [word for flag in platform_flags(is_cuda=True) for word in flag.words]


def training_arguments(iterations: int, decay_iterations: int) -> list[str]:
    """Returns the flags of the optimization, the same for every plan."""
    return (
        f"--train-iters {iterations} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
        f"--lr-decay-iters {decay_iterations} --lr-warmup-iters {max(1, decay_iterations // 10)} "
        "--adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --init-method-std 0.02 --seed 1234 "
        f"--eval-iters 0 --eval-interval {max(1, iterations)} --log-interval 1 --log-throughput"
    ).split()


def write_interpreter(folder: Path) -> Path:
    """Write the program that replaces ``python`` on the nodes of the demo."""
    path = folder / "python"
    repository, python = shlex.quote(str(Path(__file__).resolve().parents[2])), shlex.quote(sys.executable)
    path.write_text(_INTERPRETER.format(repository=repository, python=python), encoding="utf-8")
    path.chmod(0o755)
    return path


def gpus_here() -> int:
    """Returns the number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpu_environment(node: int, nodes: int, gpus: int) -> dict[str, str]:
    """Returns the variables that choose the GPU of a simulated node; none without GPUs.

    Args:
        node: Its number.
        nodes: How many there are.
        gpus: Of this machine.  Nodes that share one need a host name of their own each, or NCCL refuses them.
    """
    if not gpus:
        return {}
    found = {"CUDA_VISIBLE_DEVICES": str(node % gpus)}
    if gpus < nodes:
        found |= {"NCCL_HOSTID": f"demo-{node}", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2"}
        found |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return found


def environments(devices: Sequence[CpuDevice], gpus: int = 0) -> list[dict[str, str]]:
    """Returns the environment of every device's processes: core, speed, GPU.

    Args:
        devices: In the order of their nodes.
        gpus: Of this machine.
    """
    found = []
    for node, device in enumerate(devices):
        own = {PINNING_VARIABLE: str(device.core)}
        if device.running < 1:
            own[SLOWED_VARIABLE] = f"0:{device.running:g}"
        own |= gpu_environment(node, len(devices), gpus)
        found.append(own)
    return found


def train(
    run: Path,
    environment: Sequence[Mapping[str, str]],
    timeout_s: float = 1800.0,
    on_loss: Callable[[int, int, float], None] | None = None,
) -> list[dict[str, Any]]:
    """Start the launch script of every node, and wait for all of them.

    Args:
        run: The folder that ``emit`` wrote.
        environment: Of every node, as :func:`environments` gives it.
        timeout_s: The job is ended after this time.
        on_loss: Called with (iteration, of how many, loss).

    Returns:
        The ranks' reports, by rank; ``--het-report`` wrote them.

    Raises:
        JobError: The job failed or took longer than its limit.
    """
    scripts = [["bash", str(run / f"torchrun-node-{node}.sh")] for node in range(len(environment))]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    start(scripts, [{**meeting, **own} for own in environment], run / "logs", timeout_s, on_loss)
    return read_reports(run / "ranks", len(environment))


def start(
    commands: Sequence[Sequence[str]],
    environment: Sequence[Mapping[str, str]],
    logs: Path,
    timeout_s: float,
    on_loss: Callable[[int, int, float], None] | None = None,
) -> None:
    """Run commands side by side, their output in files of a folder; when one fails, all end.

    Raises:
        JobError: One of them failed, or they took longer than their limit.
    """
    logs.mkdir(parents=True, exist_ok=True)
    files = [logs / f"node-{node}.log" for node in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    deadline_s, shown = time.monotonic() + timeout_s, 0
    try:
        for command, own, file in zip(commands, environment, files, strict=True):
            with file.open("wb") as log:
                whole = {**default_environment(), **own}
                processes.append(subprocess.Popen(command, env=whole, stdout=log, stderr=subprocess.STDOUT))
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > deadline_s:
                raise JobError(f"the job did not end within {timeout_s:g} s; its logs are in {logs}")
            if on_loss is not None:
                shown = _show(files, shown, on_loss)
            time.sleep(_POLL_S)
        if failed := [node for node, process in enumerate(processes) if process.poll()]:
            log_file = files[failed[0]]
            code = processes[failed[0]].returncode
            raise JobError(f"node {failed[0]} ended with exit code {code}; from {log_file}:\n{excerpt(log_file)}")
        if on_loss is not None:
            _show(files, shown, on_loss)
    finally:
        _end(processes)


def _show(files: Sequence[Path], shown: int, on_loss: Callable[[int, int, float], None]) -> int:
    """Report iterations after ``shown``; the last rank logs them, on any node."""
    for file in files:
        for match in _ITERATION.finditer(file.read_text(encoding="utf-8", errors="replace")):
            if int(match[1]) > shown:
                shown = int(match[1])
                on_loss(shown, int(match[2]), float(match[3]))
    return shown


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes that still run; torchrun ends its workers on SIGTERM."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def excerpt(log: Path) -> str:
    """Returns the lines up to the first error of a log, or its end if no line looks like an error.

    torchrun appends pages about the processes that it ended after the first failure.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 1)
    return "\n".join(lines[max(0, first - 20) : first + 1])


def read_reports(folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Returns the reports that ``--het-report`` wrote, by rank.

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
