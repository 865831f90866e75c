"""What the search takes into its book: only what the runtime runs, whatever the closed form prices."""

from math import inf

import pytest

from megatron_het.schedule.ir import Kind
from testing.planner_cases import estimator_of
from tests.unit.planner.emit_plans import WIDE
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.errors import PlannerError
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search.book import Book
from tools.planner.search.outcome import Goal, Progress
from tools.planner.simulate.simulation import simulate_block, simulate_candidate


def estimator(gpu: str = "A100-40", **changes) -> Estimator:
    shape = WIDE | {"num_layers": 12, "global_batch_size": 16, "precision": "fp16", "distributed_optimizer": True}
    nodes = tuple(NodeGroup(gpu=kind, count=4, gpus_per_node=4) for kind in (gpu, "V100-16"))
    return estimator_of(Cluster(nodes=nodes), Model(**shape | changes))


def pipeline(*widths: int, layers: int = 12, tp: int = 1) -> tuple[Stage, ...]:
    """Equal stages with these numbers of replicas on the first node group."""
    return tuple(Stage(layers // len(widths), (Group(0, tp, n),)) for n in widths)


def runs(found: Estimator, candidate: Candidate) -> bool:
    return Book(found, Goal(), Progress()).try_candidate(candidate) < inf


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


def test_gathers_and_reductions_of_ministages_are_simulated():
    """They share the links of a stage; the closed form hides each of them behind compute of its own."""
    found = estimator()
    fast = Candidate((Stage(12, (Group(0, 1, 3),)),), 1, schedule="ministage", chunks=3, zero_stage=1)
    slow = fast.with_(stages=(Stage(12, (Group(0, 1, 2), Group(1, 1, 5))),))
    for candidate, least, most in ((fast, 0.99, 1.01), (slow, 1.1, 1.4)):
        estimate = found.estimate(candidate)
        simulated = simulate_block(found, candidate, estimate)
        assert least < simulated.iteration_s / estimate.iteration_s < most
        kinds = {op.kind for ops in simulated.result.program.ops for op in ops}
        assert {Kind.PARAM_GATHER, Kind.PARAM_RELEASE, Kind.GRAD_REDUCE} <= kinds
