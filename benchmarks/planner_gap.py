"""Compares plans of random clusters with those of less effort or fewer GPUs, and with an expert's regular plans.

    python -m benchmarks.planner_gap --json OUT [--first 0] [--pools 60] [--models dense,experts,vocabulary]
        [--objectives throughput,cost]

Rows in OUT are kept, so that a run can be interrupted and continued.  Counted are the cases in which the
search's plan is worse, by more than 1 %, than the plan it finds with one node less, on one kind of GPU or with fewer
schedules, than the best of 2,000 random plans, and than the best regular one (``COUNTS``); ``plain_share`` is the share
of plans with at most one kind of stage per kind of GPU.

The generator of regular plans does not use the search.  Its plans have stages of equally many replicas of one kind
each, or stages that all have the same replicas of every kind, TP inside nodes, layers by speed, every schedule, slices
and chunks, whole and split vocabularies, and experts whole or cut.
"""

import argparse
import gc
import json
import random
import sys
from collections.abc import Callable, Collection, Iterator
from itertools import combinations, product
from math import gcd, inf
from typing import Any

from benchmarks.machine import command_line, machine
from testing.planner_cases import best_value, promised, random_pool, random_search, value_of, with_catalog, without_one
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
SIMULATED = 8  # plans that look best by the closed form are simulated
TOLERANCE = 0.01
ENOUGH = 4_000  # least plans of a cluster, if its stages can be cut in so many ways

Stages = list[tuple[Group, ...]]


