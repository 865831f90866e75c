"""Who does not answer is named on every rank."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_het.runtime import training as roll_call
from megatron_het.runtime.session import HetSession
from megatron_het.runtime.training import RollCall
from testing.threads import at_once

LONG_S = 60.0


class Clock:
    """Stands still until some ranks have answered; then the caller has waited long enough, and the others have not.

    A busy machine may take seconds for an answer, so that no time by the clock says who is silent.
    """

    def __init__(self, store: dist.TCPStore, present: Sequence[int]) -> None:
        self._store, self._present = store.clone(), present
        self.sleep = roll_call.time.sleep

    def monotonic(self) -> float:
        # One of those who are present has called, and answers to nobody.
        answers = sum(self._store.check([f"het/here/{rank}"]) for rank in self._present)
        return 1.5 * LONG_S if answers >= len(self._present) - 1 else 0.0


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_silent_rank_is_named_on_all_others(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0, 1 and 3 listen; rank 2 has gone."""
    monkeypatch.setattr(roll_call, "time", Clock(store, (0, 1, 3)))
    present = {rank: RollCall(store, rank, 4, answer_s=LONG_S) for rank in (0, 1, 3)}
    said: dict[int, str] = {}
    at_once(*(lambda rank=rank, call=call: said.update({rank: call.verdict()}) for rank, call in present.items()))
    assert set(said) == {0, 1, 3} and len(set(said.values())) == 1
    assert said[0].startswith("rank 2 does not answer")


def test_a_rank_that_fails_later_knows_what_was_found(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "time", Clock(store, (0, 1)))
    calls = [RollCall(store, rank, 3, answer_s=LONG_S) for rank in range(2)]
    assert calls[1].verdict().startswith("rank 2 does not answer")
    calls[0]._store = None  # the store is out of reach by now
    calls[0]._thread.join(timeout=LONG_S)
    assert calls[0].verdict() == calls[1].verdict()


def test_all_answer(store: dist.TCPStore) -> None:
    calls = [RollCall(store, rank, 3, answer_s=LONG_S) for rank in range(3)]
    assert "all ranks answer" in calls[2].verdict()


def test_without_a_store_rank_0_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    call = RollCall(client, 1, 2, answer_s=0.5)
    del store
    assert "rank 0 has probably stopped" in call.verdict()


def test_closing_ends_the_thread(store: dist.TCPStore) -> None:
    call = RollCall(store, 0, 1, answer_s=LONG_S)
    call.close()
    assert not call._thread.is_alive()


class Groups(dict[str, Any]):
    """Of rank 1, by role: the ranks of each."""

    rank = 1


@pytest.mark.parametrize(
    ("error", "roles", "note"),
    [
        (
            RuntimeError("Connection closed"),
            ("tp", "stage"),
            "F3 failed; in collectives it works with rank 0, rank 2. If",
        ),
        (RuntimeError("Connection closed"), (), "F3 failed; in collectives it works with all ranks. If"),
        (RuntimeError("shapes differ"), ("tp",), "F3 failed"),
        (torch.OutOfMemoryError("out of memory"), ("stage",), "F3 failed"),
    ],
)
def test_peers_are_named_where_they_may_be_the_cause(
    error: RuntimeError, roles: tuple[str, ...], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda ranks: ranks)
    session: Any = SimpleNamespace(groups=Groups(tp=[1], stage=[0, 1, 2]))
    with pytest.raises(RuntimeError) as raised, HetSession.explained(session, lambda: "F3", *roles):
        raise error
    (found,) = raised.value.__notes__
    assert found.startswith(f"het: rank 1: {note}")
    assert ("collectives" in found) == ("collectives" in note)
