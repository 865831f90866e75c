"""Searches leave out what is refused when it is written: plans of more passes than an iteration may have."""

import pytest

from benchmarks.planner_cases import with_catalog
from megatron_het.plan import limits
from tools.planner.build import build_plan
from tools.planner.candidate import Candidate, Group, Stage
from tools.planner.cluster import Cluster, NodeGroup
from tools.planner.estimate import Estimator
from tools.planner.model import Model
from tools.planner.search import finish
from tools.planner.search.auto import search_auto
from tools.planner.search.goal import Goal
from tools.planner.search.sketch import Sketch

BATCH = 64


def estimator() -> Estimator:
    """Nodes of one GPU with slow links, where a pipeline is fastest."""
    model = Model(
        num_layers=12,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=512,
        global_batch_size=BATCH,
        precision="fp16",
        micro_batch_sizes=(1, 2),
        recompute=("none",),
    )
    nodes = (NodeGroup(gpu="A100-40", count=6, gpus_per_node=1, network_bytes_per_s=2.5e8),)
    return with_catalog(Cluster(nodes=nodes), model)


def most(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    """So many chunks at most, at micro batches of one sequence."""
    monkeypatch.setattr(limits, "MAX_PASSES", 2 * BATCH * chunks)


def test_the_search_takes_a_plan_that_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in large plans, nothing is simulated, so that nothing but the closed form can leave a plan out."""
    monkeypatch.setattr(finish, "MOST_OPERATIONS", 0)
    goal = Goal(schedules=("1f1b", "interleaved", "slimpipe"))
    free = search_auto(estimator(), goal).best
    assert free is not None
    passes = 2 * len(free.candidate.stages) * free.candidate.chunks * free.candidate.slices
    passes *= BATCH // free.candidate.micro_batch_size
    assert passes > 2 * BATCH * 2
    most(monkeypatch, 2)
    known = estimator()
    best = search_auto(known, goal).best
    assert best is not None
    plan = build_plan(known, best.candidate, best.estimate)  # raises where it is refused
    assert plan.num_microbatches * len(plan.stages) <= 2 * BATCH


@pytest.mark.parametrize(
    ("stages", "changes", "runs"),
    [
        (4, {}, True),
        (5, {}, False),
        (5, {"micro_batch_size": 2}, True),
        (2, {"schedule": "interleaved", "chunks": 2}, True),
        (3, {"schedule": "interleaved", "chunks": 2}, False),
        (2, {"schedule": "slimpipe", "slices": 2}, True),
        (2, {"schedule": "slimpipe", "slices": 4}, False),
    ],
)
def test_passes_of_stages_chunks_and_slices(
    monkeypatch: pytest.MonkeyPatch, stages: int, changes: dict[str, object], runs: bool
) -> None:
    most(monkeypatch, 4)
    known = estimator()
    groups = ((Group(0, 1, 1),),) * stages
    layers = (2,) * (stages - 1) + (12 - 2 * (stages - 1),)
    candidate = Candidate(tuple(map(Stage, layers, groups)), 1).with_(**changes)
    estimate = known.estimate(candidate)
    assert (estimate is not None) == runs
    assert (Sketch(known, Goal()).value(groups, candidate) < float("inf")) == runs
