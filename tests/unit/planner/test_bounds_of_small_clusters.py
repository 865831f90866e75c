"""Every plan of small clusters, listed and simulated: none is below the bound, and the best is not far above it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

import pytest

from testing.planner_cases import all_plans, with_catalog
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.schedules import SCHEDULES, schedule_of
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search.bounds import Bounds
from tools.planner.search.moves import schedule_variants
from tools.planner.search.outcome import Goal
from tools.planner.search.pools import all_gpus
from tools.planner.simulate.simulation import simulate_block

SLOW, FAST = 0.5e9, 50e9


def small(
    pools: tuple[tuple[str, int, int], ...],
    rate: float,
    zero: bool = False,
    batch: int = 4,
    hidden: int = 1024,
    sizes: tuple[int, ...] = (1, 2),
    layers: int = 3,
    words: int = 8192,
) -> Estimator:
    """Nodes as (kind, number, GPUs of each), and a model of a few layers."""
    nodes = tuple(
        NodeGroup(gpu=gpu, count=count, gpus_per_node=size, network_bytes_per_s=rate) for gpu, count, size in pools
    )
    model = Model(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=16,
        vocab_size=words,
        seq_length=1024,
        global_batch_size=batch,
        precision="fp16",
        distributed_optimizer=zero,
        micro_batch_sizes=sizes,
        recompute=("none",),
    )
    return with_catalog(Cluster(nodes=nodes), model)


CASES = {
    "one node": small((("A100-40", 1, 4),), 0.05e9, batch=32),
    "one microbatch": small((("T4", 3, 1),), FAST, batch=2, sizes=(2,), hidden=6144, words=256),
    "nodes of one": small((("A100-40", 4, 1),), SLOW),
    "nodes of one, fast": small((("A100-40", 4, 1),), FAST, batch=8),
    "two nodes of two": small((("T4", 2, 2),), SLOW),
    "two nodes of two, sharded": small((("V100-16", 2, 2),), SLOW, zero=True, batch=8),
    "nodes of one, sharded": small((("H100-SXM", 3, 1),), SLOW, zero=True, batch=8),
    "a node of each kind": small((("A100-40", 1, 2), ("T4", 1, 2)), SLOW, batch=8),
    "a node of each kind, sharded": small((("A100-40", 1, 2), ("V100-16", 1, 2)), FAST, zero=True, hidden=2048),
}
ENOUGH = 400
"""Simulated plans of each case, in random order."""


def plans(estimator: Estimator) -> Iterator[Candidate]:
    """Every list of stages with every split of the layers, under every schedule."""
    goal, zero = Goal(), int(estimator.model.distributed_optimizer)
    for batch in estimator.model.batch_sizes:
        for plain in all_plans(estimator, Candidate((), batch, zero_stage=zero), [inf]):
            yield from (c for c in schedule_variants(estimator, goal, plain) if schedule_of(c).runs(estimator, c))


def simulated(estimator: Estimator, found: list[Candidate]) -> Iterator[tuple[Candidate, float]]:
    """Those that fit, and what they take."""
    for candidate in found:
        estimate = estimator.estimate(candidate)
        if estimate is None or not estimator.fits(estimate):
            continue
        try:
            yield candidate, simulate_block(estimator, candidate, estimate).iteration_s
        except PlannerError:
            continue


def used(estimator: Estimator, candidate: Candidate) -> tuple[int, ...]:
    gpus = candidate.gpus()
    return tuple(gpus.get(pool, 0) for pool in range(len(estimator.cluster.nodes)))


@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_below_the_bounds(name: str) -> None:
    """Those of the whole cluster and of the plan's own GPUs; of all schedules and of the plan's own."""
    estimator = CASES[name]
    found = list(plans(estimator))
    random.Random(0).shuffle(found)
    everything = {
        names: Bounds(estimator, Goal(schedules=names)) for names in [tuple(SCHEDULES)] + [(s,) for s in SCHEDULES]
    }
    least: dict[object, float] = {}
    for candidate, seconds in simulated(estimator, found[:ENOUGH]):
        for names in tuple(SCHEDULES), (candidate.schedule,):
            for limits in used(estimator, candidate), all_gpus(estimator):
                key = names, limits
                if key not in least:
                    least[key] = everything[names].seconds(limits)
                assert least[key] <= seconds * (1 + 1e-9), (names, limits, candidate)
            assert not everything[names].excludes(used(estimator, candidate), seconds * (1 + 1e-6)), candidate
    assert least


@pytest.mark.parametrize("rate", [6e9, 12.5e9, 50e9])
def test_first_gather_and_last_sum_of_a_window(rate: float) -> None:
    """One layer on two replicas: nothing runs beside its gather and the sum of its gradients."""
    estimator = small((("H100-SXM", 2, 1),), rate, zero=True, batch=64, layers=1, words=256)
    candidate = Candidate((Stage(1, (Group(0, 1, 2),)),), 2, schedule="ministage", zero_stage=1)
    [(_, seconds)] = simulated(estimator, [candidate])
    least = Bounds(estimator, Goal(schedules=("ministage",))).seconds((2,))
    assert least <= seconds * (1 + 1e-9)
    assert seconds < 1.03 * least


def test_gradients_are_summed_over_nodes() -> None:
    """Many nodes of one GPU behind slow links, and few fast GPUs in one node: the slow ones cannot do it in a node."""
    alone = small((("V100-16", 4, 1), ("H100-SXM", 1, 2)), 0.2e9, batch=64)
    together = small((("V100-16", 1, 4), ("H100-SXM", 1, 2)), 0.2e9, batch=64)
    limits = all_gpus(alone)
    assert Bounds(alone, Goal()).seconds(limits) > 1.2 * Bounds(together, Goal()).seconds(limits)
