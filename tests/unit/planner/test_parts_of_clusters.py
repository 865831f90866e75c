"""GPUs are left out where that is better, and more GPUs do not make a plan worse."""

import dataclasses
from itertools import islice
from math import inf
from pathlib import Path

import pytest

from megatron_het.features.registry import check_plan_alone
from testing.planner_cases import (
    cluster_of,
    estimator_of,
    model_of,
    random_case,
    random_pool,
    read_back,
    simulate_block,
    with_catalog,
)
from tests.unit.planner.emit_plans import WIDE
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimate, Estimator
from tools.planner.costs.schedules import MINISTAGES
from tools.planner.costs.schedules.pipelines import SlimPipe
from tools.planner.costs.simulation import block_s, simulate_candidate, simulate_parts
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, load_cluster
from tools.planner.inputs.model import Model, load_model
from tools.planner.search import auto, finish, part_search
from tools.planner.search.auto import search_auto
from tools.planner.search.balance import balance
from tools.planner.search.bounds import Bounds
from tools.planner.search.candidate_cache import CandidateCache
from tools.planner.search.finish import _may_compute
from tools.planner.search.moves import neighbours, trimmed
from tools.planner.search.outcome import Effort, Found, Goal, Progress, SearchResult
from tools.planner.search.part_search import SearchContext
from tools.planner.search.pools import all_gpus, nodes_left_out, parts, pools_left_out, rounded_down
from tools.planner.search.seeds import seeds


def fast_and_slow() -> tuple[Cluster, Model]:
    """Three nodes of eight H200, and eleven nodes of two A100 behind slow links that only cost time."""
    shape = {"layers": 12, "hidden": 5120, "ffn": 14080, "heads": 40, "groups": 8, "words": 128256, "tokens": 2048}
    model = model_of(**shape, batch=480, precision="bf16", distributed_optimizer=True, recompute=("none",))
    return cluster_of(("H200", 3, 8, 50e9), ("A100-80", 11, 2, 1.25e9)), model


def test_local_search_goes_on_where_it_has_ended():
    """A better plan is behind worse ones; of what is met there nothing worse takes the place of a finalist."""
    memo = CandidateCache(with_catalog(*random_pool(161)), Goal(), Progress())
    effort = Effort(sketches=100, seeds=12, steps=80, beam=1, counts=1)
    part_search.explore(memo, effort, memo.limits)
    before, known = memo.best, set(memo.good)
    part_search._walk(memo, effort, memo.limits, part_search.PAST, inf)
    assert memo.best < 0.9 * before and known < set(memo.good)
    assert all(score < before for candidate, (score, _) in memo.good.items() if candidate not in known)


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
    context = SearchContext(estimator_of(*fast_and_slow()), Goal(), Progress())
    searched = []

    def explore(memo, effort, limits):
        searched.append(limits)
        memo.top = lambda _: [(limits, None)]
        memo.try_candidate(limits)

    def price(memo, candidate):
        memo.best = min(memo.best, times.get(candidate, 10.0))

    monkeypatch.setattr(part_search, "explore", explore)
    monkeypatch.setattr(part_search, "_climb_by_stages", lambda *_: None)
    monkeypatch.setattr(part_search, "_walk", lambda *_: None)
    monkeypatch.setattr(CandidateCache, "try_candidate", price)
    monkeypatch.setattr(Bounds, "excludes", lambda *_: False)
    memo = CandidateCache(context.merged.estimator, context.goal, context.progress)
    memo.best = 9.0
    part_search._parts(memo, Effort(), context.bounds, context.whole, is_near=True)
    assert {(16, 22), (24, 20), (24, 16), (0, 22), (24, 0), (8, 22), (16, 20), (24, 18)} <= set(searched)
    assert memo.best == 6.5 and len(searched) == len(set(searched)) < 20


def test_replicas_of_all_nodes_but_one_are_added():
    """What a cluster of one node less would add in one step: five of six V100 had been left out that way."""
    estimator = estimator_of(*fast_and_slow())
    candidate = Candidate((Stage(12, (Group(0, 1, 24),)),), 1)
    found = {groups for groups, _ in neighbours(estimator, Goal(), candidate, 0, all_gpus(estimator))}
    assert all(((Group(0, 1, 24), Group(1, 1, more)),) in found for more in (1, 20, 22))


