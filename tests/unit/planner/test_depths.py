"""Plans over slow links have more microbatches in flight, and say so."""

from __future__ import annotations

import pytest

from testing.planner_cases import estimator_of
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.inputs.cluster import Cluster, NodeGroup, ZoneLink
from tools.planner.inputs.model import Model
from tools.planner.search.depths import deeper
from tools.planner.search.methods import search
from tools.planner.search.outcome import Found, Goal
from tools.planner.simulate.simulation import simulate_block, simulate_candidate

MODEL = Model(
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=16,
    num_query_groups=16,
    vocab_size=32000,
    seq_length=2048,
    global_batch_size=32,
    micro_batch_sizes=(1,),
)


LARGE = MODEL.model_copy(update={"hidden_size": 4096, "ffn_hidden_size": 16384})
"""Does not fit on one GPU."""


def estimator(latency_s: float, model: Model = MODEL, bytes_per_s: float = 1e9):
    """Two zones of two GPUs, far apart."""
    nodes = tuple(
        NodeGroup(gpu="A100-40", count=2, gpus_per_node=1, zone=zone, network_bytes_per_s=12.5e9)
        for zone in ("a-1", "b-1")
    )
    link = ZoneLink(between=("a-1", "b-1"), bytes_per_s=bytes_per_s, latency_s=latency_s)
    return estimator_of(Cluster(nodes=nodes, links=(link,)), model)


def found(prices, layers: tuple[int, int] = (8, 8)) -> Found:
    candidate = Candidate(tuple(Stage(n, (Group(s, 1, 2),)) for s, n in enumerate(layers)), 1)
    estimate = prices.estimate(candidate)
    return Found(candidate, estimate, simulate_block(prices, candidate, estimate).iteration_s)


def test_a_slow_boundary_is_deepened_and_the_plan_says_so():
    prices = estimator(0.08)
    plain = found(prices)
    chosen = deeper(prices, Goal(), plain)
    assert chosen.iteration_s < 0.9 * plain.iteration_s
    (depth,) = chosen.candidate.depths
    assert depth > 1
    plan = build_plan(prices, chosen.candidate, chosen.estimate)
    assert plan.schedule.parameters["depths"] == [depth]
    # What is written is what was promised, in time and in memory.
    again, seated = candidate_of(plan, prices.cluster, "plan.json")
    assert again.depths == chosen.candidate.depths
    simulated = simulate_candidate(prices, again, prices.estimate(again), plan, seated)
    assert simulated.iteration_s == pytest.approx(chosen.iteration_s, rel=0.005)
    assert [m.total_bytes for m in chosen.estimate.memory] == pytest.approx(
        [max(simulated.peak_bytes[:2]), max(simulated.peak_bytes[2:])], rel=0.02
    )


def test_fast_links_keep_megatrons_order():
    prices = estimator(1e-5, bytes_per_s=1e12)
    plain = found(prices)
    assert deeper(prices, Goal(), plain) is plain


def test_wide_stages_are_not_slow_links():
    """A stage of many replicas takes a microbatch every moment, yet each replica takes as long as ever."""
    nodes = (NodeGroup(gpu="A100-40", count=12, gpus_per_node=4, network_bytes_per_s=12.5e9),)
    prices = estimator_of(Cluster(nodes=nodes), MODEL)
    candidate = Candidate((Stage(8, (Group(0, 1, 24),)), Stage(8, (Group(0, 1, 16),))), 1)
    estimate = prices.estimate(candidate)
    wide = Found(candidate, estimate, simulate_block(prices, candidate, estimate).iteration_s)
    calls = []
    prices.estimate = calls.append
    assert deeper(prices, Goal(), wide) is wide
    assert not calls  # nothing was tried


def test_memory_bounds_the_depth(monkeypatch):
    prices = estimator(0.08)
    plain = found(prices)
    least = max(m.total_bytes for m in plain.estimate.memory)
    monkeypatch.setattr(prices, "fits", lambda e: max(m.total_bytes for m in e.memory) <= least * 1.001)
    assert deeper(prices, Goal(), plain) is plain


def test_the_search_finds_depths():
    prices = estimator(0.3, LARGE)
    best = search("auto", prices, Goal(schedules=("1f1b",))).best
    assert len(best.candidate.stages) > 1 and max(best.candidate.depths) > 1
    shallow = best.candidate.with_(depths=())
    assert best.iteration_s < 0.95 * simulate_block(prices, shallow, prices.estimate(shallow)).iteration_s
