"""HTML that cannot be broken by what users write: every text is escaped unless it was made here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

_VOID = frozenset({"meta", "br", "wbr"})


class Html(str):
    """Markup that is complete and safe; every other text is escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
        name: Of the element.
        children: Elements, or texts, which are escaped.
        attributes: ``class_`` stands for ``class``, ``_`` for ``-``; None and False leave an attribute out.
    """
    out = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        written = key.rstrip("_").replace("_", "-")
        out.append(f" {written}" if value is True else f' {written}="{html.escape(str(value))}"')
    inner = join(children)
    return Html("".join(out) + (">" if name in _VOID else f">{inner}</{name}>"))


def join(children: Iterable[str]) -> Html:
    """Elements and texts one after the other."""
    return Html("".join(c if isinstance(c, Html) else html.escape(c) for c in children))


def table(head: Sequence[str], rows: Iterable[Sequence[Html]]) -> Html:
    """A table; on a narrow screen every row becomes a block whose cells carry the names of their columns.

    Args:
        head: Names of the columns.
        rows: Of cells, each of :func:`cell`, ``th`` or ``td``.
    """
    columns = join(tag("th", name, scope="col") for name in head)
    body = (tag("tr", *row) for row in rows)
    return tag("div", tag("table", tag("thead", tag("tr", columns)), tag("tbody", *body)), class_="scroll")


def cell(column: str, *children: str, class_: str = "number") -> Html:
    """A cell of a table that says the name of its column."""
    return tag("td", *children, class_=class_, data_column=column)


def embedded_json(value: Any) -> Html:
    """JSON for a script element: no character in it can end the element or begin a comment.

    Raises:
        ValueError: A number that JSON has no text for.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def seconds(value: float) -> str:
    """``7.33 s``, ``12.1 ms``, ``45 µs``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(value) >= scale:
            return f"{significant(value / scale)} {unit}"
    return f"{significant(value * 1e6)} µs" if value else "0 s"


def size(value: float) -> str:
    """``12.6 GiB``."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024.0**power:
            return f"{significant(value / 1024.0**power)} {unit}"
    return f"{value:.0f} B"


def usd(value: float) -> str:
    """``$ 0.0342``; people read more digits of small prices."""
    if value >= 1000:
        return f"$ {value:,.0f}"
    return f"$ {value:.2f}" if value >= 100 else f"$ {significant(value)}"


def share(value: float) -> str:
    """``12.3 %``."""
    return f"{significant(100 * value)} %" if abs(value) >= 1e-3 else f"{100 * value:.2f} %"


def scaled(value: float, unit: str) -> str:
    """``1.24 PFLOP/s``, ``71.5 k tokens/s``."""
    steps = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    for scale, prefix in steps:
        if abs(value) >= scale:
            gap = " " if unit[0].islower() else ""
            return f"{significant(value / scale)} {prefix}{gap}{unit}"
    return f"{significant(value)} {unit}"


def significant(value: float) -> str:
    """Three digits, all of those of large numbers."""
    if not isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".removesuffix(".") if value else "0"


def shown(value: float | str | None, unit: str) -> str:
    """A figure with its unit, see ``data.Figure``."""
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    if unit == "s":
        return seconds(value)
    if unit == "bytes":
        return size(value)
    if unit == "usd":
        return usd(value)
    if unit == "share":
        return share(value)
    if unit == "count":
        return f"{value:,.0f}"
    return scaled(value, unit)
