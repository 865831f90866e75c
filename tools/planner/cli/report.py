"""The command ``report``: the page of a plan file."""

from __future__ import annotations

import argparse

from ..inputs.files import check_target
from ..page.collect import collect, gains_of, rows_of
from ..page.html import write_page
from ..page.searched import ENDINGS, notes_of
from ..report.analysis import comparison, one_more_node
from ..report.tables import say, summary_tables
from ..search.limit import each_s
from ..search.outcome import Found
from ..search.setup import check_prices, goal_from
from .commands import load, priced, refuse_unrunnable


def report(options: argparse.Namespace) -> int:
    """Write the page."""
    check_target(options.html, "--html", ENDINGS)
    goal = goal_from(options)
    estimator, made = load(options)
    check_prices(estimator, goal, options.cluster)
    refuse_unrunnable(made, options.plan)
    candidate, estimate, seated = priced(estimator, made, options)
    title = f"Plan for {estimator.model.name} on {estimator.cluster.name}"
    notes = notes_of(options, options.plan)
    page, body = collect(estimator, candidate, estimate, made, seated, title=title, notes=notes)
    if not options.no_search:
        mine = Found(candidate, estimate, body["iteration_s"])
        kinds = len(estimator.cluster.nodes)
        seconds = each_s(options, 2 * kinds + len(goal.schedules))
        body["comparison"] = comparison(estimator, goal, mine, seconds)
        body["one_more_node"] = one_more_node(estimator, goal, mine, seconds)
        page["comparison"] = rows_of(estimator, body["comparison"])
        page["one_more_node"] = gains_of(body["one_more_node"])
    write_page(page, options.html)
    say(body | {"html": options.html}, options, *summary_tables(body), f"wrote {options.html}")
    return 0
