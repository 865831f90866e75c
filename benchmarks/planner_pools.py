"""The search on random clusters: against smaller pools, single kinds, fewer schedules, random search, and its bound."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

from benchmarks.planner_cases import with_catalog
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search.book import Book, Groups
from tools.planner.search.effort import Effort
from tools.planner.search.finish import finish, waits_for_nobody
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal, Outcome, Progress
from tools.planner.simulate.simulation import operations_of, simulate_candidate

KINDS = ("A100-40", "A100-80", "H100-SXM", "H200", "L40S", "A10G", "V100-16", "T4", "RTX-3090")
TOLERANCE = 0.005
RANDOM_CANDIDATES = 2000
MOST_OPERATIONS = 100_000
"""Larger plans are not simulated again as a whole."""
COUNTS = ("worse_with_a_node", "worse_than_one_kind", "worse_than_random_search", "worse_than_fewer_schedules")


def random_pool(seed: int) -> tuple[Cluster, Model]:
    """10 to 200 GPUs of 2 to 4 kinds, and a model that several of them are needed for, or not."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, rng.randint(2, 4))
    size = {kind: rng.choice((1, 2, 4, 8)) for kind in kinds}
    rate = {kind: rng.choice((1.25e9, 3e9, 12.5e9, 25e9, 50e9)) for kind in kinds}
    wanted = round(10 * 20 ** rng.random())
    count = dict.fromkeys(kinds, 1)
    while sum(count[k] * size[k] for k in kinds) < wanted:
        count[rng.choice(kinds)] += 1
    while sum(count[k] * size[k] for k in kinds) > 200:
        count[max(kinds, key=lambda k: count[k] * size[k])] -= 1
    nodes = tuple(
        NodeGroup(gpu=k, count=count[k], gpus_per_node=size[k], zone="lab-a", network_bytes_per_s=rate[k])
        for k in kinds
    )
    layers, hidden, heads = rng.choice(((12, 2048, 16), (24, 2048, 16), (32, 4096, 32), (40, 5120, 40)))
    model = Model(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=rng.choice((3, 4)) * hidden,
        num_attention_heads=heads,
        vocab_size=rng.choice((32000, 128256)),
        seq_length=rng.choice((1024, 2048, 4096)),
        global_batch_size=rng.choice((64, 128, 256, 480)),
        precision="fp16",
        distributed_optimizer=rng.random() < 0.8,
        recompute=("none", "full"),
    )
    return Cluster(nodes=nodes), model


def promised(estimator: Estimator, outcome: Outcome) -> float | None:
    """Simulated time of the plan that is written, read back as ``simulate`` does, over what was promised."""
    best = outcome.best
    if best is None or not best.runnable:
        return None
    if operations_of(estimator, best.candidate) * best.candidate.blocks > MOST_OPERATIONS:
        return None
    plan = build_plan(estimator, best.candidate, best.estimate)
    candidate, seated = candidate_of(plan, estimator.cluster)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    if waits_for_nobody(candidate):
        return estimate.iteration_s / best.iteration_s
    return simulate_candidate(estimator, candidate, estimate, plan, seated).iteration_s / best.iteration_s


def random_search(estimator: Estimator, goal: Goal, seed: int, count: int = RANDOM_CANDIDATES) -> float:
    """The best of so many random plans with balanced layers; the most promising are simulated."""
    rng, model = random.Random(seed), estimator.model
    book = Book(estimator, goal, Progress())
    for _ in range(count):
        like = Candidate(
            (), rng.choice(model.batch_sizes), rng.choice(model.recompute), zero_stage=int(model.distributed_optimizer)
        )
        groups = _random_groups(estimator, rng)
        if groups is not None:
            book.try_groups(groups, like)
            book.try_groups(groups, like.with_(schedule="interleaved", chunks=rng.choice((2, 3, 4))))
    outcome = Outcome("random")
    finish(book, outcome, estimator, goal, Effort(), lambda c: c)
    return outcome.best.iteration_s if outcome.best else float("inf")


def _random_groups(estimator: Estimator, rng: random.Random) -> Groups | None:
    """Every kind of GPU with a random TP size and share of its nodes, dealt to a random number of stages."""
    stages = rng.choice((1, 1, 2, 2, 3, 4, 4, 6, 8))
    if stages > estimator.model.num_layers:
        return None
    out: list[dict[tuple[int, int], int]] = [{} for _ in range(stages)]
    for pool, node in enumerate(estimator.cluster.nodes):
        tp = rng.choice([t for t in (1, 2, 4, 8) if t <= node.gpus_per_node])
        replicas = round(rng.choice((0.0, 0.5, 1.0, 1.0, 1.0)) * node.quota) // tp
        mine = rng.sample(range(stages), rng.randint(1, stages))
        for i, s in enumerate(mine):
            each = replicas // len(mine) + (1 if i < replicas % len(mine) else 0)
            if each:
                out[s][pool, tp] = each
    if not all(out):
        return None
    return tuple(tuple(Group(p, t, n) for (p, t), n in sorted(stage.items())) for stage in out)


