"""Real transfers over gloo, between two threads: what the log of both ends says of waiting and of a slow wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.slow_links import SlowLink
from megatron_het.distributed import Link
from megatron_het.report.timeline import TransferLog
from megatron_het.runtime import channels as channels_module
from megatron_het.runtime.channels import Channels
from megatron_het.watch.monitor import Sample, moved

_LATE_S, _WIRE_S = 0.4, 0.3


def _both(step: Callable[[int], Any]) -> list[Any]:
    """The same step on both sides, each in a thread."""
    with ThreadPoolExecutor(2) as pool:
        return [done.result(timeout=60) for done in [pool.submit(step, rank) for rank in range(2)]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Channels]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    groups = _both(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30)))
    direct = SimpleNamespace(
        isend=lambda tensor, dst, group, tag: group.send([tensor], dst, tag),
        irecv=lambda tensor, src, group, tag: group.recv([tensor], src, tag),
    )
    monkeypatch.setattr(channels_module, "dist", direct)
    made = []
    for rank, group in enumerate(groups):
        made.append(Channels({(0, 1): Link(group, 0), (1, 0): Link(group, 0)}, "gloo", 30.0, rank))
        made[-1].log = TransferLog()
    return made


def _sample(ends: list[Channels], rank: int) -> Sample:
    log = ends[rank].log
    assert log is not None
    departures, arrivals = log.take()
    received = [(a.posted, a.waited, a.ended) for a in arrivals]
    peer = 1 - rank
    return Sample(1, 1.0, {}, {peer: [d.posted for d in departures]}, {peer: received}, {peer: len(received)})


def _one_message(ends: list[Channels]) -> tuple[float, float]:
    """Rank 0 posts a message some time after rank 1 waits for it: seconds of the transfer, and of the wait."""
    about_to_wait = threading.Event()

    def side(rank: int) -> None:
        if rank == 1:
            target = torch.zeros(1000)
            pending = ends[1].receive(target, 0, "a receive")
            threading.Timer(_LATE_S / 2, about_to_wait.set).start()
            ends[1].wait_receive(pending)
            assert target.eq(7.0).all()
        else:
            about_to_wait.wait(30)
            time.sleep(_LATE_S)
            ends[0].send(torch.full((1000,), 7.0), 1, "a send")
            ends[0].wait_sends()

    _both(side)
    samples = {rank: _sample(ends, rank) for rank in range(2)}
    ((_, waited, ended),) = samples[1].received[0]
    return moved(samples, {0: "here", 1: "here"})[0, 1].seconds, ended - waited


def test_waiting_for_a_late_sender_is_not_a_slow_link(ends: list[Channels]) -> None:
    link_s, waited_s = _one_message(ends)
    assert waited_s >= _LATE_S
    assert link_s <= waited_s - _LATE_S


def test_a_slow_wire_is_a_slow_link(ends: list[Channels], monkeypatch: pytest.MonkeyPatch) -> None:
    wire = SlowLink(latency_s=_WIRE_S)
    isend = channels_module.dist.isend
    monkeypatch.setattr(
        channels_module.dist,
        "isend",
        lambda tensor, dst, group, tag: wire.send(lambda: isend(tensor, dst, group=group, tag=tag)),
    )
    link_s, waited_s = _one_message(ends)
    # The wire counts from the call, the sample from what comes after it: a busy machine may be in between.
    assert link_s >= 0.9 * _WIRE_S
    assert waited_s >= _LATE_S + 0.9 * _WIRE_S
