"""The sections of the page, each from its part of the data."""

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from .data import (
    ClusterMap,
    Course,
    Figure,
    LinkOnMap,
    NodeGain,
    NodeOnMap,
    PageData,
    PoolOnMap,
    Row,
    StageRow,
    TimelineData,
)
from .tables import NOTATION

# HTML that cannot be broken by what users write: every text is escaped unless it was made here.


_VOID = frozenset({"meta", "br", "wbr"})


class Html(str):
    """Markup that is complete and safe; every other text is escaped."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """An element.

    Args:
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


# The cluster as boxes: zones, nodes, and GPUs in the colour of their stage; links are drawn by a script.


FULL = 0.5  # load of a link from which it is drawn as a busy one


def cluster_section(cluster: ClusterMap, hues: Sequence[int]) -> Iterator[Html]:
    """The map and the table of links."""
    yield tag(
        "p",
        "Every square is a GPU in the colour and with the number of its stage; empty squares stay unused. The line "
        "under a node is the share of the iteration in which its network is busy.",
        class_="hint",
    )
    regions = {zone["region"] for zone in cluster["zones"]}
    zones = []
    for zone in cluster["zones"]:
        title = zone["name"] + (f" ({zone['region']})" if len(regions) > 1 and zone["region"] != zone["name"] else "")
        pools = [_pool(p, cluster["pools"], hues) for p in zone["pools"]]
        zones.append(tag("div", tag("h3", title), tag("div", *pools, class_="pools"), class_="zone"))
    drawing = Html('<svg class="links" aria-hidden="true"></svg>')
    yield tag("div", drawing, *zones, class_="map", id="map")
    for pool in cluster["pools"]:
        if pool["left_out"]:
            yield tag("p", f"{pool['gpu']}: {pool['left_out']}.", class_="left-out")
    if cluster["links"]:
        yield _links(cluster)


def _pool(index: int, pools: Sequence[PoolOnMap], hues: Sequence[int]) -> Html:
    pool = pools[index]
    price = pool["usd_per_gpu_hour"]
    network = pool["network_bytes_per_s"]
    each = f"{pool['gpus_per_node']} " if pool["gpus_per_node"] > 1 else ""
    facts = [f"{pool['count']} × {each}{_pool_name(index, pools)}"]
    if pool["used_gpus"] != pool["quota"]:
        facts.append(f"{pool['used_gpus']} of {pool['quota']} used")
    if network:
        facts.append(f"network {scaled(network, 'B/s')}")
    if price:
        facts.append(f"{usd(price)} an hour each")
    nodes = [_node(pool["gpu"], node, hues) for node in pool["nodes"]]
    title = tag("p", tag("b", facts[0]), tag("small", " · ".join(facts[1:])))
    return tag("div", title, tag("div", *nodes, class_="nodes"), class_="pool", data_pool=index)


def _node(gpu: str, node: NodeOnMap, hues: Sequence[int]) -> Html:
    squares = []
    for g, held in enumerate(node["gpus"]):
        if not held:
            squares.append(tag("i", class_="gpu", data_tip=f"{node['name']}, GPU {g}: {gpu}, unused"))
            continue
        stage, replica, rank = held
        tip = f"{node['name']}, GPU {g}: {gpu}, stage {stage}, replica {replica}, rank {rank}"
        style = f"--hue:{hues[stage]}"
        squares.append(tag("i", str(stage), class_="gpu used", style=style, data_tip=tip, data_stage=stage))
    busy = (
        f"{node['name']}: network busy {share(node['load'])} of the iteration; sends {size(node['sent_bytes'])}, "
        f"receives {size(node['received_bytes'])}"
    )
    width = min(1.0, node["load"])
    line = tag("u", style=f"width:{100 * width:.2f}%", class_="full" if node["load"] > FULL else None)
    wide = "node wide-node" if len(squares) > 4 else "node"
    return tag("div", tag("div", *squares, class_="gpus"), tag("div", line, class_="load", data_tip=busy), class_=wide)


_LINK_COLUMNS = ("between", "activations and gradients", "reductions and gathers", "bandwidth", "busiest link busy")


def _links(cluster: ClusterMap) -> Html:
    names = [_pool_name(p, cluster["pools"]) for p in range(len(cluster["pools"]))]
    zones = {p: zone["name"] for zone in cluster["zones"] for p in zone["pools"]}
    return table(_LINK_COLUMNS, (list(_link(link, names, zones)) for link in cluster["links"]))


