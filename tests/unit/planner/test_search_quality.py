"""The searches: optimal on small clusters, never worse with more GPUs, and within all limits."""

import random
import time
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_het.schedule import Costs, Shape, generate
from megatron_het.schedule.simulate import simulate
from testing.planner_cases import (
    LLAMA_70B,
    best_value,
    cluster_of,
    compare_case,
    estimator_of,
    model_of,
    random_case,
    random_pool,
    value_of,
    with_catalog,
    without_one,
)
from tools.planner.costs.build import build_plan, candidate_of, seats
from tools.planner.costs.layer import MEGATRON_HET
from tools.planner.costs.simulation import others_busy, simulate_beside
from tools.planner.inputs.cluster import Cluster, NodeGroup, ZoneLink
from tools.planner.inputs.model import Model
from tools.planner.search import methods, papers, part_search
from tools.planner.search.auto import Effort, search_auto
from tools.planner.search.methods import METHODS, search
from tools.planner.search.outcome import MEDIUM, Goal, Progress, SearchResult, cpu_limit
from tools.planner.search.papers import minimum_cut, split

SETTINGS = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ONE = Goal(schedules=("1f1b",))


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 6, 8, 9])
def test_as_good_as_brute_force(seed):
    row = compare_case(seed)
    assert row["gap"] <= 0.01


@given(st.integers(0, 10_000))
@SETTINGS
def test_one_more_gpu_is_never_worse(seed):
    cluster, model = random_case(seed, largest=6)
    extra = NodeGroup(
        gpu=random.Random(seed).choice(["A100-40", "T4", "V100-16"]),
        count=1,
        gpus_per_node=1,
        zone="lab-a",
        network_bytes_per_s=min(n.network_bytes_per_s for n in cluster.nodes),
    )
    before, after = (best_value(nodes, model, ONE) for nodes in (cluster.nodes, (*cluster.nodes, extra)))
    assert after <= before * (1 + 1e-6)


@given(st.integers(0, 10_000), st.sampled_from(["throughput", "cost"]), st.integers(1, 8), st.floats(0.5, 3.0))
@SETTINGS
def test_limits_hold(seed, objective, gpus, factor):
    """Quotas, memory, --max-gpus and the budget, whatever the objective."""
    cluster, model = random_case(seed, largest=6)
    cluster = Cluster(
        nodes=tuple(n.model_copy(update={"usd_per_gpu_hour": 0.5 + i}) for i, n in enumerate(cluster.nodes))
    )
    estimator = estimator_of(cluster, model)
    free = search_auto(estimator, ONE).best
    if free is None:
        return
    goal = Goal(objective, max_usd_per_iteration=free.usd_per_iteration * factor, max_gpus=gpus, schedules=("1f1b",))
    for found in search_auto(estimator, goal).found:
        used = found.candidate.gpus()
        assert all(n <= cluster.nodes[p].quota for p, n in used.items())
        assert sum(used.values()) <= gpus
        assert estimator.fits(found.estimate)
        assert found.usd_per_iteration <= free.usd_per_iteration * factor * (1 + 1e-9)
        assert seats(cluster, found.candidate.stages) is not None


def zoned() -> tuple[Cluster, Model]:
    nodes = tuple(
        NodeGroup(gpu=gpu, count=2, gpus_per_node=4, zone=zone, region=zone[:2], usd_per_gpu_hour=1.0)
        for zone in ("us-1", "us-2", "eu-1")
        for gpu in ("A100-40", "V100-16")
        if (gpu, zone) != ("A100-40", "eu-1")  # alone they have one region
    )
    links = (ZoneLink(between=("us", "eu"), bytes_per_s=1e8, latency_s=0.1, usd_per_gb=0.05),)
    shape = {"layers": 8, "hidden": 1024, "words": 8192, "tokens": 512}
    model = model_of(**shape, batch=64, precision="fp16", sizes=(1, 2, 4), recompute=("none",))
    return Cluster(nodes=nodes, links=links), model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_runnable_plans(method):
    """Plans pass all checks of the plan's schema, and reading them back gives the same candidate."""
    cluster, model = zoned()
    estimator = estimator_of(cluster, model)
    outcome = search(method, estimator, ONE)
    prices = estimator.running(outcome.best.candidate.gpus())
    plan = build_plan(prices, outcome.best.candidate, outcome.best.estimate)
    again, _ = candidate_of(plan, cluster)
    assert [s.layers for s in again.stages] == [s.layers for s in outcome.best.candidate.stages]
    assert again.world_size == outcome.best.candidate.world_size
    assert value_of(search("auto", estimator, ONE), ONE) <= outcome.best.iteration_s * 1.0001


