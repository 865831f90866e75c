"""The time that a search promises is the simulated time of the plan that is written."""

import dataclasses
from pathlib import Path

import pytest

from megatron_het.features.plan_checks import check_plan_alone
from testing.planner_cases import estimator_of, random_case
from tools.planner.costs.build import build_plan, candidate_of
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup, load_cluster
from tools.planner.inputs.model import Model, load_model
from tools.planner.search.auto import search_auto
from tools.planner.search.outcome import Found, Goal
from tools.planner.simulate.simulation import block_s, simulate_block, simulate_candidate, simulate_parts

EXAMPLES = Path(__file__).parents[3] / "examples" / "slurm"


def emitted_s(estimator: Estimator, found: Found) -> float:
    """The plan as written and read again, simulated as a whole."""
    plan = build_plan(estimator, found.candidate, found.estimate)
    candidate, seated = candidate_of(plan, estimator.cluster)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    return simulate_candidate(estimator, candidate, estimate, plan, seated).iteration_s


def test_the_example_is_as_fast_as_promised():
    """Four equal pipelines keep the order of one: the merged order of all of them took 8.7 s."""
    cluster = load_cluster(str(EXAMPLES / "cluster.yaml"))
    estimator = estimator_of(cluster, load_model(str(EXAMPLES / "model.yaml")))
    best = search_auto(estimator, Goal()).best
    assert best is not None
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
    nodes = (
        NodeGroup(gpu="A100-40", count=2, gpus_per_node=3, network_bytes_per_s=1e9),
        NodeGroup(gpu="A10G", count=2, gpus_per_node=1, network_bytes_per_s=1e9),
    )
    model = Model(
        num_layers=8,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        vocab_size=8192,
        seq_length=1024,
        global_batch_size=34,
        precision="fp16",
        micro_batch_sizes=(1,),
    )
    stages = (Stage(6, (Group(0, 1, 6),)), Stage(2, (Group(1, 1, 2),)))
    return estimator_of(Cluster(nodes=nodes), model), Candidate(stages, 1)


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
    assert estimate is not None
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
    assert estimate is not None
    assert "zone" not in str(build_plan(alone, candidate, estimate).to_json())


def slow_network() -> Estimator:
    """Four nodes whose links matter."""
    model = Model(
        num_layers=24,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=4096,
        global_batch_size=64,
        micro_batch_sizes=(1,),
    )
    node = NodeGroup(gpu="H100-SXM", count=4, gpus_per_node=8, network_bytes_per_s=1.25e9)
    return estimator_of(Cluster(nodes=(node,)), model)


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
