"""Regular plans are found, and priced by the closed form as the simulator prices them."""

from __future__ import annotations

import pytest

from benchmarks.planner_gap import best_regular, regular_plans
from testing.planner_cases import estimator_of, measured
from tools.planner.costs.candidate import Candidate, Group, Stage
from tools.planner.costs.estimate import Estimator
from tools.planner.costs.extras import rows_of
from tools.planner.costs.schedules import SCHEDULES
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.published.accuracy import reference_nodes
from tools.planner.search.balance import balance
from tools.planner.search.book import Book
from tools.planner.search.methods import search
from tools.planner.search.outcome import Goal, Progress
from tools.planner.search.pools import all_gpus
from tools.planner.search.seeds import even_seeds
from tools.planner.simulate.simulation import block_s

SLIMPIPE = SCHEDULES["slimpipe"]


def _estimator(
    hidden: int = 2048, vocab: int = 32000, length: int = 8192, batch: int = 32, kinds: int = 1
) -> Estimator:
    nodes = (
        NodeGroup(gpu="A100-80", count=2, gpus_per_node=4, network_bytes_per_s=25e9),
        NodeGroup(gpu="H100-SXM", count=2, gpus_per_node=4, network_bytes_per_s=25e9),
    )
    model = Model(
        num_layers=24,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=16,
        vocab_size=vocab,
        seq_length=length,
        global_batch_size=batch,
        precision="bf16",
        distributed_optimizer=True,
    )
    return estimator_of(Cluster(nodes=nodes[:kinds]), model)


def _plain(stages: int, layers: int = 24, **more: object) -> Candidate:
    each = [layers // stages + (s < layers % stages) for s in range(stages)]
    return Candidate(tuple(Stage(n, (Group(0, 1, 1),)) for n in each), 1, zero_stage=1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 6, 7, 8])
def test_slimpipe_has_slices_for_every_number_of_stages(stages: int) -> None:
    estimator = _estimator()
    found = list(SLIMPIPE.variants(estimator, _plain(stages)))
    assert len(found) == 3
    for candidate in found:
        assert SLIMPIPE.runs(estimator, candidate)
        assert stages <= candidate.slices <= 8 * stages


def test_slices_that_do_not_divide_the_sequence_are_simulated() -> None:
    estimator = _estimator(length=8191, batch=4)
    candidate = next(iter(SLIMPIPE.variants(estimator, _plain(3))))
    estimate = estimator.estimate(candidate)
    assert candidate.slices == 3 and SLIMPIPE.runs(estimator, candidate) and estimate is not None
    assert block_s(estimator, candidate, estimate) == pytest.approx(estimate.iteration_s, rel=0.03)


def test_tp_ranks_share_slices_of_different_lengths() -> None:
    estimator = _estimator()
    model = estimator.model.model_copy(update={"sequence_parallel": True, "seq_length": 6144})
    shared = Estimator(estimator.cluster, model, estimator.costs)
    candidate = Candidate((Stage(12, (Group(0, 4, 1),)),) * 2, 1, schedule="slimpipe", slices=5, zero_stage=1)
    assert SLIMPIPE.runs(shared, candidate)
    odd = Estimator(estimator.cluster, model.model_copy(update={"seq_length": 6143}), estimator.costs)
    assert not SLIMPIPE.runs(odd, candidate)


@pytest.mark.parametrize(
    ("more", "error"),
    [({"schedule": "1f1b"}, 0.05), ({"schedule": "interleaved", "chunks": 2}, 0.03), ({"schedule": "slimpipe"}, 0.04)],
)
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_what_stages_wait_for_a_split_vocabulary(more: dict[str, object], error: float, slices: int) -> None:
    estimator, stages = _estimator(vocab=128256, length=4096, batch=16), 4
    cut = slices * stages if more["schedule"] == "slimpipe" else 1
    candidate = _plain(stages, rows=rows_of((1,) * stages, False), slices=cut, **more)
    estimate = estimator.estimate(candidate)
    assert estimate is not None
    assert block_s(estimator, candidate, estimate) == pytest.approx(estimate.iteration_s, rel=error)


