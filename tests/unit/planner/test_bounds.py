"""No plan is below the bound of the GPUs that it uses: random plans under all schedules, simulated."""

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from megatron_het.plan import Plan
from testing.planner_cases import (
    LLAMA_8B,
    _random_groups,
    cluster_of,
    model_of,
    random_pool,
    read_back,
    simulate_block,
    with_catalog,
)
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.schedules import SCHEDULES, schedule_of
from tools.planner.costs.simulation import operations_of
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.search import methods as choices
from tools.planner.search.balance import balance
from tools.planner.search.bounds import Bounds
from tools.planner.search.moves import least_s, schedule_variants
from tools.planner.search.outcome import Goal
from tools.planner.search.pools import all_gpus
from tools.planner.search.poplar import can_differ, unequal


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


# No plan that keeps to the model file is below the bound of its GPUs, nor of the cluster's: unequal passes, context and
# expert parallelism, exchange.

GOAL = Goal()
MOST_SIMULATED = 1500
CHANGES = 4
KINDS = ("A100-40", "A100-80", "H100-SXM", "L40S", "V100-16", "T4")


def small_case(seed: int) -> Estimator:
    """4 to 32 GPUs of one to three kinds, and a model of a few layers; long sequences and experts among them."""
    rng = random.Random(seed)
    nodes = tuple(
        NodeGroup(
            gpu=kind,
            count=rng.randint(1, 3),
            gpus_per_node=rng.choice((1, 2, 4, 8)),
            network_bytes_per_s=rng.choice((1.25e9, 12.5e9, 50e9, 200e9)),
        )
        for kind in rng.sample(KINDS, rng.randint(1, 3))
    )
    hidden = rng.choice((512, 1024, 2048))
    length = rng.choice((512, 2048, 8192, 32768))
    total = rng.choice((7, 12, 16, 30, 63)) if length < 8192 else rng.choice((4, 6, 8))
    experts = Experts(count=8, top_k=2, ffn_hidden_size=2 * hidden, dropless=rng.random() < 0.5)
    model = model_of(
        layers=rng.randint(4, 12),
        hidden=hidden,
        groups=rng.choice((8, 16)),
        words=rng.choice((1000, 32000, 128256)),
        tokens=length,
        batch=total,
        precision="fp16",
        distributed_optimizer=rng.random() < 0.7,
        sequence_parallel=True,
        micro_batch_sizes=rng.choice(((), (), (1, 2))) if total % 2 == 0 else (),
        document_lengths=rng.choice((None, None, length // 4)),
        experts=experts if rng.random() < 0.3 else None,
    )
    return with_catalog(Cluster(nodes=nodes), model)


def changed(estimator: Estimator, rng: random.Random, candidate: Candidate) -> Candidate:
    """A candidate with some things changed at random, whether that is better or not."""
    for _ in range(rng.randint(0, CHANGES)):
        others = list(choices.changes(estimator, GOAL, candidate))
        if others:
            candidate = rng.choice(others)
    return candidate.with_(exchange=True) if candidate.slices > 1 and rng.random() < 0.5 else candidate


def random_passes(estimator: Estimator, rng: random.Random, candidate: Candidate) -> Candidate:
    """All GPUs of a candidate in one stage, with passes of random sizes."""
    total, groups = estimator.model.global_batch_size, candidate.stages[0].groups
    rows: list[list[int]] = [[1] for g in groups for _ in range(g.count)]
    allowed = estimator.model.micro_batch_sizes or range(1, total)
    left = total - len(rows)
    while left > 0:
        size = rng.choice([n for n in allowed if n <= left])
        rng.choice(rows).append(size)
        left -= size
    if left < 0:
        return candidate
    passes = iter(tuple(row) for row in rows)
    sizes = tuple(tuple(next(passes) for _ in range(g.count)) for g in groups)
    return candidate.with_(sizes=sizes, micro_batch_size=max(n for row in rows for n in row))


def candidates(estimator: Estimator, rng: random.Random, count: int) -> Iterator[Candidate]:
    """Random stages with balanced layers, under any schedule, with anything that a plan may have."""
    model = estimator.model
    for _ in range(count):
        groups = _random_groups(estimator, rng)
        batch, zero = rng.choice(model.batch_sizes), int(model.distributed_optimizer)
        like = Candidate((), batch, rng.choice(model.recompute), zero_stage=zero)
        candidate = None if groups is None else balance(estimator, groups, like)
        if candidate is None:
            continue
        if len(candidate.stages) == 1 and rng.random() < 0.7:
            other = unequal(estimator, candidate) if rng.random() < 0.3 and can_differ(estimator, candidate) else None
            yield other or random_passes(estimator, rng, candidate)
            continue
        variants = list(schedule_variants(estimator, GOAL, candidate))
        schedule = rng.choice(sorted({c.schedule for c in variants}))
        yield changed(estimator, rng, rng.choice([c for c in variants if c.schedule == schedule]))


def simulated_s(estimator: Estimator, candidate: Candidate) -> float:
    """Its price; infinite where it cannot be run or does not fit."""
    if not schedule_of(candidate).runs(estimator, candidate):
        return inf
    estimate = estimator.estimate(candidate)
    if estimate is None or not estimator.fits(estimate) or operations_of(estimator, candidate) > MOST_SIMULATED:
        return inf
    try:
        if candidate.sizes:
            build_plan(estimator, candidate, estimate)
            return estimate.iteration_s
        seconds = simulate_block(estimator, candidate, estimate).iteration_s
    except PlannerError:
        return inf
    assert least_s(estimator, candidate, estimate) <= seconds * (1 + 1e-9)
    return seconds


@functools.cache
def bounds_of(estimator: Estimator, schedules: tuple[str, ...], objective: str = "throughput") -> Bounds:
    return Bounds(estimator, Goal(objective, schedules=schedules))


def check_bound(estimator: Estimator, candidate: Candidate, seconds: float) -> None:
    """The bounds of all schedules and of the plan's own, on the plan's GPUs."""
    limits = tuple(candidate.gpus().get(pool, 0) for pool in range(len(estimator.cluster.nodes)))
    usd = seconds * sum(estimator.price[pool] * n for pool, n in enumerate(limits))
    for schedules in (tuple(SCHEDULES), (candidate.schedule,)):
        bounds = bounds_of(estimator, schedules)
        least = bounds.seconds(limits)
        assert least > 0
        assert least <= seconds * (1 + 1e-9), candidate
        assert not bounds.excludes(limits, seconds * (1 + 1e-6)), candidate
        assert bounds.seconds(all_gpus(estimator)) <= seconds * (1 + 1e-9), candidate
        assert bounds_of(estimator, schedules, "cost").value(limits) <= usd * (1 + 1e-9), candidate


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 14))])
def test_no_plan_is_below_the_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "LONG", 0)  # everything that a plan may have, for short sequences too
    estimator, rng = small_case(seed), random.Random(seed)
    for candidate in candidates(estimator, rng, 20):
        seconds = simulated_s(estimator, candidate)
        if seconds < inf:
            check_bound(estimator, candidate, seconds)


