"""GPUs are left out where that is better, and more GPUs do not make a plan worse."""

import random

import pytest

from benchmarks.planner_cases import with_catalog
from benchmarks.planner_pools import random_pool
from benchmarks.planner_quality import estimator_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.schedules import SCHEDULES
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search import thorough as thorough_search
from tools.planner.search.auto import search_auto
from tools.planner.search.book import Book
from tools.planner.search.bounds import Bounds
from tools.planner.search.effort import Effort
from tools.planner.search.outcome import Goal, Progress
from tools.planner.search.pools import all_gpus, nodes_left_out, parts, pools_left_out, rounded_down
from tools.planner.search.thorough import Ground, thorough


def fast_and_slow() -> tuple[Cluster, Model]:
    """Three nodes of eight H200, and eleven nodes of two A100 behind slow links that only cost time."""
    nodes = (
        NodeGroup(gpu="H200", count=3, gpus_per_node=8, network_bytes_per_s=50e9),
        NodeGroup(gpu="A100-80", count=11, gpus_per_node=2, network_bytes_per_s=1.25e9),
    )
    model = Model(
        num_layers=12,
        hidden_size=5120,
        ffn_hidden_size=14080,
        num_attention_heads=40,
        num_query_groups=8,
        vocab_size=128256,
        seq_length=2048,
        global_batch_size=480,
        precision="bf16",
        distributed_optimizer=True,
        recompute=("none",),
    )
    return Cluster(nodes=nodes), model


def test_one_kind_alone_is_not_better():
    """The H200 alone were 22 % faster than the plan for all."""
    cluster, model = fast_and_slow()
    together = search_auto(estimator_of(cluster, model), Goal()).best
    alone = search_auto(estimator_of(Cluster(nodes=cluster.nodes[:1]), model), Goal()).best
    assert together is not None and alone is not None
    assert together.iteration_s <= alone.iteration_s * 1.001


def test_a_part_is_cut_by_its_own_bandwidth_graph():
    """Two stages of two GPUs with fast links and three with slow ones each, which only that cut finds."""
    cluster, model = random_pool(97)  # five nodes with fast links, six with slow ones
    fewer = tuple(n.model_copy(update={"count": n.count - (i == 0)}) for i, n in enumerate(cluster.nodes))
    found = [
        thorough(Ground(with_catalog(c, model), Goal(), Progress()), (4, 6)).best
        for c in (cluster, Cluster(nodes=fewer))
    ]
    part, alone = [f.iteration_s for f in found if f is not None]
    assert part == pytest.approx(alone)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 2, 3, 4, 5))])
def test_no_kind_alone_is_better(seed):
    """By construction: every kind is searched as if there were nothing else."""
    clusters, model = growing(seed)
    effort = Effort(seeds=40, beam=1, steps=30, parts=1, part_seeds=10, part_steps=10)
    goal = Goal(schedules=("1f1b",))
    together = search_auto(estimator_of(clusters[0], model), goal, effort=effort).best
    assert together is not None
    for node in clusters[0].nodes:
        alone = search_auto(estimator_of(Cluster(nodes=(node,)), model), goal, effort=effort).best
        assert alone is None or together.iteration_s <= alone.iteration_s * (1 + 1e-9)


def test_parts_of_a_cluster():
    """Whole pools, one node less, half; never the cluster itself or nothing."""
    cluster, model = fast_and_slow()
    found = parts(estimator_of(cluster, model))
    assert found == [(24, 0), (0, 22), (16, 22), (24, 20), (8, 22), (24, 10)]


def test_parts_of_many_pools():
    names = ("A100-40", "A100-80", "T4", "V100-16", "A10G", "H100-SXM")
    nodes = tuple(NodeGroup(gpu=g, count=2, gpus_per_node=4, zone=f"z-{i % 2}") for i, g in enumerate(names))
    cluster, (_, model) = Cluster(nodes=nodes), fast_and_slow()
    found = parts(estimator_of(cluster, model))
    assert len(found) == len(set(found)) < 60
    for i in range(len(nodes)):
        assert tuple(8 if j == i else 0 for j in range(len(nodes))) in found
        assert tuple(0 if j == i else 8 for j in range(len(nodes))) in found
        assert tuple(4 if j == i else 8 for j in range(len(nodes))) in found