def test_replicas_that_shorten_nothing_are_left_out():
    """Of 128 microbatches one of 14 replicas has as many as one of 13; without it a plan was 0.8 % faster."""
    cluster, model = fast_and_slow()
    estimator = estimator_of(cluster, model.model_copy(update={"global_batch_size": 128}))
    wide = Stage(6, (Group(0, 1, 14),)), Stage(6, (Group(1, 1, 17),))
    mixed = Stage(6, (Group(0, 1, 10), Group(1, 1, 5))), Stage(6, (Group(1, 1, 16),))
    counts = [[g.count for s in trimmed(estimator, Candidate(c, 1)).stages for g in s.groups] for c in (wide, mixed)]
    assert counts == [[13, 16], [10, 5, 16]]
    memo = CandidateCache(estimator, Goal(), Progress())
    memo.try_candidate(Candidate(wide, 1, zero_stage=1))
    part_search._polish(memo)
    assert any([s.groups[0].count for s in c.stages] == [13, 16] for c in memo.good)


def test_of_finalists_that_look_alike_kinds_side_by_side_are_simulated_first(monkeypatch):
    """The closed form hardly knows places; a plan whose kinds take turns used up what may be simulated."""
    estimator = estimator_of(*fast_and_slow())
    memo = CandidateCache(estimator, Goal(), Progress())
    fast, slow = Stage(4, (Group(0, 1, 8),)), Stage(4, (Group(1, 1, 8),))
    for stages, seconds in (((fast, slow, fast), 1.0), ((fast, fast, slow), 1.0005)):
        candidate = Candidate(stages, 1, zero_stage=1)
        estimate = estimator.estimate(candidate)._replace(iteration_s=seconds)
        memo.good[candidate] = seconds, estimate
    monkeypatch.setattr(finish, "_simulated", lambda e, g, candidate, estimate, *_: Found(candidate, estimate, 1.0))
    queues = finish._queues(memo, 10)
    result = SearchResult("auto")
    found = finish._finalists(memo, result, estimator, Effort(), queues, lambda c: c, bound=inf, known=inf)
    assert [f.candidate.stages for f in found] == [(fast, fast, slow), (fast, slow, fast)]


def test_the_fewest_slices_are_tried_where_passes_have_tokens_enough():
    """15 stages, 2,048 tokens: slices of 128 tokens of eight sequences are a pass that is worth its launch."""
    estimator = estimator_of(
        Cluster(nodes=(NodeGroup(gpu="A10G", count=15, gpus_per_node=1),)),
        model_of(layers=32, hidden=4096, tokens=2048, batch=64),
    )
    stages = tuple([Stage(2, (Group(0, 1, 1),))] * 15)
    tried = {n: [v.slices for v in SlimPipe().variants(estimator, Candidate(stages, n))] for n in (4, 8)}
    assert tried == {4: [], 8: [16]}


