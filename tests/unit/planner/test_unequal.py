"""Microbatches of different sizes: chosen where they pay, priced pass by pass, written and read back."""

import pytest

from testing.planner_cases import estimator_of, model_of, read_back
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model_parts import Experts
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal
from tools.planner.search.poplar import can_differ, unequal

MIXED = (("A100-40", 2), ("V100-16", 3))
EQUAL = (("A100-40", 4),)


def estimator(kinds: tuple[tuple[str, int], ...] = MIXED, batch: int = 97, **changes: object) -> Estimator:
    nodes = tuple(NodeGroup(gpu=gpu, count=1, gpus_per_node=n, network_bytes_per_s=100e9) for gpu, n in kinds)
    shape = {"layers": 12, "hidden": 768, "heads": 12, "tokens": 512, "precision": "fp16", "recompute": ("none",)}
    return estimator_of(Cluster(nodes=nodes), model_of(**{**shape, "batch": batch, **changes}))


@pytest.mark.parametrize("method", ["poplar", "auto"])
def test_each_kind_of_gpu_runs_passes_of_its_own_size(method: str) -> None:
    """A batch that is a multiple of nothing: equal microbatches would have one sequence."""
    priced = estimator()
    best = search(method, priced, Goal()).best
    assert best is not None and best.candidate.sizes
    plan = build_plan(priced, best.candidate, best.estimate)
    sizes = plan.training.micro_batch_sizes
    assert sum(sizes) == 97 and max(sizes) == plan.training.micro_batch_size > 2 * min(sizes)
    again, seconds = read_back(priced, plan)
    assert again == best.candidate
    assert seconds == pytest.approx(best.iteration_s, rel=1e-6)
    one = search("poplar", estimator(micro_batch_sizes=(1,)), Goal()).best
    assert one is not None and best.iteration_s < 0.8 * one.iteration_s


def test_equal_gpus_run_equal_microbatches() -> None:
    priced = estimator(EQUAL, batch=96)
    for method in ("poplar", "auto"):
        best = search(method, priced, Goal()).best
        assert best is not None and not best.candidate.sizes


def test_passes_fit_the_memory_of_their_gpus() -> None:
    priced = estimator(batch=400)
    found = unequal(priced, Candidate((Stage(12, (Group(0, 1, 2), Group(1, 1, 3))),), 1))
    estimate = priced.estimate(found)
    assert estimate is not None and priced.fits(estimate)
    larger = found.with_(sizes=(found.sizes[0], ((400,),) * 3), micro_batch_size=400)
    estimate = priced.estimate(larger)
    assert estimate is not None and not priced.fits(estimate)


def test_the_slowest_replica_and_its_own_passes_decide() -> None:
    """One of two equal GPUs runs a third, smaller pass."""
    priced = estimator(EQUAL, batch=20)
    stage = Stage(12, (Group(0, 1, 2),))
    few = priced.estimate(Candidate((stage,), 8, sizes=(((8,), (8,)),)))
    more = priced.estimate(Candidate((stage,), 8, sizes=(((8,), (8, 4)),)))
    alone = priced.estimate(Candidate((stage,), 4, sizes=(((4,), (4,)),)))
    assert more.busy_s == pytest.approx(few.busy_s + alone.busy_s, rel=1e-9)
    assert more.microbatches == ((2,),)


def test_named_sizes_experts_and_pipelines_keep_equal_microbatches() -> None:
    stage = Stage(12, (Group(0, 1, 2), Group(1, 1, 3)))
    one = Candidate((stage,), 1)
    assert can_differ(estimator(), one)
    assert not can_differ(estimator(micro_batch_sizes=(1,)), one)
    assert not can_differ(estimator(experts=Experts(count=8, top_k=2, ffn_hidden_size=768)), one)
    assert not can_differ(estimator(), Candidate((Stage(6, stage.groups),) * 2, 1))
    assert not can_differ(estimator(batch=4), one)