def test_sailor_keeps_data_parallelism_in_a_region():
    cluster, model = zoned()
    estimator = estimator_of(cluster, model)
    for found in search("sailor", estimator, ONE).found:
        for stage in found.candidate.stages:
            assert len({cluster.nodes[g.pool].where for g in stage.groups}) == 1
        assert len({sum(g.count for g in s.groups) for s in found.candidate.stages}) == 1


def test_split_cuts_the_slow_links():
    """Two regions of two nodes each: the 2-cut separates the regions."""
    nodes = tuple(NodeGroup(gpu="T4", count=2, gpus_per_node=8, zone=zone) for zone in "ab")
    cluster = Cluster(nodes=nodes, links=(ZoneLink(between=("a", "b"), bytes_per_s=1e8),))
    _, model = zoned()
    partitions = list(split(estimator_of(cluster, model), 1, 4))
    assert [len(p) for p in partitions] == [1, 2, 3, 4]
    assert sorted(map(tuple, partitions[1])) == [((0, 1),), ((1, 1),)]
    assert [sorted(p) for p in partitions[3]] == [[(0, 1)], [(0, 1)], [(1, 1)], [(1, 1)]]
    part = list(split(estimator_of(cluster, model), 1, 4, (8, 16)))
    assert part[0] == [{(0, 1): 1, (1, 1): 2}] and [len(p) for p in part] == [1, 2, 3]


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_cuts_are_those_of_stoer_and_wagner(seed, parts):
    """The cut between classes of twins weighs as much as the one of the graph of all node parts."""
    rng = random.Random(seed)
    nodes = tuple(
        NodeGroup(
            gpu=rng.choice(["T4", "A100-40", "V100-16"]),
            count=rng.randint(1, 3),
            gpus_per_node=rng.choice([2, 4]),
            zone=rng.choice("ab"),
            network_bytes_per_s=rng.choice([1e9, 3e9, 2e10]),
        )
        for _ in range(rng.randint(1, 3))
    )
    links = (
        (ZoneLink(between=("a", "b"), bytes_per_s=rng.choice([1e8, 5e9])),)
        if {n.zone for n in nodes} == {"a", "b"}
        else ()
    )
    estimator = estimator_of(Cluster(nodes=nodes, links=links), zoned()[1])
    vertices = []
    part: dict[tuple[int, int], int] = {}
    for p, node in enumerate(nodes):
        for n in range(node.count):
            size = rng.randint(1, min(parts, node.gpus_per_node))
            part[p, size] = part.get((p, size), 0) + 1
            vertices += [(p, n, k) for k in range(size)]
    if len(vertices) < 2:
        return
    graph = nx.Graph()
    for i, a in enumerate(vertices):
        for b in vertices[i + 1 :]:
            network = estimator.network
            graph.add_edge(a, b, weight=network.intra[a[0]] if a[:2] == b[:2] else network.rate(a[0], b[0], 8))
    for most in (papers.MOST_CLASSES, 1):  # all cuts, and the library's where there are more classes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(papers, "MOST_CLASSES", most)
            weight, first, second = minimum_cut(estimator, part)
        assert weight == pytest.approx(nx.stoer_wagner(graph)[0])
        count = sum(n * size for side in (first, second) for (_, size), n in side.items())
        assert first and second and count == len(vertices)


def test_an_interrupted_search_has_its_best_so_far(monkeypatch):
    cluster, model = zoned()
    calls = {"n": 0}
    original = part_search._climb

    def stop(*arguments):
        calls["n"] += 1
        if calls["n"] > 1:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(part_search, "_climb", stop)
    outcome = search_auto(estimator_of(cluster, model), ONE, effort=Effort(seeds=50))
    assert outcome.interrupted
    assert outcome.best is not None


