"""How often copies are taken."""

from __future__ import annotations

import pytest

from megatron_het.elastic.copies import SHARE, Cost, Pace


def run(pace: Pace, iteration_s: float, cost: Cost, count: int = 4) -> None:
    now_s = 0.0
    for _ in range(count):
        pace.left(now_s)
        now_s += iteration_s
        pace.arrived(now_s)
        pace.copied(cost)
        now_s += cost.held_s


@pytest.mark.parametrize(
    ("cost", "host_computes", "wanted"),
    [
        (Cost(0.02, 0.5, 0.02), False, 1),  # 2 % and arrives before the next one
        (Cost(0.02, 0.5, 0.02), True, 2),  # the sender takes 2 % more
        (Cost(0.10, 0.5, 0.0), False, 4),  # 10 % over 4 iterations
        (Cost(0.01, 2.5, 0.0), False, 3),  # the next one would wait for it
    ],
)
def test_the_fewest_iterations_that_fit(cost: Cost, host_computes: bool, wanted: int):
    pace = Pace(None)
    run(pace, 1.0, cost)
    found = pace.wanted(host_computes=host_computes)
    assert found == wanted
    assert pace.cost_s(host_computes=host_computes) / (found * pace.iteration_s()) <= SHARE


def test_one_slow_copy_and_one_slow_iteration_do_not_count():
    pace = Pace(None)
    run(pace, 1.0, Cost(0.02), 4)
    run(pace, 30.0, Cost(9.0), 1)
    run(pace, 1.0, Cost(0.02), 4)
    assert pace.wanted(host_computes=True) == 1


def test_a_session_measures_anew():
    pace = Pace(None)
    run(pace, 1.0, Cost(0.3))
    pace.every = pace.wanted(host_computes=False)
    assert pace.every == 10
    pace.begin()
    assert (pace.every, pace.wanted(host_computes=False)) == (1, 1)
    assert [i for i in range(1, 4) if pace.is_due(i)] == [1, 2, 3]


def test_what_the_user_sets_stays():
    pace = Pace(3)
    run(pace, 1.0, Cost(0.9))
    pace.begin()
    assert [i for i in range(1, 10) if pace.is_due(i)] == [3, 6, 9]
    assert not any(Pace(0).is_due(i) for i in range(1, 10))


def test_copies_tell_how_fast_state_moves():
    pace = Pace(1)
    run(pace, 1.0, Cost(0.1, 0.2, held_bytes=4000, sent_bytes=1000))
    assert pace.rates is None, "what takes as long as a message tells nothing of the link"
    for sent_s in (0.2, 0.4, 50.0):
        run(pace, 1.0, Cost(0.1, sent_s, held_bytes=10**9, sent_bytes=10**8), 1)
    assert pace.rates == (pytest.approx(10**10), pytest.approx(2.5 * 10**8))
    pace.begin()
    assert pace.rates is not None, "a change is judged right after the one before"
