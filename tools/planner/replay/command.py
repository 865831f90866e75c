"""The command ``replay``: plans for pools of nodes, the progress of a job with them, tables and pictures."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from megatron_het.elastic.worth import grows_s
from megatron_het.safe_io import add_options, amount, count

from ..costs.estimate import Estimator
from ..errors import PlannerError
from ..inputs.cluster import Cluster
from ..inputs.files import check_target, read_json, write_text
from ..report.data import PageData
from ..report.html import check_page, notes_of, render
from ..report.tables import NOTATION, describe, say, shown_progress, table
from ..search.methods import search_on
from ..search.outcome import Goal, Progress, check_prices, cpu_limit, estimator_from, goal_from, left_s
from .policies import CHANGES, Costs, Course, Pool, Trace, load_trace, pauses_by_state, run_all, with_start

# Pictures of a replay (completed iterations and nodes over time) and of ``rent`` (tokens per USD).


_COLOURS = {"elastic": "#1f6fb4", "restart": "#d9822b", "full pool": "#7a7a7a"}


def draw(trace: Trace, courses: Sequence[Course], names: Sequence[str], file: str) -> None:
    """Write the picture: SVG or PNG by the file's extension."""
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


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The best plan for a pool."""

    pool: Pool  # its nodes
    iteration_s: float | None  # of the best plan; None where none fits
    plan: str = ""  # summary in one line
    state_bytes: float = 0.0  # parameters and optimizer state of the rank with the most
    grows_s: float = 0.0  # the part of a change's seconds that grows with state, links and groups
    used: Pool = ()  # nodes with ranks of the plan, if known
    gpus: int = 0  # used by the plan


def plan_of_pool(
    found: dict[Pool, PoolPlan], estimator: Estimator, goal: Goal, method: str, pool: Pool, limit_s: float
) -> None:
    """Add the best plan of a pool to ``found``; it may be one that was found for a part of the pool.

    Args:
        found: Plans by the nodes of every group of the cluster file.

    Raises:
        PlannerError: The search found no plan within its time limit.
    """
    best = _search_pool(estimator, goal, method, pool, limit_s)
    for smaller in found.values():
        is_part = all(a <= b for a, b in zip(smaller.pool, pool, strict=True))
        fits = smaller.iteration_s is not None and is_part
        if fits and (smaller.iteration_s or 0.0) < (best.iteration_s or inf):
            best = replace(smaller, pool=pool)
    found[pool] = best


def _search_pool(estimator: Estimator, goal: Goal, method: str, pool: Pool, limit_s: float) -> PoolPlan:
    cluster = limited(estimator.cluster, pool)
    if cluster is None:
        return PoolPlan(pool, None)
    part = estimator.on(cluster)
    progress = Progress(limit_s=limit_s)
    with cpu_limit(progress):
        best = search_on(method, part, goal, progress).best
    if best is None or not best.runnable:
        return PoolPlan(pool, None)
    memory, candidate = best.estimate.memory, best.candidate
    state_bytes = max(m.parameter_bytes + m.optimizer_bytes for m in memory)
    # The ranks of a node share its network.
    share_bytes_per_s = min(node.network_bytes_per_s / node.gpus_per_node for node in cluster.nodes)
    seconds = grows_s(state_bytes, share_bytes_per_s, 2 + 2 * max(m.group.count for m in memory))
    gpus = candidate.gpus()
    kinds = (-(-gpus.get(i, 0) // node.gpus_per_node) for i, node in enumerate(cluster.nodes))
    used = tuple(next(kinds) if n else 0 for n in pool)  # the limited cluster lacks groups without nodes
    line = describe(part, candidate)
    return PoolPlan(pool, best.iteration_s, line, state_bytes, seconds, used, gpus=candidate.world_size)


def limited(cluster: Cluster, pool: Pool) -> Cluster | None:
    """Returns the cluster limited to the nodes of a pool; None for a pool without nodes."""
    sizes = [(group, size) for group, size in zip(cluster.nodes, pool, strict=True) if size]
    nodes = [group.model_copy(update={"count": size, "hosts": group.hosts[:size]}) for group, size in sizes]
    if not any(node.quota for node in nodes):
        return None
    places = {name for node in nodes for name in (node.zone, node.where)}
    links = tuple(link for link in cluster.links if all(end in places for end in link.between))
    return cluster.model_copy(update={"nodes": tuple(nodes), "links": links})


_SECONDS = (
    ("join_s", "pause of the training when a node joins"),
    ("leave_s", "pause of the training when a node leaves on notice"),
    ("death_s", "pause of the training when a node fails"),
    ("start_s", "time of a new node, while the others train, before it can join"),
    ("restart_s", "time to restart all processes and load a checkpoint"),
    ("save_s", "pause of the training for a checkpoint"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    rows: dict[str, tuple[Any, ...]] = {
        "trace": (None, "TRACE", "CSV: time_s, gpu, nodes, notice; see docs/elastic.md", {"type": Path}),
        "--picture": (None, "FILE", "write a picture (SVG or PNG by extension)"),
        "--html": (None, "FILE", "write one HTML page of what is printed"),
    }
    add_options(parser, rows)
    add_pauses(parser)


def add_pauses(parser: argparse.ArgumentParser) -> None:
    """Add the options for the pauses of a job: at changes, restarts and checkpoints."""
    text = "output of benchmarks.elastic: pauses measured on this hardware"
    rows: dict[str, tuple[Any, ...]] = {"--pauses": (None, "FILE", text, {"type": Path})}
    for name, text in _SECONDS:
        told = {"type": amount(0.0, 1e7)}
        rows[f"--{name.replace('_', '-')}"] = (None, "S", f"{text} (default {getattr(Costs(), name):g})", told)
    text = f"iterations between two checkpoints (default {Costs().save_every})"
    add_options(parser, rows | {"--save-every": (None, "N", text, {"type": count(1, 10**9)})})


def replay(options: argparse.Namespace) -> int:
    """Search a plan for every pool of the trace, replay the trace under every policy, print the results."""
    goal, estimator = goal_from(options), estimator_from(options)
    check_prices(estimator, goal, options.cluster)
    check_page(options)
    if options.picture is not None:
        check_target(options.picture, "--picture", (".svg", ".png"))
    trace = load_trace(options.trace, estimator.cluster)
    costs, sources, each_byte_s = costs_from(options)
    full = tuple(node.count for node in estimator.cluster.nodes)
    ready = (change.pool for change in with_start(trace, costs.start_s))  # pools while other nodes start
    pools = {*trace.pools(), *ready, full}
    limit_s, plans = left_s(options) / len(pools), dict[Pool, PoolPlan]()
    with shown_progress("searching a plan for every pool of the trace", options):
        for pool in sorted(pools, key=sum):  # a plan for a part of a pool also works for the pool
            plan_of_pool(plans, estimator, goal, options.search, pool, limit_s)
    ideal_s = plans[full].iteration_s
    if ideal_s is None:
        raise PlannerError(options.cluster, "nodes", None, "no plan fits all nodes of the cluster file")
    costs = with_growth(costs, sources, each_byte_s, plans[full])
    courses = run_all(trace, lambda pool: plans[pool].iteration_s, costs, full)
    body = body_of(trace, courses, list(plans.values()), ideal_s)
    body["pauses"] = {name: {"value": getattr(costs, name), "from": of} for name, of in sources.items()}
    written = [f"pauses from {of}: {', '.join(names)}" for of, names in _by_source(costs, sources).items()]
    if options.picture is not None:
        draw(trace, courses, [node.gpu for node in estimator.cluster.nodes], options.picture)
        written.append(f"wrote {options.picture}")
    if options.html:
        write_text(options.html, render(page_of(estimator, body, courses, notes_of(options))))
        written.append(f"wrote {options.html}")
    say(body, options, *_tables(body, estimator.cluster), *written)
    return 0


DEFAULTS = "four processes of a small model on two cores, and an assumption for this model's state (--pauses)"
ASSUMED = "assumptions"


def _by_source(costs: Costs, sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the pauses with their values, grouped by source."""
    out: dict[str, list[str]] = {}
    for name, source in sources.items():
        value = getattr(costs, name)
        text = f"a save every {value:g} iterations" if name == "save_every" else f"{name[:-2]} {value:g} s"
        out.setdefault(source, []).append(text)
    return out


