"""Compares seconds per iteration on one GPU with stock Megatron and with the planner's predictions.

``python -m benchmarks.gpu.timings --json OUT``: six layers of hidden size 4096 with Transformer Engine, where it is
installed, in bf16.  Stock Megatron and a plan of one stage take turns at 4,096 tokens (``executor_ratio``); one
sequence of 32,768 tokens is trained by stock Megatron and in 8 and 16 slices (``slices_8_at_32k``,
``slices_16_at_32k``).  With ``--longest``, sequences of 128k and 256k tokens are trained in their place, with full
recomputation (``longest_tokens``: what ran).  The planner predicts the same runs from its catalog (``catalog_error``)
and, with ``--profile``, from a profile of this GPU (``profile_error``).  Trainings run one at a time, forked from a
process that has loaded all libraries.  The file is written after every training.  ``--small`` takes a tiny model and
works on a CPU as well.
"""

import contextlib
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, machine, scratch
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.safe_io import amount, check_target, read_json, write_json, write_text
from testing.cases import plain_flags, platform_words
from testing.runner import Job, Runner

BARS = {"executor_ratio": 1.01, "slices_8_at_32k": 1.05, "slices_16_at_32k": 1.10}
CATALOG_BAR, PROFILE_BAR = 0.08, 0.04
_WARMUP, _CASE_S = 2, 90.0
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_TAIL_LINES = 20
_LEAST_S = 10.0


@dataclass(frozen=True, slots=True)
class Training:
    """One training of the model."""

    name: str  # key of the result
    tokens: int  # of a sequence
    microbatches: int  # of an iteration, one sequence each
    iterations: int  # trained; the first two are not timed
    schedule: str | None = None  # None for stock Megatron
    slices: int = 1  # of a sequence, where the schedule has slices
    layers: int = 6  # of the model
    recompute: bool = False  # whether layers are recomputed


@dataclass(frozen=True, slots=True)
class Width:
    """Widths of a layer."""

    hidden: int = 4096
    ffn: int = 11008
    heads: int = 32
    vocabulary: int = 32000


SMALL = Width(64, 128, 4, 256)
TRAININGS = (
    Training("32k-stock", 32768, 1, 7),
    Training("32k-slices-8", 32768, 1, 7, "slimpipe", 8),
    Training("32k-slices-16", 32768, 1, 7, "slimpipe", 16),
    Training("4k-stock", 4096, 8, 7),
    Training("4k-plan", 4096, 8, 7, "1f1b"),
    Training("4k-plan-again", 4096, 8, 7, "1f1b"),
    Training("4k-stock-again", 4096, 8, 7),
)
LONGEST = (
    Training("128k-slices-16", 131072, 1, 3, "slimpipe", 16, layers=2, recompute=True),
    Training("128k-stock", 131072, 1, 3, layers=2, recompute=True),
    Training("256k-slices-16", 262144, 1, 3, "slimpipe", 16, layers=2, recompute=True),
    Training("256k-stock", 262144, 1, 3, layers=2, recompute=True),
)


