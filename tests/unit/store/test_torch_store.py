"""Waits for processes that are known to be lost end at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_het.elastic.links import Links
from megatron_het.store import Store, StoreServer
from megatron_het.store.torch_store import LostError, TorchStore

LONG_S, SOON_S = 600.0, 100.0
TOKEN = "0123456789abcdef"


@pytest.fixture
def shared() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1", 0, TOKEN)
    server.start()
    yield server
    server.close()


def test_a_wait_ends_when_somebody_is_lost(shared: StoreServer) -> None:
    store = TorchStore(shared, LONG_S, name="here", lost="lost")
    store.set("here", b"1")
    store.wait(["here"])
    threading.Timer(0.1, shared.put, ("lost", "b")).start()
    start_s = time.monotonic()
    with pytest.raises(LostError, match="process of this generation is lost"):
        store.get("never")
    assert time.monotonic() - start_s < SOON_S
    assert store.get("here") == b"1", "what is there is given all the same"


def test_a_wait_is_bounded(shared: StoreServer) -> None:
    store = TorchStore(shared, LONG_S, name="here", lost="lost")
    with pytest.raises(RuntimeError, match=r"never did not come within 0\.05 s"):
        store.wait(["never"], timedelta(seconds=0.05))


def test_connections_are_not_waited_for_when_a_member_has_died(shared: StoreServer) -> None:
    errors = []

    def connect() -> None:
        try:
            Links(TorchStore(shared, LONG_S, name="here", lost="lost"), 0, 2, LONG_S)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    shared.put("lost", "the other member")
    thread.join(SOON_S)
    assert not thread.is_alive() and "is lost" in str(errors)


def test_a_store_over_the_jobs_own_does_what_torchs_own_does(shared: StoreServer) -> None:
    own = TorchStore(Store(lambda: [("127.0.0.1", shared.port)], TOKEN, LONG_S), LONG_S)
    over = dist.PrefixStore("x", own)
    for store in (over.clone(), dist.HashStore()):
        store.set("a", b"\x00\xff")
        assert store.get("a") == b"\x00\xff" and store.check(["a"]) and not store.check(["a", "b"])
        assert store.add("n", 2) == 2 and store.get("n") == b"2"
        assert store.compare_set("a", "y", "z") == b"\x00\xff" and store.compare_set("new", "", "z") == b"z"
        assert list(store.multi_get(["a", "n"])) == [b"\x00\xff", b"2"]
