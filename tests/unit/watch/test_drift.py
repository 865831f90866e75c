"""What drifted is named, whatever else is noisy: devices, single operations, links, figures of a whole kind."""

import random
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

from benchmarks.drift_stand_ins import SlowLink
from megatron_het.distributed import Link
from megatron_het.features.watch.drift import DriftWatch, Finding, Subject, lower_median
from megatron_het.features.watch.monitor import moved
from megatron_het.features.watch.samples import MOST_TRANSFERS, PLACES, Board, Hello, Sample, spread
from megatron_het.report import TransferLog
from megatron_het.runtime import channels as channels_module
from megatron_het.runtime.channels import Channels
from tests.unit.store.memory import MemoryStore

_OPERATIONS = {"FORWARD": 0.10, "BACKWARD": 0.20}


def _devices(*kinds: str) -> list[Subject]:
    return [Subject(f"rank {i}", "device", kind, _OPERATIONS) for i, kind in enumerate(kinds)]


def _link() -> Subject:
    return Subject("rank 0 -> rank 1", "link", "a -> a", {"transfer": 0.002}, ends=("rank 0", "rank 1"))


Figures = Callable[[int, int, str], float]  # (iteration, device, operation) -> measured over predicted


def _follow(
    watch: DriftWatch, devices: int, figures: Figures, transfer: Callable[[int], float], until: int = 40
) -> list[Finding]:
    draw = random.Random(1)
    found = []
    for iteration in range(1, until + 1):
        rows = {
            f"rank {d}": {
                op: seconds * figures(iteration, d, op) * draw.uniform(0.97, 1.03)
                for op, seconds in _OPERATIONS.items()
            }
            for d in range(devices)
        }
        found += watch.add(iteration, 0.4, rows, {"rank 0 -> rank 1": (transfer(iteration), 8.0)})
    return found


def _planned_s(_iteration: int) -> float:
    return 0.002


