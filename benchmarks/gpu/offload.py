"""Measures the cost of offloading on a GPU: ministages with and without shards in host memory.

``python -m benchmarks.gpu.offload --json OUT``: layers of a 7B model (hidden size 4096) in four
ministages on one GPU, bf16, recompute per layer.  Variants alternate, each in a process of its own:
nothing offloaded, parameters, parameters and activations, and the optimizer's state besides.  Figures: time of an
iteration relative to nothing offloaded (``max_slowdown``, over parameters and activations; at most 0.03
wanted) and peak bytes of the device.  The figures so far are written after every run, so that a benchmark that is
cut short leaves them.  A variant that fails ends no other: ``errors`` has the end of its log, and it is not run again.

Without a CUDA device it prints a message and measures nothing; ``--small`` runs everything with a tiny model, also
there, as a test.
"""

import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.timings import Training, Width, train
from benchmarks.machine import command_line, machine, save, scratch
from megatron_het.plan import ModelShape, Plan, Replica, ScheduleSpec, Stage, TrainingShape, save_plan
from megatron_het.safe_io import amount
from testing.cases import plain_flags, platform_words
from testing.runner import Runner

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


@dataclass(frozen=True)
class Size(Width):
    """Dimensions of the model and of its batch."""

    tokens: int = 4096
    microbatches: int = 8


SMALL = Size(64, 96, 4, 255, 32, 3)


def plan_of(options: Mapping[str, Any], size: Size) -> Plan:
    """Returns a plan of one stage with one replica."""
    layers = (LAYERS_PER_MINISTAGE,) * MINISTAGES
    return Plan(
        ModelShape(sum(layers), size.hidden, size.heads, size.heads, size.tokens, size.ffn),
        TrainingShape(1, size.microbatches, precision="bf16", recompute="full", distributed_optimizer=True),
        (Stage(layers, (Replica((0,), tuple(range(size.microbatches))),)),),
        ScheduleSpec("ministage", {"window": True, **options}),
    )


def arguments(plan: Plan, size: Size, iterations: int, is_cuda: bool) -> list[str]:
    """Returns Megatron's flags for a plan on this machine."""
    flags = plain_flags(plan.model, size.vocabulary, plan.num_microbatches, iterations)
    own = "--bf16 --split 90,10,0 --clip-grad 1.0 --lr 1e-4 --distributed-timeout-minutes 5"
    return [*flags, *own.split(), "--dist-ckpt-optim-fully-reshardable", *platform_words(is_cuda=is_cuda)]


class VariantError(RuntimeError):
    """A training failed."""


def run(
    runner: Runner, name: str, size: Size, iterations: int, folder: Path, is_cuda: bool, deadline_s: float
) -> dict[str, float]:
    """Run one training of a variant.

    Raises:
        VariantError: It failed; with the end of its log.
    """
    plan = plan_of(VARIANTS[name], size)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    words = [*arguments(plan, size, iterations, is_cuda), "--het-plan", str(folder / "plan.json")]
    words += ["--het-report", str(folder)]
    training = Training(name, size.tokens, size.microbatches, iterations)
    found = train(runner, training, words, folder, deadline_s, _TIMEOUT_S)
    if "error" in found:
        raise VariantError("\n".join([f"{name}: {found['error']}", *found.get("log", ())]))
    report = json.loads((folder / "rank-0.json").read_text(encoding="utf-8"))
    timed = [i["elapsed_s"] for i in report["iterations"][_WARMUP:] if i["elapsed_s"] and not i["metered"]]
    return {
        "iteration_s": statistics.median(timed),
        "window_peak_bytes": report["window"]["peak_bytes"],
        "activation_peak_bytes": report["memory"]["activation_peak_bytes"],
    }


def figures(runs: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns the figures of the runs so far; an unfinished round counts for the variants that have run.

    Without runs of the judged variants there is no ``max_slowdown``; ``not_run`` names them.
    """
    slowdowns = {
        name: statistics.median(b["iteration_s"] / a["iteration_s"] for a, b in zip(runs["nothing"], found)) - 1
        for name, found in runs.items()
        if found and runs["nothing"]
    }
    missing = [name for name in ("nothing", *JUDGED) if not runs[name]]
    worst = None if missing else max(slowdowns[name] for name in JUDGED)
    passed = worst is not None and worst <= BAR
    return {"max_slowdown": worst, "bar": BAR, "passed": passed, "slowdowns": slowdowns, "not_run": missing}


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.gpu.offload", __doc__)
    parser.add_argument("--tokens", type=int, default=Size.tokens, help="per microbatch (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=Size.microbatches, help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=10, help="timed iterations per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each variant runs (default: %(default)s)")
    parser.add_argument("--limit-s", type=amount(1, 7200), default=7200.0, help="no run begins that would end later")
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU too; its figures mean nothing")
    options = parser.parse_args()
    deadline_s = time.monotonic() + options.limit_s
    if options.rounds < 1 or options.iterations < 2:
        parser.error("at least one round and two iterations (the last one's end is not seen)")
    import torch

    is_cuda = torch.cuda.is_available()
    if not is_cuda and not options.small:
        sys.stdout.write("skipped: benchmarks.gpu.offload needs a CUDA device, and there is none here\n")
        return 0
    size = SMALL if options.small else Size(tokens=options.tokens, microbatches=options.microbatches)
    common = {"device": torch.cuda.get_device_name() if is_cuda else "CPU", "machine": machine(), **asdict(size)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    report, errors, longest_s = figures(runs), dict[str, str](), 0.0  # has ``not_run`` if no run ends in time
    with scratch("gpu-offload-") as folder, Runner("cuda" if is_cuda else "cpu", compiles=True) as runner:
        for turn, name in itertools.product(range(options.rounds), VARIANTS):
            begin_s, own = time.monotonic(), folder / name.replace(" ", "-")
            if name in errors or begin_s + longest_s > deadline_s:
                continue
            try:
                iterations = _WARMUP + options.iterations
                runs[name].append(run(runner, name, size, iterations, own, is_cuda, deadline_s))
                said = f"{runs[name][-1]['iteration_s']:.4f} s"
            except VariantError as error:
                errors[name] = said = str(error)
            longest_s = max(longest_s, time.monotonic() - begin_s)
            sys.stdout.write(f"round {turn} {name:28} {said}\n")
            sys.stdout.flush()
            report = {**figures(runs), **common, "rounds": turn + 1, "runs": runs, "errors": errors}
            save(options.json, report)
    shown = {key: report[key] for key in ("max_slowdown", "slowdowns", "passed", "not_run")}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    return 0 if report["passed"] or (options.small and not errors and not report["not_run"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