@given(st.integers(0, 10_000), st.sampled_from(METHODS[1:]), st.sampled_from(["throughput", "cost"]), st.booleans())
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_auto_is_never_worse_than_a_published_method(seed, method, objective, sharded):
    cluster, model = random_case(seed, largest=6)
    cluster = Cluster(
        nodes=tuple(n.model_copy(update={"usd_per_gpu_hour": 0.5 + i}) for i, n in enumerate(cluster.nodes))
    )
    model = model.model_copy(update={"distributed_optimizer": sharded, "recompute": ("none", "full")})
    estimator, goal = estimator_of(cluster, model), Goal(objective)
    theirs = [f for f in search(method, estimator, goal).found if f.runnable]
    if theirs:
        assert value_of(search("auto", estimator, goal), goal) <= theirs[0].value(goal) * (1 + 1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch", "sharded"), [(8, False), (12, True)])
def test_fewer_microbatches_than_gpus(method, batch, sharded):
    """A replica needs a microbatch: GPUs are left out, or carry stages and TP groups."""
    model = model_of(layers=12, hidden=1024, batch=batch, precision="fp16", distributed_optimizer=sharded)
    nodes = (NodeGroup(gpu="A100-40", count=2, gpus_per_node=8), NodeGroup(gpu="V100-16", count=2, gpus_per_node=4))
    estimator = estimator_of(Cluster(nodes=nodes), model)
    best = search(method, estimator, Goal()).best
    plan = build_plan(estimator, best.candidate, best.estimate)
    assert all(replica.microbatches for stage in plan.stages for replica in stage.replicas)
    if method == "poplar":
        assert best.candidate.gpus() == {0: batch // best.candidate.micro_batch_size}


@pytest.mark.parametrize("method", METHODS)
def test_a_node_group_without_quota_is_left_out(method):
    cluster, model = zoned()
    nodes = (cluster.nodes[0].model_copy(update={"max_gpus": 0}), *cluster.nodes[1:])
    best = search(method, estimator_of(cluster.model_copy(update={"nodes": nodes}), model), ONE).best
    assert 0 not in best.candidate.gpus()


def test_the_bound_is_within_the_time_limit(monkeypatch):
    """A search that has used its time returns what it found: nothing long comes after it."""
    progress = Progress(limit_s=0.05)

    def spend(method: str, estimator: object, goal: object, given: Progress, known: float) -> SearchResult:
        while not given.spent:
            time.process_time()
        return SearchResult(method)

    class SlowBounds(methods.Bounds):
        def __init__(self, *arguments: object) -> None:
            assert not progress.spent, "the limit was over when the bound was asked for"
            super().__init__(*arguments)

    monkeypatch.setattr(methods, "_search", spend)
    monkeypatch.setattr(methods, "Bounds", SlowBounds)
    estimator = estimator_of(*random_case(0, largest=6))
    with cpu_limit(progress):
        outcome = search("sailor", estimator, ONE, progress)
    assert outcome.method == "sailor" and outcome.bound > 0


TOLERANCE = 1.005
EFFORT = replace(
    MEDIUM, sketches=150, seeds=15, beam=1, counts=2, steps=40, parts=3, part_sketches=60, part_seeds=6, part_steps=20
)
FEWER = Goal(schedules=("1f1b", "interleaved"))


def small_pool(seed: int) -> tuple[Cluster, Model]:
    """9 to 24 GPUs of two kinds, and a model with few microbatches."""
    rng = random.Random(seed)
    nodes = tuple(
        NodeGroup(
            gpu=kind,
            count=rng.randint(5, 6),
            gpus_per_node=rng.choice((1, 2)),
            zone="lab-a",
            network_bytes_per_s=rng.choice((1.25e9, 12.5e9, 25e9)),
        )
        for kind in rng.sample(("A100-40", "A100-80", "L40S", "A10G", "V100-16", "T4"), 2)
    )
    hidden = rng.choice((1024, 2048, 4096))
    model = model_of(
        layers=rng.choice((6, 8, 12)),
        hidden=hidden,
        ffn=3 * hidden,
        words=rng.choice((8192, 32000)),
        batch=rng.choice((16, 24, 32)),
        precision="fp16",
        distributed_optimizer=rng.random() < 0.5,
        micro_batch_sizes=(1, 2),
        recompute=("none", "full"),
    )
    return Cluster(nodes=nodes), model


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 6))])
def test_more_schedules_kinds_and_nodes_are_never_worse(seed):
    cluster, model = small_pool(seed)
    whole = estimator_of(cluster, model, None, MEGATRON_HET)
    best = search_auto(whole, Goal(), effort=EFFORT).best
    if best is None:
        return
    fewer = search_auto(whole, FEWER, effort=EFFORT).best
    assert fewer is None or best.iteration_s <= TOLERANCE * fewer.iteration_s
    for i, node in enumerate(cluster.nodes):
        less = tuple(n.model_copy(update={"count": n.count - (i == j)}) for j, n in enumerate(cluster.nodes))
        smaller = search_auto(whole.on(Cluster(nodes=less)), Goal(), effort=EFFORT).best
        assert smaller is None or best.iteration_s <= TOLERANCE * smaller.iteration_s
        alone = search_auto(whole.on(Cluster(nodes=(node,))), Goal(), effort=EFFORT).best
        assert alone is None or best.iteration_s <= TOLERANCE * alone.iteration_s


