"""Comparison of a plan with other plans, and its bottlenecks, for ``explain``, ``compare`` and the page."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import inf
from typing import Any

from megatron_het.plan import Plan

from ..costs.build import build_plan
from ..costs.candidate import Candidate, Group, Stage
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import SCHEDULES, schedule_of
from ..costs.simulation import with_costs
from ..inputs.cluster import NodeGroup
from ..search.finish import simulated
from ..search.methods import search_on
from ..search.outcome import Found, Goal, Progress, SearchResult
from ..search.seeds import sizes_over_replicas
from .tables import describe, unpriced

# Plans of a homogeneous framework on a mixed cluster: the baseline of comparisons.


MOST_GROUPS = 4  # up to so many node groups every choice of them is tried; beyond it all, each kind and each region


def stock_plans(estimator: Estimator) -> Iterator[Candidate]:
    """Yields plans for stock Megatron: one TP and EP size, equal stages with equal replicas, equal batches (1F1B).

    Stock Megatron treats all GPUs alike.  Tried are parts of the cluster (see ``MOST_GROUPS``) with the node groups in
    both orders, every TP size that all of them have, every number of stages that divides the layers, and as many
    replicas as there are GPUs for and the microbatches divide over.
    """
    model, nodes = estimator.model, estimator.cluster.nodes
    for pools in _parts(nodes):
        apart = estimator.cluster.vendors_problem(pools)  # no plan of several vendors can run
        sizes = set() if apart else set.intersection(*(set(estimator.costs.tp_sizes(nodes[p].gpu)) for p in pools))
        for tp in sorted(sizes):
            for order in {pools, pools[::-1]}:
                # TP groups that the nodes hold, none of which leaves its node
                held = [(p, *divmod(nodes[p].quota, nodes[p].gpus_per_node)) for p in order]
                counts = [(p, whole * (nodes[p].gpus_per_node // tp) + rest // tp) for p, whole, rest in held]
                seats = [p for p, groups in counts for _ in range(groups)]
                for count in range(1, min(len(seats), model.num_layers) + 1):
                    if model.num_layers % count == 0:
                        yield from _replicated(estimator, seats, tp, count)


def best_even_split(estimator: Estimator, goal: Goal | None = None) -> tuple[Candidate, Estimate] | None:
    """The best plan of stock Megatron that fits, within the goal's limits; None where there is none."""
    fitting = [
        (c, e)
        for c in stock_plans(estimator)
        if (e := estimator.running(c.gpus()).estimate(c)) and estimator.fits(e) and not (goal and goal.violation(c, e))
    ]
    return min(fitting, key=lambda pair: (goal or Goal()).value(pair[1])) if fitting else None


def _parts(nodes: tuple[NodeGroup, ...]) -> list[tuple[int, ...]]:
    usable = tuple(p for p, n in enumerate(nodes) if n.quota)
    if len(usable) <= MOST_GROUPS:
        return [c for k in range(1, len(usable) + 1) for c in combinations(usable, k)]
    kinds = {(name, getattr(nodes[p], name)) for name in ("gpu", "where") for p in usable}
    alike = {tuple(p for p in usable if getattr(nodes[p], name) == value) for name, value in kinds}
    return sorted({usable, *alike})