def costs_from(options: argparse.Namespace) -> tuple[Costs, dict[str, str], dict[str, float]]:
    """Returns pauses, their sources (options, ``--pauses``, defaults in this order), and seconds per byte of state.

    Raises:
        PlannerError: The file of ``--pauses`` has no pauses.
    """
    found: dict[str, Any] = {}
    each_byte_s: dict[str, float] = {}
    measured = ("join_s", "leave_s", "death_s", "restart_s")
    names = (*(name for name, _ in _SECONDS), "save_every")
    sources = {name: DEFAULTS if name in measured else ASSUMED for name in names}
    if options.pauses is not None:
        document = read_json(options.pauses)
        try:
            if "sizes" in document:
                lines = pauses_by_state(document["sizes"])
                found = {f"{kind}_s": lines[kind][0] for kind in CHANGES}
                each_byte_s = {f"{kind}_s": lines[kind][1] for kind in CHANGES}
            else:
                found = {f"{kind}_s": float(document["pause_s"][kind]["whole"]) for kind in CHANGES}
                found["restart_s"] = float(document["restart_s"])
        except (KeyError, TypeError, ValueError):
            problem = "no pauses: pause_s.join.whole, pause_s.leave.whole, pause_s.death.whole and restart_s are "
            problem += "expected, or sizes, each with state_bytes and the first three"
            hint = "Give a file that python -m benchmarks.elastic --json wrote"
            raise PlannerError(str(options.pauses), "pause_s", None, problem, hint) from None
        if bad := next((key for key, value in found.items() if not 0 <= value < 1e7), None):
            raise PlannerError(str(options.pauses), bad, found[bad], "is no time")
        sources |= dict.fromkeys(found, str(options.pauses))
    for name in names:
        if getattr(options, name) is not None:
            found[name] = getattr(options, name)
            sources[name] = "the command line"
            each_byte_s.pop(name, None)
    return Costs(**found), sources, each_byte_s


