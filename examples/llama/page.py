"""The demo's report page: the planner's page of the plan, with what was measured beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_het.schedule import Kind
from tools.planner.__main__ import parser_of
from tools.planner.cli.commands import load, priced
from tools.planner.page.collect import Event, collect, pack
from tools.planner.page.data import Figure, Lane, PageData, Row
from tools.planner.page.html import write_page
from tools.planner.page.sections import size


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
    write_page(with_measured(page, result, traces), str(file))


def with_measured(page: PageData, result: dict[str, Any], traces: Sequence[Path]) -> PageData:
    """Add what was measured to the page of a plan.

    Args:
        page: What the planner predicts; changed in place.
        result: The contents of ``report.json``.
        traces: Of every rank, one iteration; without one of them no measured timeline is added.
    """
    page["figures"] = [*_figures(result), *page["figures"]]
    page["timelines"] += _measured(traces, result)
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


def _measured(traces: Sequence[Path], result: dict[str, Any]) -> list[Any]:
    """The traced iteration; nothing when there are no traces."""
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


def _comparison(result: dict[str, Any]) -> list[Row]:
    rows = (
        ("planned, measured", "plan", "measured_iteration_s"),
        ("planned, predicted", "plan", "predicted_iteration_s"),
        ("even split, measured", "even_split", "even_split_iteration_s"),
        ("even split, predicted", "even_split", "even_split_predicted_iteration_s"),
    )
    return [
        Row(
            what=what,
            plan=result[plan],
            iteration_s=result[key],
            tokens_per_s=result["tokens_per_iteration"] / result[key],
            usd_per_iteration=None,
            gpus=len(result["per_rank"]),
        )
        for what, plan, key in rows
    ]