def test_the_nodes_of_the_best_plans_are_searched_alone(monkeypatch):
    """Whole nodes of several kinds; of one kind alone there is a search already.  A better plan is gone on from."""
    context = SearchContext(estimator_of(*fast_and_slow()), Goal(), Progress())

    def found(seconds: float, *groups: Group) -> Found:
        candidate = Candidate(tuple(Stage(12 // len(groups), (group,)) for group in groups), 1, zero_stage=1)
        return Found(candidate, context.estimator.estimate(candidate), seconds, confirmed=True)

    fast, slow = Group(0, 1, 15), Group(1, 1, 3)
    outcome = SearchResult("auto", found=[found(8.0, Group(0, 1, 24)), found(9.0, fast, slow), found(9.5, slow, fast)])
    outcome.found.append(found(9.9, Group(0, 1, 24), Group(1, 1, 22)))
    better, searched = found(7.0, Group(0, 1, 8), Group(1, 1, 4)), []

    def search(context, limits, known, effort):
        searched.append((limits, known))
        return SearchResult("auto", found=[better] if limits == (16, 4) else [])

    monkeypatch.setattr(auto, "part_search", search)
    monkeypatch.setattr(Bounds, "excludes", lambda *_: False)
    auto._parts_alone(context, outcome)
    assert searched == [((16, 4), 8.0), ((8, 4), 7.0), ((24, 20), 7.0)]  # at last one A100 node less, the least loss
    assert outcome.best == better
    worse = [Found(better.candidate, better.estimate, 9.0)]
    assert finish.confirm(context.estimator, Goal(), worse, 8.0) == worse  # which are not confirmed


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_parts_of_a_small_cluster_are_searched_for_every_objective(objective, monkeypatch):
    """A node less made a plan 3 % cheaper, and a node more may not make it dearer."""
    kinds = (("A100-40", 2, 4, 25e9), ("T4", 4, 2, 3e9))
    nodes = tuple(n.model_copy(update={"usd_per_gpu_hour": 1.0}) for n in cluster_of(*kinds).nodes)
    searched = []

    def search(context, limits, *_, **__):
        searched.append(limits)
        return SearchResult("auto")

    monkeypatch.setattr(auto, "part_search", search)
    monkeypatch.setattr(auto, "_published_methods", lambda *_: None)
    search_auto(estimator_of(Cluster(nodes=nodes), fast_and_slow()[1]), Goal(objective))
    assert {(8, 8), (8, 6), (4, 8)} <= set(searched)


def test_a_model_that_is_far_too_large_is_searched_on_the_whole_cluster_only(monkeypatch):
    """987 GB of state in 269 GB: parts, proofs and published methods took 8 of 9 seconds to find nothing."""
    estimator, searched = with_catalog(*random_pool(8, "experts")), []
    assert not estimator.may_hold(all_gpus(estimator)) and with_catalog(*random_pool(20)).may_hold((1, 8, 2, 4))
    assert not part_search.branch_and_bound(CandidateCache(estimator, Goal(), Progress()), 100, 0.1)

    def search(context, limits, *_, **__):
        searched.append(limits)
        nearest = Candidate((Stage(40, (Group(0, 1, 6),)),), 1)
        return SearchResult("auto", nearest=(nearest, estimator.estimate(nearest)))

    monkeypatch.setattr(auto, "part_search", search)
    monkeypatch.setattr(auto, "_published_methods", lambda *_: pytest.fail("they are asked"))
    assert search_auto(estimator, Goal()).nearest is not None and searched == [all_gpus(estimator)]


def test_refinements_that_meet_go_on_once():
    """Of 52 refinements of one search every third came by plans of another one, and took the same way again."""
    estimator, goal, tried = with_catalog(*random_pool(20)), Goal(), list[Candidate]()

    def simulate(candidate: Candidate, estimate: Estimate, _: float) -> Found:
        tried.append(candidate)
        return Found(candidate, estimate, estimate.iteration_s)

    start = Candidate(tuple(Stage(n, (Group(1, 1, 2),)) for n in (1, 4, 8, 11)), 1, "full", zero_stage=1)
    first = estimator.estimate(start)
    found = [Found(plan, first, first.iteration_s) for plan in (start, start)]
    refined = [finish.refine(estimator, goal, one, 10**9, simulate, False) for one in found]
    assert refined[0] == refined[1] and len(tried) == len(set(tried)) > 0
    met = Found(tried[0], refined[0].estimate, first.iteration_s)
    other = finish.refine(estimator, goal, met, 10**9, simulate, False)
    assert other is refined[0] and len(tried) == len(set(tried))


def test_as_many_ministages_as_layers_are_tried():
    """The best plan of 16 L40S had 40 ministages of one layer each, and only a published method found it."""
    estimator = with_catalog(*random_pool(307))
    plain = Candidate((Stage(40, (Group(1, 1, 16),)),), 4, "full", zero_stage=1)
    assert max(c.chunks for c in MINISTAGES.variants(estimator, plain)) == 40


def test_what_stages_compute_at_least_is_below_every_price():
    """Starting points and changes of plans are left out where that is too much."""
    estimator, goal, shares = with_catalog(*random_pool(2)), Goal(), []
    memo = CandidateCache(estimator, goal, Progress())
    for groups, like in islice(seeds(memo, 40, all_gpus(estimator), [inf]), 300):
        candidate = balance(estimator, groups, like)
        estimate = candidate and estimator.estimate(candidate)
        if candidate and estimate:
            shares.append(memo.sketch.least(groups, like) / estimate.iteration_s)
            may_compute = _may_compute(estimator, goal, Found(candidate, estimate), estimate.iteration_s)
            assert all(may_compute(s, *stage) for s, stage in enumerate(candidate.stages))
    assert 0.95 < max(shares) <= 1 + 1e-9


# The time that a search promises is the simulated time of the plan that is written.

EXAMPLES = Path(__file__).parents[3] / "examples" / "slurm"


def emitted_s(estimator: Estimator, found: Found) -> float:
    return read_back(estimator, build_plan(estimator, found.candidate, found.estimate))[1]


def test_the_example_is_as_fast_as_promised():
    """Four equal pipelines keep the order of one: the merged order of all of them took 8.7 s."""
    cluster = load_cluster(str(EXAMPLES / "cluster.yaml"))
    estimator = estimator_of(cluster, load_model(str(EXAMPLES / "model.yaml")))
    best = search_auto(estimator, Goal()).best
    assert best.iteration_s < 1.05 * best.estimate.iteration_s
    assert emitted_s(estimator, best) == pytest.approx(best.iteration_s, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_as_fast_as_promised(seed):
    cluster, model = random_case(seed)
    best = search_auto(estimator_of(cluster, model), Goal()).best
    if best is not None:
        assert emitted_s(estimator_of(cluster, model), best) == pytest.approx(best.iteration_s, rel=1e-6)


def irregular() -> tuple[Estimator, Candidate]:
    """Two pipelines (of three and one replicas per stage) that sit differently in nodes."""
    model = model_of(layers=8, hidden=1024, words=8192, batch=34, precision="fp16", micro_batch_sizes=(1,))
    stages = (Stage(6, (Group(0, 1, 6),)), Stage(2, (Group(1, 1, 2),)))
    return estimator_of(cluster_of(("A100-40", 2, 3, 1e9), ("A10G", 2, 1, 1e9)), model), Candidate(stages, 1)


@pytest.mark.parametrize("order", ["greedy", "alternating", "backward-first"])
def test_parts_take_as_long_as_the_whole(order):
    """The order that was chosen stands in the plan."""
    estimator, candidate = irregular()
    candidate = candidate.with_(order=order)
    estimate = estimator.estimate(candidate)
    plan = build_plan(estimator, candidate, estimate)
    assert plan.schedule.parameters["order"] == order
    again, seated = candidate_of(plan, estimator.cluster)
    assert again.order == order
    whole = simulate_candidate(estimator, candidate, estimate, plan, seated).iteration_s
    assert simulate_parts(estimator, candidate, estimate, plan, seated) == pytest.approx(whole, rel=1e-9)


def test_an_unknown_order_in_a_plan_is_one_error():
    estimator, candidate = irregular()
    with pytest.raises(PlannerError, match=r"schedule.parameters.order = 'fast'.*greedy, alternating"):
        build_plan(estimator, candidate.with_(order="fast"), estimator.estimate(candidate))


def test_a_plan_is_read_back_in_the_zones_that_it_was_made_for():
    """Node groups of one GPU would be filled in the order of the file: over the slow link between the zones."""
    zones = [NodeGroup(gpu="A100-40", count=2, gpus_per_node=2, network_bytes_per_s=1e9, zone=f"us-{z}") for z in "ab"]
    estimator, _ = irregular()
    estimator = estimator_of(Cluster(nodes=tuple(zones)), estimator.model)
    # The second zone first, and both stages in one zone each.
    candidate = Candidate((Stage(5, (Group(1, 1, 2),)), Stage(3, (Group(1, 1, 1),))), 1)
    estimate = estimator.estimate(candidate)
    plan = build_plan(estimator, candidate, estimate)
    assert {replica.zone for stage in plan.stages for replica in stage.replicas} == {"us-b"}
    again, _ = candidate_of(plan, estimator.cluster)
    assert again.stages == candidate.stages
    with pytest.raises(PlannerError, match=r"zone.*no A100-40 there.*us-c"):
        moved = [zone.model_copy(update={"zone": f"us-{z}"}) for zone, z in zip(zones, "cd")]
        candidate_of(plan, Cluster(nodes=tuple(moved)))
    alone = estimator_of(Cluster(nodes=(zones[1],)), estimator.model)
    candidate = Candidate((Stage(5, (Group(0, 1, 2),)), Stage(3, (Group(0, 1, 1),))), 1)
    estimate = alone.estimate(candidate)
    assert "zone" not in str(build_plan(alone, candidate, estimate).to_json())


def slow_network() -> Estimator:
    """Four nodes whose links matter."""
    model = model_of(layers=24, hidden=2048, tokens=4096, batch=64, micro_batch_sizes=(1,))
    return estimator_of(cluster_of(("H100-SXM", 4, 8, 1.25e9)), model)


NODES = tuple(Stage(6, (Group(0, 1, 8),)) for _ in range(4))


@pytest.mark.parametrize("slices", [4, 16])
def test_slices_cut_what_is_sent(slices):
    """The first message of a pipeline is a slice, so a slow link delays the later stages by a slice's transfer."""
    estimator = slow_network()
    candidate = Candidate(NODES, 1, schedule="slimpipe", slices=slices)
    estimate = estimator.estimate(candidate)
    assert estimate.iteration_s == pytest.approx(block_s(estimator, candidate, estimate), rel=0.08)


def test_a_pipeline_sits_where_it_sits_among_the_others():
    """Stages that fill nodes send between nodes, although one pipeline alone would fit into one node."""
    estimator = slow_network()
    candidate = Candidate(NODES, 1)
    estimate = estimator.estimate(candidate)
    plan = build_plan(estimator, candidate, estimate)
    whole = simulate_candidate(estimator, candidate, estimate, plan).iteration_s
    assert block_s(estimator, candidate, estimate) == pytest.approx(whole, rel=1e-9)
    assert simulate_block(estimator, candidate, estimate).iteration_s == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved", "ministage", "slimpipe"])
def test_stages_with_different_numbers_of_chunks(schedule):
    """A plan that asks for them is read, priced, simulated and written as it is."""
    estimator, candidate = irregular()
    even = candidate.with_(schedule=schedule, chunks=2, slices=2 if schedule == "slimpipe" else 1, zero_stage=1)
    plan = build_plan(estimator, even, estimator.estimate(even))
    first, last = plan.stages
    joined = dataclasses.replace(plan, stages=(first, dataclasses.replace(last, layers=(sum(last.layers),))))
    check_plan_alone(joined)
    again, seated = candidate_of(joined, estimator.cluster)
    assert (again.chunks, again.chunk_counts, again.head_stage) == (2, (2, 1), 0)
    estimate = estimator.estimate(again)
    written = build_plan(estimator, again, estimate)
    assert [stage.layers for stage in written.stages] == [(3, 3), (2,)]
    found = simulate_candidate(estimator, again, estimate, joined, seated)
    assert found.iteration_s > 0 and len(found.peak_bytes) == 8
    # The loss follows the second chunk of the first stage, which has the output layer's time.
    forward = found.result.program.shape
    assert forward.path[-1] == (0, 1) and forward.layers == ((3, 3), (2,))
    assert again.with_(chunks=2).chunk_counts == () and again.with_(micro_batch_size=1).chunk_counts == (2, 1)


def estimator(gpu: str = "A100-40", **changes) -> Estimator:
    shape = WIDE | {"num_layers": 12, "global_batch_size": 16, "precision": "fp16", "distributed_optimizer": True}
    nodes = tuple(NodeGroup(gpu=kind, count=4, gpus_per_node=4) for kind in (gpu, "V100-16"))
    return estimator_of(Cluster(nodes=nodes), Model(**shape | changes))


def pipeline(*widths: int, layers: int = 12, tp: int = 1) -> tuple[Stage, ...]:
    return tuple(Stage(layers // len(widths), (Group(0, tp, n),)) for n in widths)


def runs(found: Estimator, candidate: Candidate) -> bool:
    return CandidateCache(found, Goal(), Progress()).try_candidate(candidate) < inf


@pytest.mark.parametrize("tied", [False, True])
def test_ministages_only_where_a_parameter_window_can_hold_them(tied):
    """Replicas of a stage may differ in TP; tied embeddings may be in two stages, or in two chunks of one."""
    found = estimator(tied_embeddings=tied)
    one = (Stage(12, (Group(0, 1, 2), Group(1, 1, 2))),)
    two = (Stage(6, (Group(0, 1, 2),)), Stage(6, (Group(1, 1, 2),)))
    mixed = (Stage(12, (Group(0, 1, 2), Group(1, 2, 1))),)
    for stages in (one, two, mixed):
        candidate = Candidate(stages, 1, zero_stage=1)
        assert runs(found, candidate)
        ministages = candidate.with_(schedule="ministage", chunks=2)
        assert runs(found, ministages)
        assert not runs(found, ministages.with_(zero_stage=0))
        build_plan(found, ministages, found.estimate(ministages))


@pytest.mark.parametrize("tied", [False, True])
def test_interleaved_chunks_on_a_single_stage_are_not_proposed(tied):
    """They follow each other as the layers of the stage do, and gain nothing."""
    found = estimator(tied_embeddings=tied)
    chunks = Candidate(pipeline(2), 1, schedule="interleaved", chunks=2)
    assert not runs(found, chunks)
    assert runs(found, chunks.with_(stages=pipeline(2, 2)))


def test_interleaved_plans_have_whole_groups_of_microbatches():
    """16 microbatches over 3 stages of 3 replicas: 6 in the largest block fit, 16 in the plan do not."""
    for batch, widths, fits in ((16, (3, 3, 3), False), (18, (3, 3, 3), True), (12, (4, 4), False), (16, (4, 4), True)):
        found = estimator(global_batch_size=batch)
        candidate = Candidate(pipeline(*widths), 1, schedule="interleaved", chunks=2)
        assert runs(found, candidate) == fits
        if fits:
            estimate = found.estimate(candidate)
            simulate_block(found, candidate, estimate)
            simulate_candidate(found, candidate, estimate, build_plan(found, candidate, estimate))


@pytest.mark.parametrize(
    ("change", "widths", "tp", "slices", "fits"),
    [
        ({}, (2, 2), 1, 2, True),
        ({}, (2, 2, 2), 1, 2, False),  # a stage without a slice
        ({"seq_length": 1020}, (2, 2), 1, 8, True),  # slices that differ by a token
        ({"seq_length": 1024}, (1, 1), 4, 512, True),
        ({"seq_length": 1024, "sequence_parallel": True}, (1, 1), 4, 512, False),  # 2 tokens over TP 4
        ({"seq_length": 1024, "sequence_parallel": True}, (1, 1), 4, 256, True),
        ({"hidden_size": 960}, (2, 2), 1, 2, False),  # heads of 60 channels
        ({"hidden_size": 960, "gpu": "CPU"}, (2, 2), 1, 2, True),
    ],
)
def test_slices_suit_stages_tensor_parallelism_and_kernels(change, widths, tp, slices, fits):
    found = estimator(**change)
    candidate = Candidate(pipeline(*widths, tp=tp), 1, schedule="slimpipe", slices=slices)
    assert runs(found, candidate.with_(schedule="1f1b", slices=1))
    assert runs(found, candidate) == fits


def test_every_replica_has_a_microbatch():
    """8 microbatches: 8 replicas at most; an even division needs a divisor."""
    found = estimator(global_batch_size=8)
    for width, fits, even in ((8, True, True), (6, True, False), (16, False, False)):
        candidate = Candidate((Stage(12, (Group(0, 1, width),)),), 1)
        assert (found.estimate(candidate) is not None) == fits
        assert (found.estimate(candidate.with_(even=True)) is not None) == even
    eight = Candidate((Stage(12, (Group(0, 1, 8),)),), 1)
    wide = eight.with_(stages=(Stage(12, (Group(0, 1, 16),)),))
    with pytest.raises(PlannerError, match="8 microbatches|some would have none"):
        build_plan(found, wide, found.estimate(eight))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_the_closed_form_is_exact_for_one_stage(schedule, chunks):
    """So that the search need not simulate it: nothing waits, with mixed GPUs and uneven batches too."""
    found = estimator()
    for groups in ((Group(0, 1, 3),), (Group(0, 1, 2), Group(1, 1, 5)), (Group(0, 1, 6), Group(1, 1, 2))):
        candidate = Candidate((Stage(12, groups),), 1, schedule=schedule, chunks=chunks, zero_stage=1)
        estimate = found.estimate(candidate)
        assert simulate_block(found, candidate, estimate).iteration_s == pytest.approx(estimate.iteration_s, rel=1e-9)