def with_growth(costs: Costs, sources: Mapping[str, str], each_byte_s: Mapping[str, float], plan: PoolPlan) -> Costs:
    """Add the seconds that grow with the full pool's plan to defaults and measurements, which are of a small model."""
    # A restart reads the same state from storage, which is assumed to be as fast as a node.
    names = (f"{kind}_s" for kind in (*CHANGES, "restart"))
    more_s = {name: plan.grows_s for name in names if sources[name] == DEFAULTS}
    more_s |= {name: seconds * plan.state_bytes for name, seconds in each_byte_s.items()}
    return replace(costs, **{name: round(getattr(costs, name) + seconds, 3) for name, seconds in more_s.items()})


def body_of(trace: Trace, courses: list[Course], plans: list[PoolPlan], ideal_s: float) -> dict[str, Any]:
    """Returns the output of ``--json``; ``ideal_s`` is the iteration time with all nodes."""
    return {
        "span_s": trace.end_s,
        "full_pool_iteration_s": ideal_s,
        "policies": [
            {
                "policy": course.policy,
                "iterations": course.iterations,
                "goodput": course.iterations * ideal_s / trace.end_s,
                "repeated_iterations": course.repeated,
                "training_s": course.training_s,
                "paused_s": course.paused_s,
                "idle_s": course.idle_s,
                "changes": course.changes,
            }
            for course in courses
        ],
        "pools": [{"nodes": list(p.pool), "iteration_s": p.iteration_s, "plan": p.plan, "gpus": p.gpus} for p in plans],
    }


def page_of(estimator: Estimator, body: dict[str, Any], courses: Sequence[Course], notes: list[str]) -> PageData:
    """The page of a replay."""
    cluster, model = estimator.cluster, estimator.model
    tokens = model.global_batch_size * model.seq_length
    pools = [
        pool
        | {
            "what": nodes_in_words(pool["nodes"], cluster),
            "plan": pool["plan"] or None,
            "tokens_per_s": None if pool["iteration_s"] is None else tokens / pool["iteration_s"],
            "usd_per_iteration": None,
        }
        for pool in sorted(body["pools"], key=lambda p: p["iteration_s"] or inf)
    ]
    rows = [row | {"curve": course.curve} for row, course in zip(body["policies"], courses, strict=True)]
    return {
        "title": f"Replay of a trace for {model.name} on {cluster.name}",
        "subtitle": "What a job gets done while nodes come and go",
        "figures": [
            {"name": f"goodput, {row['policy']}", "value": row["goodput"], "unit": "share",
             "note": f"{row['iterations']:,.0f} iterations"} for row in rows
        ],
        "replay": {"courses": rows, "end_s": body["span_s"], "pools": pools},
        "notes": notes,
    }  # fmt: skip


def nodes_in_words(counts: Sequence[int], cluster: Cluster) -> str:
    """Returns a pool as text, with prices if the same nodes have several."""
    words, names = [], [f"{node.gpus_per_node} {cluster.place(node)}" for node in cluster.nodes]
    for n, name, node in zip(counts, names, cluster.nodes, strict=True):
        prices = {other.usd_per_gpu_hour for other, same in zip(cluster.nodes, names) if same == name}
        price = f" at USD {node.usd_per_gpu_hour:g}" if len(prices) > 1 and node.usd_per_gpu_hour is not None else ""
        words += [f"{n} node{'s' * (n > 1)} of {name}{price}"] if n else []
    return ", ".join(words) or "none"


def _tables(body: dict[str, Any], cluster: Cluster) -> list[Any]:
    policies = table("What the job gets done", "policy", "iterations", "goodput", "repeated", "training s", "paused s",
                     "idle s", "changes")  # fmt: skip
    for row in body["policies"]:
        policies.add_row(
            row["policy"],
            f"{row['iterations']:.0f}",
            f"{100 * row['goodput']:.1f} %",
            f"{row['repeated_iterations']:.1f}",
            *(f"{row[key]:.0f}" for key in ("training_s", "paused_s", "idle_s")),
            str(row["changes"]),
        )
    pools, plans = table("Plans", "nodes", "s per iteration"), []
    for i, pool in enumerate(body["pools"], 1):
        seconds = "no plan fits" if pool["iteration_s"] is None else f"{pool['iteration_s']:.4g}"
        pools.add_row(f"{i}: {nodes_in_words(pool['nodes'], cluster)}", seconds)
        plans += [f"{i}: {pool['plan']}"] if pool["plan"] else []
    return [
        policies,
        "goodput: iterations that count, as a share of those with all nodes and no change in the same time",
        pools,
        *plans,
        NOTATION,
    ]
