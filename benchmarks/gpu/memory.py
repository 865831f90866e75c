"""Compares a training's memory on one GPU with the prediction: ``python -m benchmarks.gpu.memory --json OUT``.

The planner makes a plan of a small Llama for this machine's GPU; five iterations run under it.  ``largest_error`` is
the largest error of the planner among parameters, gradients, optimizer state and activations, as a share of all.
``dry_run_error`` is the same of a dry run of the rank, over parameters, gradients and optimizer state.  ``--small``
takes a tiny model and works on a CPU as well.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line
from megatron_het.plan import Plan, load_plan
from megatron_het.safe_io import check_target, read_json, write_json, write_text
from megatron_het.store import free_port
from testing.cases import platform_words
from tools.planner.emit.flags import model_arguments, plan_arguments
from tools.planner.inputs.model import Model

_TIMEOUT_S = 90.0
_KINDS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


def documents(is_small: bool, memory_bytes: int, precision: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns cluster file and model file."""
    figures = {
        "flops": {precision: 1e14},
        "memory_bytes": memory_bytes,
        "memory_bytes_per_s": 1e12,
        "intra_node_bytes_per_s": 1e11,
        "flash_attention_2": True,
        "source": "this machine",
    }
    cluster = {"nodes": [{"gpu": "here", "count": 1, "gpus_per_node": 1}], "gpus": {"here": figures}}
    width = 64 if is_small else 2048
    model = {
        "num_layers": 2 if is_small else 8,
        "hidden_size": width,
        "ffn_hidden_size": 2 * width,
        "num_attention_heads": width // 64 if width > 64 else 4,
        "vocab_size": 256 if is_small else 32000,
        "seq_length": 32 if is_small else 2048,
        "global_batch_size": 4,
        "precision": precision,
    }
    return cluster, model


def make_plan(folder: Path, cluster: dict[str, Any], model: dict[str, Any]) -> Plan:
    """Returns the planner's plan, with its predictions."""
    import yaml

    for name, document in (("cluster", cluster), ("model", model)):
        write_text(folder / f"{name}.yaml", yaml.safe_dump(document))
    command = [sys.executable, "-m", "tools.planner", "plan", "--limit-s", "20", "--schedules", "1f1b"]
    command += ["--cluster", str(folder / "cluster.yaml"), "--model", str(folder / "model.yaml")]
    subprocess.run([*command, "--out", str(folder / "plan.json")], check=True, timeout=_TIMEOUT_S)
    return load_plan(folder / "plan.json")


def flags_of(plan: Plan, model: dict[str, Any], folder: Path) -> list[str]:
    """Returns Megatron's flags of model and plan."""
    words = [*model_arguments(plan, Model(**model)), *plan_arguments(plan)]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model["vocab_size"] - 1)]
    return [*words, "--het-plan", str(folder / "plan.json")]


def dry_run(plan: Plan, model: dict[str, Any], folder: Path, is_cuda: bool) -> dict[str, int]:
    """Returns the bytes by kind that a dry run of the rank counts."""
    out = folder / "dry-run.json"
    command = [sys.executable, "-W", "ignore", "-m", "megatron_het.dry_run", "--rank", "0", "--out", str(out)]
    words = flags_of(plan, model, folder)
    if not is_cuda:
        words += platform_words(is_cuda=False)
    command += ["--kernels", "gpu" if is_cuda else "cpu"]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    subprocess.run([*command, "--", *words], env=environment, check=True, timeout=_TIMEOUT_S)
    found = read_json(out)["memory"]["by_category"]
    return {"parameter_bytes": found["parameters"], "gradient_bytes": found["gradients"]} | {
        "optimizer_bytes": found["optimizer"]
    }


def train(plan: Plan, model: dict[str, Any], folder: Path, is_cuda: bool) -> dict[str, int]:
    """Train; returns the bytes by kind in the run report."""
    words = flags_of(plan, model, folder)
    words += platform_words(is_cuda=is_cuda)
    words += ["--mock-data", "--split", "90,10,0", "--eval-iters", "0", "--eval-interval", "1000"]
    words += ["--train-iters", "5", "--lr", "1e-4", "--log-interval", "1", "--distributed-timeout-minutes", "1"]
    words += ["--het-report", str(folder)]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_het.pretrain_gpt", *words]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    own = {**os.environ, **rank, "MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    subprocess.run(command, env=own, check=True, timeout=_TIMEOUT_S)
    memory = read_json(folder / "rank-0.json")["memory"]
    return {kind: memory[kind if kind in memory else kind.replace("_bytes", "_peak_bytes")] for kind in _KINDS}


def errors(plan: Plan, measured: dict[str, int]) -> dict[str, float]:
    """Returns the error of every kind, as a share of all measured bytes."""
    assert plan.predicted is not None
    predicted = plan.predicted.per_rank[0]
    total = sum(measured.values())
    return {kind: abs(getattr(predicted, kind) - measured[kind]) / total for kind in _KINDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = command_line("benchmarks.gpu.memory", __doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU too; its figures mean nothing")
    options = parser.parse_args(arguments)
    check_target(options.json)
    import torch

    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.small:
        parser.exit(3, "benchmarks.gpu.memory needs a CUDA device, and there is none here\n")
    precision = "bf16" if is_cuda else "fp32"
    size = torch.cuda.mem_get_info()[1] if is_cuda else 8 << 30
    cluster, model = documents(options.small, size, precision)
    with tempfile.TemporaryDirectory(prefix="gpu-memory-") as name, ThreadPoolExecutor(1) as pool:
        plan = make_plan(Path(name), cluster, model)
        dry_ran = pool.submit(dry_run, plan, model, Path(name), is_cuda)  # on the CPU, beside the training
        measured = train(plan, model, Path(name), is_cuda)
        found = errors(plan, measured)
        report: dict[str, Any] = {"largest_error": max(found.values()), "errors": found, "measured": measured}
        write_json(options.json, report)
        dry, total = dry_ran.result(), sum(measured.values())
    report["dry_run_error"] = max(abs(size - measured[kind]) / total for kind, size in dry.items())
    write_json(options.json, report | {"dry_run": dry})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
