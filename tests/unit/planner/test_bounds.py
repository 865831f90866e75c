"""No plan is below the bound of the GPUs that it uses: random plans under all schedules, simulated."""

import random

import pytest

from testing.planner_cases import _random_groups, random_pool, with_catalog
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.schedules import SCHEDULES
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.search import bounds as module
from tools.planner.search.balance import balance
from tools.planner.search.bounds import Bounds
from tools.planner.search.depths import least_s
from tools.planner.search.moves import schedule_variants
from tools.planner.search.outcome import Goal
from tools.planner.search.pools import all_gpus
from tools.planner.simulate.simulation import operations_of, simulate_block

MOST_OPERATIONS = 6000


def random_plans(seed, count):
    """(estimator, candidate) of random stages with balanced layers, each under one of the schedules."""
    rng = random.Random(seed)
    cluster, model = random_pool(seed)
    model = model.model_copy(update={"num_layers": rng.randint(4, 12), "global_batch_size": rng.choice((32, 48, 64))})
    estimator, goal = with_catalog(cluster, model), Goal()
    while count:
        groups = _random_groups(estimator, rng)
        like = Candidate(
            (), rng.choice(model.batch_sizes), rng.choice(model.recompute), zero_stage=int(model.distributed_optimizer)
        )
        candidate = None if groups is None else balance(estimator, groups, like)
        if candidate is not None:
            yield estimator, rng.choice(list(schedule_variants(estimator, goal, candidate)))
            count -= 1


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_is_below_the_bound_of_its_gpus(seed):
    bounds = {}
    for estimator, candidate in random_plans(seed, 25):
        estimate = estimator.estimate(candidate)
        if estimate is None or not estimator.fits(estimate) or operations_of(estimator, candidate) > MOST_OPERATIONS:
            continue
        used = candidate.gpus()
        limits = tuple(used.get(p, 0) for p in range(len(estimator.cluster.nodes)))
        for schedules in (tuple(SCHEDULES), (candidate.schedule,)):
            found = bounds.setdefault(schedules, Bounds(estimator, Goal(schedules=schedules)))
            try:
                simulated = simulate_block(estimator, candidate, estimate).iteration_s
            except PlannerError:
                continue
            assert least_s(estimator, candidate, estimate) <= simulated * (1 + 1e-9)
            least = found.seconds(limits)
            assert least <= simulated * (1 + 1e-9)
            assert not found.excludes(limits, simulated * (1 + 1e-6))
            assert found.ideal(limits) <= least * (1 + 1e-9)


def test_gradients_and_the_first_microbatch_count():
    """Many GPUs behind slow links: summing gradients, or filling a pipeline, takes longer than computing."""
    _, model = random_pool(1)
    model = model.model_copy(update={"num_layers": 16, "global_batch_size": 64, "distributed_optimizer": False})
    node = NodeGroup(gpu="H100-SXM", count=64, gpus_per_node=1, network_bytes_per_s=1.25e9)
    slow, fast = (
        with_catalog(Cluster(nodes=(node.model_copy(update={"network_bytes_per_s": rate}),)), model)
        for rate in (0.3e9, 100e9)
    )
    goal = Goal(schedules=("1f1b",))
    behind, near = Bounds(slow, goal), Bounds(fast, goal)
    assert behind.ideal((64,)) == near.ideal((64,))
    assert behind.seconds((64,)) > 1.2 * near.seconds((64,))
    candidate = Candidate((Stage(16, (Group(0, 1, 64),)),), 1)
    estimate = slow.estimate(candidate)
    assert estimate is not None
    assert estimate.iteration_s >= behind.seconds(all_gpus(slow))


def test_tables_that_are_too_large_are_left_out(monkeypatch):
    """The bound is then that of the work alone: lower, and true all the same."""
    cluster, model = random_pool(0)
    estimator = with_catalog(cluster, model)
    limits = all_gpus(estimator)
    with_tables = Bounds(estimator, Goal()).seconds(limits)
    monkeypatch.setattr(module, "MOST_CELLS", 0)
    monkeypatch.setattr(module.Relaxation, "_tables", None)  # nobody asks for them
    found = Bounds(estimator, Goal())
    assert 0 < found.ideal(limits) <= found.seconds(limits) < with_tables


def figures(estimator: Estimator, pool: int) -> tuple[float, float]:
    """GPU seconds of a layer and of the head of one sequence, each with the TP size that suits it."""
    units = [(tp, unit) for tp in (1, 2, 4, 8) if (unit := estimator.unit(pool, tp, 1, "none")) is not None]
    layer = min(tp * (unit.layer_f + unit.layer_b) for tp, unit in units)
    return layer, min(tp * (unit.head_f + unit.head_b) for tp, unit in units)


def test_the_head_counts_as_much_as_where_it_is_done():
    """Over PCIe layers take much longer in TP groups and the head does not: no GPU may count the one as the other."""
    _, model = random_pool(1)
    changes = {"num_layers": 12, "global_batch_size": 64, "vocab_size": 128256, "micro_batch_sizes": (1,)}
    model = model.model_copy(update={**changes, "recompute": ("none",)})
    counts = {"A10G": 4, "H100-SXM": 1}
    nodes = tuple(NodeGroup(gpu=gpu, count=n, gpus_per_node=8) for gpu, n in counts.items())
    estimator = with_catalog(Cluster(nodes=nodes), model)
    bounds = Bounds(estimator, Goal(schedules=("1f1b",)))
    for limits in (32, 0), (0, 8), (32, 8):
        of_pools = [(n, *figures(estimator, pool)) for pool, n in enumerate(limits) if n]
        for head in [head_s / layer_s for _, layer_s, head_s in of_pools]:  # that many layers for everybody
            rate = sum(n * max(1 / layer_s, head / head_s) for n, layer_s, head_s in of_pools)
            assert bounds.seconds(limits) >= model.global_batch_size * (model.num_layers + head) / rate
