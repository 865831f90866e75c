"""Who does not answer is named on every rank."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron_het.runtime.roll_call import RollCall


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_silent_rank_is_named_on_all_others(store: dist.TCPStore) -> None:
    """Ranks 0, 1 and 3 listen; rank 2 has gone."""
    present = {rank: RollCall(store, rank, 4, answer_s=1.0) for rank in (0, 1, 3)}
    said: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda rank=rank, call=call: said.update({rank: call.verdict()}))
        for rank, call in present.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert set(said) == {0, 1, 3} and len(set(said.values())) == 1
    assert said[0].startswith("rank 2 does not answer")


def test_a_rank_that_fails_later_knows_what_was_found(store: dist.TCPStore) -> None:
    calls = [RollCall(store, rank, 3, answer_s=0.5) for rank in range(2)]
    assert calls[1].verdict().startswith("rank 2 does not answer")
    calls[0]._store = None  # the store is out of reach by now
    calls[0]._thread.join(timeout=5)
    assert calls[0].verdict() == calls[1].verdict()


def test_all_answer(store: dist.TCPStore) -> None:
    calls = [RollCall(store, rank, 3, answer_s=1.0) for rank in range(3)]
    assert "all ranks answer" in calls[2].verdict()


def test_without_a_store_rank_0_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    call = RollCall(client, 1, 2, answer_s=0.5)
    del store
    assert "rank 0 has probably stopped" in call.verdict()


def test_closing_ends_the_thread(store: dist.TCPStore) -> None:
    call = RollCall(store, 0, 1)
    call.close()
    assert not call._thread.is_alive()
