"""Waits for processes that are known to be lost end at once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_het.elastic.board import Board, ServedBoard
from megatron_het.elastic.links import Links
from megatron_het.elastic.meeting import BoardStore, LostError, MeetingStore
from megatron_het.store import StoreError

LONG_S, SOON_S = 600.0, 100.0


def test_a_wait_ends_when_somebody_is_lost():
    shared = dist.HashStore()
    store = MeetingStore(shared, "here", "lost", LONG_S)
    store.set("here", b"1")
    store.wait(["here"])
    threading.Timer(0.1, shared.set, ("lost", "b")).start()
    start_s = time.monotonic()
    with pytest.raises(LostError, match="process of this generation is lost"):
        store.get("never")
    assert time.monotonic() - start_s < SOON_S
    assert store.get("here") == b"1", "what is there is given all the same"


def test_a_wait_is_bounded():
    store = MeetingStore(dist.HashStore(), "here", "lost", LONG_S)
    with pytest.raises(RuntimeError, match=r"never did not come within 0\.05 s"):
        store.wait(["never"], timedelta(seconds=0.05))


def test_connections_are_not_waited_for_when_a_member_has_died():
    shared, errors = dist.HashStore(), []

    def connect() -> None:
        try:
            Links(MeetingStore(shared, "here", "lost", LONG_S), 0, 2, LONG_S)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    shared.set("lost", "the other member")
    thread.join(SOON_S)
    assert not thread.is_alive() and "is lost" in str(errors)


def test_the_watch_drops_a_sample_where_nobody_answers():
    asked: list[Any] = []

    class Away:
        def ask(self, *request: Any, **_: Any) -> Any:
            asked.append(request)
            raise StoreError("away")

    board: Any = Away()
    store = BoardStore(board)
    for _ in range(3):
        store.set("0/world/het/watch/x", "1")
        assert not store.check(["0/world/het/watch/x"])
        store._away_until_s = time.monotonic() + LONG_S
    assert len(asked) < 3, "and asks no more for a while"
    with pytest.raises(StoreError):
        store.set("0/world/other", "1")


def test_a_store_over_the_board_does_what_torchs_own_does():
    board = ServedBoard("127.0.0.1", 0, "0123456789abcdef")
    board.open()
    own = BoardStore(Board("127.0.0.1", board.port, "0123456789abcdef"))
    over = dist.PrefixStore("x", own)
    for store in (over, dist.HashStore()):
        store.set("a", b"\x00\xff")
        assert store.get("a") == b"\x00\xff" and store.check(["a"]) and not store.check(["a", "b"])
        assert store.add("n", 2) == 2 and store.get("n") == b"2"
        assert store.compare_set("a", "y", "z") == b"\x00\xff" and store.compare_set("new", "", "z") == b"z"
        assert list(store.multi_get(["a", "n"])) == [b"\x00\xff", b"2"]
    board.close()
