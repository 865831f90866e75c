"""State moves between members of any cuts; the members are threads that talk over gloo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_het.elastic.copies import Copies, keepers_of
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.links import Links
from megatron_het.elastic.pieces import Piece, StateError
from megatron_het.elastic.state import Holdings, Snapshot, move

WHOLE = {"w": torch.arange(6 * 8, dtype=torch.float32).view(6, 8), "b": torch.arange(100.0, 110.0)}
Held = list[tuple[Piece, torch.Tensor]]


def together(size: int, work: Callable[[Links], Any]) -> list[Any]:
    """Run ``work`` on so many members at the same time; their results."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    found: list[Any] = [None] * size

    def member(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        links = Links(dist.PrefixStore("x", client), rank, size, 20.0)
        try:
            found[rank] = work(links)
        except Exception as error:
            found[rank] = error
        links.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return found


def piece(
    key: str, offset: tuple[int, ...], block: tuple[int, ...], start: int, stop: int
) -> tuple[Piece, torch.Tensor]:
    whole = WHOLE[key]
    cut = whole[tuple(slice(o, o + n) for o, n in zip(offset, block, strict=True))].reshape(-1)[start:stop]
    return Piece(key, "main", "float32", tuple(whole.shape), offset, block, start, stop), cut.clone()


# Tensor-parallel cuts of both dimensions, and of one of them the optimizer's shards.
BY_ROWS = [[piece("w", (0, 0), (3, 8), 0, 11), piece("b", (0,), (10,), 0, 10)],
           [piece("w", (0, 0), (3, 8), 11, 24), piece("b", (0,), (10,), 0, 10)],
           [piece("w", (3, 0), (3, 8), 0, 24)]]  # fmt: skip
BY_COLUMNS = [[piece("w", (0, 4), (6, 4), 0, 24)],
              [piece("w", (0, 0), (6, 4), 0, 13), piece("b", (0,), (10,), 0, 4)],
              [piece("w", (0, 0), (6, 4), 13, 24), piece("b", (0,), (10,), 4, 10)]]  # fmt: skip


def moved(links: Links, old: list[Held], new: list[Held]) -> Held:
    held = old[links.rank]
    needed = [(p, torch.full_like(tensor, -1.0)) for p, tensor in new[links.rank]]
    move(links, held, needed, Holdings([[p for p, _ in m] for m in old]), [[p for p, _ in m] for m in new])
    return needed


@pytest.mark.parametrize(
    ("old", "new"), [(BY_ROWS, BY_COLUMNS), (BY_COLUMNS, BY_ROWS), (BY_ROWS, [[], [], BY_ROWS[0]])]
)
def test_between_any_two_cuts(old: list[Held], new: list[Held]):
    for member, found in enumerate(together(3, lambda links: moved(links, old, new))):
        assert len(found) == len(new[member]), found
        for (_, tensor), (_, expected) in zip(found, new[member], strict=True):
            assert torch.equal(tensor, expected)


def test_what_nobody_holds_is_named():
    (error,) = together(1, lambda links: moved(links, [BY_ROWS[0]], [BY_COLUMNS[1]]))
    assert isinstance(error, StateError) and "w (main)" in str(error)


def test_receivers_begin_with_different_holders():
    everybody = [[piece("b", (0,), (10,), 0, 10)[0]]] * 4
    holdings = Holdings([*everybody, [], []])
    senders = [holdings.moves(receiver, everybody[0])[0][0].sender for receiver in range(6)]
    assert senders[:4] == [0, 1, 2, 3], "each takes its own"
    assert senders[4] != senders[5]


def test_keepers_are_on_other_nodes_and_differ():
    nodes = ["a", "a", "b", "b", "c"]
    keepers = keepers_of(nodes)
    assert all(nodes[keeper] != node for keeper, node in zip(keepers, nodes, strict=True) if keeper is not None)
    assert keepers[0] != keepers[1] and keepers[2] != keepers[3]
    assert keepers_of(["a", "a", "a"]) == [1, 2, 0] and keepers_of(["a"]) == [None]


def snapshot(rank: int, pieces: Held) -> Snapshot:
    return Snapshot(4, rank, "t", {"flops": 1.0}, {"w": {"step": 4.0}}, {}, pieces)


def test_a_copy_of_what_no_other_node_holds(monkeypatch: pytest.MonkeyPatch):
    """Rank 2's rows go to another node; the bias, which is on two nodes, stays where it is."""
    from megatron_het.elastic import copies
    from megatron_het.elastic.pieces import LocalState

    generation = Generation(0, None, (0, 1, 2), nodes=("a", "b", "b"))  # type: ignore[arg-type]
    states = [LocalState(list(held)) for held in BY_ROWS]
    monkeypatch.setattr(copies, "blocks_of", lambda *_: {})
    monkeypatch.setattr(copies, "collect", lambda models, *_, **_options: states[models])
    monkeypatch.setattr(copies, "described", lambda trainee, iteration, state, pieces: snapshot(trainee.models, pieces))

    class Session:
        def materialise_parameters(self) -> None:
            pass

    class Trainee:
        optimizer = args = None

        def __init__(self, rank: int) -> None:
            self.models = rank

    def keep(links: Links) -> Copies:
        own = Copies(every=2)
        own.open(generation, links.rank, links)
        for iteration in (3, 4):
            own.keep(Session(), Trainee(links.rank), iteration)  # type: ignore[arg-type]
        own.wait()
        return own

    found = together(3, keep)
    received = [[s for s in member.snapshots if s.rank != rank] for rank, member in enumerate(found)]
    assert [sorted(s.rank for s in member) for member in received] == [[1, 2], [0], []]
    (copy,) = (s for s in received[0] if s.rank == 2)
    assert [p for p, _ in copy.pieces] == [BY_ROWS[2][0][0]]
    assert torch.equal(copy.pieces[0][1], BY_ROWS[2][0][1])
    (other,) = (s for s in received[0] if s.rank == 1)
    assert {p.key for p, _ in other.pieces} == {"w"}