def test_replicas_of_two_kinds_that_divide_alike_are_pipelines_of_their_own() -> None:
    estimator = _estimator(kinds=2, batch=64)
    candidate = Candidate((Stage(8, (Group(0, 2, 1), Group(1, 2, 1))),) * 3, 1, zero_stage=1)
    estimate = estimator.estimate(candidate)
    assert estimate is not None and len(set(estimate.microbatches)) == 1
    assert block_s(estimator, candidate, estimate) == pytest.approx(estimate.iteration_s, rel=0.02)


def test_layers_are_balanced_for_a_split_vocabulary_and_for_whole_experts() -> None:
    estimator = _estimator(vocab=256000)
    groups = ((Group(0, 2, 1),),) * 4
    whole = balance(estimator, groups, Candidate((), 1, zero_stage=1))
    split = balance(estimator, groups, Candidate((), 1, zero_stage=1, rows=((1.0, 1.0),), ep=8))
    assert whole is not None and split is not None
    assert whole.stages[-1].layers < 6 and [s.layers for s in split.stages] == [6] * 4
    assert split.rows == ((0.25, 0.25),) * 4 and split.ep == 2


def test_vocabularies_are_split_from_the_start_where_the_head_is_long() -> None:
    def seeds(vocab: int) -> list[Candidate]:
        estimator = _estimator(vocab=vocab)
        book = Book(estimator, Goal(), Progress())
        return [like for _, like in even_seeds(book, all_gpus(estimator), 50)]

    assert not any(like.rows for like in seeds(8192))
    assert any(like.rows for like in seeds(128256))


def test_the_search_is_no_worse_than_regular_plans() -> None:
    """Three nodes of 8 A100 and four of 4 L40S over 25 Gbit/s, Llama 3 8B with 8,192 tokens."""
    nodes = (
        NodeGroup(gpu="A100-40", count=3, gpus_per_node=8, network_bytes_per_s=3.125e9),
        NodeGroup(gpu="L40S", count=4, gpus_per_node=4, network_bytes_per_s=3.125e9),
    )
    model = Model(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128256,
        seq_length=8192,
        global_batch_size=256,
        distributed_optimizer=True,
    )
    estimator = estimator_of(Cluster(nodes=nodes), model)
    best = search("auto", estimator, Goal()).best
    assert best is not None
    assert best.iteration_s <= best_regular(estimator, Goal(), 2000)[0] * 1.01


def test_regular_plans_are_many() -> None:
    assert sum(1 for _ in regular_plans(_estimator(kinds=2))) > 4000


def _opt(*counts: tuple[str, int]) -> Estimator:
    return measured("OPT-350", Cluster(nodes=tuple(reference_nodes(gpu, n) for gpu, n in counts)), 256)


def test_more_gpus_never_make_the_cheapest_plan_dearer() -> None:
    goal, least = Goal(objective="cost", min_iterations_per_s=0.2), float("inf")
    for counts in ((("A100-40", 4),), (("A100-40", 13),), (("A100-40", 25), ("V100-16", 8))):
        best = search("auto", _opt(*counts), goal).best
        assert best is not None and best.iteration_s <= 5
        assert best.usd_per_iteration <= least * (1 + 1e-9)
        least = best.usd_per_iteration


def test_what_comes_nearest_to_a_budget_is_the_cheapest_plan() -> None:
    estimator = _opt(("A100-40", 4), ("V100-16", 4))
    best = search("auto", estimator, Goal(objective="cost")).best
    outcome = search("auto", estimator, Goal(max_usd_per_iteration=1e-4))
    assert best is not None and outcome.best is None and outcome.nearest is not None
    assert outcome.nearest[1].usd_per_iteration <= best.usd_per_iteration * 1.02
