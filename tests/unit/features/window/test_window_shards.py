"""Divisions of a bucket: which collective gets which parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_het.features.window.shards import Parts, UnequalParts, parts_of, set_shares, shares_of
from testing.groups import Group

SHARES = (0.5, 0.0, 0.25, 0.25)
RANKS = [3, 5, 6, 9]


class _Work:
    def __init__(self) -> None:
        self.waited, self.done = 0, False

    def wait(self) -> None:
        self.waited += 1

    def is_completed(self) -> bool:
        return self.done


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Collectives are recorded instead of run."""
    made: list[tuple[Any, ...]] = []

    def recording(name: str) -> Any:
        def collective(*positional: Any, group: Any, async_op: bool) -> _Work:
            assert async_op
            work = _Work()
            made.append((name, *positional, work))
            return work

        return collective

    for name in ("broadcast", "reduce", "all_gather", "reduce_scatter"):
        monkeypatch.setattr(dist, name, recording(name))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: RANKS)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    return made


def parts(backend: str, rank: int) -> UnequalParts:
    group: Any = Group(len(RANKS), rank)
    group.backend = backend
    return UnequalParts(group, SHARES)


@pytest.mark.parametrize(("rank", "start", "stop"), [(0, 0, 512), (1, 512, 512), (2, 512, 768), (3, 768, 1024)])
def test_own_part_is_a_view(calls: list[Any], rank: int, start: int, stop: int) -> None:
    whole = torch.arange(1024.0)
    own = parts("gloo", rank).own(whole)
    assert torch.equal(own, whole[start:stop])
    own += 1
    assert torch.equal(own, whole[start:stop])


def test_on_gloo_every_owner_of_something_sends_or_receives_its_part(calls: list[Any]) -> None:
    whole, part = torch.zeros(1024), torch.ones(256)
    gathering = parts("gloo", 2).gather(whole, part)
    assert [(name, t.numel(), owner) for name, t, owner, _ in calls] == [
        ("broadcast", 512, 3),
        ("broadcast", 256, 6),
        ("broadcast", 256, 9),
    ]
    assert whole.nonzero().flatten().tolist() == list(range(512, 768))  # what this rank sends
    works = [call[-1] for call in calls]
    works[0].done = works[1].done = True
    assert not gathering.is_completed()
    works[2].done = True
    assert gathering.is_completed()
    gathering.wait()
    assert [work.waited for work in works] == [1, 1, 1]
    calls.clear()
    parts("gloo", 2).reduce(whole)
    assert [(name, t.numel(), owner) for name, t, owner, _ in calls] == [
        ("reduce", 512, 3),
        ("reduce", 256, 6),
        ("reduce", 256, 9),
    ]


def test_on_nccl_one_grouped_collective_fills_and_sums_in_place(calls: list[Any]) -> None:
    whole, part = torch.zeros(1024), torch.ones(0)
    parts("nccl", 1).gather(whole, part)
    ((name, lists, sent, _),) = calls
    assert name == "all_gather" and sent is part
    assert [t.numel() for t in lists] == [512, 0, 256, 256]
    assert [t.storage_offset() for t in lists] == [0, 512, 512, 768]
    assert all(t.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for t in lists)
    calls.clear()
    parts("nccl", 3).reduce(whole)
    ((name, into, lists, _),) = calls
    assert name == "reduce_scatter" and into.data_ptr() == whole[768:].data_ptr()
    assert [t.numel() for t in lists] == [512, 0, 256, 256]


def test_shares_must_be_those_of_the_group(calls: list[Any]) -> None:
    group: Any = Group(len(RANKS))
    group.backend = "gloo"
    with pytest.raises(ValueError, match="2 shares for a group of 4 ranks"):
        UnequalParts(group, (0.5, 0.5))


def test_buffers_are_divided_equally_unless_told_otherwise(calls: list[Any]) -> None:
    group: Any = Group(len(RANKS))
    group.backend = "gloo"
    buffers = [SimpleNamespace(), SimpleNamespace()]
    chunks = [SimpleNamespace(buffers=found, expert_parallel_buffers=[SimpleNamespace()]) for found in (buffers, [])]
    assert set_shares(chunks, None, None) is chunks
    assert shares_of(buffers[0]) is None and type(parts_of(buffers, group)) is Parts
    set_shares(chunks, SHARES, SHARES[::-1])
    assert [shares_of(chunk.expert_parallel_buffers[0]) for chunk in chunks] == [SHARES[::-1]] * 2
    assert shares_of(buffers[1]) == SHARES and isinstance(parts_of(buffers, group), UnequalParts)
    assert type(parts_of([], group)) is Parts  # a ministage without layers
