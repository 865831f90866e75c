"""The demo's report page and pictures: measured beside predicted figures.

The page is the planner's page of the plan.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_het.schedule import Kind
from tools.planner.__main__ import parser_of
from tools.planner.cli.commands import load, priced
from tools.planner.inputs.files import write_text
from tools.planner.report.collect import Event, collect, pack
from tools.planner.report.data import Figure, Lane, PageData
from tools.planner.report.html import render, size


def write(words: Sequence[str], result: dict[str, Any], traces: Sequence[Path], file: Path) -> None:
    """Write the page.

    Args:
        words: Plan file and inputs, as for ``report``.
        result: The contents of ``report.json``.
        traces: Of every rank, one iteration.
        file: The page.
    """
    options = parser_of("report").parse_args(list(words))
    estimator, plan = load(options)
    candidate, estimate, seated = priced(estimator, plan, options)
    page, _ = collect(estimator, candidate, estimate, plan, seated, title="Demo: a small Llama on a mixed cluster")
    write_text(file, render(with_measured(page, result, traces)))


def with_measured(page: PageData, result: dict[str, Any], traces: Sequence[Path]) -> PageData:
    """Add the measured figures to the page of a plan.

    Args:
        page: What the planner predicts; changed in place.
        result: The contents of ``report.json``.
        traces: Of every rank, one iteration; without one of them no measured timeline is added.
    """
    page["figures"] = [*_figures(result), *page["figures"]]
    page["timelines"] += _measured_timeline(traces, result)
    page["comparison"] = _comparison(result)
    page["notes"] += [f"Even split: {result['even_split']}.", *_memory(result), *result["doubts"]]
    return page


def _figures(result: dict[str, Any]) -> list[Figure]:
    predicted, measured = result["predicted_iteration_s"], result["measured_iteration_s"]
    loss = result["validation_loss"]
    rows: list[tuple[str, float | str | None, str, str]] = [
        ("Iteration, measured", measured, "s", f"prediction {100 * (predicted / measured - 1):+.1f} %"),
        ("Even split, measured", result["even_split_iteration_s"], "s", ""),
        ("Speedup", f"{result['speedup_over_even_split']:.2f}", "", "over the even split, measured"),
        ("Bubble, measured", result["measured_bubble_fraction"], "share", ""),
        ("Validation loss", None if loss is None else f"{loss:.3f}", "", "nats per byte"),
    ]
    return [Figure(name=name, value=value, unit=unit, note=note) for name, value, unit, note in rows]


def _memory(result: dict[str, Any]) -> list[str]:
    return [
        f"Rank {r['rank']} ({r['device']}): {size(r['measured_memory_bytes'])} measured, "
        f"{size(r['predicted_memory_bytes'])} predicted; busy {r['measured_compute_s']:.3f} s measured, "
        f"{r['predicted_compute_s']:.3f} s predicted."
        for r in result["per_rank"]
    ]


def _measured_timeline(traces: Sequence[Path], result: dict[str, Any]) -> list[Any]:
    """Returns the timeline of the traced iteration; nothing without traces."""
    if not all(f.is_file() for f in traces):
        return []
    events = []
    for lane, file in enumerate(traces):
        for e in json.loads(file.read_text(encoding="utf-8"))["traceEvents"]:
            if e.get("ph") == "X" and e["tid"] == 0:
                a, start = e["args"], e["ts"] / 1e6
                end = start + e["dur"] / 1e6
                place = {"microbatch": a["microbatch"], "slice": a.get("slice", 0), "chunk": a.get("chunk", 0)}
                events.append(Event(lane, Kind.rows[a["kind"]], start, end, **place, peer=-1, size=None))
    lanes = [
        Lane(name=f"rank {r['rank']}: {r['device']}", stage=r["stage"], compute_s=r["measured_compute_s"], idle_s={})
        for r in result["per_rank"]
    ]
    return [pack("Measured, passes of one iteration", max(e.end_s for e in events), lanes, events)]


def _comparison(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = (
        ("planned, measured", "plan", "measured_iteration_s"),
        ("planned, predicted", "plan", "predicted_iteration_s"),
        ("even split, measured", "even_split", "even_split_iteration_s"),
        ("even split, predicted", "even_split", "even_split_predicted_iteration_s"),
    )
    return [
        {
            "what": what,
            "plan": result[plan],
            "iteration_s": result[key],
            "tokens_per_s": result["tokens_per_iteration"] / result[key],
            "usd_per_iteration": None,
            "gpus": len(result["per_rank"]),
        }
        for what, plan, key in rows
    ]


# Loss curve, predicted against measured, and the timeline of one iteration.

_PREDICTED, _MEASURED = "#9ecae1", "#2171b5"
_FORWARD, _BACKWARD = "#4c9f70", "#d98c3f"


def loss_picture(report: dict[str, Any], path: Path) -> None:
    """Draw loss over iterations, times, and memory per rank, side by side.

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
    _memory_bars(right, report)
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


