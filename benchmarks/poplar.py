"""Compares Poplar's automatic batches on unequal processes with equal ones: ``python -m benchmarks.poplar --json OUT``.

The processes are those of the demo: one with a core of its own, others that share one (``examples/llama/devices.py``).
For every ZeRO stage ``--het-auto-batch`` measures and allocates; then its plan and a plan with equal batches train in
turns.  Keys, for all stages together and for each under ``stages``:

- ``speedup``: median iteration with equal batches over that with allocated ones, the least of all stages;
- ``idle_fraction``: share of an iteration that a device waits for the slowest one's compute, mean of devices, at ZeRO-0
  and 1;
- ``allocation_error``: compute seconds of an iteration as the curves predict them, against the measured ones; the
  largest of all devices at ZeRO-0 and 1 (a pass of ZeRO-2 and 3 waits for collectives inside);
- ``parity``: the largest relative difference of 24 plans to one process, from ``benchmarks.parity --schedule
  data-parallel``;
- ``limit``: with an artificial memory limit on one process, the raised ZeRO stage, and whether training went on.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, scratch, write_report
from examples.llama.devices import PINNING_VARIABLE, available_cores, mixed_devices, pinning
from examples.llama.job import CPU_ARGUMENTS
from megatron_het.auto_batch.allocation import base_plan, with_zero
from megatron_het.plan import Plan, load_plan, save_plan
from megatron_het.store import free_port
from testing.runner import run_in_session
from tools.planner.profile.settings import default_environment

BARS = {"speedup": 1.25, "idle_fraction": 0.05, "allocation_error": 0.10, "parity": 1e-5}
# With 96 sequences one sequence is about a twentieth of what a slow process computes, so that rounding the shares costs
# little; and the update and the collectives, which do not grow with the batch, are a small part of an iteration.
_BATCH, _LAYERS, _SEQUENCE, _WIDTH = 96, 4, 128, 128
_RUN_S = 900.0
_MODEL = (
    *("--num-layers", str(_LAYERS), "--hidden-size", str(_WIDTH), "--num-attention-heads", "4"),
    *("--seq-length", str(_SEQUENCE), "--max-position-embeddings", str(_SEQUENCE)),
    "--untie-embeddings-and-output-weights",
)
_TRAINING = (
    *("--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "511"),
    *("--split", "100,0,0", "--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
    *CPU_ARGUMENTS,
)
_WARM_UP = 3  # iterations whose times do not count; the second one is metered


def _train(folder: Path, world_size: int, words: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Train, and return the ranks' reports.

    Raises:
        RuntimeError: The run failed; the message ends with its log.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)),
        *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
        *("-m", "examples.llama.pinned", "megatron_het.pretrain_gpt", *_MODEL, *_TRAINING, *words),
        *("--het-report", str(folder / "report")),
    ]
    log = folder / "train.log"
    code = run_in_session(command, log, _RUN_S, {**default_environment(), **environment})
    if code != 0:
        raise RuntimeError(f"{folder.name}: exit code {code}\n{log.read_text(errors='replace')[-3000:]}")
    return [json.loads((folder / "report" / f"rank-{rank}.json").read_text()) for rank in range(world_size)]


def _steady(report: Mapping[str, Any], name: str) -> float:
    """Returns the median of a figure of a rank's iterations."""
    found = [i[name] for i in report["iterations"][_WARM_UP:] if i["elapsed_s"] is not None]
    return statistics.median(found)