def best_regular(estimator: Estimator, goal: Goal, most: int = 4 * ENOUGH) -> tuple[float, Candidate | None, int]:
    """Returns the value of the best regular plan, the plan, and the number of plans.

    Args:
        most: Most plans to price, spread evenly over all of them.
    """
    plans = list(regular_plans(estimator))
    plans = plans[:: max(1, len(plans) // most)]
    priced: list[tuple[float, int, Candidate, Estimate]] = []
    for i, candidate in enumerate(plans):
        prices = estimator.running(candidate.gpus())
        estimate = prices.estimate(candidate) if schedule_of(candidate).runs(prices, candidate) else None
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
                value *= block_s(estimator.running(candidate.gpus()), candidate, estimate) / estimate.iteration_s
            except PlannerError:
                continue
        left -= 1
        best = min(best, (value, candidate), key=lambda entry: entry[0])
    return (*best, len(plans))


def regular_plans(estimator: Estimator) -> Iterator[Candidate]:
    """Yields all regular plans that the schedules may run."""
    model = estimator.model
    zero = int(model.distributed_optimizer)
    for stages, (batch, recompute) in product(_shapes(estimator), product(SIZES, model.recompute)):
        if model.global_batch_size % batch or sum(g.count for g in stages[0]) * batch > model.global_batch_size:
            continue
        plain = Candidate((), batch, recompute, zero_stage=zero)
        for (ep, is_shared), split in product(_expert_parallel(estimator, stages), (False, True)):
            if split and (len(stages) == 1 or model.mtp_num_layers):
                continue
            layers = _layers(estimator, stages, plain, split)
            if layers is None:
                continue
            part = 1 / len(stages)
            rows = ((part, 0.0 if model.tied_embeddings else part),) * len(stages) if split else ()
            made = tuple(Stage(n, groups) for n, groups in zip(layers, stages))
            one = plain.with_(stages=made, ep=1 if is_shared else ep, rows=rows)
            yield from _scheduled(estimator, one.over_replicas(ep) if is_shared else one)


def _scheduled(estimator: Estimator, plain: Candidate) -> Iterator[Candidate]:
    """Yields the plan under every schedule."""
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
    """Yields the replicas of every stage: each stage of one kind, in both orders; or all kinds in every stage."""
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
    """Returns powers of two, and three times powers of two."""
    return [n for n in range(1, most + 1) if n & (n - 1) == 0 or (n % 3 == 0 and (n // 3) & (n // 3 - 1) == 0)]


def _expert_parallel(estimator: Estimator, stages: Stages) -> list[tuple[int, bool]]:
    """Yields ways to divide experts: cut; whole, over TP ranks; over replicas (True), as stock Megatron does."""
    x, most = estimator.model.experts, max(g.tp for groups in stages for g in groups)
    if x is None:
        return [(1, False)]
    ranks, size = min(sum(g.tp * g.count for g in groups) for groups in stages), gcd(x.count, SIZES[-1])
    return [(1, False), *[(gcd(x.count, most), False)] * (most > 1), *[(size, True)] * (most < size <= ranks)]


def _layers(estimator: Estimator, stages: Stages, like: Candidate, split: bool) -> list[int] | None:
    """Returns layers by speed, each given to the stage that would finish it first; None if a kind has no figures."""
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


COUNTS = (
    "worse_than_regular",
    "worse_with_a_node",
    "worse_than_one_kind",
    "worse_than_fewer_schedules",
    "worse_than_random_search",
)
"""Shares by which a plan is worse; at most 0 where it is not."""


def compare(row: dict[str, Any], figures: Collection[str] = COUNTS) -> Iterator[None]:
    """Fill missing figures of a row: the search's plan of a random cluster, and the gain of each other plan over it.

    Args:
        row: ``seed``, ``model`` and ``objective``, and what was found before.
        figures: Those of ``COUNTS`` that are wanted.
    """
    cluster, model = random_pool(row["seed"], row["model"])
    goal, estimator = Goal(row["objective"]), with_catalog(cluster, model)
    if "found" not in row:
        row |= _planned(estimator, goal)
        yield
    if row["found"] is None:
        return
    less = random.Random(row["seed"]).randrange(len(cluster.nodes))
    most = max(cluster.nodes, key=lambda n: n.quota * cluster.gpu(n.gpu).peak("fp16"))
    fewer = Goal(row["objective"], schedules=("1f1b", "interleaved"))
    others: dict[str, Callable[[], float]] = {
        "worse_with_a_node": lambda: best_value(without_one(cluster.nodes, less), model, goal),
        "worse_than_one_kind": lambda: best_value([most], model, goal),
        "worse_than_fewer_schedules": lambda: best_value(cluster.nodes, model, fewer),
        "worse_than_random_search": lambda: random_search(estimator, goal, row["seed"]),
    }
    if "worse_than_regular" in set(figures) - row.keys():
        value, regular, count = best_regular(estimator, goal)
        row |= {"regular_plans": count, "regular": describe(estimator, regular) if regular else None}
        row["worse_than_regular"] = row["fastest"] / value - 1
        yield
    for name, other in others.items():
        if name in set(figures) - row.keys():
            gc.collect()  # a search leaves a million objects in reference cycles
            row[name] = row["fastest"] / other() - 1
            yield


def _planned(estimator: Estimator, goal: Goal) -> dict[str, Any]:
    """Returns the search's plan as users get it; ``fastest`` is the best value, though a regular plan may be taken."""
    outcome = search("auto", estimator, goal)
    row = {"gpus": " + ".join(f"{n.quota} {n.gpu}" for n in estimator.cluster.nodes), "cpu_s": outcome.cpu_s}
    if outcome.best is None:
        return row | {"found": None}
    found = outcome.best
    return row | {
        "found": found.value(goal),
        "fastest": value_of(outcome, goal),
        "plan": describe(estimator, found.candidate),
        "is_plain": irregularity(estimator, found.candidate)[0] <= 0,
        "bound_gap": outcome.gap(goal),
        "promised_over_emitted": promised(estimator, outcome),
    }


def summed_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of worse cases, the largest share, and the cases."""
    planned = [row for row in rows if row["found"] is not None]
    by_name = {name: [row[name] for row in planned if name in row] for name in COUNTS}
    by_name = {name: shares for name, shares in by_name.items() if shares}
    out: dict[str, Any] = {name: sum(share > TOLERANCE for share in shares) for name, shares in by_name.items()}
    out["compared"] = {name: len(shares) for name, shares in by_name.items()}
    out["worst"] = {name: max(0.0, *shares) for name, shares in by_name.items()}
    out["plain_share"] = sum(row["is_plain"] for row in planned) / max(1, len(planned))
    ratios = [row["promised_over_emitted"] for row in planned if row["promised_over_emitted"] is not None]
    return out | {"promised_over_emitted": max(ratios, default=None), "cases": rows}


def add_arguments(parser: argparse.ArgumentParser, pools: int) -> None:
    """Add the arguments for random clusters, models and objectives."""
    parser.add_argument("--pools", type=int, default=pools, help="random clusters (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of these clusters (default 0)")
    parser.add_argument("--models", default="dense", help="dense, experts, vocabulary (default dense)")
    parser.add_argument("--objectives", default="throughput", help="throughput, cost (default throughput)")


def compared(
    options: argparse.Namespace, rows: list[dict[str, Any]], figures: Collection[str] = COUNTS
) -> Iterator[list[dict[str, Any]]]:
    """Yields all cases, known ones included, after each new figure."""
    known = {(row["seed"], row["model"], row["objective"]): row for row in rows}
    seeds = range(options.first, options.first + options.pools)
    for case in product(seeds, options.models.split(","), options.objectives.split(",")):
        row = known.get(case) or dict(zip(("seed", "model", "objective"), case))
        for _ in compare(row, figures):
            if case not in known:
                known[case] = row
                rows.append(row)
            yield rows
        print(f"  {row}", file=sys.stderr, flush=True)


def main() -> None:
    """Compute the requested cases that OUT lacks."""
    parser = command_line("benchmarks.planner_gap", __doc__)
    add_arguments(parser, 60)
    options = parser.parse_args()
    known = json.loads(options.json.read_text())["cases"] if options.json.exists() else []
    for rows in compared(options, known):
        write_json(options.json, {"machine": machine(), **summed_up(rows)})


if __name__ == "__main__":
    main()