def _memory_bars(axes: Any, report: dict[str, Any]) -> None:
    rows = report["per_rank"]
    for offset, key, color in ((-0.2, "predicted_memory_bytes", _PREDICTED), (0.2, "measured_memory_bytes", _MEASURED)):
        places, heights = [r["rank"] + offset for r in rows], [r[key] / 2**20 for r in rows]
        bars = axes.bar(places, heights, width=0.4, color=color, label=key.split("_")[0])
        axes.bar_label(bars, fmt="%.0f" if rows[0][key] > 10 << 20 else "%.1f", padding=2, fontsize=8)
    axes.set_xticks([r["rank"] for r in rows], [f"rank {r['rank']}\n{r['device']}" for r in rows])
    axes.set(ylabel="MiB", title="Memory of parameters, gradients,\noptimizer and activations")
    axes.set_ylim(
        top=1.35 * max(r[k] for r in rows for k in ("predicted_memory_bytes", "measured_memory_bytes")) / 2**20
    )
    axes.legend(frameon=False, ncols=2, loc="upper center")


def timeline_picture(devices: Sequence[str], predicted: Path, measured: Sequence[Path], path: Path) -> bool:
    """Draw the predicted above the measured timeline of all ranks; returns False without traces of the run.

    Args:
        devices: Name of every rank's device.
        predicted: The trace of the planner's simulation; its processes are the ranks in order.
        measured: The trace of every rank.
        path: The picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    plt = _pyplot()
    if not all(file.is_file() for file in measured):
        return False
    ranks = len(devices)
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(13, 1.5 + 1.1 * ranks), sharex=True)
    for rank in range(ranks):
        _passes(upper, rank, [event for event in _events(predicted) if event["pid"] == rank])
        _passes(lower, rank, _events(measured[rank]))
    for axes, title in ((upper, "predicted by the planner"), (lower, "measured")):
        axes.set_yticks(range(ranks), [f"rank {r}\n{devices[r]}" for r in range(ranks)])
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xlabel("seconds from the start of the iteration (green: forward, orange: backward)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _events(trace: Path) -> list[dict[str, Any]]:
    """Returns the compute events of a Chrome trace."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X" and event.get("tid") == 0]


def _passes(axes: Any, rank: int, events: Sequence[dict[str, Any]]) -> None:
    """Returns the forward and backward passes of a rank."""
    for event in events:
        kind = event["args"]["kind"]
        if kind in ("FORWARD", "BACKWARD"):
            start_s = event["ts"] / 1e6
            microbatch = event["args"]["microbatch"]
            _bar(axes, rank, start_s, start_s + event["dur"] / 1e6, kind == "FORWARD", microbatch)


def _bar(axes: Any, rank: int, start_s: float, end_s: float, forward: bool, microbatch: int) -> None:
    color = _FORWARD if forward else _BACKWARD
    axes.barh(rank, end_s - start_s, left=start_s, height=0.8, color=color, edgecolor="white", linewidth=0.5)
    axes.text((start_s + end_s) / 2, rank, str(microbatch), ha="center", va="center", fontsize=6, color="white")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