def equal_plan(plan: Plan, zero: int, largest: int) -> Plan:
    """Returns the plan with the same batch divided evenly, in the largest passes that fit on all devices."""
    ranks = plan.world_size
    counts = [_BATCH // ranks + (rank < _BATCH % ranks) for rank in range(ranks)]
    passes = [[min(largest, count - done) for done in range(0, count, largest)] for count in counts]
    return with_zero(plan, zero, passes, [r.device for r in plan.stages[0].replicas])


def measure_stage(zero: int, folder: Path, iterations: int, rounds: int) -> dict[str, Any]:
    """Measure all figures of one ZeRO stage."""
    devices = mixed_devices(available_cores(), max_cores=2)
    world_size = len(devices)
    environment = {PINNING_VARIABLE: pinning(devices)}
    batch = ("--global-batch-size", str(_BATCH))
    automatic = ("--het-auto-batch", str(folder), "--het-zero", str(zero), *batch, "--train-iters", "2")
    _train(folder / "measured", world_size, automatic, environment)
    found = json.loads((folder / "auto_batch" / "measured.json").read_text())
    plans = {"allocated": load_plan(folder / "auto_batch" / "plan.json")}
    largest = min(curve["sizes"][-1] for curve in found["curves"])
    plans["equal"] = equal_plan(plans["allocated"], zero, largest)
    elapsed: dict[str, list[float]] = {name: [] for name in plans}
    compute: list[list[float]] = []
    for turn in range(rounds):
        for name, plan in plans.items():
            file = folder / f"{name}.json"
            save_plan(plan, file)
            words = ("--het-plan", str(file), "--calculate-per-token-loss", "--train-iters", str(iterations))
            reports = _train(folder / f"{name}-{turn}", world_size, words, environment)
            elapsed[name].append(max(_steady(report, "elapsed_s") for report in reports))
            if name == "allocated":
                compute.append([_steady(report, "compute_s") for report in reports])
    busy = [statistics.median(row) for row in zip(*compute, strict=True)]
    iteration_s = statistics.median(elapsed["allocated"])
    return {
        "zero": found["zero"],
        "passes": found["passes"],
        "curves": found["curves"],
        "predicted_compute_s": found["predicted_compute_s"],
        "compute_s": busy,
        "equal_s": elapsed["equal"],
        "allocated_s": elapsed["allocated"],
        "speedup": statistics.median(elapsed["equal"]) / iteration_s,
        "idle_fraction": statistics.mean(max(busy) - own for own in busy) / iteration_s,
        "allocation_error": max(
            abs(expected - own) / own for expected, own in zip(found["predicted_compute_s"], busy, strict=True)
        ),
    }


def measure_limit(folder: Path) -> dict[str, Any]:
    """Limit the memory of the second of two processes: the ZeRO stage must be raised, and training go on."""
    # Short sequences: the state counts, not the activations.
    short = ("--seq-length", "32", "--max-position-embeddings", "32")
    base, _ = base_plan([*_MODEL, *short, "--global-batch-size", str(_BATCH)], 2)
    width, vocabulary = base.model.hidden_size, 512
    parameters = base.model.num_layers * 12 * width**2 + (2 * vocabulary + 32) * width
    limits = f"{1 << 32};{17 * parameters}"  # fp32 ZeRO-0 keeps 16 bytes of each, and a pass needs more beside
    words = (*short, "--het-auto-batch", str(folder), "--global-batch-size", str(_BATCH), "--train-iters", "4")
    reports = _train(folder / "limited", 2, words, {"HET_MEMORY_LIMIT_BYTES": limits})
    found = json.loads((folder / "auto_batch" / "measured.json").read_text())
    losses = [loss for _, loss in reports[0]["losses"]]
    return {
        "limits_bytes": limits,
        "zero": found["zero"],
        "did_not_fit": [entry["zero"] for entry in found["did_not_fit"]],
        "largest": [curve["sizes"][-1] for curve in found["curves"]],
        "passes": found["passes"],
        "losses": losses,
        "passed": found["zero"] > 0 and len(losses) == 4 and losses[-1] < losses[0],
    }


def measure_parity(folder: Path, seed: int) -> dict[str, Any]:
    """Compare 24 plans with one process."""
    file = folder / "parity.json"
    command = [sys.executable, "-m", "benchmarks.parity", "--schedule", "data-parallel"]
    subprocess.run([*command, "--seed", str(seed), "--json", str(file)], check=False, timeout=3 * _RUN_S)
    found = json.loads(file.read_text())
    names = [key for key in found if key.startswith("max_") and "later" not in key]
    return {"plans": len(found["cases"]), "failed": found["failed"], "parity": max(found[name] for name in names)}


def main() -> int:
    """Command line."""
    parser = command_line("benchmarks.poplar", __doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the plans whose parity is measured")
    parser.add_argument("--iterations", type=int, default=14, help="of each run (default: 14)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan, in turns (default: 3)")
    parser.add_argument(
        "--stages", type=int, nargs="+", choices=range(4), default=range(4), help="ZeRO stages (default: all)"
    )
    parser.add_argument("--only", choices=("speed", "limit", "parity"), help="a part of it")
    options = parser.parse_args()
    report: dict[str, Any] = {"bars": BARS}
    with scratch("poplar-") as folder:
        if options.only in (None, "speed"):
            stages = []
            for zero in options.stages:
                stages.append(measure_stage(zero, folder / f"zero-{zero}", options.iterations, options.rounds))
                print(json.dumps(stages[-1]), flush=True)
            report["speedup"] = min(stage["speedup"] for stage in stages)
            accumulating = [stage for stage in stages if stage["zero"] < 2]
            for name in ("idle_fraction", "allocation_error") if accumulating else ():
                report[name] = max(stage[name] for stage in accumulating)
            report["stages"] = stages
        if options.only in (None, "limit"):
            report["limit"] = measure_limit(folder / "limit")
        if options.only in (None, "parity"):
            found = measure_parity(folder, options.seed)
            report["parity"] = found["parity"] if not found["failed"] else float("inf")
            report["parity_plans"] = found
    higher = ("speedup",)
    failed = [
        name
        for name, bar in BARS.items()
        if name in report and (report[name] < bar if name in higher else report[name] > bar)
    ]
    failed += ["limit"] if "limit" in report and not report["limit"]["passed"] else []
    report["missed"], report["passed"] = failed, not failed
    write_report(options.json, report, unprinted=("stages",))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