CASES: dict[str, tuple[str, Figures, Callable[[int], float], list[tuple[Any, ...]]]] = {
    "all is as planned": ("aab", lambda i, d, op: 1.0, _planned_s, []),
    "the only device of its kind": (
        "ab",
        lambda i, d, op: 1.5 if d == 1 and i >= 20 else 1.0,
        _planned_s,
        [("device", "rank 1")],
    ),
    "a single long iteration": ("ab", lambda i, d, op: 9.0 if i % 10 == 9 else 1.0, _planned_s, []),
    "one kind of operation on one device": (
        "aaa",
        lambda i, d, op: 1.6 if (d, op) == (2, "BACKWARD") and i >= 15 else 1.0,
        _planned_s,
        [("operation", "rank 2", "BACKWARD")],
    ),
    "a wrong profile of a kind and an operation": (
        "aab",
        lambda i, d, op: 1.5 if op == "BACKWARD" and d < 2 else 1.0,
        _planned_s,
        [("profile", "a", "BACKWARD", 0)],
    ),
    "a device that is slow from the start": (
        "aaa",
        lambda i, d, op: 2.0 if d == 1 else 1.0,
        _planned_s,
        [("device", "rank 1", "", 0)],
    ),
    "all devices of a kind slow down together": (
        "aab",
        lambda i, d, op: 1.5 if d < 2 and i >= 20 else 1.0,
        _planned_s,
        [("profile", "a")],
    ),
    "a slow link": (
        "aa",
        lambda i, d, op: 1.0,
        lambda i: 0.02 if i >= 20 else 0.002,
        [("link", "rank 0 -> rank 1", "", 20)],
    ),
    "a link to a slow device, whose window is full before that of the device": (
        "aa",
        lambda i, d, op: 2.0 if d == 1 and i >= 20 else 1.0,
        lambda i: 0.02 if i >= 19 else 0.002,
        [("device", "rank 1")],
    ),
    "a link that costs next to nothing": ("aa", lambda i, d, op: 1.0, lambda i: 0.003 if i >= 20 else 0.002, []),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_found(case: str) -> None:
    kinds, figures, transfer, expected = CASES[case]
    found = _follow(DriftWatch([*_devices(*kinds), _link()]), len(kinds), figures, transfer)
    said = [(f.what, f.name, f.operation, f.since) for f in found]
    assert [one[: len(wanted)] for one, wanted in zip(said, expected, strict=True)] == expected


def test_a_device_that_slows_down_is_named_within_few_iterations() -> None:
    watch = DriftWatch([*_devices("a", "a", "b"), _link()])
    (found,) = _follow(watch, 3, lambda i, d, op: 2.0 if d == 1 and i >= 20 else 1.0, _planned_s)
    assert (found.what, found.name) == ("device", "rank 1")
    assert found.since == 20 and found.found <= 23
    assert 1.9 < found.factor < 2.1
    assert "rank 1" in found.text() and "since iteration 20" in found.text()


def test_a_drift_that_ends_is_over() -> None:
    watch = DriftWatch([*_devices("a", "b"), _link()])
    found = _follow(watch, 2, lambda i, d, op: 1.5 if d == 1 and 15 <= i < 25 else 1.0, _planned_s)
    assert [f.name for f in found] == ["rank 1", "rank 1"] and found[0] is found[1]
    assert found[1].ended is not None and 25 <= found[1].ended <= 30
    assert not watch.active


def test_a_wrong_profile_of_all_operations_and_a_slow_device_are_told_apart() -> None:
    watch = DriftWatch([*_devices("a", "a", "a"), _link()])
    found = _follow(watch, 3, lambda i, d, op: (2.0 if d == 0 and i >= 20 else 1.0) * 0.5, _planned_s)
    assert [(f.what, f.name, f.operation) for f in found] == [("profile", "a", ""), ("device", "rank 0", "")]
    assert 0.45 < found[0].factor < 0.55 and 1.9 < found[1].factor < 2.1


def test_the_lower_median() -> None:
    assert lower_median([3.0, 1.0]) == 1.0
    assert lower_median([3.0, 1.0, 2.0]) == 2.0
    assert lower_median([4.0, 3.0, 1.0, 2.0]) == 2.0


@pytest.mark.parametrize("is_slow_since", [14, 0])
def test_a_link_is_slow_since_it_was_waited_for(is_slow_since: int) -> None:
    links = [Subject(f"rank {a} -> rank {b}", "link", "a -> a", {"transfer": 0.002}) for a, b in ((0, 1), (1, 2))]
    watch = DriftWatch(links)
    found = []
    for iteration in range(3, 20):
        rows = {"rank 1 -> rank 2": (0.002, 8.0)}
        if iteration in (6, 9) or iteration >= is_slow_since:  # before it is slow, somebody waits for it now and then
            rows["rank 0 -> rank 1"] = (0.002 if iteration < is_slow_since else 0.06, 8.0)
        found += watch.add(iteration, 0.4, {}, rows)
    assert [(f.what, f.name, f.since) for f in found] == [("link", "rank 0 -> rank 1", is_slow_since)]


# Transfers are timed from both ends: neither waiting for the sender nor the clock of another machine is link time.


_LINK_S, _BACK_S = 0.004, 0.004


def _samples(ahead_s: float, link_s: float = _LINK_S, back_s: float = _BACK_S) -> dict[int, Sample]:
    """Two ranks that send each other three messages; rank 1 waits long before each of them was sent."""
    sent_0 = [1.0, 2.0, 3.0]
    received_1 = [(t - 0.5 + ahead_s, t - 0.4 + ahead_s, t + link_s + ahead_s) for t in sent_0]
    sent_1 = [1.5 + ahead_s, 2.5 + ahead_s, 3.5 + ahead_s]
    # The first receive of rank 0 is posted late, and for the last one nobody waits.
    received_0 = [(1.6, 1.61, 1.6 + back_s), (2.1, 2.2, 2.5 + back_s), (3.1, 3.9, 3.9)]
    received_0[0] = (1.6, 1.6, 1.6 + back_s)
    return {
        0: Sample(7, 1.0, {}, {1: sent_0}, {1: received_0}, {1: 3}),
        1: Sample(7, 1.0, {}, {0: sent_1}, {0: received_1}, {0: 3}),
    }


def test_waiting_for_the_sender_is_not_link_time() -> None:
    found = moved(_samples(0.0), {0: "here", 1: "here"})
    assert found[0, 1].seconds == pytest.approx(_LINK_S)
    assert found[0, 1].waited_for == 3
    assert found[1, 0].seconds == pytest.approx(_BACK_S)
    assert found[1, 0].waited_for == 2, "nobody waited for the last one"


@pytest.mark.parametrize("ahead_s", [-1234.5, 0.0, 98765.4])
def test_clocks_of_two_machines_may_differ(ahead_s: float) -> None:
    found = moved(_samples(ahead_s), {0: "one", 1: "two"})
    for one in found.values():
        assert one.seconds == pytest.approx(_LINK_S, abs=1e-6)


def test_a_slow_direction_between_two_machines_is_seen_in_their_mean() -> None:
    found = moved(_samples(5.0, link_s=0.040), {0: "one", 1: "two"})
    assert found[0, 1].seconds == pytest.approx(found[1, 0].seconds)
    assert 0.015 < found[0, 1].seconds < 0.030


def test_ends_that_do_not_match_are_left_out() -> None:
    samples = _samples(0.0)
    samples[0] = Sample(7, 1.0, {}, {1: [1.0]}, samples[0].received, {1: 3})
    assert (0, 1) not in moved(samples, {0: "here", 1: "here"})


def test_both_ends_tell_of_the_same_transfers() -> None:
    many = list(range(100))
    assert len(spread(many)) == MOST_TRANSFERS
    assert spread(many) == spread(tuple(many))
    assert spread([1, 2]) == [1, 2]


def test_samples_and_hellos_travel_as_text() -> None:
    for sample in _samples(0.0).values():
        assert Sample.decode(sample.encode()) == sample
    hello = Hello(3, 1, "host", "host boot", {"FORWARD": 0.5})
    assert Hello.decode(hello.encode()) == hello


def test_the_board_waits_for_nobody_and_does_not_grow() -> None:
    board = Board(MemoryStore())
    board.post("sample", 0, "a")
    assert board.read("sample", [0, 1]) is None
    board.post("sample", 1, "b")
    assert board.read("sample", [0, 1]) == ["a", "b"]
    store = MemoryStore()
    for iteration in range(100):
        Board(store).post("sample", 0, "x", iteration % PLACES)
    assert len(store.values) == PLACES


# Real transfers over gloo, between two threads: what the log of both ends says of waiting and of a slow wire.


_LATE_S, _WIRE_S = 0.4, 0.3


def _both(step: Callable[[int], Any]) -> list[Any]:
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
            threading.Timer(_LATE_S, about_to_wait.set).start()
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
