"""The commands ``explain`` and ``compare``."""

from __future__ import annotations

import argparse

from ..page.searched import check_page, page_of_search, written
from ..report.alternatives import alternatives, row_of
from ..report.analysis import binding, comparison, one_more_node
from ..report.tables import bound_lines, plans_tables, say, search_body, shown_progress, summary, summary_tables, table
from ..search.limit import each_s
from ..search.setup import estimator_from, goal_from
from .commands import require, run_search


def explain(options: argparse.Namespace) -> int:
    """Why this plan, what binds, the runners-up, what one more node of each kind would bring."""
    check_page(options)
    estimator, goal = estimator_from(options), goal_from(options)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    body = summary(estimator, best.candidate, best.estimate, best.simulated_s)
    body["search"] = search_body(outcome, goal)
    body["binding"] = binding(estimator, goal, best)
    body["runners_up"] = alternatives(estimator, outcome, best)
    seconds = each_s(options, len(estimator.cluster.nodes))
    with shown_progress("searching with one node more of each kind", options):
        body["one_more_node"] = one_more_node(estimator, goal, best, seconds)
    shown = [row_of(estimator, "this plan", best, best), *body["runners_up"]]
    runners = plans_tables("Plans of other kinds", "differs by", shown)
    more = table("One more node", "kind", "s per iteration", "change")
    for row in body["one_more_node"]:
        more.add_row(f"{row['gpu']} ({row['zone']})", f"{row['iteration_s']:.4g}", f"{100 * row['change']:+.1f} %")
    page = page_of_search(
        estimator, best, options, "Plan", binding=body["binding"], runners_up=shown, one_more_node=body["one_more_node"]
    )
    lines = [*bound_lines(outcome, goal), *[f"- {text}" for text in body["binding"]]]
    say(body | page, options, *summary_tables(body), *lines, *runners, more, *written(page))
    return 0


def compare(options: argparse.Namespace) -> int:
    """The plan against an even split, single GPU types and single schedules."""
    check_page(options)
    estimator, goal = estimator_from(options), goal_from(options)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    seconds = each_s(options, len(estimator.cluster.nodes) + len(goal.schedules))
    with shown_progress("searching on single kinds and with single schedules", options):
        rows = comparison(estimator, goal, best, seconds)
    shown = plans_tables("Comparison", "what", rows)
    page = page_of_search(estimator, best, options, "Comparison", comparison=rows)
    say({"rows": rows, "search": search_body(outcome, goal)} | page, options, *shown, *written(page))
    return 0