def _replicated(estimator: Estimator, seats: list[int], tp: int, count: int) -> Iterator[Candidate]:
    """Returns plans with a given number of stages, and the most replicas that equal batches allow."""
    model = estimator.model
    stages: dict[int, tuple[Stage, ...]] = {}
    for batch in model.batch_sizes:
        if model.global_batch_size % batch:
            continue
        total = model.global_batch_size // batch
        width = next((w for w in range(len(seats) // count, 0, -1) if total % w == 0), 0)
        if width not in stages:
            stages[width] = even_stages(seats, tp, count, width, model.num_layers // count)
        for recompute in model.recompute:
            plain = Candidate(stages[width], batch, recompute, zero_stage=int(model.distributed_optimizer), even=True)
            yield from dict.fromkeys((plain, *(plain.over_replicas(ep) for ep in sizes_over_replicas(estimator))))


def even_stages(seats: list[int], tp: int, count: int, width: int, layers: int) -> tuple[Stage, ...]:
    """Stages of ``width`` replicas each, in the order of the seats (the node group of each TP group)."""
    held = [seats[s * width : (s + 1) * width] for s in range(count)]
    return tuple(Stage(layers, tuple(Group(p, tp, n) for p, n in Counter(mine).items())) for mine in held)


# Plans that differ from the best one in kind: in schedule, number of stages, TP or GPUs used.


def kind_of(c: Candidate) -> tuple[object, ...]:
    """Returns what makes two plans differ in kind; layers, batches and the order of stages do not."""
    sizes = {(g.pools, g.tp) for s in c.stages for g in s.groups}
    return c.schedule, len(c.stages), tuple(sorted(c.gpus().items())), tuple(sorted(sizes))


def alternatives(estimator: Estimator, outcome: SearchResult, best: Found, count: int = 8) -> list[dict[str, Any]]:
    """Returns the best plan of each other kind that the search has found, the best first.

    Plans that the runtime cannot run are left out.
    """
    by_kind = {kind_of(best.candidate): best}
    for found in outcome.found:
        if found.runnable:
            by_kind.setdefault(kind_of(found.candidate), found)
    _, *others = by_kind.values()
    return [row_of(estimator, differences(estimator, best.candidate, f.candidate), f, best) for f in others[:count]]


def row_of(estimator: Estimator, what: str, found: Found | None, best: Found, why: str = "") -> dict[str, Any]:
    """Returns one row: a plan compared with the best one, or why there is none."""
    if found is None:
        names = ("plan", "iteration_s", "ratio", "usd_per_iteration", "gpus_without_price", "gpus")
        return {"what": what, **dict.fromkeys(names), "why": why}
    return {
        "what": what,
        "plan": describe(estimator, found.candidate),
        "iteration_s": found.iteration_s,
        "ratio": found.iteration_s / best.iteration_s,
        "usd_per_iteration": found.usd_per_iteration,
        "gpus_without_price": unpriced(estimator, found.candidate),
        "gpus": found.candidate.world_size,
    }


def differences(estimator: Estimator, best: Candidate, other: Candidate) -> str:
    """Returns the differences in kind between two plans, as text."""
    out = []
    if schedule_of(other).name != schedule_of(best).name:
        out.append(f"schedule {other.schedule}")
    if len(other.stages) != len(best.stages):
        out.append(f"{len(other.stages)} stage{'s' if len(other.stages) > 1 else ''}")
    mine, theirs, nodes = best.gpus(), other.gpus(), estimator.cluster.nodes
    for pool, node in enumerate(nodes):
        used, several = theirs.get(pool, 0), sum(n.gpu == node.gpu for n in nodes) > 1
        name = f"{node.gpu} ({node.zone})" if several else node.gpu
        if used != mine.get(pool, 0):
            out.append(f"{used} of {node.quota} {name}" if used else f"no {name}")
        elif used and (sizes := _sizes(other, pool)) != _sizes(best, pool):
            out.append(f"TP {' and '.join(map(str, sizes))} on {name}")
    return ", ".join(out)


def _sizes(c: Candidate, pool: int) -> list[int]:
    return sorted({g.tp for s in c.stages for g in s.groups if pool in g.pools})


# A plan that was found, with its prediction.


MOST_PRICED = 2_000_000
"""Most compute operations of an iteration for which a plan stores costs: pricing more takes minutes."""
PRICING_S = 2e-5  # approximate CPU seconds of pricing per operation


def complete(estimator: Estimator, found: Found, notes: str = "", left_s: float = inf) -> Plan:
    """Returns the plan with its simulated iteration time, and the costs with which the watch compares a run.

    Args:
        left_s: Remaining CPU seconds; costs that take longer are left out.

    Raises:
        PlannerError: TP groups that do not fit into nodes, or a plan that contradicts itself.
    """
    made = build_plan(estimator, found.candidate, found.estimate, notes=notes)
    assert made.predicted is not None
    made = replace(made, predicted=replace(made.predicted, iteration_s=found.iteration_s))
    candidate = found.candidate
    operations = 2 * len(candidate.stages) * candidate.chunks * candidate.slices * made.num_microbatches
    if operations > MOST_PRICED or operations * PRICING_S > left_s:
        return made
    return with_costs(estimator, found.candidate, found.estimate, made)


def binding(estimator: Estimator, goal: Goal, best: Found) -> list[str]:
    """Returns the bottlenecks of the plan, as sentences."""
    e, c = best.estimate, best.candidate
    nodes = estimator.cluster.nodes
    out = []
    slow = ", ".join(sorted({nodes[p].gpu for g in c.stages[e.bottleneck].groups for p in g.pools}))
    out.append(
        f"stage {e.bottleneck} ({slow}) decides the pace: it computes {100 * e.busy_s / e.iteration_s:.0f} % of the "
        "iteration"
    )
    for label, seconds in (
        ("the pipeline's fill and drain", e.fill_s),
        ("gradient reduction", e.sync_s),
        ("parameter gathers", e.gather_s),
        ("the optimizer step", e.update_s),
    ):
        if seconds > 0.03 * e.iteration_s:
            out.append(f"{label} takes {100 * seconds / e.iteration_s:.0f} %")
    worst = e.worst_memory
    share = worst.total_bytes / worst.capacity_bytes
    out.append(
        f"memory is fullest on stage {worst.stage} ({nodes[worst.group.pool].gpu}): {100 * share:.0f} %"
        + (", so memory keeps the plan from being faster" if share > 0.9 * estimator.memory_margin else "")
    )
    unused = {p: n.quota - c.gpus().get(p, 0) for p, n in enumerate(nodes)}
    for pool, count in unused.items():
        if count:
            out.append(
                f"{count} of {nodes[pool].quota} {estimator.cluster.place(nodes[pool])} stay unused: "
                "no plan with them was found that is clearly better"
            )
    for key, limit, value in (
        ("max_usd_per_iteration", goal.max_usd_per_iteration, best.usd_per_iteration),
        ("max_gpus", goal.max_gpus, c.world_size),
    ):
        if limit is not None and value > 0.95 * limit:
            out.append(f"{key} = {limit} binds (the plan needs {value:.4g})")
    if goal.min_iterations_per_s is not None and best.iteration_s * goal.min_iterations_per_s > 0.95:
        out.append(
            f"min_iterations_per_s = {goal.min_iterations_per_s} binds (the plan reaches {1 / best.iteration_s:.4g})"
        )
    return out


def one_more_node(estimator: Estimator, goal: Goal, best: Found, progress: Progress) -> list[dict[str, Any]]:
    """Search again with one node more of each group; returns the rows of the results."""
    out = []
    cluster = estimator.cluster
    for p, node in enumerate(cluster.nodes):
        quota = None if node.max_gpus is None else node.max_gpus + node.gpus_per_node
        wider = node.model_copy(update={"count": node.count + 1, "hosts": (), "max_gpus": quota})
        larger = cluster.model_copy(update={"nodes": (*cluster.nodes[:p], wider, *cluster.nodes[p + 1 :])})
        found = _searched(estimator.on(larger), goal, progress, f"one node more of {node.gpu}")
        if found is None or found.value(goal) > best.value(goal):
            found = best  # a plan need not use the new node
        seconds = found.iteration_s
        out.append(
            {
                "gpu": node.gpu,
                "zone": node.zone,
                "place": cluster.place(node),
                "iteration_s": seconds,
                "usd_per_iteration": None if unpriced(estimator, found.candidate) else found.usd_per_iteration,
                "change": seconds / best.iteration_s - 1,
            }
        )
    return out


def _searched(estimator: Estimator, goal: Goal, progress: Progress, text: str) -> Found | None:
    """Returns the plan that ``plan`` would make on another cluster."""
    progress.text = text
    return search_on("auto", estimator, goal, Progress(limit_s=progress.limit_s), robust=False).best


def comparison(estimator: Estimator, goal: Goal, mine: Found, progress: Progress) -> list[dict[str, Any]]:
    """Returns a plan beside the best even split (``stock_plans``), single kinds of GPU and single schedules."""
    even = best_even_split(estimator, goal)
    split = None if even is None else simulated(estimator.running(even[0].gpus()), *even) or Found(*even)
    rows = [row_of(estimator, "this plan", mine, mine), row_of(estimator, "best even split", split, mine)]
    kinds = [node.gpu for node in estimator.cluster.nodes]
    for gpu in dict.fromkeys(kinds) if len(set(kinds)) > 1 else ():
        narrow, what = estimator.only([p for p, kind in enumerate(kinds) if kind == gpu]), f"{gpu} only"
        rows.append(row_of(narrow, what, _searched(narrow, goal, progress, what), mine))
    for name in goal.schedules:
        what, only = f"schedule {name} only", replace(goal, schedules=(name,))
        needed = SCHEDULES[name].shards_parameters and not estimator.model.distributed_optimizer
        why = "it needs distributed_optimizer: true in the model file" if needed else ""
        rows.append(row_of(estimator, what, _searched(estimator, only, progress, what), mine, why))
    return rows