def unequal_pipeline(plan: Plan, total: int) -> Plan:
    """A plan of equal microbatches with the same ones cut to fewer sequences, the first and the last most."""
    sizes = [plan.training.micro_batch_size] * plan.num_microbatches
    left = sum(sizes) - total
    for m in (0, -1, 1):
        less = min(left, sizes[m] - 1)
        sizes[m], left = sizes[m] - less, left - less
    training = replace(plan.training, global_batch_size=total, micro_batch_sizes=tuple(sizes))
    return replace(plan, training=training, predicted=None)


def test_pipelines_of_unequal_microbatches() -> None:
    """A hand-written pipeline whose first and last microbatches are small, so that nobody waits long."""
    shape: dict[str, Any] = {"num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16}
    cluster = Cluster(nodes=(NodeGroup(gpu="H100-SXM", count=1, gpus_per_node=4),))
    whole, less = (
        with_catalog(cluster, Model(**shape, vocab_size=1000, seq_length=64, global_batch_size=n)) for n in (160, 96)
    )
    stages = tuple(Stage(2, (Group(0, 1, 1),)) for _ in range(4))
    candidate = Candidate(stages, 32)
    estimate = whole.estimate(candidate)
    plan = unequal_pipeline(build_plan(whole, candidate, estimate), 96)
    assert Bounds(less, Goal(schedules=("1f1b",))).seconds((4,)) <= read_back(less, plan)[1]


def test_63_sequences_in_unequal_passes() -> None:
    """Passes of 16 and 15 sequences are faster than microbatches of 1, and no power of two divides 63."""
    node = NodeGroup(gpu="A100-80", count=1, gpus_per_node=4)
    shape: dict[str, Any] = {"num_layers": 12, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16}
    model = Model(**shape, vocab_size=32000, seq_length=64, global_batch_size=63)
    estimator = with_catalog(Cluster(nodes=(node,)), model)
    candidate = unequal(estimator, Candidate((Stage(12, (Group(0, 1, 4),)),), 1))
    assert candidate is not None and candidate.sizes
    check_bound(estimator, candidate, simulated_s(estimator, candidate))


def test_the_passes_that_suit_a_gpu_best_count() -> None:
    """Passes of two sequences take less time for each than passes of one."""
    model = model_of(layers=3, hidden=1024, words=8192, batch=32, precision="fp16", micro_batch_sizes=(1, 2))
    estimator = with_catalog(cluster_of(("A100-40", 1, 4, 0.05e9)), model)
    one, two = (Candidate((Stage(3, (Group(0, 1, 1),)),), size) for size in (1, 2))
    assert simulated_s(estimator, two) < simulated_s(estimator, one)
    check_bound(estimator, two, simulated_s(estimator, two))


def test_context_parallelism_of_long_sequences() -> None:
    """CP 4 divides the activations, so that no layer needs as many TP ranks."""
    both = ("none", "full")
    model = model_of(
        **LLAMA_8B, layers=8, tokens=131072, batch=4, distributed=True, sequence_parallel=True, recompute=both
    )
    estimator = with_catalog(cluster_of(("A100-40", 4, 8, 200e9)), model)
    stages = {
        "1f1b": (Stage(8, (Group(0, 2, 4),)),),
        "ministage": (Stage(8, (Group(0, 2, 4),)),),
        "slimpipe": (Stage(4, (Group(0, 2, 2),)),) * 2,
    }
    checked = set()
    for schedule, recompute in product(stages, model.recompute):
        candidate = Candidate(stages[schedule], 1, recompute, schedule, zero_stage=1, cp=4)
        candidate = candidate.with_(
            chunks=8 if schedule == "ministage" else 1, slices=8 if schedule == "slimpipe" else 1
        )
        seconds = simulated_s(estimator, candidate)
        if seconds < inf:
            check_bound(estimator, candidate, seconds)
            checked.add(schedule)
    assert len(checked) > 1


def test_kernels_of_slices_that_are_faster() -> None:
    """In heads of 64 numbers whole attention is priced higher."""
    model = model_of(layers=8, hidden=1024, tokens=65536, batch=1, distributed_optimizer=True, recompute=("none",))
    estimator = with_catalog(cluster_of(("L40S", 1, 2, 100e9)), model)
    stages = (Stage(4, (Group(0, 1, 1),)),) * 2
    candidate = Candidate(
        stages, 1, schedule="slimpipe", slices=32, zero_stage=1, exchange=True, rows=((0.5, 0.5),) * 2
    )
    check_bound(estimator, candidate, simulated_s(estimator, candidate))


@pytest.mark.parametrize("dropless", [False, True])
def test_expert_parallelism(dropless: bool) -> None:
    """EP 8 saves the collectives of experts that are cut, and so is faster than TP alone."""
    node = NodeGroup(gpu="H100-SXM", count=1, gpus_per_node=8)
    experts = Experts(count=64, top_k=6, ffn_hidden_size=1408, dropless=dropless)
    model = model_of(layers=8, hidden=2048, tokens=4096, batch=1, experts=experts)
    estimator = with_catalog(Cluster(nodes=(node,)), model)
    candidate = Candidate((Stage(8, (Group(0, 8, 1),)),), 1, ep=8)
    seconds = simulated_s(estimator, candidate)
    assert seconds < inf
    check_bound(estimator, candidate, seconds)
