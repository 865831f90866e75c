"""The searches: optimal on small clusters, never worse with more GPUs, and within all limits."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.planner_quality import compare_case, estimator_of, random_case
from tools.planner.build import build_plan, candidate_of, seats
from tools.planner.cluster import Cluster, NodeGroup, ZoneLink
from tools.planner.model import Model
from tools.planner.search.auto import Effort, search_auto
from tools.planner.search.goal import Goal
from tools.planner.search.methods import METHODS, search

SETTINGS = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ONE = Goal(schedules=("1f1b",))


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 6, 8, 9])
def test_as_good_as_brute_force(seed):
    row = compare_case(seed)
    assert row["gap"] <= 0.01


@given(st.integers(0, 10_000))
@SETTINGS
def test_one_more_gpu_is_never_worse(seed):
    """The added GPU may be left unused."""
    cluster, model = random_case(seed, largest=6)
    before = search_auto(estimator_of(cluster, model), ONE).best
    extra = NodeGroup(gpu=random.Random(seed).choice(["A100-40", "T4", "V100-16"]), count=1, gpus_per_node=1, zone="lab-a",
                      network_bytes_per_s=min(n.network_bytes_per_s for n in cluster.nodes))
    after = search_auto(estimator_of(Cluster(nodes=(*cluster.nodes, extra)), model), ONE).best
    if before is not None:
        assert after is not None
        assert after.iteration_s <= before.iteration_s * (1 + 1e-6)


@given(st.integers(0, 10_000), st.sampled_from(["throughput", "cost"]), st.integers(1, 8), st.floats(0.5, 3.0))
@SETTINGS
def test_limits_hold(seed, objective, gpus, factor):
    """Quotas, memory, --max-gpus and the budget, whatever the objective."""
    cluster, model = random_case(seed, largest=6)
    cluster = Cluster(nodes=tuple(n.model_copy(update={"usd_per_gpu_hour": 0.5 + i}) for i, n in enumerate(cluster.nodes)))
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


def test_cost_objective_pipelines_small_gpus():
    """A model too large for one T4 gets a pipeline when there is nothing else."""
    model = Model(num_layers=24, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=16, vocab_size=32000,
                  seq_length=512, global_batch_size=32, precision="fp16", gated=False, recompute=("full",), micro_batch_sizes=(1, 2))
    cluster = Cluster(nodes=(NodeGroup(gpu="T4", count=8, gpus_per_node=1, usd_per_gpu_hour=0.35),))
    best = search_auto(estimator_of(cluster, model), Goal("cost", schedules=("1f1b",))).best
    assert best is not None
    assert len(best.candidate.stages) > 1


def zoned() -> tuple[Cluster, Model]:
    nodes = tuple(
        NodeGroup(gpu=gpu, count=2, gpus_per_node=4, zone=zone, region=zone[:2], usd_per_gpu_hour=1.0)
        for zone in ("us-1", "us-2", "eu-1") for gpu in ("A100-40", "V100-16")
    )  # fmt: skip
    links = (ZoneLink(between=("us", "eu"), bytes_per_s=1e8, latency_s=0.1, usd_per_gb=0.05),)
    model = Model(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16, vocab_size=8192,
                  seq_length=512, global_batch_size=64, precision="fp16", micro_batch_sizes=(1, 2, 4), recompute=("none",))
    return Cluster(nodes=nodes, links=links), model


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_runnable_plans(method):
    """Plans pass all checks of the plan's schema, and reading them back gives the same candidate."""
    cluster, model = zoned()
    estimator = estimator_of(cluster, model)
    outcome = search(method, estimator, Goal(schedules=("1f1b",)))
    assert outcome.best is not None
    plan = build_plan(estimator, outcome.best.candidate, outcome.best.estimate)
    again, _ = candidate_of(plan, cluster)
    assert [s.layers for s in again.stages] == [s.layers for s in outcome.best.candidate.stages]
    assert again.world_size == outcome.best.candidate.world_size
    best = search_auto(estimator, Goal(schedules=("1f1b",))).best
    assert best.iteration_s <= outcome.best.iteration_s * 1.0001


def test_sailor_keeps_data_parallelism_in_a_region():
    cluster, model = zoned()
    estimator = estimator_of(cluster, model)
    for found in search("sailor", estimator, ONE).found:
        for stage in found.candidate.stages:
            assert len({cluster.nodes[g.pool].where for g in stage.groups}) == 1
        assert len({sum(g.count for g in s.groups) for s in found.candidate.stages}) == 1


def test_split_cuts_the_slow_links():
    """Two regions of two nodes each: the 2-cut separates the regions."""
    from tools.planner.search.zorse import bandwidth_graph, split

    cluster = Cluster(
        nodes=(NodeGroup(gpu="T4", count=2, gpus_per_node=8, zone="a"), NodeGroup(gpu="T4", count=2, gpus_per_node=8, zone="b")),
        links=(ZoneLink(between=("a", "b"), bytes_per_s=1e8),),
    )
    _, model = zoned()
    graph = bandwidth_graph(estimator_of(cluster, model), 1)
    parts = split(graph, 4)
    assert [len(p) for p in parts] == [1, 2, 3, 4]
    assert sorted({v[0] for v in part} for part in parts[1]) == [{0}, {1}] or {frozenset(p) for p in parts[1]} == {
        frozenset({(0, 0, 0), (0, 1, 0)}), frozenset({(1, 0, 0), (1, 1, 0)})}  # fmt: skip


def test_poplar_allocations_use_the_whole_batch():
    from tools.planner.search.poplar import Curve, allocate_accumulated, allocate_synchronised

    fast = Curve((1, 2, 4, 8), (1.0, 1.2, 1.8, 3.2))
    slow = Curve((1, 2), (3.0, 5.6))
    plan = allocate_accumulated([fast, slow, slow], 61)
    assert sum(size * (steps - 1) + last for size, steps, last in plan) == 61
    assert plan[0][0] == 8
    seconds, sizes, steps = allocate_synchronised([fast, slow], 64, 0.5)
    assert sum(sizes) * steps >= 64
    assert seconds == min(allocate_synchronised([fast, slow], 64, 0.5, tries=t)[0] for t in (50, 200))


def test_an_interrupted_search_has_its_best_so_far(monkeypatch):
    from tools.planner.search import auto

    cluster, model = zoned()
    calls = {"n": 0}
    original = auto._climb

    def stop(*arguments):
        calls["n"] += 1
        if calls["n"] > 1:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(auto, "_climb", stop)
    outcome = search_auto(estimator_of(cluster, model), ONE, effort=Effort(seeds=50))
    assert outcome.interrupted
    assert outcome.best is not None