def _pool_name(index: int, pools: Sequence[PoolOnMap]) -> str:
    """The kind of GPU, with a number where several pools have it."""
    gpu = pools[index]["gpu"]
    alike = [p for p, pool in enumerate(pools) if pool["gpu"] == gpu]
    return f"{gpu} #{alike.index(index) + 1}" if len(alike) > 1 else gpu


def _link(link: LinkOnMap, names: Sequence[str], zones: dict[int, str]) -> Iterator[Html]:
    first, second = link["first"], link["second"]
    if first == second:
        text = f"nodes of {names[first]}"
    elif zones[first] == zones[second]:
        text = f"{names[first]} – {names[second]}"
    else:
        text = f"{names[first]} ({zones[first]}) – {names[second]} ({zones[second]})"
    load = link["load"]
    bar = tag("i", class_="c-full" if load > FULL else "c-compute", style=f"width:{100 * min(1.0, load):.2f}%")
    yield tag("th", text, scope="row")
    yield cell(_LINK_COLUMNS[1], size(link["transfer_bytes"]))
    yield cell(_LINK_COLUMNS[2], size(link["collective_bytes"]))
    yield cell(_LINK_COLUMNS[3], scaled(link["bytes_per_s"], "B/s"))
    yield cell(_LINK_COLUMNS[4], tag("div", bar, class_="bar"), tag("small", share(load)), class_="wide")


# The section of a replay: what a job gets done under each policy, over time and in figures.


_WIDTH, _HEIGHT, _MOST_POINTS = 1000.0, 260.0, 1000
_STYLES = ("stroke-width:3", "stroke-width:2;stroke-dasharray:9 4", "stroke-width:2;stroke-dasharray:2 4")
_WORDS = ("solid line", "dashed line", "dotted line")


def replay_section(courses: Sequence[Course], end_s: float) -> Html:
    """Curves of iterations that count, up to the end of the trace, and a table."""
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


_HUES = (215, 28, 150, 280, 0, 190, 52, 325)  # of up to eight stages; of more, the colour circle is divided

MEMORY = ("parameters", "gradients", "optimizer", "activations", "workspace", "reserved")
IDLE = {
    "compute": "compute",
    "warmup": "filling and draining",
    "imbalance": "waiting for a slower device",
    "communication": "waiting for transfers",
    "gather": "waiting for gathers and copies",
    "tail": "reduction and update",
}
_USD = "USD per iteration"
GROUPS = ("forward", "backward", "weight gradient", "other compute", "transfer", "collective", "host copy")


def stage_hues(page: PageData) -> list[int]:
    """A hue in degrees for every stage."""
    stages = [r["stage"] for r in page.get("stages", ())]
    stages += [lane["stage"] for t in page.get("timelines", ()) for lane in t["lanes"]]
    count = max(stages, default=-1) + 1
    return list(_HUES[:count]) if count <= len(_HUES) else [round(215 + 300 * s / count) % 360 for s in range(count)]


def all_of(page: PageData, hues: Sequence[int]) -> Iterator[Html]:
    """Everything that the page has, top to bottom."""
    yield tag("header", tag("h1", page["title"]), tag("p", page["subtitle"], class_="lead"), _figures(page["figures"]))
    if page.get("binding"):
        yield _section("What binds", tag("ul", *(tag("li", text) for text in page["binding"])))
    if "cluster" in page:
        yield _section("Cluster", *cluster_section(page["cluster"], hues))
    if page.get("stages"):
        yield _section("Stages and memory", *_stages(page["stages"], hues))
    if page.get("timelines"):
        yield _section("Timeline of one iteration", *_timelines(page["timelines"]))
        yield _section("Where the time goes", *_times(page["timelines"], page.get("causes", {}), hues))
    if "replay" in page:
        replay = page["replay"]
        yield _section("What the job gets done", replay_section(replay["courses"], replay["end_s"]))
        yield _plans("Plans of the trace's pools", replay["pools"])
    if page.get("comparison"):
        yield _plans("Against other plans", page["comparison"])
    if page.get("runners_up"):
        yield _plans("Plans of other kinds", page["runners_up"])
    if page.get("one_more_node"):
        yield _section("One more node", _gains(page["one_more_node"]))
    if page.get("notes"):
        yield _section("Notes", tag("ul", *(tag("li", text) for text in page["notes"])))


def _section(title: str, *parts: str) -> Html:
    return tag("section", tag("h2", title), *parts)


def _plans(title: str, rows: Sequence[Row]) -> Html:
    """Plans beside each other, and how to read one."""
    return _section(title, _comparison(rows), tag("p", " ".join(NOTATION.split()), class_="hint"))


