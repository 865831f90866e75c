"""A copy that fails holds nobody; all ranks copy at the same pace."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_het.elastic.copies import Copies, Cost
from megatron_het.elastic.links import Links
from megatron_het.elastic.state import Snapshot

TIMEOUT_S, SOON_S = 600.0, 100.0


def together(*calls: Any) -> list[Any]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    return [thread.is_alive() for thread in threads]


def test_nobody_waits_for_a_rank_whose_copy_failed():
    store, links = dist.HashStore(), {}

    def connect(rank: int) -> None:
        links[rank] = Links(store, rank, 4, TIMEOUT_S)

    assert not any(together(*(lambda r=rank: connect(r) for rank in range(4))))
    generation: Any = SimpleNamespace(nodes=("a", "b", "c", "d"))
    copies = {rank: Copies(1) for rank in (0, 1, 3)}
    for rank, mine in copies.items():
        mine.open(generation, rank, links[rank])
    links.pop(2).close()  # rank 1 gives to it, rank 3 takes from it; rank 0 takes from rank 3
    snapshot: Any = Snapshot(1, 0, "", {}, {}, {})
    block: Any = None
    alive = together(
        *(lambda m=m, r=r: m._exchange(links[r], snapshot, block, 0, Cost(0.0)) for r, m in copies.items())
    )
    assert not any(alive)


def test_ranks_agree_on_the_pace_of_the_slowest(capsys: pytest.CaptureFixture[str]):
    store = dist.HashStore()
    copies = [Copies(None), Copies(None)]
    generation: Any = SimpleNamespace(nodes=("a", "b"))

    def agree(rank: int) -> None:
        mine = copies[rank]
        mine.open(generation, rank, Links(store, rank, 2, TIMEOUT_S))
        for _ in range(4):
            mine.pace.left(0.0)
            mine.pace.arrived(1.0)
            mine.pace.copied(Cost(0.01 if rank else 0.2))
            mine._agree([], False)

    assert not any(together(*(lambda r=rank: agree(r) for rank in range(2))))
    assert [mine.pace.every for mine in copies] == [7, 7]
    said = capsys.readouterr().out
    assert said.count("copies of the state in memory: after every 7 iterations (here a copy takes") == 1
