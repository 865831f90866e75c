"""The automatic search against exhaustive enumeration on small random clusters."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from tools.planner.costs.candidate import Candidate, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layercost import CatalogCosts
from tools.planner.errors import PlannerError
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search.auto import search_auto
from tools.planner.search.book import LESS
from tools.planner.search.outcome import Goal
from tools.planner.search.thorough import stage_options
from tools.planner.simulate.simulation import simulate_block

KINDS = ("A100-40", "V100-16", "T4", "RTX-3090", "A10G", "GH-96")


def random_case(seed: int, largest: int = 8) -> tuple[Cluster, Model]:
    """Up to 8 GPUs of up to 3 types, and a small model with few microbatches."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, rng.randint(1, 3))
    left = rng.randint(len(kinds) + 1, largest)
    nodes = []
    for i, kind in enumerate(kinds):
        most = left - (len(kinds) - 1 - i)
        gpus = rng.randint(1, most) if i + 1 < len(kinds) else most
        left -= gpus
        per_node = rng.choice([n for n in (1, 2, 4, 8) if gpus % n == 0])
        nodes.append(
            NodeGroup(
                gpu=kind,
                count=gpus // per_node,
                gpus_per_node=per_node,
                zone="lab-a",
                network_bytes_per_s=rng.choice([1.25e9, 3e9, 12.5e9, 25e9]),
            )
        )
    hidden = rng.choice([1024, 2048, 4096])
    model = Model(
        name="small",
        num_layers=rng.randint(3, 6),
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=16,
        vocab_size=rng.choice([8192, 32000]),
        seq_length=1024,
        global_batch_size=rng.choice([8, 12, 16]),
        precision="fp16",
        micro_batch_sizes=(1, 2, 4),
        recompute=("none",),
    )
    return Cluster(nodes=tuple(nodes)), model


def estimator_of(cluster: Cluster, model: Model) -> Estimator:
    """With datasheet costs."""
    return Estimator(cluster, model, CatalogCosts(model, lambda name: catalog()[name]))


def all_plans(estimator: Estimator, point: Candidate, limit: list[float]) -> Iterator[Candidate]:
    """Every ordered list of stages with every split of the layers.

    Only what provably takes longer than ``limit[0]`` (perfect division of one stage's compute over its
    replicas) is left out.
    """
    total = estimator.model.global_batch_size // point.micro_batch_size
    options = []
    for groups in stage_options(estimator, point):
        units = [estimator.unit(g.pool, g.tp, point.micro_batch_size, point.recompute) for g in groups]
        rate = sum(g.count / (u.layer_f + u.layer_b) for g, u in zip(groups, units) if u)
        if sum(g.count for g in groups) <= total:
            options.append((groups, rate))

    def grow(stages: list[Stage], left: list[int], layers: int) -> Iterator[Candidate]:
        for groups, rate in options:
            rest = list(left)
            for g in groups:
                rest[g.pool] -= g.tp * g.count
            if min(rest) < 0:
                continue
            for n in range(1, layers + 1):
                if n * total / rate > limit[0]:
                    break
                here = [*stages, Stage(n, groups)]
                if n == layers:
                    yield point.with_(stages=tuple(here))
                elif any(rest):
                    yield from grow(here, rest, layers - n)

    yield from grow([], [n.quota for n in estimator.cluster.nodes], estimator.model.num_layers)


def brute_force(estimator: Estimator, start: float) -> tuple[float, int, int]:
    """(shortest simulated iteration, plans enumerated, plans simulated) over all 1F1B plans.

    Args:
        start: A known iteration time, to leave out at once what is longer.
    """
    best, seen, simulated = [start * 1.0001], 0, 0
    for batch in estimator.model.batch_sizes:
        for recompute in estimator.model.recompute:
            for candidate in all_plans(estimator, Candidate((), batch, recompute), best):
                seen += 1
                tried, estimate = candidate, estimator.estimate(candidate)
                for slack in LESS:
                    if estimate is None or estimator.fits(estimate):
                        break
                    tried = candidate.with_(slack=slack)
                    estimate = estimator.estimate(tried)
                if estimate is None or not estimator.fits(estimate) or max(estimate.stage_busy_s) >= best[0]:
                    continue
                try:
                    simulated += 1
                    best[0] = min(best[0], simulate_block(estimator, tried, estimate).iteration_s)
                except PlannerError:
                    continue
    return best[0], seen, simulated


def compare_case(seed: int) -> dict[str, Any]:
    """Gap of the search to the best of all plans on one random cluster (negative: other schedules won)."""
    cluster, model = random_case(seed)
    estimator = estimator_of(cluster, model)
    outcome = search_auto(estimator, Goal(schedules=("1f1b",)))
    row: dict[str, Any] = {
        "seed": seed,
        "gpus": " + ".join(f"{n.quota} {n.gpu}" for n in cluster.nodes),
        "layers": model.num_layers,
        "search_cpu_s": outcome.cpu_s,
        "exact": outcome.exact,
    }
    if outcome.best is None:
        found = next(
            (
                c
                for b in model.batch_sizes
                for c in all_plans(estimator, Candidate((), b), [1e9])
                if (e := estimator.estimate(c)) and estimator.fits(e)
            ),
            None,
        )
        return {**row, "gap": 0.0 if found is None else float("inf"), "iteration_s": None}
    started = time.process_time()
    best, seen, simulated = brute_force(estimator, outcome.best.iteration_s)
    return {
        **row,
        "iteration_s": outcome.best.iteration_s,
        "brute_force_s": best,
        "plans": seen,
        "simulated": simulated,
        "gap": outcome.best.iteration_s / best - 1,
        "brute_force_cpu_s": time.process_time() - started,
    }
