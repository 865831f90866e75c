"""The search finds plans that are at least as good as known ones, on clusters where it once missed them."""

import pytest

from testing.planner_cases import estimator_of, search_cases
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.layercost import CatalogCosts
from tools.planner.costs.runtime import runtime_for
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.inputs.model_parts import Experts
from tools.planner.search.auto import search_auto
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal
from tools.planner.simulate.simulation import block_s


def of_experts(*kinds: tuple[str, int, int, float]) -> Estimator:
    """A model of the shape of Mixtral on nodes of these kinds: their number, GPUs each, bytes per second."""
    nodes = tuple(
        NodeGroup(gpu=gpu, count=n, gpus_per_node=each, network_bytes_per_s=rate) for gpu, n, each, rate in kinds
    )
    model = Model(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=32000,
        seq_length=4096,
        global_batch_size=256,
        distributed_optimizer=True,
        experts=Experts(count=8, top_k=2, ffn_hidden_size=14336),
    )
    return estimator_of(Cluster(nodes=nodes), model)


H100, A100_80 = ("H100-SXM", 2, 8, 50e9), ("A100-80", 4, 8, 25e9)
A100_40, L40S = ("A100-40", 4, 8, 25e9), ("L40S", 8, 4, 12.5e9)


def even(kind: Group, layers: tuple[int, ...]) -> tuple[Stage, ...]:
    """A stage for each of these numbers of layers, all with the same replicas."""
    return tuple(Stage(n, (kind,)) for n in layers)


FAST = even(Group(1, 2, 4), (4, 4, 4, 4)) + even(Group(0, 1, 4), (3, 4, 4, 5))
"""TP of 2 on the A100 and none on the H100, four replicas on every stage."""
SMALL = even(Group(1, 1, 4), (2,) * 8) + even(Group(0, 1, 4), (2,) * 8)
"""Two layers on each of sixteen stages, which fit into little memory without TP."""


@pytest.mark.parametrize(
    ("kinds", "known"),
    [
        ((H100, A100_80), Candidate(FAST, 2, "none", schedule="slimpipe", slices=16, zero_stage=1)),
        pytest.param(
            (A100_40, L40S),
            Candidate(SMALL, 1, "none", schedule="slimpipe", slices=16, zero_stage=1),
            marks=pytest.mark.full,
        ),
    ],
)
def test_stages_of_equal_width_over_two_pools(kinds: tuple[tuple[str, int, int, float], ...], known: Candidate):
    """Without starting points of both pools the plans found were 8 and 56 % slower."""
    estimator = of_experts(*kinds)
    estimate = estimator.estimate(known)
    assert estimate is not None and estimator.fits(estimate)
    best = search_auto(estimator, Goal()).best
    assert best is not None
    assert best.iteration_s <= block_s(estimator, known, estimate) * 1.001


GH, A100 = 2, 0
TAPERED = tuple(
    Stage(layers, (Group(pool, tp, count),))
    for layers, pool, tp, count in (
        (2, GH, 1, 22),
        (5, GH, 1, 53),
        (4, GH, 1, 42),
        (4, GH, 1, 42),
        (9, GH, 1, 94),
        (3, A100, 2, 42),
        (3, A100, 2, 42),
        (2, A100, 2, 40),
    )
)
"""A short first stage and a long last one of the fastest GPUs, A100 with TP 2 after them, no V100."""


def test_stages_spread_anew_over_a_pool():
    """Without moves that spread and cut the stages of a pool anew the plan found was 6 % slower."""
    estimator = search_cases()["GPT-Neo-2.7, 256 A100-40 + 256 V100-16 + 256 GH-96"]
    known = Candidate(TAPERED, 1)
    estimate = estimator.estimate(known)
    assert estimate is not None and estimator.fits(estimate)
    best = search_auto(estimator, Goal()).best
    assert best is not None
    assert best.iteration_s <= block_s(estimator, known, estimate) * 1.001


