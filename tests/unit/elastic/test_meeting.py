"""Waits for processes that are known to be lost end at once."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_het.elastic.links import Links
from megatron_het.elastic.meeting import LostError, MeetingStore

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
