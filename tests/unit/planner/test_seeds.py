"""Starting points of the search: replicas in proportion to layers, TP by memory, stages of equal width."""

import gc

import pytest

from testing.planner_cases import estimator_of
from tools.planner.costs.candidate import Candidate, Group
from tools.planner.costs.estimate import Estimator
from tools.planner.inputs.cluster import Cluster, NodeGroup
from tools.planner.inputs.model import Model
from tools.planner.search import seeds as seeds_module
from tools.planner.search import thorough as thorough_module
from tools.planner.search.book import Book, there
from tools.planner.search.effort import NORMAL
from tools.planner.search.limit import collector_paused
from tools.planner.search.outcome import Goal, Progress
from tools.planner.search.pools import all_gpus
from tools.planner.search.seeds import _Cut, even_seeds, tp_choices

POINT = Candidate((), 1, "none", zero_stage=1)


def fast_and_small(hidden: int = 2048) -> Estimator:
    """Twelve H200 in two nodes, and 16 V100 with a ninth of their memory."""
    nodes = (
        NodeGroup(gpu="H200", count=2, gpus_per_node=6, network_bytes_per_s=25e9),
        NodeGroup(gpu="V100-16", count=4, gpus_per_node=4, network_bytes_per_s=12.5e9),
    )
    model = Model(
        num_layers=12,
        hidden_size=hidden,
        ffn_hidden_size=3 * hidden,
        num_attention_heads=16,
        vocab_size=32000,
        seq_length=1024,
        global_batch_size=64,
        precision="fp16",
        distributed_optimizer=True,
        micro_batch_sizes=(1, 2),
    )
    return estimator_of(Cluster(nodes=nodes), model)


def test_replicas_follow_layers():
    """Seven layers in three stages get replicas as 3 : 2 : 2, where equal stages would get as many each."""
    estimator = fast_and_small()
    cut = _Cut(estimator, [(0,)], {0: 1}, 1.0, POINT, (12, 0))
    groups = cut.fitted(3, 7)
    assert groups is not None
    assert [[g.count for g in stage] for stage in groups] == [[5], [3], [4]]
    assert cut.fitted(13, 12) is None  # more stages than layers


def test_blocks_get_layers_by_speed():
    """All replicas of both kinds are used, and a slow block of many replicas has few layers."""
    estimator = fast_and_small()
    groups = _Cut(estimator, [(0,), (1,)], {0: 1, 1: 1}, 1.0, POINT, (12, 16)).fitted(5, 12)
    assert groups is not None and len(groups) == 5
    assert sum(g.count for stage in groups for g in stage if g.pool == 0) == 12
    assert sum(g.count for stage in groups for g in stage if g.pool == 1) == 16
    assert sum(stage[0].pool == 0 for stage in groups) > sum(stage[0].pool == 1 for stage in groups)


def test_little_memory_gets_a_larger_tp_size():
    estimator = fast_and_small(8192)
    mixed = tp_choices(estimator, (0, 1), POINT, mixed=True)
    assert any(choice[1] > choice[0] for choice in mixed)
    assert not any(choice[1] > choice[0] for choice in tp_choices(estimator, (0, 1), POINT, mixed=False))


def test_even_stages_fill_nodes():
    """Six replicas, a node's, are no power of two; nothing that must be slower than the best is there."""
    estimator = fast_and_small()
    book = Book(estimator, Goal(), Progress())
    found = list(even_seeds(book, all_gpus(estimator), 1000))
    assert any(len(groups) == 2 and groups[0][0] == Group(0, 1, 6) for groups, _ in found)
    for groups, _ in found:
        assert len({stage[0].count for stage in groups}) == 1 and all(len(stage) == 1 for stage in groups)
        assert there(estimator, all_gpus(estimator), groups)
    few = list(even_seeds(book, all_gpus(estimator), 10))
    assert len(few) >= 10 and few == found[: len(few)]
    book.bound = 1e-9
    assert not list(even_seeds(book, all_gpus(estimator), 1000))


def test_even_stages_of_several_pools():
    """As many stages of each pool as its GPUs give, with TP sizes of their own, the slower replicas first."""
    estimator = fast_and_small()
    found = [groups for groups, _ in even_seeds(Book(estimator, Goal(), Progress()), all_gpus(estimator), 10_000)]
    assert ((Group(1, 2, 2),),) * 4 + ((Group(0, 1, 2),),) * 6 in found
    assert ((Group(1, 1, 4),),) * 4 + ((Group(0, 1, 4),),) * 3 in found
    assert max(len(groups) for groups in found) <= 12  # layers
    alone = [groups for groups, _ in even_seeds(Book(estimator, Goal(), Progress()), (12, 0), 10_000)]
    assert {stage[0].pool for groups in alone for stage in groups} == {0}


def test_even_stages_of_many_pools_share_a_tp_size(monkeypatch: pytest.MonkeyPatch):
    """Not every choice of TP sizes is looked at there."""
    estimator = fast_and_small()

    def sizes() -> set[tuple[tuple[int, int], ...]]:
        found = even_seeds(Book(estimator, Goal(), Progress()), all_gpus(estimator), 10_000)
        return {tuple(sorted({(s[0].pool, s[0].tp) for s in groups})) for groups, _ in found}

    some = sizes()
    monkeypatch.setattr(seeds_module, "MOST_COMBINED", 1)
    fewer = sizes()
    assert ((0, 2), (1, 2)) in fewer and ((0, 2), (1, 1)) not in fewer
    assert fewer < some


def test_a_second_climb_goes_where_the_first_has_been(monkeypatch: pytest.MonkeyPatch):
    estimator = fast_and_small()
    book, limits = Book(estimator, Goal(), Progress()), all_gpus(estimator)
    groups, like = next(even_seeds(book, limits, 1))
    _, start = book.try_groups(groups, like)
    assert start is not None
    first = thorough_module._climb(book, NORMAL, start, limits)
    assert book.try_candidate(first) < book.try_candidate(start)

    def nobody(*_: object) -> None:
        raise AssertionError("looked at again")

    monkeypatch.setattr(thorough_module, "_better", nobody)
    assert thorough_module._climb(book, NORMAL, start, limits) == first


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_before(on: bool):
    (gc.enable if on else gc.disable)()
    try:
        with pytest.raises(KeyboardInterrupt), collector_paused():
            assert not gc.isenabled()
            raise KeyboardInterrupt
        assert gc.isenabled() == on
    finally:
        gc.enable()