@pytest.mark.parametrize("goal", [Goal(schedules=("1f1b",)), Goal()])
def test_a_finalist_that_is_slow_at_first_gets_more_in_flight(goal: Goal):
    """Across zones the best plan is half again as slow in Megatron's order, and 18 % of the time hangs on it.

    Beside SlimPipe, whose plans need no more in flight, it was lost: the plan found was 9 % slower.
    """
    estimator = search_cases()["GPT-Neo-2.7, 10,000 GPUs of 4 types in 8 zones"]
    best = search_auto(estimator, goal).best
    assert best is not None
    assert best.candidate.depths and best.iteration_s < 1.68


SIX = ((5, {3: 312}), (6, {7: 312}), (6, {11: 312}), (6, {15: 311, 23: 39}), (5, {19: 312}), (4, {15: 1, 23: 273}))
"""Layers and replicas by pool: six stages of GH, one zone each but for what the fourth one borrows."""


@pytest.mark.full
def test_the_best_known_plan_of_10_000_gpus_is_found():
    estimator = search_cases()["GPT-Neo-2.7, 10,000 GPUs of 4 types in 8 zones"]
    stages = tuple(Stage(layers, tuple(Group(p, 1, n) for p, n in pools.items())) for layers, pools in SIX)
    known = Candidate(stages, 1, "none", depths=(1, 1, 5, 1, 1), slack=1.0)
    estimate = estimator.estimate(known)
    if estimate is None or not estimator.fits(estimate):
        pytest.fail("the known plan does not fit")
    best = search_auto(estimator, Goal()).best
    assert best is not None and best.iteration_s <= min(1.68, block_s(estimator, known, estimate) * 1.001)


def of_llama(*kinds: tuple[str, int, int, float]) -> Estimator:
    """A model of the shape of Llama-3-8B at 8,192 tokens on nodes of these kinds, with the prices that users get."""
    nodes = tuple(
        NodeGroup(gpu=gpu, count=n, gpus_per_node=each, network_bytes_per_s=rate) for gpu, n, each, rate in kinds
    )
    model = Model(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        seq_length=8192,
        global_batch_size=256,
        distributed_optimizer=True,
    )
    cluster = Cluster(nodes=nodes)
    runtime = runtime_for([cluster.gpu(node.gpu) for node in nodes])
    return Estimator(cluster, model, CatalogCosts(model, cluster.gpu, runtime), runtime)


L40S_FIRST = even(Group(1, 1, 4), (3,) * 4) + even(Group(0, 2, 4), (7, 7, 6))
A100_FIRST = even(Group(1, 1, 2), (4,) * 4) + even(Group(0, 1, 2), (2,) * 8)
TWELFTH = ((1 / 12, 1 / 12),) * 12


@pytest.mark.full
@pytest.mark.parametrize(
    ("kinds", "known"),
    [
        (
            (("A100-40", 3, 8, 3.125e9), ("L40S", 4, 4, 3.125e9)),
            Candidate(L40S_FIRST, 2, "none", schedule="slimpipe", slices=16, zero_stage=1),
        ),
        (
            (("RTX-4090", 8, 2, 1.25e9), ("A100-80", 1, 8, 1.25e9)),
            Candidate(A100_FIRST, 2, "none", schedule="slimpipe", slices=16, zero_stage=1, rows=TWELFTH),
        ),
    ],
)
def test_long_pipelines_of_slices_over_slow_networks(kinds: tuple[tuple[str, int, int, float], ...], known: Candidate):
    """Pipelines of seven and of twelve stages, whose numbers do not divide the length of a sequence."""
    estimator = of_llama(*kinds)
    estimate = estimator.estimate(known)
    assert estimate is not None and estimator.fits(estimate)
    best = search("auto", estimator, Goal()).best
    assert best is not None
    assert best.iteration_s <= block_s(estimator, known, estimate) * 1.001
