"""Unequal shares of a stage's state: only where equal ones do not fit, and the same in every estimate."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_het.features import options_of
from megatron_het.features.activation_offload.spec import offload_ratio
from tests.unit.plan.feature_checks import check_feature
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.estimates import GroupMemory, rank_parameters
from tools.planner.costs.layercost import CatalogCosts
from tools.planner.costs.schedules.ministage import at_peak, shares_by_memory
from tools.planner.inputs.catalog import catalog
from tools.planner.inputs.cluster import Cluster
from tools.planner.inputs.model import Model
from tools.planner.published.accuracy import reference_nodes
from tools.planner.search.balance import balance
from tools.planner.simulate.simulation import simulate_candidate, with_costs

BIG, SMALL = 0, 1


def estimator(layers: int = 28, margin: float = 0.95) -> Estimator:
    model = Model(
        num_layers=layers,
        hidden_size=2048,
        ffn_hidden_size=5632,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=1024,
        global_batch_size=32,
        precision="fp16",
        distributed_optimizer=True,
    )
    cluster = Cluster(nodes=(reference_nodes("A100-40", 4), reference_nodes("V100-16", 4)))
    return Estimator(cluster, model, CatalogCosts(model, lambda g: catalog()[g]), memory_margin=margin)


def mixed(layers: int = 28, chunks: int = 1, **more: object) -> Candidate:
    """One stage of two large and two small GPUs."""
    stage = Stage(layers, (Group(BIG, 1, 2), Group(SMALL, 1, 2)))
    return Candidate((stage,), 1, "full", schedule="ministage", chunks=chunks, zero_stage=1).with_(**more)


def test_state_goes_where_memory_is_free_when_equal_shares_do_not_fit():
    e, candidate = estimator(), mixed()
    equal = e.estimate(candidate.with_(shares=((0.25, 0.25),)))
    assert not e.fits(equal)
    estimate = e.estimate(candidate)
    assert e.fits(estimate)
    big, small = estimate.memory
    assert 2 * big.state_share + 2 * small.state_share == pytest.approx(1)
    assert big.state_share > 2 * small.state_share
    # Nothing is lost.
    assert sum(m.total_bytes for m in estimate.memory) == pytest.approx(sum(m.total_bytes for m in equal.memory))


def test_if_any_division_fits_the_one_by_memory_does():
    """Two kinds of replicas that are full at different moments."""
    e, rng, tried = estimator(), random.Random(0), 0
    for _ in range(300):
        chunks, count = rng.choice((1, 2, 4, 8)), 1e9
        candidate = mixed(chunks=chunks, offload=rng.random() < 0.3)
        found = [
            GroupMemory(0, Group(pool, 1, 1), 0.0, 0.0, 0.0, rng.random() * 6e10, 0.0, 0.0, rng.uniform(0.6e10, 6e10))
            for pool in (BIG, SMALL)
        ]

        def fits(shares, found=found, candidate=candidate, count=count):
            peaks = (at_peak(e, candidate, m, count, s) for m, s in zip(found, shares, strict=True))
            return all(m.total_bytes <= 0.95 * m.capacity_bytes * (1 + 1e-9) for m in peaks)

        if any(fits((i / 50, 1 - i / 50)) for i in range(51)):
            tried += 1
            assert fits(shares_by_memory(e, candidate, found, [count, count]))
    assert tried > 30


@pytest.mark.parametrize("change", [{"chunks": 4}, {"schedule": "1f1b"}])
def test_equal_shares_where_they_fit_and_without_a_window(change):
    estimate = estimator().estimate(mixed(**change))
    assert all(m.state_share is None for m in estimate.memory)


def test_a_plan_says_who_keeps_how_much_and_is_priced_by_that():
    e, candidate = estimator(), mixed()
    estimate = e.estimate(candidate)
    plan = build_plan(e, candidate, estimate)
    shares = [r.state_share for r in plan.stages[0].replicas]
    assert shares == pytest.approx([estimate.memory[i].state_share for i in (0, 0, 1, 1)], abs=1e-4)
    assert sum(r.optimizer_bytes for r in plan.predicted.per_rank) == pytest.approx(
        sum(m.optimizer_bytes * m.group.count for m in estimate.memory)
    )
    check_feature("window", plan, SimpleNamespace(clip_grad=0.0, log_num_zeros_in_grad=False, optimizer="adam"))
    again = e.estimate(candidate_of(plan, e.cluster)[0])
    assert e.fits(again)
    for found, expected in zip(again.memory, estimate.memory, strict=True):
        assert found.total_bytes == pytest.approx(expected.total_bytes, rel=1e-3)


def test_a_plan_with_equal_shares_is_not_priced_with_better_ones():
    e, candidate = estimator(), mixed()
    plan = build_plan(e, candidate, e.estimate(candidate))
    replicas = tuple(replace(r, state_share=1.0) for r in plan.stages[0].replicas)
    equal = replace(plan, stages=(replace(plan.stages[0], replicas=replicas),))
    assert not e.fits(e.estimate(candidate_of(equal, e.cluster)[0]))


def test_what_is_priced_as_offloaded_is_offloaded():
    e, candidate = estimator(), mixed(chunks=4, offload=True)
    plan = build_plan(e, candidate, e.estimate(candidate))
    options = options_of(plan, "window")
    assert options.offload and options.offload_optimizer and offload_ratio(plan) == 1.0
    assert candidate_of(plan, e.cluster)[0].offload


def test_of_replicas_of_one_kind_the_one_that_keeps_most_counts():
    e = estimator()
    candidate = Candidate((Stage(28, (Group(BIG, 1, 4),)),), 1, "full", schedule="ministage", zero_stage=1)
    plan = build_plan(e, candidate, e.estimate(candidate))
    even = e.estimate(candidate_of(plan, e.cluster)[0]).memory[0]
    assert even.state_share is None
    replicas = tuple(replace(r, state_share=s) for r, s in zip(plan.stages[0].replicas, (5.0, 1.0, 1.0, 1.0)))
    uneven = replace(plan, stages=(replace(plan.stages[0], replicas=replicas),))
    (most,) = e.estimate(candidate_of(uneven, e.cluster)[0]).memory
    assert most.state_share == 0.625
    assert most.optimizer_bytes == pytest.approx(2.5 * even.optimizer_bytes)


def test_balancing_layers_counts_on_divided_state():
    """The mixed stage gets layers that its small GPUs could not take with an equal share."""
    e = estimator(layers=60)
    groups = ((Group(BIG, 1, 2), Group(SMALL, 1, 2)), (Group(BIG, 1, 2),))
    candidate = balance(e, groups, mixed(chunks=2))
    estimate = e.estimate(candidate)
    assert e.fits(estimate)
    assert estimate.memory[0].state_share is not None
    assert not e.fits(e.estimate(candidate.with_(shares=((0.25, 0.25), (0.5,)))))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("ministage", 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_with_more_rows_of_the_vocabulary_takes_longer_for_them_and_holds_more(
    schedule: str, chunks: int, tied: bool
):
    e = estimator(24)
    stages = (Stage(12, (Group(BIG, 1, 1),)), Stage(12, (Group(BIG, 1, 1),)))
    candidate = Candidate(stages, 1, "full", schedule=schedule, chunks=chunks, zero_stage=1)
    made = build_plan(e, candidate, e.estimate(candidate))
    parameters = {**made.schedule.parameters, "vocabulary": True, "vocabulary_shares": [3, 1]}
    model = replace(made.model, tied_embeddings=tied)
    plan = replace(made, model=model, schedule=replace(made.schedule, parameters=parameters))
    again, seated = candidate_of(plan, e.cluster)
    (unit,) = {e.unit_of(again, stages[0].groups[0])}
    held = [rank_parameters(again, unit, s) - 12 * unit.layer_parameters for s in range(2)]
    assert held[0] == 3 * held[1]
    assert sum(held) == unit.embedding_parameters + (0 if tied else unit.head_parameters)
    predicted = with_costs(e, again, e.estimate(again), plan, seated).predicted
    assert predicted is not None and predicted.costs is not None
    first, last = predicted.costs.devices
    assert first.vocab_forward_s == pytest.approx(3 * last.vocab_forward_s, rel=1e-4) and last.vocab_forward_s > 0
    equal = replace(plan, schedule=replace(plan.schedule, parameters={**parameters, "vocabulary_shares": [1, 1]}))
    seconds = [simulate_candidate(e, again, e.estimate(again), p, seated).iteration_s for p in (equal, plan)]
    assert seconds[0] < seconds[1]  # alike devices are best with alike parts
