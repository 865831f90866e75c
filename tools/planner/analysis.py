"""The commands ``explain`` and ``compare``."""

from __future__ import annotations

import argparse
from typing import Any

from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.cluster import Cluster
from tools.planner.commands import require, run_search, search_body
from tools.planner.errors import PlannerError
from tools.planner.estimate import Estimate, Estimator
from tools.planner.report import describe, ranking, say, summary, summary_tables, table
from tools.planner.search.auto import search_auto
from tools.planner.search.goal import Goal
from tools.planner.search.outcome import Found
from tools.planner.setup import estimator_from, goal_from
from tools.planner.simulation import simulate_block


def explain(options: argparse.Namespace) -> int:
    """Why this plan, what binds, the runners-up, what one more node of each kind would bring."""
    estimator, goal = estimator_from(options), goal_from(options)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    body = summary(estimator, best.candidate, best.estimate, best.simulated_s)
    body["search"] = search_body(outcome)
    body["binding"] = binding(estimator, goal, best)
    body["runners_up"] = ranking(estimator, outcome)
    body["one_more_node"] = one_more_node(estimator, goal, best)
    runners = table("Runners-up", "plan", "s per iteration", "USD per iteration", "GPUs")
    for row in body["runners_up"]:
        runners.add_row(row["plan"], f"{row['iteration_s']:.4g}", f"{row['usd_per_iteration']:.4g}", str(row["gpus"]))
    more = table("One more node", "kind", "s per iteration", "change")
    for row in body["one_more_node"]:
        more.add_row(f"{row['gpu']} ({row['zone']})", f"{row['iteration_s']:.4g}", f"{100 * row['change']:+.1f} %")
    say(body, options, *summary_tables(body), *[f"- {text}" for text in body["binding"]], runners, more)
    return 0


def binding(estimator: Estimator, goal: Goal, best: Found) -> list[str]:
    """What keeps the plan from being better, in sentences."""
    e, c = best.estimate, best.candidate
    nodes = estimator.cluster.nodes
    out = []
    slow = ", ".join(sorted({nodes[g.pool].gpu for g in c.stages[e.bottleneck].groups}))
    out.append(f"stage {e.bottleneck} ({slow}) decides the pace: {e.busy_s:.4g} s of compute "
               f"({100 * e.busy_s / e.iteration_s:.0f} % of the iteration)")
    for label, seconds in (("the pipeline's warm-up and drain", e.fill_s), ("gradient reduction", e.sync_s),
                           ("parameter gathers", e.gather_s), ("the optimizer step", e.update_s)):
        if seconds > 0.03 * e.iteration_s:
            out.append(f"{label} takes {100 * seconds / e.iteration_s:.0f} %")
    worst = e.worst_memory
    share = worst.total_bytes / worst.capacity_bytes
    out.append(f"memory is fullest on stage {worst.stage} ({nodes[worst.group.pool].gpu}): {100 * share:.0f} %"
               + (" - it binds" if share > 0.9 * estimator.memory_margin else ""))
    unused = {p: n.quota - c.gpus().get(p, 0) for p, n in enumerate(nodes)}
    for pool, count in unused.items():
        if count:
            out.append(f"{count} of {nodes[pool].quota} {nodes[pool].gpu} ({nodes[pool].zone}) stay unused: "
                       "using them would not make the iteration shorter or cheaper")
    for key, limit, value in (
        ("max_usd_per_iteration", goal.max_usd_per_iteration, best.usd_per_iteration),
        ("max_gpus", goal.max_gpus, c.world_size),
    ):
        if limit is not None and value > 0.95 * limit:
            out.append(f"{key} = {limit} binds (the plan needs {value:.4g})")
    if goal.min_iterations_per_s is not None and best.iteration_s * goal.min_iterations_per_s > 0.95:
        out.append(f"min_iterations_per_s = {goal.min_iterations_per_s} binds (the plan reaches {1 / best.iteration_s:.4g})")
    return out


def one_more_node(estimator: Estimator, goal: Goal, best: Found) -> list[dict[str, Any]]:
    """The search again with one node more of each kind."""
    out = []
    for p, node in enumerate(estimator.cluster.nodes):
        wider = node.model_copy(update={"count": node.count + 1, "hosts": (),
                                        "max_gpus": None if node.max_gpus is None else node.max_gpus + node.gpus_per_node})
        nodes = tuple(wider if i == p else n for i, n in enumerate(estimator.cluster.nodes))
        found = search_auto(_with_nodes(estimator, nodes), goal).best
        seconds = min(found.iteration_s, best.iteration_s) if found and goal.objective == "throughput" else (
            found.iteration_s if found else best.iteration_s)
        out.append({"gpu": node.gpu, "zone": node.zone, "iteration_s": seconds, "change": seconds / best.iteration_s - 1})
    return out