def growing(seed: int) -> tuple[list[Cluster], Model]:
    """A pool of more than eight GPUs of two or three kinds that gets one node more four times, and a model."""
    rng = random.Random(seed)
    kinds = rng.sample(("A100-40", "V100-16", "T4", "RTX-3090", "A10G", "GH-96"), rng.randint(2, 3))
    size = {kind: rng.choice([1, 2, 4]) for kind in kinds}
    rate = {kind: rng.choice([1.25e9, 3e9, 12.5e9, 25e9]) for kind in kinds}
    count = {kind: rng.randint(1, 2) for kind in kinds}
    while sum(count[kind] * size[kind] for kind in kinds) < 9:
        count[rng.choice(kinds)] += 1
    hidden = rng.choice([1024, 2048, 4096])
    model = Model(
        num_layers=rng.choice([6, 8, 12]),
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=16,
        vocab_size=rng.choice([8192, 32000, 128256]),
        seq_length=1024,
        global_batch_size=rng.choice([16, 24, 32]),
        precision="fp16",
        micro_batch_sizes=(1, 2, 4),
        recompute=("none",),
        distributed_optimizer=True,
    )
    out = []
    for _ in range(5):
        nodes = [
            NodeGroup(gpu=k, count=count[k], gpus_per_node=size[k], zone="lab-a", network_bytes_per_s=rate[k])
            for k in kinds
        ]
        out.append(Cluster(nodes=tuple(nodes)))
        count[rng.choice(kinds)] += 1
    return out, model


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 2, 3))])
def test_a_node_more_is_not_worse(seed):
    """Beyond the size that is searched to the proven optimum."""
    clusters, model = growing(seed)
    effort = Effort(seeds=250, beam=2, steps=150, part_seeds=60, part_steps=60)
    goal = Goal(schedules=("1f1b",))
    before = None
    for cluster in clusters:
        best = search_auto(estimator_of(cluster, model), goal, effort=effort).best
        assert best is not None
        assert before is None or best.iteration_s <= before * 1.01
        before = best.iteration_s


@pytest.mark.parametrize(
    "schedules",
    [
        tuple(SCHEDULES),
        *(pytest.param(names, marks=pytest.mark.full) for names in (("1f1b",), ("1f1b", "interleaved"))),
    ],
)
def test_no_plan_is_below_the_bound(schedules):
    for seed in range(2):
        clusters, model = growing(seed)
        for objective in ("throughput", "cost"):
            nodes = tuple(n.model_copy(update={"usd_per_gpu_hour": 1.0 + i}) for i, n in enumerate(clusters[0].nodes))
            estimator = estimator_of(Cluster(nodes=nodes), model)
            goal = Goal(objective, schedules=schedules)
            best = search_auto(estimator, goal, effort=Effort(seeds=60, beam=1, steps=60)).best
            assert best is not None
            assert best.value(goal) >= Bounds(estimator, goal).value(all_gpus(estimator))


def test_the_bound_knows_the_least_bubble():
    """No GPU holds all layers: 1F1B cannot be nearer to the ideal than the least bubble allows."""
    _, model = fast_and_slow()
    model = model.model_copy(update={"num_layers": 64, "global_batch_size": 8, "micro_batch_sizes": (1,)})
    estimator = estimator_of(Cluster(nodes=(NodeGroup(gpu="A100-80", count=8, gpus_per_node=1),)), model)
    plain, all_of_them = (Bounds(estimator, Goal(schedules=s)) for s in (("1f1b",), tuple(SCHEDULES)))
    alone = estimator.estimate(Candidate((Stage(64, (Group(0, 1, 1),)),), 1, "full", zero_stage=1))
    assert alone is not None and not estimator.fits(alone)
    assert plain.seconds((8,)) > 1.05 * all_of_them.seconds((8,))
    candidate = Candidate(tuple(Stage(8, (Group(0, 1, 1),)) for _ in range(8)), 1, zero_stage=1)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    assert estimate.iteration_s >= plain.seconds((8,))


def test_a_power_of_two_of_one_pool():
    cluster, model = fast_and_slow()
    estimator = estimator_of(cluster, model)
    assert rounded_down(estimator, (24, 22)) == [(16, 22), (24, 16)]
    assert rounded_down(estimator, (16, 2)) == [(8, 2)] and rounded_down(estimator, (8, 0)) == []
    assert nodes_left_out(estimator, (16, 2)) == [(8, 2), (16, 0)]
    assert nodes_left_out(estimator, (16, 4), 2) == [(0, 4), (8, 2), (16, 0)]
    assert pools_left_out((24, 0, 22)) == [(0, 0, 22), (24, 0, 0)] and pools_left_out((0, 8)) == []


def test_nodes_are_left_out_as_long_as_that_is_better(monkeypatch):
    """The best part has two nodes of one pool less; what is no better is not gone on from."""
    times = {(24, 22): 9.0, (24, 20): 8.0, (24, 18): 7.0, (16, 18): 6.5, (8, 16): 1.0}
    ground = Ground(estimator_of(*fast_and_slow()), Goal(), Progress())
    searched = []

    def explore(book, effort, limits):
        searched.append(limits)
        book.top = lambda _: [(limits, None)]
        book.try_candidate(limits)

    def price(book, candidate):
        book.best = min(book.best, times.get(candidate, 10.0))

    monkeypatch.setattr(thorough_search, "explore", explore)
    monkeypatch.setattr(thorough_search, "_climb_by_stages", lambda *_: None)
    monkeypatch.setattr(Book, "try_candidate", price)
    monkeypatch.setattr(Bounds, "excludes", lambda *_: False)
    book = Book(ground.merged.estimator, ground.goal, ground.progress)
    book.best = 9.0
    thorough_search._parts(book, Effort(), ground.bounds, ground.whole, is_near=True)
    assert {(16, 22), (24, 20), (24, 16), (0, 22), (24, 0), (8, 22), (16, 20), (24, 18)} <= set(searched)
    assert book.best == 6.5 and len(searched) == len(set(searched)) < 20
