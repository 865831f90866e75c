"""The page: one HTML document that holds its styles, scripts and data, and fetches nothing."""

import argparse
import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from math import isfinite
from typing import Any, cast

from jinja2 import Environment, StrictUndefined

from ..costs.build import build_plan, seats
from ..costs.estimate import Estimator
from ..errors import PlannerError, command
from ..inputs.files import check_target, write_text
from ..search.outcome import Found
from .collect import collect, rows_of
from .data import PageData
from .tables import DATASHEETS, NOTATION

SCRIPTS = ("tips.js", "links.js", "timeline.js")


def render(page: PageData) -> str:
    """The document.

    A Content-Security-Policy lets the browser fetch nothing and run only the scripts of this
    package, by their hashes: names and notes from files stay text.

    Raises:
        ValueError: A number that JSON cannot represent.
    """
    scripts = [_asset(name) for name in SCRIPTS]
    digests = (base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()) for text in scripts)
    hashes = " ".join(f"'sha256-{digest.decode('ascii')}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; form-action 'none'"
    hues = stage_hues(page)
    whole = dict.fromkeys(PageData.__annotations__) | cast(dict[str, Any], page)
    texts = {"policy": policy, "style": _asset("page.css"), "scripts": scripts, "embedded": {**page, "hues": hues}}
    environment = Environment(autoescape=True, undefined=StrictUndefined, extensions=["jinja2.ext.do"])
    filters = {"seconds": seconds, "size": size, "share": share, "significant": significant}
    environment.filters |= filters | {"figure": shown, "css": css_class}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    template = environment.from_string("".join(line.strip() for line in _asset("page.html").splitlines()))
    return template.render(page=whole, hues=hues, **texts, **drawn(page))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


# The option ``--html`` of the commands that search: the page of the best plan.


ENDINGS = (".html", ".htm")


def check_page(options: argparse.Namespace) -> None:
    """Check before long work that the page can be written."""
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
    """Write the page if ``--html`` was given; returns ``{"html": file}``, else an empty dictionary.

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
    write_text(options.html, render(page))
    return {"html": options.html}


def notes_of(options: argparse.Namespace, plan: str = "") -> list[str]:
    """Returns notes on the sources of the page's figures."""
    files = [f"plan {plan}"] if plan else []
    files += [f"cluster {options.cluster}", f"model {options.model}"]
    files += [f"profile {options.profile}"] if options.profile else []
    return [f"Made from {', '.join(files)}.", *([] if options.profile else [DATASHEETS.format(command())])]


# Formatting of figures, and further values for the template (``assets/page.html``).


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
    """``$ 0.0342``; small prices have more digits."""
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
    if unit == "count":
        return f"{value:,.0f}"
    plain = {"s": seconds, "bytes": size, "usd": usd, "share": share}
    return plain[unit](value) if unit in plain else scaled(value, unit)


FULL = 0.5  # load of a link from which it is drawn as a busy one
_HUES = (215, 28, 150, 280, 0, 190, 52, 325)  # of up to eight stages; of more, the colour circle is divided
_WIDTH, _HEIGHT, _MOST_POINTS = 1000.0, 260.0, 1000  # of the picture of a replay

MEMORY = ("parameters", "gradients", "optimizer", "activations", "workspace", "reserved")
IDLE = {
    "compute": "compute",
    "warmup": "filling and draining",
    "imbalance": "waiting for a slower device",
    "communication": "waiting for transfers",
    "gather": "waiting for gathers and copies",
    "tail": "reduction and update",
}
GROUPS = ("forward", "backward", "weight gradient", "other compute", "transfer", "collective", "host copy")


def css_class(name: str) -> str:
    """Returns the CSS class of a known name; unknown categories get the neutral class."""
    return name.replace(" ", "-") if name in (*MEMORY, *IDLE, *GROUPS) else "unknown"


def stage_hues(page: PageData) -> list[int]:
    """A hue in degrees for every stage."""
    stages = [r["stage"] for r in page.get("stages", ())]
    stages += [lane["stage"] for t in page.get("timelines", ()) for lane in t["lanes"]]
    count = max(stages, default=-1) + 1
    return list(_HUES[:count]) if count <= len(_HUES) else [round(215 + 300 * s / count) % 360 for s in range(count)]


def drawn(page: PageData) -> dict[str, Any]:
    """Returns the template's values besides the page's data."""
    stages, timelines = page.get("stages", ()), page.get("timelines", ())
    held = {name for r in stages for name, value in r["memory_bytes"].items() if value > 0}
    groups = {group for t in timelines for _, _, group in t["labels"]}
    times = _stage_times(page)
    least_s = 1e-9 * timelines[0]["makespan_s"] if timelines else 0.0
    idle = dict.fromkeys(name for mean in times.values() for name, value in mean.items() if value > least_s)
    gpus = [pool["gpu"] for pool in (page["cluster"]["pools"] if "cluster" in page else ())]
    numbers = [f" #{gpus[: p + 1].count(gpu)}" if gpus.count(gpu) > 1 else "" for p, gpu in enumerate(gpus)]
    return {
        "full": FULL,
        "notation": " ".join(NOTATION.split()),
        "pool_names": [gpu + number for gpu, number in zip(gpus, numbers)],
        "memory_names": {name: name for name in (*(n for n in MEMORY if n in held), *sorted(held - {*MEMORY}))},
        "most_bytes": max((max(r["total_bytes"], r["capacity_bytes"] or 0.0) for r in stages), default=0.0),
        "group_names": {name: name for name in GROUPS if name in groups},
        "stage_times": times,
        "idle_names": {name: IDLE.get(name, name) for name in idle},
        **(_replay(**page["replay"]) if "replay" in page else {}),
    }


def _stage_times(page: PageData) -> dict[int, dict[str, float]]:
    """Seconds of compute, and idle ones by cause: mean of the drawn replicas of every stage."""
    stages: dict[int, list[dict[str, float]]] = {}
    for timeline in page.get("timelines", ())[:1]:
        for lane in timeline["lanes"]:
            stages.setdefault(lane["stage"], []).append({"compute": lane["compute_s"], **lane["idle_s"]})
    return {
        stage: {name: sum(lane.get(name, 0.0) for lane in lanes) / len(lanes) for name in lanes[0]}
        for stage, lanes in stages.items()
    }


def _replay(courses: Sequence[dict[str, Any]], end_s: float, **_: Any) -> dict[str, Any]:
    """Returns the curves of a replay, thinned out if they have very many points."""
    most = max((n for course in courses for _, n in course["curve"]), default=0.0) or 1.0
    lines = []
    for course in courses:
        points = [(t, n) for t, n in course["curve"] if t <= end_s]
        points = [*points[:: max(1, len(points) // _MOST_POINTS)], points[-1]]
        lines.append(" ".join(f"{_WIDTH * t / end_s:.1f},{_HEIGHT * (1 - 0.96 * n / most):.1f}" for t, n in points))
    return {"replay_most": most, "replay_lines": lines, "replay_size": (_WIDTH, _HEIGHT)}
