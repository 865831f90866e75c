"""What offloading costs on a GPU: ministages with shards in host memory against the same without.

``python -m benchmarks.gpu.offload --json OUT``: layers of a 7B model (hidden size 4096) in four
ministages on one GPU, bf16, recompute per layer.  Variants alternate, each in a process of its own:
nothing offloaded, parameters, parameters and activations, and the optimizer's state besides.  Figures: time of an
iteration relative to nothing offloaded (``max_slowdown``, over parameters and activations; at most 0.03
wanted) and peak bytes of the device.  Without a CUDA device it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan

HIDDEN, FFN, HEADS, VOCABULARY = 4096, 11008, 32, 32000
MINISTAGES, LAYERS_PER_MINISTAGE = 4, 2
BAR, _WARMUP, _TIMEOUT_S = 0.03, 3, 1200
PARAMETERS = {"offload": True}
ACTIVATIONS = {"offload_activations": 1.0}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "nothing": {},
    "parameters": PARAMETERS,
    "parameters and activations": {**PARAMETERS, **ACTIVATIONS},
    "and optimizer state": {**PARAMETERS, **ACTIVATIONS, "offload_optimizer": True},
}
JUDGED = ("parameters", "parameters and activations")


def plan_of(options: Mapping[str, Any], tokens: int, microbatches: int) -> Plan:
    """One stage of one replica."""
    layers = (LAYERS_PER_MINISTAGE,) * MINISTAGES
    return Plan(
        ModelShape(sum(layers), HIDDEN, HEADS, HEADS, tokens, FFN),
        TrainingShape(
            1, microbatches, precision="bf16", recompute="full", distributed_optimizer=True
        ),
        (Stage(layers, (Replica((0,), tuple(range(microbatches))),)),),
        ScheduleSpec("ministage", {"window": True, **options}),
    )


def arguments(plan: Plan, iterations: int) -> list[str]:
    """Megatron's flags for a plan on this machine."""
    from megatron_het.platform.flags import platform_flags

    tokens = plan.model.seq_length
    flags = f"""
        --num-layers {plan.model.num_layers} --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
        --num-attention-heads {HEADS} --seq-length {tokens} --max-position-embeddings {tokens}
        --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --mock-data --split 90,10,0
        --micro-batch-size 1 --global-batch-size {plan.num_microbatches} --bf16
        --calculate-per-token-loss --clip-grad 1.0 --train-iters {iterations} --lr 1e-4
        --eval-iters 0 --eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 5
        --dist-ckpt-optim-fully-reshardable
        """.split()
    return flags + [word for flag in platform_flags(is_cuda=True) for word in flag.words]


def run(name: str, plan: Plan, folder: Path, iterations: int) -> dict[str, float]:
    """One training in a process of its own.

    Raises:
        SystemExit: It failed; with the end of its log.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "megatron_het.pretrain_gpt", *arguments(plan, _WARMUP + iterations),
               "--het-plan", str(folder / "plan.json"), "--het-report", str(folder)]  # fmt: skip
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        tail = "\n".join((folder / "log").read_text(errors="replace").splitlines()[-30:])
        sys.exit(f"error: {name} ended with exit code {done.returncode}\n{tail}")
    report = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))
    timed = [i["elapsed_s"] for i in report["iterations"][_WARMUP:] if i["elapsed_s"] and not i["metered"]]
    return {
        "iteration_s": statistics.median(timed),
        "window_peak_bytes": report["window"]["peak_bytes"],
        "activation_peak_bytes": report["memory"]["activation_peak_bytes"],
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.offload", description=__doc__)
    parser.add_argument("--json", required=True, type=Path, help="where to write the figures")
    parser.add_argument("--tokens", type=int, default=4096, help="per microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10, help="timed iterations per run")
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant runs")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.stdout.write("skipped: benchmarks.gpu.offload needs a CUDA device, and there is none here\n")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="gpu-offload-"))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    try:
        for turn in range(options.rounds):
            for name, window in VARIANTS.items():
                plan = plan_of(window, options.tokens, options.microbatches)
                runs[name].append(run(name, plan, folder / name.replace(" ", "-"), options.iterations))
                sys.stdout.write(f"round {turn} {name:28} {runs[name][-1]['iteration_s']:.4f} s\n")
                sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    slowdowns = {
        name: statistics.median(
            b["iteration_s"] / a["iteration_s"] for a, b in zip(runs["nothing"], runs[name], strict=True)
        ) - 1
        for name in VARIANTS
    }  # fmt: skip
    worst = max(slowdowns[name] for name in JUDGED)
    report = {
        "max_slowdown": worst, "bar": BAR, "passed": worst <= BAR, "slowdowns": slowdowns,
        "device": torch.cuda.get_device_name(), "machine": machine(), "tokens": options.tokens,
        "microbatches": options.microbatches, "runs": runs,
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps({"max_slowdown": worst, "passed": worst <= BAR}, indent=1) + "\n")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