@pytest.mark.parametrize("names", [("1f1b",), pytest.param(("1f1b", "slimpipe"), marks=pytest.mark.full)])
def test_what_is_found_of_a_schedule_does_not_depend_on_the_others(names):
    """Of A100 and V100 the plan was 2 % slower with all schedules than with 1F1B, whose plan was not refined then."""
    cluster, model = small_pool(2)
    effort = replace(EFFORT, small_gpus=0, parts=0)
    every, alone = (
        search_auto(estimator_of(cluster, model), g, effort=effort) for g in (Goal(), Goal(schedules=names))
    )
    if alone.best is not None:
        assert every.best.iteration_s <= alone.best.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", [*(pytest.param(n, marks=pytest.mark.full) for n in (5, 7)), 10704])
def test_a_node_more_is_never_worse(seed):
    """139, 153 and 20 GPUs of several kinds (the last 6 % slower), as ``plan`` searches; ``--only nodes`` has more."""
    cluster, model = random_pool(seed)
    assert (100 < cluster.total_gpus <= 200) != (seed == 10704)
    fewer = without_one(cluster.nodes, random.Random(seed).randrange(len(cluster.nodes)))
    assert best_value(cluster.nodes, model, Goal()) <= 1.01 * best_value(fewer, model, Goal())


@pytest.mark.full
def test_a_kind_alone_in_a_large_cluster_is_searched_as_if_there_were_nothing_else():
    """38 T4 and 44 RTX-3090: the plan was 1.6 % slower than the one for the RTX-3090 alone."""
    cluster, model = random_pool(9360)
    alone = [node for node in cluster.nodes if node.gpu == "RTX-3090"]
    assert best_value(cluster.nodes, model, Goal()) <= best_value(alone, model, Goal()) * (1 + 1e-9)


@pytest.mark.full
def test_ministages_do_not_hide_what_is_faster_at_long_sequences():
    """Their closed form was so hopeful that nothing else was simulated, and the plan 16 % slower than without them."""
    cluster = cluster_of(("H100-SXM", 8, 8, 50e9), ("H200", 4, 8, 50e9))
    model = model_of(
        **LLAMA_70B, layers=80, words=128256, tokens=131072, batch=32, precision="bf16", distributed_optimizer=True
    )
    goals = Goal(), Goal(schedules=("1f1b", "interleaved", "slimpipe"))
    every, fewer = (search_auto(estimator_of(cluster, model), goal).best for goal in goals)
    assert every.iteration_s <= TOLERANCE * fewer.iteration_s


def pipeline(microbatches: int):
    return generate(
        "1f1b", Shape(layers=((1,), (1,)), route=((0,) * microbatches, (0,) * microbatches), replicas=(1, 1))
    )


def costs(first: float, second: float) -> Costs:
    return Costs(forward_s=((first,), (second,)), backward_s=((first,), (second,)))


def test_nothing_overlaps_with_one_microbatch() -> None:
    program = pipeline(1)
    assert others_busy(simulate(program, costs(1, 1))) == pytest.approx([0, 0])
    assert simulate_beside(program, costs(1, 1), [0.7, 0.5]).makespan_s == pytest.approx(2 * 0.7 + 2 * 0.5)


def test_a_short_stage_leaves_a_long_one_alone() -> None:
    """The second stage has a quarter of the work: the first is alone for most of its time, the second never."""
    program = pipeline(32)
    first, second = others_busy(simulate(program, costs(4, 1)))
    assert first == pytest.approx(0.25, abs=0.02)
    assert second > 0.95
    whole, found = (simulate_beside(program, costs(4, 1), [share, share]).makespan_s for share in (1.0, 0.8))
    assert 0.82 < found / whole < 0.86


def test_without_a_measurement_nothing_changes() -> None:
    program = pipeline(4)
    assert simulate_beside(program, costs(2, 1), [1.0, 1.0]).makespan_s == simulate(program, costs(2, 1)).makespan_s


def test_ministages_keep_activations_where_the_state_waits_in_main_memory() -> None:
    """Found beside a plan of 6.5 s: 76 RTX 3090 hold few large stages with all activations."""
    estimator = with_catalog(*random_pool(11023, "experts")).only([1])
    best = search_auto(estimator, Goal(schedules=("ministage",)), known=6.6).best
    assert best is not None and best.iteration_s < 5.5
    assert (best.candidate.recompute, best.candidate.offload) == ("none", True)
