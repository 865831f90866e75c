"""Training under a plan on one GPU, against one process: ``python -m benchmarks.gpu.ranks --case CASE --json OUT``.

``staged``: three ranks share the GPU, over NCCL by way of sockets; two stages, the second with two replicas;
activations travel by way of host memory.  ``nccl``: one rank, ministages with a parameter window over NCCL.  The
model is the doctor's tiny one.  The figure is the largest relative difference of a loss.  It runs on a CPU as well,
over gloo, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_het.device import SAME_DEVICES
from megatron_het.doctor.numerics import difference
from megatron_het.doctor.tiny import flags_of, one_process, tiny_plan
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.safe_io import amount, check_target, write_json

_LIMIT_S = 150.0
_MODEL = ModelShape(4, 64, 8, 8, 64, ffn_hidden_size=128)
CASES: dict[str, Plan] = {
    "staged": Plan(
        _MODEL,
        TrainingShape(1, 6),
        (
            Stage((2,), (Replica((0,), tuple(range(6))),)),
            Stage((2,), (Replica((1,), (0, 2, 3, 5)), Replica((2,), (1, 4)))),
        ),
    ),
    "nccl": Plan(
        _MODEL,
        TrainingShape(1, 4, distributed_optimizer=True),
        (Stage((2, 2), (Replica((0,), tuple(range(4))),)),),
        ScheduleSpec("ministage", {"window": True}),
    ),
}


def losses(plan: Plan, folder: Path, more: Sequence[str], deadline_s: float) -> list[float]:
    """Losses of a training of the plan, all of its ranks on this machine.

    Args:
        plan: Tiny.
        folder: Of logs and reports; made.
        more: Further flags.
        deadline_s: When a rank that still runs is taken for one that hangs, by ``time.monotonic()``.

    Raises:
        SystemExit: A rank failed or hung; with the end of its log.
    """
    import torch

    from megatron_het.device.flags import platform_flags

    is_cuda = torch.cuda.is_available()
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    machine = [w for flag in platform_flags(is_cuda=is_cuda) for w in flag.words]
    words = [*flags_of(plan, machine), *more, "--het-plan", str(folder / "plan.json"), "--het-report", str(folder)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [_start(rank, plan.world_size, port, words, folder) for rank in range(plan.world_size)]
    try:
        codes: list[int | None] = [
            process.wait(timeout=max(0.0, deadline_s - time.monotonic())) for process in processes
        ]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, code in enumerate(codes):
        if code != 0:
            tail = (folder / f"rank-{rank}.log").read_text(errors="replace").splitlines()[-15:]
            sys.exit(f"rank {rank} " + ("hangs" if code is None else f"ended with {code}") + "\n" + "\n".join(tail))
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(plan.world_size)]
    return [float(loss) for _, loss in next(r["losses"] for r in reversed(reports) if r["losses"])]


def _start(rank: int, world_size: int, port: int, words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    environment: dict[str, Any] = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        SAME_DEVICES: "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "megatron_het.pretrain_gpt", *words]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ranks", description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES), required=True, help="what runs")
    parser.add_argument("--json", required=True, type=Path, help="where to write the figures")
    parser.add_argument(
        "--limit-s", type=amount(1, 3600), default=_LIMIT_S, help="bound on both trainings (default: %(default)g)"
    )
    options = parser.parse_args(arguments)
    check_target(options.json)
    deadline_s = time.monotonic() + options.limit_s
    plan = tiny_plan(CASES[options.case])
    shared = ["--het-transport", "staged"] if options.case == "staged" else []
    with tempfile.TemporaryDirectory(prefix="gpu-ranks-") as folder:
        alone = losses(one_process(plan), Path(folder) / "alone", [], deadline_s)
        together = losses(plan, Path(folder) / "plan", shared, deadline_s)
    write_json(options.json, {"difference": difference(together, alone), "losses": together, "alone": alone})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