def _best_s(nodes: Iterable[NodeGroup], model: Model, goal: Goal) -> float:
    return fastest_s(search("auto", with_catalog(Cluster(nodes=tuple(nodes)), model), goal))


def fastest_s(outcome: Outcome) -> float:
    """The time of the fastest plan, also where a plainer one was taken."""
    return min((found.iteration_s for found in outcome.found if found.runnable), default=inf)


def compare_pool(seed: int) -> dict[str, Any]:
    """One random cluster: how much worse the plan is than what less would give (positive: worse)."""
    cluster, model = random_pool(seed)
    rng, goal = random.Random(seed), Goal()
    estimator = with_catalog(cluster, model)
    outcome = search("auto", estimator, goal)
    row: dict[str, Any] = {"seed": seed, "gpus": " + ".join(f"{n.quota} {n.gpu}" for n in cluster.nodes)}
    row |= {"cpu_s": outcome.cpu_s, "iteration_s": outcome.best.iteration_s if outcome.best else None}
    if outcome.best is None:
        return row
    mine = fastest_s(outcome)
    row |= {"bound_gap": outcome.gap(goal), "promised_over_emitted": promised(estimator, outcome)}
    less = rng.randrange(len(cluster.nodes))
    row["worse_with_a_node"] = mine / _best_s(_without_one(cluster.nodes, less), model, goal) - 1
    alone = max(cluster.nodes, key=lambda n: n.quota * cluster.gpu(n.gpu).peak("fp16"))
    row["worse_than_one_kind"] = mine / _best_s([alone], model, goal) - 1
    row["worse_than_random_search"] = mine / random_search(estimator, goal, seed) - 1
    some = Goal(schedules=("1f1b", "interleaved"))
    row["worse_than_fewer_schedules"] = mine / _best_s(cluster.nodes, model, some) - 1
    return row


def nodes(seeds: Sequence[int], known: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Only the comparison with one node less: how many plans a further node makes worse.

    Args:
        seeds: Of the clusters.
        known: Rows of other clusters, which are kept.
    """
    rows = _rows(_with_a_node, seeds, known)
    return {"clusters": len(rows), "worse": sum(row["worse"] > TOLERANCE for row in rows), "cases": rows}


def _with_a_node(seed: int) -> dict[str, Any]:
    """The plan of a cluster against that of one node less."""
    cluster, model = random_pool(seed)
    rng, goal = random.Random(seed), Goal()
    less = rng.randrange(len(cluster.nodes))
    mine = _best_s(cluster.nodes, model, goal)
    row = {"seed": seed, "gpus": cluster.total_gpus, "iteration_s": mine, "worse": 0.0}
    if mine < inf:
        row["worse"] = mine / _best_s(_without_one(cluster.nodes, less), model, goal) - 1
    return row


def _rows(
    compare: Callable[[int], dict[str, Any]], seeds: Sequence[int], known: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Comparisons of these clusters, beside known rows of others, by seed."""
    rows = [row for row in known if row["seed"] not in seeds]
    for seed in seeds:
        rows.append(compare(seed))
        gc.collect()  # a search leaves a million objects that refer to each other
        print(f"  pool {seed}: {rows[-1]}", file=sys.stderr, flush=True)
    return sorted(rows, key=lambda row: row["seed"])


def _without_one(found: Sequence[NodeGroup], less: int) -> list[NodeGroup]:
    """The nodes without one of pool ``less``."""
    fewer = [n.model_copy(update={"count": n.count - (i == less)}) for i, n in enumerate(found)]
    return [n for n in fewer if n.count]


def pools(seeds: Sequence[int], known: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """``compare_pool`` of these clusters, in numbers of clusters beyond the tolerance.

    Args:
        seeds: Of the clusters.
        known: Rows of other clusters, which are kept.
    """
    rows = _rows(compare_pool, seeds, known)
    planned = [r for r in rows if r["iteration_s"] is not None]
    out: dict[str, Any] = {key: sum(r[key] > TOLERANCE for r in planned) for key in COUNTS}
    ratios = [r["promised_over_emitted"] for r in planned if r["promised_over_emitted"] is not None]
    return out | {
        "clusters": len(rows),
        "promised_over_emitted": max(ratios, default=None),
        "bound_gap": {f"random cluster {r['seed']}": r["bound_gap"] for r in planned},
        "cases": rows,
    }