def _figures(figures: Sequence[Figure]) -> Html:
    tiles = [
        tag(
            "div",
            tag("dt", f["name"]),
            tag("dd", _large(shown(f["value"], f["unit"])), tag("span", f["note"])),
            class_="tile",
        )
        for f in figures
    ]
    return tag("dl", *tiles, class_="tiles")


def _large(text: str) -> Html:
    """A figure in large type, its unit in small."""
    number, gap, unit = text.partition(" ")
    if number == "$":
        return tag("b", text)
    return tag("b", number, tag("small", gap + unit))


def _legend(names: Mapping[str, str]) -> Html:
    """Colours and what they mean; the colours are classes of the style sheet."""
    keys = (tag("li", tag("i", class_=f"swatch c-{_class(key)}"), text) for key, text in names.items())
    return tag("ul", *keys, class_="legend")


def _class(name: str) -> str:
    """A name of ours as a class; others (a category that a caller made up) get the neutral one."""
    known = (*MEMORY, *IDLE, *GROUPS)
    return name.replace(" ", "-") if name in known else "unknown"


def _bar(parts: Mapping[str, float], whole: float, tip: Callable[[str, float], str], mark: float | None = None) -> Html:
    """A bar divided into parts, with a mark (a limit) where one is given."""
    pieces = [
        tag("i", class_=f"c-{_class(name)}", style=f"width:{100 * value / whole:.3f}%", data_tip=tip(name, value))
        for name, value in parts.items()
        if value > 0 and whole > 0
    ]
    if mark is not None and whole > 0:
        pieces.append(tag("em", style=f"left:{100 * mark / whole:.3f}%"))
    return tag("div", *pieces, class_="bar")


def _stages(rows: Sequence[StageRow], hues: Sequence[int]) -> Iterator[Html]:
    longest = max(max(r["total_bytes"], r["capacity_bytes"] or 0.0) for r in rows)
    found = {name for r in rows for name, value in r["memory_bytes"].items() if value > 0}
    names = sorted(found, key=lambda name: (MEMORY.index(name) if name in MEMORY else len(MEMORY), name))
    hint = "Memory of one GPU by category."
    if any(r["limit_bytes"] for r in rows):
        hint += " The frame is the GPU's memory; the line is the most that a plan may use."
    yield tag("p", hint, class_="hint")
    yield _legend({name: name for name in names})
    yield tag("div", *(_stage(r, longest, hues) for r in rows), class_="stages")


def _stage(r: StageRow, longest: float, hues: Sequence[int]) -> Html:
    capacity, limit, total = r["capacity_bytes"], r["limit_bytes"], r["total_bytes"]
    fits = limit is None or total <= limit
    said = f"{size(total)}" + ("" if capacity is None else f" of {size(capacity)}")
    frame = tag(
        "div",
        _bar(
            r["memory_bytes"],
            max(total, capacity or 0.0),
            lambda name, value: f"{name}: {size(value)} ({share(value / total)} of what is used)",
            limit,
        ),
        class_="frame",
        style=f"width:{100 * max(total, capacity or 0.0) / longest:.3f}%",
    )
    facts = [
        f"{r['replicas']} × {r['gpu']}" + (f" · TP {r['tp']}" if r["tp"] > 1 else ""),
        f"{r['layers']} layers · {r['microbatches']} microbatches · computes {seconds(r['busy_s'])}",
    ]
    if r["where"]:
        facts[0] += f" · {r['where']}"
    return tag(
        "div",
        tag("span", str(r["stage"]), class_="stage-number", style=f"--hue:{hues[r['stage']]}"),
        tag("div", tag("b", facts[0]), tag("small", facts[1]), *([tag("small", r["note"])] if r["note"] else [])),
        tag("div", frame, tag("small", said, "" if fits else tag("strong", " TOO MUCH"))),
        class_="stage",
        data_stage=r["stage"],
    )


