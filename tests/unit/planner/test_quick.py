"""The quick time of a plan is the simulator's, and sketches know good stages from bad ones."""

import random

import pytest

from megatron_het.schedule.generators.listing import ORDERS
from testing.planner_cases import estimator_of, random_case
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search.balance import balance
from tools.planner.search.book import Book
from tools.planner.search.outcome import Goal, Progress
from tools.planner.search.seeds import seeds
from tools.planner.search.sketch import divide
from tools.planner.simulate.simulation import block_s, simulate_block


def estimator() -> Estimator:
    model = Model(
        num_layers=12,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=2048,
        global_batch_size=48,
        precision="fp16",
        micro_batch_sizes=(1, 2),
        recompute=("none", "full"),
    )
    nodes = (
        NodeGroup(gpu="A100-80", count=2, gpus_per_node=4, network_bytes_per_s=1.25e9),
        NodeGroup(gpu="A10G", count=3, gpus_per_node=4, network_bytes_per_s=1.25e9),
    )
    return estimator_of(Cluster(nodes=nodes), model)


@pytest.mark.parametrize(
    ("schedule", "chunks", "slices"), [("1f1b", 1, 1), ("interleaved", 2, 1), ("slimpipe", 1, 4), ("slimpipe", 1, 16)]
)
@pytest.mark.parametrize("width", [1, 4])
def test_plain_pipelines_take_the_simulated_time(schedule, chunks, slices, width):
    """Slow links, so that messages queue up."""
    found = estimator()
    stages = tuple(Stage(n, (Group(pool, 1, width),)) for n, pool in ((4, 0), (4, 0), (2, 1), (2, 1)))
    candidate = Candidate(stages, 1, schedule=schedule, chunks=chunks, slices=slices)
    estimate = found.estimate(candidate)
    simulated = simulate_block(found, candidate, estimate).iteration_s
    assert block_s(found, candidate, estimate) == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_irregular_plans_take_the_simulated_time(order):
    """Messages of a link come in the order in which their sender computes, however replicas are mixed."""
    found, rng = estimator(), random.Random(1)
    for _ in range(6):
        stages = []
        for layers in ((7, 5), (4, 5, 3))[rng.randint(0, 1)]:
            counts = enumerate((rng.randint(1, 2), rng.randint(0, 4)))
            stages.append(Stage(layers, tuple(Group(pool, 1, n) for pool, n in counts if n)))
        candidate = Candidate(tuple(stages), 1, order=order)
        estimate = found.estimate(candidate)
        simulated = simulate_block(found, candidate, estimate).iteration_s
        assert block_s(found, candidate, estimate) == pytest.approx(simulated, rel=1e-12)


def test_a_window_is_simulated():
    """Its gathers and reductions are operations of the program."""
    found = estimator_of(estimator().cluster, estimator().model.model_copy(update={"distributed_optimizer": True}))
    candidate = Candidate((Stage(12, (Group(0, 1, 4),)),), 1, schedule="ministage", chunks=4, zero_stage=1)
    estimate = found.estimate(candidate)
    simulated = simulate_block(found, candidate, estimate).iteration_s
    assert block_s(found, candidate, estimate) == pytest.approx(simulated, rel=1e-12)


def test_a_stage_without_room_gets_no_layers():
    assert divide([1.0, 9.0, 1.0], [0.0, 4.0, 0.0], [8, 0, 8], 8) == [4, 0, 4]


def test_layers_are_divided_at_best():
    rng = random.Random(3)
    for _ in range(200):
        stages = rng.randint(1, 4)
        seconds = [rng.uniform(0.1, 3.0) for _ in range(stages)]
        ends = [rng.uniform(0.0, 2.0) for _ in range(stages)]
        caps = [rng.randint(1, 8) for _ in range(stages)]
        wanted = rng.randint(stages, max(stages, sum(caps)))
        if wanted > sum(caps):
            continue
        layers = divide(seconds, ends, caps, wanted)
        assert sum(layers) == wanted
        assert all(1 <= n <= cap for n, cap in zip(layers, caps))
        mine = max((n + e) * t for n, e, t in zip(layers, ends, seconds))
        assert mine == pytest.approx(_best(seconds, ends, caps, wanted))


def _best(seconds, ends, caps, wanted):
    if not seconds:
        return 0.0 if wanted == 0 else float("inf")
    return (
        min(
            max((n + ends[0]) * seconds[0], _best(seconds[1:], ends[1:], caps[1:], wanted - n))
            for n in range(1, min(caps[0], wanted) + 1)
        )
        if wanted > 0
        else float("inf")
    )


@pytest.mark.parametrize("seed", range(6))
def test_the_best_seed_looks_good(seed):
    """Of all seeds that fit, the best by the closed form or one as good is among the first by the sketches."""
    cluster, model = random_case(seed)
    found = estimator_of(cluster, model)
    book = Book(found, Goal(schedules=("1f1b",)), Progress())
    scored = []
    for groups, like in seeds(book, 200, tuple(n.quota for n in cluster.nodes), [float("inf")]):
        candidate = balance(found, groups, like)
        if candidate is not None and book.try_candidate(candidate) < float("inf") and candidate in book.good:
            scored.append((book.sketch.value(groups, like), book.good[candidate][0]))
    scored.sort()
    if scored:
        assert min(score for _, score in scored[:8]) <= 1.03 * min(score for _, score in scored)
