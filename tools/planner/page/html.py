"""The page: one HTML document that holds its styles, scripts and data, and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from importlib import resources
from typing import Any, cast

from ..inputs.files import write_text
from . import sections
from .data import PageData
from .markup import Html, embedded_json, join, tag

SCRIPTS = ("tips.js", "links.js", "timeline.js")


def write_page(page: PageData, path: str | os.PathLike[str]) -> None:
    """Write a complete page or nothing.

    Raises:
        PlannerError: The file cannot be written.
    """
    write_text(path, render(page))


def render(page: PageData) -> str:
    """The document.

    The browser itself is told (Content-Security-Policy) to fetch nothing and to run only the scripts of this
    package, by their hashes: whatever names and notes hold stays text.
    """
    scripts = [_asset(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; form-action 'none'"
    hues = sections.stage_hues(page)
    embedded: Mapping[str, Any] = {**cast(Mapping[str, Any], page), "hues": hues}
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", page["title"]),
        tag("style", Html(_asset("page.css"))),
    )
    body = tag(
        "body",
        tag("main", *(part for part in sections.all_of(page, hues) if part)),
        tag("div", id="tip", role="status", hidden=True),
        tag("script", embedded_json(embedded), type="application/json", id="page-data"),
        *(tag("script", Html(text)) for text in scripts),
    )
    return "<!doctype html>\n" + Html('<html lang="en">') + join([head, body]) + "</html>\n"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