def tiny(training: Training) -> Training:
    """Returns the training with two layers and few tokens."""
    return replace(training, tokens=training.tokens // 512, microbatches=min(training.microbatches, 2), layers=2)


def plan_of(training: Training, width: Width, device: str, precision: str) -> Plan:
    """Returns a plan of one stage with one replica on a GPU of the given kind."""
    return Plan(
        ModelShape(
            training.layers, width.hidden, width.heads, width.heads, training.tokens, width.ffn, width.vocabulary
        ),
        TrainingShape(
            1, training.microbatches, precision=precision, recompute="full" if training.recompute else "none"
        ),
        (Stage((training.layers,), (Replica((0,), tuple(range(training.microbatches)), device=device),)),),
        ScheduleSpec(training.schedule or "1f1b", {"slices": training.slices} if training.slices > 1 else {}),
    )


def arguments(training: Training, width: Width, is_cuda: bool) -> list[str]:
    """Returns Megatron's flags of a training."""
    model = plan_of(training, width, "", "fp32").model
    words = [*plain_flags(model, width.vocabulary - 1, training.microbatches, training.iterations)]
    words += ["--split", "90,10,0", "--clip-grad", "1.0", "--lr", "1e-4", "--distributed-timeout-minutes", "2"]
    words += ["--bf16"] if is_cuda else []
    words += _FULL if training.recompute else ()
    return words + platform_words(is_cuda=is_cuda)


def documents(training: Training, width: Width, device: str, precision: str, memory_bytes: int) -> dict[str, Any]:
    """Returns cluster file and model file of a training, by name."""
    node: dict[str, Any] = {"nodes": [{"gpu": device, "count": 1, "gpus_per_node": 1}]}
    if device == "here":  # the GPU is not in the catalog
        node["gpus"] = {
            device: {
                "flops": {precision: 1e11},
                "memory_bytes": memory_bytes,
                "memory_bytes_per_s": 1e10,
                "intra_node_bytes_per_s": 1e10,
                "source": "not measured",
            }
        }
    model = {
        "num_layers": training.layers,
        "hidden_size": width.hidden,
        "ffn_hidden_size": width.ffn,
        "num_attention_heads": width.heads,
        "vocab_size": width.vocabulary,
        "seq_length": training.tokens,
        "global_batch_size": training.microbatches,
        "precision": precision,
    }
    return {"cluster.yaml": node, "model.yaml": model}


def predicted(plan: Plan, files: Mapping[str, Any], folder: Path, profile: Path | None = None) -> float:
    """Returns the seconds per iteration that the planner predicts, from its catalog or from a profile.

    Raises:
        ValueError: The planner refuses the plan, with its words.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    for name, document in files.items():
        write_text(folder / name, yaml.safe_dump(document))
    save_plan(plan, folder / "plan.json")
    command = [sys.executable, "-m", "tools.planner", "simulate", str(folder / "plan.json"), "--json"]
    command += ["--cluster", str(folder / "cluster.yaml"), "--model", str(folder / "model.yaml")]
    command += [] if profile is None else ["--profile", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CASE_S, check=False)
    if done.returncode:
        raise ValueError(done.stderr or done.stdout)
    return float(json.loads(done.stdout)["iteration_s"])


def profile(files: Mapping[str, Any], folder: Path, device: str, is_small: bool) -> Path:
    """Profile this GPU with the model of the timings.

    Raises:
        subprocess.SubprocessError: Profiling failed or took too long.
    """
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "profile.json"
    write_text(folder / "model.yaml", yaml.safe_dump(files["model.yaml"]))
    command = [sys.executable, "-m", "tools.planner", "profile", "--model", str(folder / "model.yaml")]
    command += ["--kind", device, "--out", str(out), "--micro-batch-sizes", "1", "--no-links", "--tp", "1"]
    command += ["--window-s", "0.25", "--windows", "2", "--recompute", "none"]
    command += ["--slice-tokens", "4,8" if is_small else "2048,4096"]
    subprocess.run(command, check=True, timeout=_CASE_S * 2)
    return out


def watch(rank: int, out: str) -> None:
    """Write seconds per iteration and peak memory to a file after every iteration of this process."""
    import torch
    from megatron.training import training

    step, times, is_cuda = training.train_step, list[float](), torch.cuda.is_available()

    @functools.wraps(step)
    def train_step(*positional: Any, **named: Any) -> Any:
        if is_cuda:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        found = step(*positional, **named)
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
        peak = torch.cuda.max_memory_allocated() if is_cuda else 0
        write_json(Path(out), {"times_s": times, "peak_bytes": peak})
        return found

    training.train_step = train_step


def train(
    runner: Runner, training: Training, words: Sequence[str], folder: Path, deadline_s: float, most_s: float = _CASE_S
) -> dict[str, Any]:
    """Train, forked from a process that has loaded all libraries; returns the figures, or the error with its log.

    Args:
        runner: Of one training at a time.
        words: Megatron's command line.
        folder: For what it writes.
        deadline_s: Of ``time.monotonic()``; it is ended then.
        most_s: It is ended after so long.
    """
    limit_s = min(deadline_s - time.monotonic(), most_s)
    if limit_s < _LEAST_S:
        return {"error": "not run: no time was left"}
    out = folder / "times.json"
    setup = ("benchmarks.gpu.timings:watch", {"out": str(out)})
    done = runner.run(Job(training.name, 1, tuple(words), folder, setup=setup, timeout_s=limit_s), check=False)
    found: dict[str, Any] = {"whole_s": round(done.elapsed_s, 1)}
    with contextlib.suppress(OSError, ValueError):
        found |= read_json(out)
    if not done.succeeded or len(found.get("times_s", ())) < training.iterations:
        return found | {"error": f"exit code {done.returncodes[0]}", "log": done.log().splitlines()[-_TAIL_LINES:]}
    return found | {"iteration_s": statistics.median(found["times_s"][_WARMUP:])}


def figures(runs: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Returns ratios and errors of what has run so far; None where a training is missing.

    Args:
        runs: What was measured, by training.
        expected: Seconds per iteration by training, by source.
    """

    def seconds(*names: str) -> float | None:
        found = [runs[name]["iteration_s"] for name in names if "iteration_s" in runs.get(name, {})]
        return statistics.mean(found) if found else None

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above and below else None

    stock = seconds("32k-stock")
    errors = {
        source: {
            name: s / runs[name]["iteration_s"] - 1 for name, s in of.items() if "iteration_s" in runs.get(name, {})
        }
        for source, of in expected.items()
    }
    worst = {f"{source}_error": max(map(abs, found.values())) for source, found in errors.items() if found}
    return {
        "executor_ratio": ratio(seconds("4k-plan", "4k-plan-again"), seconds("4k-stock", "4k-stock-again")),
        "slices_8_at_32k": ratio(seconds("32k-slices-8"), stock),
        "slices_16_at_32k": ratio(seconds("32k-slices-16"), stock),
        "longest_tokens": max((t.tokens for t in LONGEST if "iteration_s" in runs.get(t.name, {})), default=0),
        "errors": errors,
        **worst,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 where a training failed."""
    parser = command_line("benchmarks.gpu.timings", __doc__)
    parser.add_argument("--profile", action="store_true", help="profile the GPU too, and predict from the profile")
    parser.add_argument("--longest", action="store_true", help="train 128k and 256k tokens in place of these")
    parser.add_argument("--limit-s", type=amount(1, 3600), default=240.0, help="of all (default: %(default)g)")
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU too; its figures mean nothing")
    options = parser.parse_args(words)
    check_target(options.json)
    deadline_s = time.monotonic() + options.limit_s
    import torch

    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.small:
        parser.exit(3, "benchmarks.gpu.timings needs a CUDA device, and there is none here\n")
    from tools.planner.cli.inventory import catalog_name

    named = catalog_name(torch.cuda.get_device_name()) if is_cuda else None
    device, precision = named.name if named else "here", "bf16" if is_cuda else "fp32"
    memory = torch.cuda.get_device_properties(0).total_memory if is_cuda else 8 << 30
    width = SMALL if options.small else Width()
    chosen: Sequence[Training] = LONGEST if options.longest else TRAININGS
    chosen = tuple(map(tiny, chosen)) if options.small else chosen
    runs = dict[str, dict[str, Any]]()
    files = {t.name: documents(t, width, device, precision, memory) for t in chosen}
    kept: dict[str, Any] = {"bars": BARS, "kind": device, "machine": machine(), "predicted_s": {}}

    def keep() -> None:
        write_json(options.json, {**figures(runs, kept["predicted_s"]), **kept, "runs": runs})

    def predict(source: str, profile_path: Path | None) -> None:
        for training in chosen:
            if profile_path is not None and (training.tokens, training.layers) != (chosen[0].tokens, chosen[0].layers):
                continue  # a profile is valid for one model only
            plan = plan_of(training, width, device, precision)
            try:
                said_s = predicted(plan, files[training.name], folder / f"{training.name}-{source}", profile_path)
                kept["predicted_s"].setdefault(source, {})[training.name] = said_s
            except (ValueError, subprocess.SubprocessError) as error:
                print(f"{source} of {training.name}: {error}", flush=True)

    with scratch("gpu-timings-") as folder:
        with Runner("cuda" if is_cuda else "cpu", compiles=True) as runner:
            predict("catalog", None)  # while libraries are loaded
            for training in chosen:
                words, own = arguments(training, width, is_cuda), folder / training.name
                if training.schedule is not None:
                    own.mkdir()
                    save_plan(plan_of(training, width, device, precision), own / "plan.json")
                    words += ["--het-plan", str(own / "plan.json")]
                found = runs[training.name] = train(runner, training, words, own, deadline_s)
                said = f"{found['iteration_s']:.4f} s" if "iteration_s" in found else found["error"]
                print(f"{training.name:20} {said}", flush=True)
                keep()
        if options.profile:
            try:
                measured = profile(files[chosen[0].name], folder / "profile", device, options.small)
                kept["profile"] = read_json(measured)
                predict("profile", measured)
            except (subprocess.SubprocessError, OSError) as error:
                print(f"no profile: {error}", flush=True)
            keep()
    print(json.dumps(figures(runs, kept["predicted_s"]), indent=1))
    return int(any("error" in run for run in runs.values()))


if __name__ == "__main__":
    raise SystemExit(main())
