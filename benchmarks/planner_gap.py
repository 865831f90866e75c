"""Regular plans of a cluster, as an expert would write them down: what the search is measured against.

    python -m benchmarks.planner_gap --json OUT [--first 0] [--pools 60]

Clusters that OUT has already are kept, so that a run can be stopped and taken up again.  ``worse_than_regular`` counts
those on which the search's plan is worse than the best regular one by more than 1 %; ``plain_share`` is the share of
plans with at most one kind of stage per kind of GPU.

The generator knows nothing of the search.  Its plans have stages of equally many replicas of one kind each, or stages
that all have the same replicas of every kind, TP inside nodes, layers by speed, every schedule, slices and chunks,
whole and split vocabularies, and experts whole or cut.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import combinations, product
from math import gcd, inf
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from testing.planner_cases import fastest_s, random_pool, with_catalog
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimate, Estimator
from tools.planner.costs.schedules import schedule_of
from tools.planner.costs.simulation import block_s, operations_of
from tools.planner.errors import PlannerError
from tools.planner.inputs.files import write_json
from tools.planner.report.tables import describe
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal
from tools.planner.search.overlap import irregularity

SIZES = (1, 2, 4, 8)
CHUNKS, SLICES = (2, 4), (4, 8, 16, 32, 64)
LEAST_TOKENS = 128
MOST_OPERATIONS = 60_000
SIMULATED = 8
"""Plans that look best by the closed form are simulated."""
TOLERANCE = 0.01
ENOUGH = 4_000
"""Plans of a cluster at least, where its stages can be cut in so many ways."""

Stages = list[tuple[Group, ...]]


def best_regular(estimator: Estimator, goal: Goal, most: int = 4 * ENOUGH) -> tuple[float, Candidate | None, int]:
    """The value of the best regular plan, the plan, and how many there were.

    Args:
        most: So many plans are priced at most, spread over all that there are.
    """
    plans = list(regular_plans(estimator))
    plans = plans[:: max(1, len(plans) // most)]
    priced: list[tuple[float, int, Candidate, Estimate]] = []
    for i, candidate in enumerate(plans):
        estimate = estimator.estimate(candidate) if schedule_of(candidate).runs(estimator, candidate) else None
        if estimate is not None and estimator.fits(estimate) and goal.violation(candidate, estimate) == 0:
            priced.append((goal.value(estimate), i, candidate, estimate))
    priced.sort(key=lambda entry: entry[:2])
    best: tuple[float, Candidate | None] = inf, None
    left = SIMULATED
    for closed_form, _, candidate, estimate in priced:
        if not left:
            break
        value = closed_form
        if len(candidate.stages) > 1:
            if operations_of(estimator, candidate) > MOST_OPERATIONS:
                continue
            try:
                value = closed_form * block_s(estimator, candidate, estimate) / estimate.iteration_s
            except PlannerError:
                continue
        left -= 1
        best = min(best, (value, candidate), key=lambda entry: entry[0])
    return (*best, len(plans))


def regular_plans(estimator: Estimator) -> Iterator[Candidate]:
    """All of them that the schedules may run."""
    model = estimator.model
    zero = int(model.distributed_optimizer)
    for stages, (batch, recompute) in product(_shapes(estimator), product(SIZES, model.recompute)):
        if model.global_batch_size % batch or sum(g.count for g in stages[0]) * batch > model.global_batch_size:
            continue
        plain = Candidate((), batch, recompute, zero_stage=zero)
        for ep, split in product(_expert_parallel(estimator, stages), (False, True)):
            if split and (len(stages) == 1 or model.mtp_num_layers):
                continue
            layers = _layers(estimator, stages, plain, split)
            if layers is None:
                continue
            part = 1 / len(stages)
            rows = ((part, 0.0 if model.tied_embeddings else part),) * len(stages) if split else ()
            made = tuple(Stage(n, groups) for n, groups in zip(layers, stages))
            yield from _scheduled(estimator, plain.with_(stages=made, ep=ep, rows=rows))


def _scheduled(estimator: Estimator, plain: Candidate) -> Iterator[Candidate]:
    """Under every schedule."""
    count, length = len(plain.stages), estimator.model.seq_length
    yield plain
    if count == 1:
        return
    for chunks in CHUNKS:
        yield plain.with_(schedule="interleaved", chunks=chunks)
    for slices in SLICES:
        if count <= slices <= length // LEAST_TOKENS:
            yield plain.with_(schedule="slimpipe", slices=slices)


def _shapes(estimator: Estimator) -> Iterator[Stages]:
    """Replicas of every stage: of one kind each, in both orders; or the same of every kind in all."""
    nodes, most = estimator.cluster.nodes, estimator.model.num_layers
    pools = range(len(nodes))
    for count in (1, 2, 3):
        for chosen in combinations(pools, min(count, len(nodes))):
            for tps in product(*([t for t in SIZES if t <= nodes[p].gpus_per_node] for p in chosen)):
                units = [
                    nodes[p].quota // nodes[p].gpus_per_node * (nodes[p].gpus_per_node // t)
                    for p, t in zip(chosen, tps)
                ]
                for width in _widths(min(units)):
                    whole = [n // width for n in units]
                    for used in (
                        {tuple(whole), tuple(max(1, n // 2) for n in whole)} if len(chosen) == 1 else {tuple(whole)}
                    ):
                        stages: Stages = []
                        for p, t, n in zip(chosen, tps, used):
                            stages += [(Group(p, t, width),)] * n
                        if len(stages) <= most:
                            yield stages
                            if len(chosen) > 1:
                                yield stages[::-1]
                if len(chosen) > 1:
                    for stages_count in (n for n in (1, 2, 3, 4, 6, 8) if n <= min(*units, most)):
                        alike = tuple(Group(p, t, n // stages_count) for p, t, n in zip(chosen, tps, units))
                        yield [alike] * stages_count
        if count >= len(nodes):
            return


def _widths(most: int) -> list[int]:
    """Powers of two and three times such."""
    return [n for n in range(1, most + 1) if n & (n - 1) == 0 or (n % 3 == 0 and (n // 3) & (n // 3 - 1) == 0)]


def _expert_parallel(estimator: Estimator, stages: Stages) -> tuple[int, ...]:
    """Experts cut, and whole ones as far as there are ranks."""
    x, most = estimator.model.experts, max(g.tp for groups in stages for g in groups)
    return (1,) if x is None or most == 1 else (1, gcd(x.count, most))


def _layers(estimator: Estimator, stages: Stages, like: Candidate, split: bool) -> list[int] | None:
    """By speed, one after the other to the stage that is done with it first; None where a kind has no figures."""
    rates, ends, last = [], [], len(stages) - 1
    for s, groups in enumerate(stages):
        units = [(g.count, estimator.unit_of(like, g)) for g in groups]
        found = [(n, u) for n, u in units if u is not None]
        if len(found) < len(units):
            return None
        rates.append(sum(n / (u.layer_f + u.layer_b) for n, u in found))
        head = 1 / len(stages) if split else float(s == last)
        ends.append(head / sum(n / (u.head_f + u.head_b) for n, u in found))
    layers = [1] * len(stages)
    for _ in range(estimator.model.num_layers - len(stages)):
        s = min(range(len(stages)), key=lambda s: (layers[s] + 1) / rates[s] + ends[s])
        layers[s] += 1
    return layers


def compare(seed: int) -> dict[str, Any]:
    """One random cluster: the search's plan, and the best regular one."""
    estimator, goal = with_catalog(*random_pool(seed)), Goal()
    outcome = search("auto", estimator, goal)
    best = outcome.best
    seconds, regular, count = best_regular(estimator, goal)
    return {
        "seed": seed,
        "gpus": " + ".join(f"{n.quota} {n.gpu}" for n in estimator.cluster.nodes),
        "cpu_s": outcome.cpu_s,
        "found_s": best.iteration_s if best else None,
        "plan": describe(estimator, best.candidate) if best else None,
        "is_plain": bool(best) and irregularity(estimator, best.candidate)[0] <= 0,  # type: ignore[union-attr]
        "regular_plans": count,
        "regular_s": seconds if regular else None,
        "regular": describe(estimator, regular) if regular else None,
        "worse_than_regular": fastest_s(outcome) / seconds - 1 if best and regular else 0.0,
        "bound_s": outcome.bound,
    }


def main() -> None:
    """The random clusters that are asked for and not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--pools", type=int, default=60)
    args = parser.parse_args()
    rows = json.loads(args.json.read_text())["cases"] if args.json.exists() else []
    for seed in range(args.first, args.first + args.pools):
        if any(row["seed"] == seed for row in rows):
            continue
        rows.append(compare(seed))
        print(f"  pool {seed}: {rows[-1]}", file=sys.stderr, flush=True)
        worse = sum(row["worse_than_regular"] > TOLERANCE for row in rows)
        share = sum(row["is_plain"] for row in rows) / len(rows)
        write_json(args.json, {"machine": machine(), "worse_than_regular": worse, "plain_share": share, "cases": rows})


if __name__ == "__main__":
    main()
