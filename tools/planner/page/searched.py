"""The option ``--html`` of the commands that search: the page of the best plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ..command import command
from ..costs.build import build_plan, seats
from ..costs.estimate import Estimator
from ..errors import PlannerError
from ..inputs.files import check_target
from ..search.outcome import Found
from .collect import collect, gains_of, rows_of
from .html import write_page

ENDINGS = (".html", ".htm")


def check_page(options: argparse.Namespace) -> None:
    """Before long work: whether the page can be written."""
    if options.html:
        check_target(options.html, "--html", ENDINGS)


def page_of_search(
    estimator: Estimator,
    best: Found,
    options: argparse.Namespace,
    what: str,
    *,
    comparison: Sequence[dict[str, Any]] = (),
    binding: Sequence[str] = (),
    runners_up: Sequence[dict[str, Any]] = (),
    one_more_node: Sequence[dict[str, Any]] = (),
) -> dict[str, str]:
    """Write the page where ``--html`` was given.

    Returns:
        ``{"html": file}``, or nothing.

    Raises:
        PlannerError: A plan that the runtime does not run has no timeline.
    """
    if not options.html:
        return {}
    if not best.runnable:
        raise PlannerError(
            "command line",
            "--html",
            options.html,
            f"the best plan needs ZeRO-{best.candidate.zero_stage}, which has no timeline",
            "Leave out --html, or use --search auto",
        )
    plan = build_plan(estimator, best.candidate, best.estimate)
    seated = seats(estimator.cluster, best.candidate.stages, best.candidate.cp)
    assert seated is not None  # the search places what it returns
    title = f"{what} for {estimator.model.name} on {estimator.cluster.name}"
    page, _ = collect(estimator, best.candidate, best.estimate, plan, seated, title=title, notes=notes_of(options))
    page["binding"] = list(binding)
    page["comparison"] = rows_of(estimator, comparison)
    page["runners_up"] = rows_of(estimator, runners_up)
    page["one_more_node"] = gains_of(one_more_node)
    write_page(page, options.html)
    return {"html": options.html}


def written(page: dict[str, str]) -> list[str]:
    """Returns what to say about it."""
    return [f"wrote {page['html']}"] if page else []


def notes_of(options: argparse.Namespace, plan: str = "") -> list[str]:
    """Where the figures of a page come from."""
    files = [f"plan {plan}"] if plan else []
    files += [f"cluster {options.cluster}", f"model {options.model}"]
    files += [f"profile {options.profile}"] if options.profile else []
    out = ["Made from " + ", ".join(files) + "."]
    if options.profile is None:
        out.append(
            f"GPU figures are from datasheets, network figures from the cluster file; '{command()} profile' measures."
        )
    return out
