"""What the demo found: predicted against measured, as JSON, tables and pictures."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.llama.planning import Estimate
from examples.llama.screen import Screen
from megatron_het.plan import Placement, Plan, plan_hash

#: Iterations at the start of a run that are not counted: caches and pages are cold, and the second
#: one is slowed by metering memory.
WARM_UP = 2

_MEMORY = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


@dataclass(slots=True)
class Trial:
    """One plan, how it was predicted, and the reports of all runs of it.

    Attributes:
        plan: The plan.
        estimate: Its simulation.
        runs: The rank reports of each run.
    """

    plan: Plan
    estimate: Estimate
    runs: list[list[dict[str, Any]]] = field(default_factory=list)

    def iteration_times_s(self, run: int) -> list[float]:
        """Times of the counted iterations of one run."""
        return counted(self.runs[run][0], "elapsed_s")

    @property
    def iteration_s(self) -> float:
        """Median over the counted iterations of all runs."""
        return statistics.median(t for run in range(len(self.runs)) for t in self.iteration_times_s(run))

    @property
    def bubble_fraction(self) -> float:
        """(schedule - mean busy time) / mean busy time, the median over all runs."""
        found = []
        for reports in self.runs:
            busy = statistics.fmean(statistics.median(counted(r, "compute_s")) for r in reports)
            schedule = max(statistics.median(counted(r, "schedule_s")) for r in reports)
            found.append((schedule - busy) / busy)
        return statistics.median(found)


def counted(report: dict[str, Any], key: str) -> list[float]:
    """A figure of one rank's iterations after the warm-up, metered ones left out.

    Raises:
        ValueError: The run was too short.
    """
    values = [
        i[key]
        for i in report["iterations"][WARM_UP:]
        if i.get(key) is not None and i.get("elapsed_s") is not None and not i.get("metered")
    ]
    if not values:
        raise ValueError(
            f"rank {report['rank']} ran {len(report['iterations'])} iterations; "
            f"at least {WARM_UP + 2} are needed to time one"
        )
    return values


def build(trial: Trial, even: Trial, training: list[dict[str, Any]], devices: Sequence[str]) -> dict[str, Any]:
    """The contents of ``report.json``.

    Args:
        trial: The chosen plan with its short runs and, last, the long training.
        even: The even split with its short runs.
        training: The rank reports of the long training.
        devices: Name of every rank's device.
    """
    predicted = trial.plan.predicted
    assert predicted is not None
    losses = losses_of(training)
    validation: list[Any] = next((r["validation"] for r in reversed(training) if r.get("validation")), [])
    measured_s, even_s = trial.iteration_s, even.iteration_s
    return {
        "plan_hash": plan_hash(trial.plan),
        "losses": losses,
        "validation_loss": statistics.fmean(v for _, v in validation) if validation else None,
        "predicted_iteration_s": predicted.iteration_s,
        "measured_iteration_s": measured_s,
        "prediction_error": predicted.iteration_s / measured_s - 1,
        "even_split_iteration_s": even_s,
        "even_split_predicted_iteration_s": even.estimate.iteration_s,
        "speedup_over_even_split": _paired_speedup(trial, even),
        "predicted_bubble_fraction": predicted.bubble_fraction,
        "measured_bubble_fraction": trial.bubble_fraction,
        "plan": describe(trial.plan),
        "even_split": describe(even.plan),
        "runs": {
            "plan_iteration_s": [trial.iteration_times_s(i) for i in range(len(trial.runs))],
            "even_split_iteration_s": [even.iteration_times_s(i) for i in range(len(even.runs))],
            "plan_losses": [losses_of(run) for run in trial.runs],
            "even_split_losses": [losses_of(run) for run in even.runs],
        },
        "per_rank": _per_rank(trial, training, devices),
    }


def losses_of(reports: list[dict[str, Any]]) -> list[Any]:
    """``[iteration, loss]`` of a run, from the rank that has them."""
    return next((r["losses"] for r in reversed(reports) if r.get("losses")), [])


def _paired_speedup(trial: Trial, even: Trial) -> float:
    """Median of even / planned over the alternating short runs, which a drift of the machine hits alike."""
    pairs = min(len(trial.runs), len(even.runs))
    return statistics.median(
        statistics.median(even.iteration_times_s(i)) / statistics.median(trial.iteration_times_s(i))
        for i in range(pairs)
    )


def _per_rank(trial: Trial, training: list[dict[str, Any]], devices: Sequence[str]) -> list[dict[str, Any]]:
    placement, predicted = Placement(trial.plan), trial.plan.predicted
    assert predicted is not None
    rows = []
    for report in training:
        rank = report["rank"]
        where, expected = placement.locate(rank), predicted.per_rank[rank]
        replica = placement.replica(where.stage, where.replica)
        memory = dict(report["memory"])
        memory["activation_bytes"] = memory.pop("activation_peak_bytes", 0)
        rows.append(
            {
                "rank": rank,
                "device": devices[rank],
                "stage": where.stage,
                "replica": where.replica,
                "layers": sum(trial.plan.stages[where.stage].layers),
                "microbatches": len(replica.microbatches),
                "predicted_compute_s": expected.compute_s,
                "measured_compute_s": statistics.median(counted(report, "compute_s")),
                "predicted_memory": {k: getattr(expected, k) for k in _MEMORY},
                "measured_memory": {k: memory.get(k, 0) for k in _MEMORY},
                "predicted_memory_bytes": expected.total_bytes,
                "measured_memory_bytes": sum(memory.get(k, 0) for k in _MEMORY),
            }
        )
    return rows


def describe(plan: Plan) -> str:
    """A plan in one line: ``5 layers on fast | 4 layers on slow (6) + slow (6)``."""
    stages = []
    for stage in plan.stages:
        names = " + ".join(
            f"{r.device} ({len(r.microbatches)})" if len(stage.replicas) > 1 else r.device for r in stage.replicas
        )
        stages.append(f"{sum(stage.layers)} layers on {names}")
    return " | ".join(stages)


def save(report: dict[str, Any], path: Path) -> None:
    """Write the report; an existing file is replaced only by a complete one."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def show(report: dict[str, Any], screen: Screen) -> None:
    """The tables at the end of the demo."""
    rows = [
        [
            f"{r['rank']}: {r['device']}",
            f"{r['stage']}",
            f"{r['layers']}",
            f"{r['microbatches']}",
            f"{r['predicted_compute_s']:.3f}",
            f"{r['measured_compute_s']:.3f}",
            f"{r['predicted_memory_bytes'] / 2**20:.0f}",
            f"{r['measured_memory_bytes'] / 2**20:.0f}",
        ]
        for r in report["per_rank"]
    ]
    screen.table(
        "Ranks",
        [
            "rank",
            "stage",
            "layers",
            "micro-\nbatches",
            "busy s\npredict.",
            "busy s\nmeasured",
            "MiB\npredict.",
            "MiB\nmeasured",
        ],
        rows,
    )
    losses = [loss for _, loss in report["losses"]]
    figures = [
        ("iteration, planned, s", report["predicted_iteration_s"], report["measured_iteration_s"]),
        ("iteration, even split, s", report["even_split_predicted_iteration_s"], report["even_split_iteration_s"]),
        ("bubble / busy time", report["predicted_bubble_fraction"], report["measured_bubble_fraction"]),
        (
            "speedup over the even split",
            report["even_split_predicted_iteration_s"] / report["predicted_iteration_s"],
            report["speedup_over_even_split"],
        ),
    ]
    screen.table("The job", ["", "predicted", "measured"], [[name, f"{a:.3f}", f"{b:.3f}"] for name, a, b in figures])
    screen.line(f"Planned:    {report['plan']}")
    screen.line(f"Even split: {report['even_split']}")
    if losses:
        end = f"Training loss {losses[0]:.3f} -> {losses[-1]:.3f} over {len(losses)} iterations"
        if report["validation_loss"] is not None:
            end += f", validation loss {report['validation_loss']:.3f}"
        screen.line(end + " (nats per byte)")
