"""The page: one HTML document that holds its styles, scripts and data, and fetches nothing."""

import argparse
import base64
import hashlib
import os
from collections.abc import Sequence
from importlib import resources
from typing import Any, cast

from jinja2 import Environment, StrictUndefined, Template

from ..costs.build import build_plan, seats
from ..costs.estimate import Estimator
from ..errors import PlannerError, command
from ..inputs.files import check_target, write_text
from ..search.outcome import Found
from . import sections
from .collect import collect, rows_of
from .data import PageData

SCRIPTS = ("tips.js", "links.js", "timeline.js")


def write_page(page: PageData, path: str | os.PathLike[str]) -> None:
    """Write a complete page or nothing; raises PlannerError."""
    write_text(path, render(page))


def render(page: PageData) -> str:
    """The document.

    The browser itself is told (Content-Security-Policy) to fetch nothing and to run only the scripts of this
    package, by their hashes: whatever names and notes hold stays text.

    Raises:
        ValueError: A number that JSON has no text for.
    """
    scripts = [_asset(name) for name in SCRIPTS]
    digests = (base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()) for text in scripts)
    hashes = " ".join(f"'sha256-{digest.decode('ascii')}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; form-action 'none'"
    hues = sections.stage_hues(page)
    whole = dict.fromkeys(PageData.__annotations__) | cast(dict[str, Any], page)
    texts = {"policy": policy, "style": _asset("page.css"), "scripts": scripts, "embedded": {**page, "hues": hues}}
    return _template().render(page=whole, hues=hues, **texts, **sections.drawn(page))


def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, extensions=["jinja2.ext.do"])
    filters = {name: getattr(sections, name) for name in ("seconds", "size", "share", "significant")}
    environment.filters |= filters | {"figure": sections.shown, "css": sections.css_class}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string("".join(line.strip() for line in _asset("page.html").splitlines()))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


# The option ``--html`` of the commands that search: the page of the best plan.


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
    """Write the page where ``--html`` was given; ``{"html": file}``, or nothing.

    Raises:
        PlannerError: A plan that the runtime does not run has no timeline.
    """
    if not options.html:
        return {}
    if not best.runnable:
        problem = f"the best plan needs ZeRO-{best.candidate.zero_stage}, which has no timeline"
        raise PlannerError("command line", "--html", options.html, problem, "Leave out --html, or use --search auto")
    plan = build_plan(estimator, best.candidate, best.estimate)
    seated = seats(estimator.cluster, best.candidate.stages, best.candidate.cp)
    assert seated is not None  # the search places what it returns
    title = f"{what} for {estimator.model.name} on {estimator.cluster.name}"
    page, _ = collect(estimator, best.candidate, best.estimate, plan, seated, title=title, notes=notes_of(options))
    page["binding"] = list(binding)
    page["comparison"] = rows_of(estimator, comparison)
    page["runners_up"] = rows_of(estimator, runners_up)
    page["one_more_node"] = list(one_more_node)
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
