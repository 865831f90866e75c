"""Transfers are timed from both ends: neither waiting for the sender nor the clock of another machine is link time."""

from __future__ import annotations

import pytest

from megatron_het.watch.monitor import MOST_TRANSFERS, PLACES, Board, Hello, Sample, moved, spread
from tests.unit.store.memory import MemoryStore

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
