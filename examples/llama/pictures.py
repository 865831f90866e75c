"""The demo's pictures: loss curve, predicted against measured, and the timeline of one iteration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.llama.planning import Estimate
from megatron_het.schedule import Kind

_PREDICTED, _MEASURED, _EVEN = "#9ecae1", "#2171b5", "#bdbdbd"
_FORWARD, _BACKWARD = "#4c9f70", "#d98c3f"


def loss_picture(report: dict[str, Any], path: Path) -> None:
    """Loss over iterations, times, and memory per rank, side by side.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = _pyplot()
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), width_ratios=(2, 1.1, 1.4))
    left.plot([i for i, _ in report["losses"]], [v for _, v in report["losses"]], color=_MEASURED, label="training")
    if report["validation_loss"] is not None:
        left.axhline(report["validation_loss"], color=_BACKWARD, linestyle="--", label="validation, at the end")
    left.set(xlabel="iteration", ylabel="loss, nats per byte", title="Loss")
    left.legend(frameon=False)
    _times(middle, report)
    _memory(right, report)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _times(axes: Any, report: dict[str, Any]) -> None:
    values = [
        report["predicted_iteration_s"],
        report["measured_iteration_s"],
        report["even_split_predicted_iteration_s"],
        report["even_split_iteration_s"],
    ]
    places = [0, 1, 2.5, 3.5]
    bars = axes.bar(places, values, width=0.9, color=[_PREDICTED, _MEASURED, _PREDICTED, _MEASURED])
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.set_xticks([0.5, 3.0], ["planned", "even split"])
    axes.set(ylabel="seconds", title="One iteration")
    axes.set_ylim(top=1.3 * max(values))
    axes.legend([bars[0], bars[1]], ["predicted", "measured"], frameon=False, ncols=2, loc="upper center")


def _memory(axes: Any, report: dict[str, Any]) -> None:
    rows = report["per_rank"]
    for offset, key, color in ((-0.2, "predicted_memory_bytes", _PREDICTED), (0.2, "measured_memory_bytes", _MEASURED)):
        bars = axes.bar(
            [r["rank"] + offset for r in rows],
            [r[key] / 2**20 for r in rows],
            width=0.4,
            color=color,
            label=key.split("_")[0],
        )
        axes.bar_label(bars, fmt="%.0f" if rows[0][key] > 10 << 20 else "%.1f", padding=2, fontsize=8)
    axes.set_xticks([r["rank"] for r in rows], [f"rank {r['rank']}\n{r['device']}" for r in rows])
    axes.set(ylabel="MiB", title="Memory of parameters, gradients,\noptimizer and activations")
    axes.set_ylim(
        top=1.35 * max(r[k] for r in rows for k in ("predicted_memory_bytes", "measured_memory_bytes")) / 2**20
    )
    axes.legend(frameon=False, ncols=2, loc="upper center")


def timeline_picture(estimate: Estimate, devices: Sequence[str], traces: Path, path: Path) -> bool:
    """Predicted above measured: which rank ran what, when.  False when there are no traces.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = _pyplot()
    ranks = len(estimate.program.ops)
    files = [traces / f"trace-rank-{rank}.json" for rank in range(ranks)]
    if not all(f.is_file() for f in files):
        return False
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(13, 1.3 + 0.9 * ranks), sharex=True)
    timeline = estimate.timeline
    node = 0
    for rank, ops in enumerate(estimate.program.ops):
        for op in ops:
            start, end = timeline.start_s[node], timeline.end_s[node]
            _bar(upper, rank, start, end, op.kind == Kind.FORWARD, op.microbatch)
            node += 1
    for rank, file in enumerate(files):
        for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]:
            label = str(event.get("name", ""))
            if event.get("ph") == "X" and event.get("tid") == 0 and label.startswith(("F ", "B ")):
                start = event["ts"] / 1e6
                microbatch = int(label.split()[2])
                _bar(lower, rank, start, start + event["dur"] / 1e6, label.startswith("F "), microbatch)
    for axes, title in ((upper, "predicted"), (lower, "measured")):
        axes.set_yticks(range(ranks), [f"rank {r}\n{devices[r]}" for r in range(ranks)])
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("seconds from the start of the iteration (green: forward, orange: backward)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _bar(axes: Any, rank: int, start_s: float, end_s: float, forward: bool, microbatch: int) -> None:
    color = _FORWARD if forward else _BACKWARD
    axes.barh(rank, end_s - start_s, left=start_s, height=0.8, color=color, edgecolor="white", linewidth=0.5)
    axes.text((start_s + end_s) / 2, rank, str(microbatch), ha="center", va="center", fontsize=6, color="white")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
