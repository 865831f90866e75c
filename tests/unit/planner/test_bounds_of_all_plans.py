"""No plan that keeps to the model file is below the bound: unequal passes, context and expert parallelism, exchange."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from megatron_het.plan import Plan
from testing.planner_cases import _random_groups, with_catalog
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.schedules import SCHEDULES, schedule_of
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.search import methods as choices
from tools.planner.search.balance import balance
from tools.planner.search.bounds import Bounds
from tools.planner.search.moves import schedule_variants
from tools.planner.search.outcome import Goal
from tools.planner.search.poplar import can_differ, unequal
from tools.planner.simulate.simulation import operations_of, simulate_block, simulate_candidate

GOAL = Goal()
MOST_OPERATIONS = 1500
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
    model = Model(
        num_layers=rng.randint(4, 12),
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=16,
        num_query_groups=rng.choice((8, 16)),
        vocab_size=rng.choice((1000, 32000, 128256)),
        seq_length=length,
        global_batch_size=total,
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
    if estimate is None or not estimator.fits(estimate) or operations_of(estimator, candidate) > MOST_OPERATIONS:
        return inf
    try:
        if candidate.sizes:
            build_plan(estimator, candidate, estimate)
            return estimate.iteration_s
        return simulate_block(estimator, candidate, estimate).iteration_s
    except PlannerError:
        return inf


def used_gpus(estimator: Estimator, candidate: Candidate) -> tuple[int, ...]:
    used = candidate.gpus()
    return tuple(used.get(pool, 0) for pool in range(len(estimator.cluster.nodes)))


@functools.cache
def bounds_of(estimator: Estimator, schedules: tuple[str, ...], objective: str = "throughput") -> Bounds:
    return Bounds(estimator, Goal(objective, schedules=schedules))


def check_bound(estimator: Estimator, candidate: Candidate, seconds: float) -> None:
    """The bounds of all schedules and of the plan's own, on the plan's GPUs."""
    limits = used_gpus(estimator, candidate)
    usd = seconds * sum(estimator.price[pool] * n for pool, n in enumerate(limits))
    for schedules in (tuple(SCHEDULES), (candidate.schedule,)):
        bounds = bounds_of(estimator, schedules)
        least = bounds.seconds(limits)
        assert 0 < bounds.ideal(limits) <= least * (1 + 1e-9)
        assert least <= seconds * (1 + 1e-9), candidate
        assert not bounds.excludes(limits, seconds * (1 + 1e-6)), candidate
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
    assert estimate is not None
    plan = unequal_pipeline(build_plan(whole, candidate, estimate), 96)
    found, seated = candidate_of(plan, less.cluster)
    estimate = less.estimate(found)
    assert estimate is not None
    seconds = simulate_candidate(less, found, estimate, plan, seated).iteration_s
    assert Bounds(less, Goal(schedules=("1f1b",))).seconds((4,)) <= seconds


def test_63_sequences_in_unequal_passes() -> None:
    """Passes of 16 and 15 sequences are faster than microbatches of 1, and no power of two divides 63."""
    node = NodeGroup(gpu="A100-80", count=1, gpus_per_node=4)
    shape: dict[str, Any] = {"num_layers": 12, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16}
    model = Model(**shape, vocab_size=32000, seq_length=64, global_batch_size=63)
    estimator = with_catalog(Cluster(nodes=(node,)), model)
    candidate = unequal(estimator, Candidate((Stage(12, (Group(0, 1, 4),)),), 1))
    assert candidate is not None and candidate.sizes
    check_bound(estimator, candidate, simulated_s(estimator, candidate))


def test_context_parallelism_of_long_sequences() -> None:
    """CP 4 divides the activations, so that no layer needs as many TP ranks."""
    node = NodeGroup(gpu="A100-40", count=4, gpus_per_node=8, network_bytes_per_s=200e9)
    model = Model(
        num_layers=8,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=32000,
        seq_length=131072,
        global_batch_size=4,
        distributed_optimizer=True,
        sequence_parallel=True,
        recompute=("none", "full"),
    )
    estimator = with_catalog(Cluster(nodes=(node,)), model)
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


@pytest.mark.parametrize("dropless", [False, True])
def test_expert_parallelism(dropless: bool) -> None:
    """EP 8 saves the collectives of experts that are cut, and so is faster than TP alone."""
    node = NodeGroup(gpu="H100-SXM", count=1, gpus_per_node=8)
    model = Model(
        num_layers=8,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=4096,
        global_batch_size=1,
        experts=Experts(count=64, top_k=6, ffn_hidden_size=1408, dropless=dropless),
    )
    estimator = with_catalog(Cluster(nodes=(node,)), model)
    candidate = Candidate((Stage(8, (Group(0, 8, 1),)),), 1, ep=8)
    seconds = simulated_s(estimator, candidate)
    assert seconds < inf
    check_bound(estimator, candidate, seconds)
