"""The section of a replay: what a job gets done under each policy, over time and in figures."""

from __future__ import annotations

from collections.abc import Sequence

from .data import Course
from .markup import Html, cell, join, seconds, share, significant, table, tag

_WIDTH, _HEIGHT, _MOST_POINTS = 1000.0, 260.0, 1000
_STYLES = ("stroke-width:3", "stroke-width:2;stroke-dasharray:9 4", "stroke-width:2;stroke-dasharray:2 4")
_WORDS = ("solid line", "dashed line", "dotted line")


def replay_section(courses: Sequence[Course], end_s: float) -> Html:
    """Curves of iterations that count, and a table.

    Args:
        courses: By policy.
        end_s: When the trace ends.
    """
    most = max((n for course in courses for _, n in course["curve"]), default=0.0) or 1.0
    lines = [_line(course, end_s, most, _STYLES[i % 3]) for i, course in enumerate(courses)]
    drawing = tag(
        "svg",
        *lines,
        viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}",
        role="img",
        aria_label="iterations that count over time, by policy",
        preserveAspectRatio="none",
        style="width:100%;height:auto;border-left:1px solid var(--soft);border-bottom:1px solid var(--soft)",
    )
    words = ", ".join(f"{course['policy']} as a {_WORDS[i % 3]}" for i, course in enumerate(courses))
    hint = f"Iterations that count, up to {significant(most)}, over {seconds(end_s)}: {words}."
    return join([drawing, tag("p", hint, class_="hint"), _table(courses)])


def _line(course: Course, end_s: float, most: float, style: str) -> Html:
    """A curve; of very many points some are left out."""
    points = [(t, n) for t, n in course["curve"] if t <= end_s]
    points = [*points[:: max(1, len(points) // _MOST_POINTS)], points[-1]]
    places = " ".join(f"{_WIDTH * t / end_s:.1f},{_HEIGHT * (1 - 0.96 * n / most):.1f}" for t, n in points)
    return tag("polyline", points=places, style=f"fill:none;stroke:var(--accent);{style}")


def _table(courses: Sequence[Course]) -> Html:
    head = ["policy", "iterations", "goodput", "", "repeated", "training", "paused", "idle", "changes"]
    body = []
    for course in courses:
        width = f"width:{100 * min(1.0, course['goodput']):.2f}%"
        body.append(
            [
                tag("th", course["policy"], scope="row"),
                cell("iterations", f"{course['iterations']:,.0f}"),
                cell("goodput", share(course["goodput"])),
                tag("td", tag("div", tag("i", class_="c-compute", style=width), class_="bar"), class_="wide"),
                cell("repeated", f"{course['repeated_iterations']:,.1f}"),
                cell("training", seconds(course["training_s"])),
                cell("paused", seconds(course["paused_s"])),
                cell("idle", seconds(course["idle_s"])),
                cell("changes", str(course["changes"])),
            ]
        )
    return table(head, body)