def _timelines(timelines: Sequence[TimelineData]) -> Iterator[Html]:
    yield tag(
        "p",
        "Each row is a replica of a stage; numbers are microbatches. Thin lines below a row are transfers, collectives "
        "and copies. ",
        tag("span", "Drag to move. Zoom with the buttons, a double click, or Ctrl and the wheel. ", class_="on-screen"),
        tag("span", "Point at an operation to read it.", class_="on-screen"),
        class_="hint",
    )
    found = dict.fromkeys(group for t in timelines for _, _, group in t["labels"])
    yield _legend({name: name for name in GROUPS if name in found})
    buttons = (("in", "+", "zoom in"), ("out", "−", "zoom out"), ("left", "←", "earlier"), ("right", "→", "later"))
    controls = [tag("button", text, type="button", data_do=name, aria_label=label) for name, text, label in buttons]
    controls.append(tag("button", "whole iteration", type="button", data_do="all"))
    controls.append(tag("button", "colour by microbatch", type="button", data_do="colour", aria_pressed="false"))
    controls.append(tag("output", id="shown-time"))
    yield tag("div", *controls, class_="controls")
    for i, t in enumerate(timelines):
        title = f"{t['title']}: {seconds(t['makespan_s'])}"
        text = f"Timeline of {len(t['lanes'])} devices"
        canvas = tag("canvas", class_="timeline", data_timeline=i, tabindex=0, role="img", aria_label=text)
        yield tag("figure", tag("figcaption", title), tag("div", canvas, class_="tall"))
        for text in t["left_out"]:
            yield tag("p", text, ".", class_="left-out")
    yield tag("noscript", tag("p", "The timeline is drawn by a script of this page; scripts are switched off."))


def _times(timelines: Sequence[TimelineData], causes: Mapping[str, float], hues: Sequence[int]) -> Iterator[Html]:
    """Idle time by cause: mean of the drawn replicas of every stage."""
    first = timelines[0]
    stages: dict[int, list[dict[str, float]]] = {}
    for lane in first["lanes"]:
        stages.setdefault(lane["stage"], []).append({"compute": lane["compute_s"], **lane["idle_s"]})
    rows = []
    seen: dict[str, str] = {}
    for stage, lanes in stages.items():
        mean = {name: sum(lane.get(name, 0.0) for lane in lanes) / len(lanes) for name in lanes[0]}
        seen |= {name: IDLE.get(name, name) for name, value in mean.items() if value > 1e-9 * first["makespan_s"]}
        idle = 1 - mean["compute"] / first["makespan_s"]
        bar = _bar(
            mean,
            first["makespan_s"],
            lambda name, value: f"{IDLE.get(name, name)}: {seconds(value)} ({share(value / first['makespan_s'])})",
        )
        rows.append(
            tag(
                "div",
                tag("span", str(stage), class_="stage-number", style=f"--hue:{hues[stage]}"),
                bar,
                tag("small", f"{share(idle)} idle"),
                class_="time",
            )
        )
    yield _legend(seen)
    yield tag("div", *rows, class_="times")
    yield tag(
        "p",
        f"Simulated, mean of the drawn replicas of each stage; a whole bar is {seconds(first['makespan_s'])}.",
        class_="hint",
    )
    if causes:
        text = "; ".join(f"{name} {seconds(value)}" for name, value in causes.items())
        yield tag("p", f"By the closed form: {text}.", class_="hint")


def _comparison(rows: Sequence[Row]) -> Html:
    longest = max((r["iteration_s"] or 0.0 for r in rows), default=0.0)
    best = rows[0]["iteration_s"]
    with_names = any(r["what"] for r in rows)
    with_usd = any(r["usd_per_iteration"] for r in rows)
    head = [*(["what"] if with_names else []), "iteration", "", "tokens/s"]
    head += [*([_USD] if with_usd else []), "GPUs", "plan"]
    body = []
    for r in rows:
        cells = [tag("th", r["what"], scope="row")] if with_names else []
        taken = r["iteration_s"]
        if taken is None or r["tokens_per_s"] is None:
            cells.append(tag("td", "no plan found", colspan=len(head) - len(cells)))
        else:
            ratio = f"× {taken / best:.2f}" if best else ""
            width = f"width:{100 * taken / longest:.2f}%"
            cells += [
                cell("iteration", seconds(taken), tag("small", f" {ratio}")),
                tag("td", tag("div", tag("i", class_="c-compute", style=width), class_="bar"), class_="wide"),
                cell("tokens/s", significant(r["tokens_per_s"])),
            ]
            if with_usd:
                price = r["usd_per_iteration"]
                cells.append(cell(_USD, "unknown" if price is None else usd(price)))
            cells.append(cell("GPUs", str(r["gpus"] or "")))
            cells.append(tag("td", r["plan"] or "", class_="plan"))
        body.append(cells)
    return table(head, body)


def _gains(rows: Sequence[NodeGain]) -> Html:
    body = [
        [
            tag("th", f"{r['gpu']} ({r['zone']})", scope="row"),
            cell("iteration", seconds(r["iteration_s"])),
            cell("change", f"{100 * r['change']:+.1f} %"),
            cell(_USD, usd(r["usd_per_iteration"])),
        ]
        for r in rows
    ]
    return table(["one node more of", "iteration", "change", _USD], body)
