"""The order in which groups of two are created, and who shares one."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.distributed import PairGroups, in_rounds, sparing_groups_of_one
from megatron_het.distributed import groups as creation
from megatron_het.distributed import groups as pairs

EDGES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda e: e[0] != e[1]), max_size=40)


@given(EDGES)
def test_no_rank_has_two_edges_of_a_round_and_rounds_are_few(edges: list[tuple[int, int]]) -> None:
    found = in_rounds(edges)
    assert sorted(edge for _, edge in found) == sorted(set(edges))
    busy = Counter((number, rank) for number, edge in found for rank in edge)
    assert set(busy.values()) <= {1}
    most = max(Counter(rank for edge in set(edges) for rank in edge).values(), default=1)
    assert max((number for number, _ in found), default=0) < 2 * most


@given(EDGES)
def test_creating_in_rounds_ends(edges: list[tuple[int, int]]) -> None:
    """Every rank makes its next edge when the other one does; nobody is left in the end."""
    order = [edge for _, edge in in_rounds(edges)]
    left = {rank: [edge for edge in order if rank in edge] for rank in range(12)}
    while any(left.values()):
        ready = [e for e in order if all(left[rank] and left[rank][0] == e for rank in e)]
        assert ready
        for edge in ready:
            for rank in edge:
                left[rank].pop(0)


def test_a_pipeline_is_connected_in_two_rounds() -> None:
    assert {number for number, _ in in_rounds((k, k + 1) for k in range(100))} == {0, 1}


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], str]]:
    found: list[tuple[str, tuple[int, ...], str]] = []

    def create(role: str, ranks: Any, backend: str, _timeout_s: float) -> Any:
        found.append((role, tuple(ranks), backend))
        return SimpleNamespace(role=role)

    monkeypatch.setattr(pairs, "create_group", create)
    monkeypatch.setattr(PairGroups, "_move_one", lambda *_: None)
    return found


BOTH_WAYS = [(0, 1), (1, 0), (1, 2), (2, 1), (3, 4)]


def test_two_ranks_share_one_gloo_group_for_everything(created: list[Any]) -> None:
    groups = PairGroups(1, 1.0)
    first = groups.connect(BOTH_WAYS, "gloo", "transfers", one_order=True)
    second = groups.connect([(0, 1), (1, 3)], "gloo", "tokens", one_order=False)
    assert [ranks for _, ranks, _ in created] == [(0, 1), (1, 2), (1, 3)] and len(groups) == 3
    assert set(first) == {(0, 1), (1, 0), (1, 2), (2, 1)} and set(second) == {(0, 1), (1, 3)}
    assert first[0, 1].group is first[1, 0].group is second[0, 1].group
    assert first[0, 1].tag == first[1, 0].tag != second[0, 1].tag


def test_nccl_groups_are_shared_by_directions_of_one_order_only(created: list[Any]) -> None:
    groups = PairGroups(1, 1.0)
    joined = groups.connect(BOTH_WAYS, "nccl", "transfers", one_order=True)
    apart = groups.connect(BOTH_WAYS, "nccl", "parts", one_order=False)
    assert joined[0, 1].group is joined[1, 0].group
    assert len({id(link.group) for link in apart.values()}) == 4 and len(groups) == 6
    assert len(created) == len(set(created)), "names of groups are told apart"
    with pytest.raises(ValueError, match="already"):
        groups.connect([], "nccl", "parts", one_order=False)


def test_names_are_those_of_the_members() -> None:
    name = creation.group_name("stage.gloo", range(0, 1024, 2))
    assert name == creation.group_name("stage.gloo", tuple(range(0, 1024, 2))) and len(name) < 50
    assert name != creation.group_name("stage.gloo", range(0, 1024, 2)[:-1])
    assert name != creation.group_name("class.gloo", range(0, 1024, 2))


def test_collectives_of_one_rank_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *_a, name=name, **_n: made.append(name))
    alone, before, some = dist.ProcessGroup(0, 1), dist.all_reduce, torch.ones(1)
    with sparing_groups_of_one():
        dist.all_reduce(some, dist.ReduceOp.SUM, alone)
        dist.broadcast(some, 0, group=alone)
        dist.all_reduce(some, group=alone, async_op=True)  # somebody waits for what it returns
        dist.all_reduce(some, group=dist.ProcessGroup(0, 2))
    assert made == ["all_reduce", "all_reduce"] and dist.all_reduce is before