def _with_nodes(estimator: Estimator, nodes: tuple[Any, ...]) -> Estimator:
    cluster = Cluster(name=estimator.cluster.name, nodes=nodes, links=estimator.cluster.links, gpus=estimator.cluster.gpus)
    return Estimator(cluster, estimator.model, estimator.costs, estimator.runtime, estimator.memory_margin)


def even_splits(estimator: Estimator, zero: int | None = None) -> list[Candidate]:
    """What a homogeneous framework would run: all GPUs, equal stages of each size, equal batches.

    Args:
        zero: ZeRO stage; by default that of Megatron's distributed optimizer where the model allows it.
    """
    model = estimator.model
    singles = [p for p, n in enumerate(estimator.cluster.nodes) for _ in range(n.quota)]
    if zero is None:
        zero = 1 if model.distributed_optimizer else 0
    out = []
    for count in (k for k in range(1, min(len(singles), model.num_layers) + 1) if len(singles) % k == 0):
        if model.num_layers % count:
            continue
        width = len(singles) // count
        stages = []
        for s in range(count):
            pools = singles[s * width : (s + 1) * width]
            stages.append(Stage(model.num_layers // count, tuple(Group(p, 1, pools.count(p)) for p in dict.fromkeys(pools))))
        for batch in model.batch_sizes:
            for recompute in model.recompute:
                out.append(Candidate(tuple(stages), batch, recompute, zero_stage=zero, even=True))
    return out


def best_even_split(estimator: Estimator, zero: int | None = None) -> tuple[Candidate, Estimate] | None:
    """The fastest even split that fits."""
    fitting = [(c, e) for c in even_splits(estimator, zero) if (e := estimator.estimate(c)) and estimator.fits(e)]
    return min(fitting, key=lambda pair: pair[1].iteration_s) if fitting else None


def compare(options: argparse.Namespace) -> int:
    """The plan against an even split, single GPU types and single schedules."""
    estimator, goal = estimator_from(options), goal_from(options)
    outcome = run_search(estimator, goal, options)
    best = require(outcome, estimator, goal, options)
    rows = [_row(estimator, "this plan", best)]
    even = best_even_split(estimator)
    rows.append(_row(estimator, "even split of all GPUs", _simulated(estimator, *even) if even else None))
    for gpu in dict.fromkeys(n.gpu for n in estimator.cluster.nodes):
        nodes = tuple(n for n in estimator.cluster.nodes if n.gpu == gpu)
        if len(nodes) < len(estimator.cluster.nodes):
            narrow = _with_nodes(estimator, nodes)
            rows.append(_row(narrow, f"{gpu} only", search_auto(narrow, goal).best))
    for schedule in goal.schedules:
        only = Goal(goal.objective, goal.max_usd_per_iteration, goal.min_iterations_per_s, goal.max_gpus, (schedule,))
        rows.append(_row(estimator, f"schedule {schedule} only", search_auto(estimator, only).best))
    for row in rows:
        row["ratio"] = row["iteration_s"] / best.iteration_s if row["iteration_s"] else None
    shown = table("Comparison", "what", "s per iteration", "ratio", "USD per iteration", "GPUs", "plan")
    for row in rows:
        if row["iteration_s"] is None:
            shown.add_row(row["what"], "no plan found", "", "", "", "")
        else:
            shown.add_row(row["what"], f"{row['iteration_s']:.4g}", f"{row['ratio']:.2f}", f"{row['usd_per_iteration']:.4g}",
                          str(row["gpus"]), row["plan"])
    say({"rows": rows, "search": search_body(outcome)}, options, shown)
    return 0


def _simulated(estimator: Estimator, candidate: Candidate, estimate: Estimate) -> Found:
    try:
        return Found(candidate, estimate, simulate_block(estimator, candidate, estimate).iteration_s)
    except PlannerError:
        return Found(candidate, estimate)


def _row(estimator: Estimator, what: str, found: Found | None) -> dict[str, Any]:
    if found is None:
        return {"what": what, "iteration_s": None, "usd_per_iteration": None, "gpus": None, "plan": None}
    return {"what": what, "iteration_s": found.iteration_s, "usd_per_iteration": found.usd_per_iteration,
            "gpus": found.candidate.world_size, "plan": describe(estimator, found.candidate)}
