"""What lies between the plan of the search and its bound: regular plans with short slices and a split vocabulary.

    python -m benchmarks.planner_gap --json OUT [--pools 0,2,5]

The search does not propose slices of fewer than 256 tokens, and splits a vocabulary in its last step only.  The bound
holds for such plans.  Per random cluster (``planner_pools.random_pool``): seconds of the plan found, of the best plan
on one kind of GPU with equally many layers and replicas per stage, short slices and the vocabulary split evenly, and
the bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.planner_cases import with_catalog
from benchmarks.planner_pools import random_pool
from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.errors import PlannerError
from tools.planner.estimate import Estimator
from tools.planner.files import write_json
from tools.planner.report import describe
from tools.planner.schedules import schedule_of
from tools.planner.search.auto import search_auto
from tools.planner.search.bounds import Bounds
from tools.planner.search.goal import Goal
from tools.planner.search.pools import all_gpus
from tools.planner.simulation import operations_of, simulate_block

SLICES, BATCHES = (8, 16, 32, 64), (1, 2, 4)
LEAST_TOKENS = 32
MOST_OPERATIONS = 60_000


def regular_plans(estimator: Estimator) -> Iterator[Candidate]:
    """On each pool alone: stages of equally many layers and replicas, with every number of slices."""
    model, pools = estimator.model, enumerate(estimator.cluster.nodes)
    counts = [n for n in range(2, model.num_layers + 1) if model.num_layers % n == 0]
    for (pool, node), stages, slices, batch in product(pools, counts, SLICES, BATCHES):
        width = node.quota // stages
        if width and stages <= slices <= model.seq_length // LEAST_TOKENS and model.global_batch_size % batch == 0:
            yield Candidate(
                (Stage(model.num_layers // stages, (Group(pool, 1, width),)),) * stages,
                batch,
                schedule="slimpipe",
                slices=slices,
                zero_stage=int(model.distributed_optimizer),
                rows=((1 / stages, 1 / stages),) * stages,
            )


def simulated_s(estimator: Estimator, candidate: Candidate) -> float:
    """Its time; infinite where it does not fit or takes too long to simulate."""
    estimate = estimator.estimate(candidate)
    if estimate is None or not estimator.fits(estimate) or not schedule_of(candidate).runs(estimator, candidate):
        return inf
    if operations_of(estimator, candidate) > MOST_OPERATIONS:
        return inf
    try:
        return simulate_block(estimator, candidate, estimate).iteration_s
    except PlannerError:
        return inf


def compare(seed: int) -> dict[str, Any]:
    """One random cluster."""
    estimator, goal = with_catalog(*random_pool(seed)), Goal()
    best = search_auto(estimator, goal).best
    seconds, regular = min(
        ((simulated_s(estimator, c), c) for c in regular_plans(estimator)), key=lambda found: found[0]
    )
    return {
        "seed": seed,
        "gpus": " + ".join(f"{n.quota} {n.gpu}" for n in estimator.cluster.nodes),
        "found_s": best.iteration_s if best else None,
        "regular_s": seconds,
        "regular": describe(estimator, regular),
        "tokens_per_slice": estimator.model.seq_length // regular.slices,
        "bound_s": Bounds(estimator, goal).value(all_gpus(estimator)),
    }


def main() -> None:
    """The random clusters that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--pools", default="0,2,5")
    args = parser.parse_args()
    rows = []
    for seed in map(int, args.pools.split(",")):
        rows.append(compare(seed))
        print(f"  pool {seed}: {rows[-1]}", file=sys.stderr, flush=True)
    write_json(args.json, {"machine": machine(), "cases": rows})


if __name__ == "__main__":
    main()
