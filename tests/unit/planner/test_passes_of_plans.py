"""Searches leave out what is refused when it is written: plans of more passes than an iteration may have."""

import json
from pathlib import Path

import pytest

from megatron_het.plan import validate as limits
from megatron_het.plan.validate import most_chunks
from testing.planner_cases import with_catalog
from tools.planner.__main__ import main
from tools.planner.cli.commands import larger_micro_batches
from tools.planner.costs.build import build_plan
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search import finish
from tools.planner.search.auto import search_auto
from tools.planner.search.outcome import Goal
from tools.planner.search.sketch import Sketch

BATCH = 64


def estimator(micro_batch_sizes: tuple[int, ...] = (1, 2)) -> Estimator:
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
        micro_batch_sizes=micro_batch_sizes,
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
    free = search_auto(estimator((1,)), goal).best
    assert free is not None
    passes = 2 * len(free.candidate.stages) * free.candidate.chunks * free.candidate.slices
    passes *= BATCH // free.candidate.micro_batch_size
    assert passes > 2 * BATCH
    most(monkeypatch, 1)
    known = estimator((1,))
    best = search_auto(known, goal).best
    assert best is not None
    plan = build_plan(known, best.candidate, best.estimate)  # raises where it is refused
    assert plan.num_microbatches * len(plan.stages) <= BATCH


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


def test_the_error_says_that_larger_micro_batches_allow_more_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """70 billion parameters on ten GPUs of 40 GB: two stages do not hold them, and more have too many passes."""
    model = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    model |= {"vocab_size": 128000, "seq_length": 4096, "global_batch_size": 100_000, "distributed_optimizer": True}
    (tmp_path / "m.yaml").write_text(json.dumps(model | {"micro_batch_sizes": [1], "recompute": ["full"]}))
    nodes = [{"gpu": "A100-40", "count": 10, "gpus_per_node": 1, "network_bytes_per_s": 1e10}]
    (tmp_path / "c.yaml").write_text(json.dumps({"nodes": nodes}))
    words = ["plan", "--cluster", f"{tmp_path}/c.yaml", "--model", f"{tmp_path}/m.yaml", "--out", f"{tmp_path}/p"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "the model fits nowhere" in told
    assert "allow micro_batch_sizes of 4 or more, with which there may be 10 stages" in told
    assert "those of 1 leave room for 2 stages" in told


@pytest.mark.parametrize(
    ("batch", "sizes", "nodes", "overfull", "advice"),
    [
        (100_000, (1,), 2, 9.0, ""),  # as many stages as GPUs were looked at
        (100_000, (1, 4), 10, 9.0, ""),
        (100_000, (1, 2), 10, 9.0, "micro_batch_sizes of 4 or more"),
        (100_000, (1,), 10, 2.5, "may be 5 stages"),
        (131_072, (1,), 10, 1.01, "room for one stage,"),
    ],
)
def test_when_larger_micro_batches_are_advised(
    batch: int, sizes: tuple[int, ...], nodes: int, overfull: float, advice: str
) -> None:
    known = estimator()
    model = known.model.model_copy(update={"global_batch_size": batch, "micro_batch_sizes": sizes})
    group = known.cluster.nodes[0].model_copy(update={"count": nodes})
    told = larger_micro_batches(known.cluster.model_copy(update={"nodes": (group,)}), model, overfull)
    assert advice in told and bool(told) == bool(advice), told
    if advice:  # what is advised is enough, and one less is not
        enough = int(told.split(" of ")[1].split()[0])
        stages = int(told.split("there may be ")[1].split()[0])
        assert stages <= min(model.num_layers, nodes)
        assert most_chunks(-(-batch // enough), 1) >= stages > most_chunks(-(-batch // (enough - 1)), 1)
