"""Pictures of a replay (iterations that count over time, and nodes) and of what to rent (tokens per USD)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .policies import Course, Trace

_COLOURS = {"elastic": "#1f6fb4", "restart": "#d9822b", "full pool": "#7a7a7a"}


def draw(trace: Trace, courses: Sequence[Course], names: Sequence[str], file: str) -> None:
    """Write the picture.

    Args:
        trace: The trace.
        courses: By policy.
        names: Of the groups of nodes.
        file: SVG or PNG by its extension.
    """
    from matplotlib.figure import Figure

    unit, word = next((u, w) for u, w in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
                      if trace.end_s >= 2 * u or u == 1.0)  # fmt: skip
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for course in courses:
        points = [*course.curve, (trace.end_s, course.iterations)]
        inside = [(t, n) for t, n in points if t <= trace.end_s]
        style = "--" if course.policy == "full pool" else "-"
        upper.plot([t / unit for t, _ in inside], [n for _, n in inside], style, color=_COLOURS[course.policy],
                   label=f"{course.policy}: {course.iterations:.0f}")  # fmt: skip
    upper.set_ylabel("iterations that count")
    upper.set_ylim(bottom=0)
    upper.legend(loc="upper left", frameon=False)
    times = [change.time_s / unit for change in trace.changes] + [trace.end_s / unit]
    for i, name in enumerate(names):
        counts = [change.pool[i] for change in trace.changes]
        lower.step(times, [*counts, counts[-1]], where="post", label=name)
    lower.set_ylabel("nodes")
    lower.set_ylim(bottom=0)
    lower.set_xlim(0, trace.end_s / unit)
    lower.set_xlabel(word)
    lower.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    figure.savefig(file, dpi=130)


def draw_ladder(rungs: Sequence[Mapping[str, Any]], chosen: int, file: str) -> None:
    """Write the picture of ``rent``: tokens per second and the price of a token over USD per hour.

    Args:
        rungs: Rows of ``rent --json``.
        chosen: Number of the rung that is marked.
        file: SVG or PNG by its extension.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    usd = [rung["usd_per_hour"] for rung in rungs]
    for axes, key, label in (
        (upper, "tokens_per_s", "tokens/s"),
        (lower, "usd_per_billion_tokens", "USD per 10⁹ tokens"),
    ):
        values = [rung[key] for rung in rungs]
        axes.plot(usd, values, "o-", color=_COLOURS["elastic"])
        axes.plot(usd[chosen], values[chosen], "o", color=_COLOURS["restart"], markersize=10)
        axes.set_ylabel(label)
        axes.set_ylim(0, 1.1 * max(values))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    for i, rung in enumerate(rungs):
        place = (usd[i], rung["tokens_per_s"])
        upper.annotate(f"+ {rung['added']}", place, (6, -12), textcoords="offset points", fontsize=8)
    lower.set_xlabel("USD per hour")
    figure.savefig(file, dpi=130)
