"""Poplar's curves and allocation."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_het.auto_batch.allocation import Curve, accumulated, allocate, synchronised


def linear(start_s: float, each_s: float, largest: int) -> Curve:
    """Seconds ``start_s + each_s n``: larger passes do more per second."""
    return Curve.of({n: start_s + each_s * n for n in sorted({1, 2, 4, largest}) if n <= largest})


FAST, SLOW = linear(1.0, 1.0, 8), linear(1.0, 3.0, 4)


def test_a_curve_never_falls_and_goes_through_its_points() -> None:
    curve = Curve.of({1: 2.0, 4: 1.5, 8: 4.0})  # the second point is noise
    assert [curve.at(n) for n in (0, 1, 4, 8)] == [0.0, 2.0, 2.0, 4.0]
    assert all(curve.at(n) <= curve.at(n + 1) for n in range(8))
    with pytest.raises(ValueError, match="9 sequences does not fit"):
        curve.at(9)


def test_a_device_that_is_shared_by_turns_is_as_fast_as_its_share() -> None:
    """A short pass fits into a turn; then one waits for the turn of the other process, which takes 0.1 s."""
    alone, shared = [0.02] * 10, ([0.02] * 4 + [0.12]) * 2
    curves = [Curve.of_passes({1: alone, 24: [0.48]}), Curve.of_passes({1: shared, 24: [0.96]})]
    assert curves[1].at(1) == pytest.approx(2 * curves[0].at(1))
    fast, slow = map(sum, accumulated(curves, 24))
    assert fast == pytest.approx(2 * slow, abs=1)
    with pytest.raises(ValueError, match="a pass of every size"):
        Curve.of_passes({1: [0.1], 2: []})


def test_the_best_pass_has_the_most_sequences_per_second() -> None:
    assert FAST.best == 8
    assert Curve.of({1: 1.0, 2: 2.0, 4: 8.0}).best == 1
    assert FAST.passes(17) == [8, 8, 1] or FAST.seconds_of(17) <= 2 * 9.0 + 2.0
    assert sum(FAST.passes(19)) == 19 and max(FAST.passes(19)) <= 8


@pytest.mark.parametrize("seed", range(8))
def test_accumulated_is_the_best_of_all_divisions(seed: int) -> None:
    rng = random.Random(seed)
    curves = [linear(rng.random(), 0.2 + rng.random(), rng.choice((2, 4, 8))) for _ in range(3)]
    batch = rng.randint(6, 24)
    passes = accumulated(curves, batch)
    assert sum(map(sum, passes)) == batch and all(passes)
    assert all(max(own) <= c.largest for own, c in zip(passes, curves, strict=True))
    took = max(sum(map(c.at, own)) for own, c in zip(passes, curves, strict=True))
    divisions = ((a, b, batch - a - b) for a, b in itertools.product(range(1, batch), repeat=2) if a + b < batch)
    best = min(max(c.seconds_of(n) for c, n in zip(curves, row, strict=True)) for row in divisions)
    assert took <= 1.03 * best


def test_synchronised_gives_all_devices_equally_many_passes_that_end_together() -> None:
    rows = synchronised([FAST, SLOW], 20, 0.1)
    assert sum(map(sum, rows)) == 20
    assert all(row[0] <= 8 and row[1] <= 4 for row in rows)
    for fast, slow in rows[:-1]:
        assert abs(FAST.at(fast) - SLOW.at(slow)) <= 3.0


def test_the_whole_batch_is_allocated_and_the_fast_device_runs_at_its_peak() -> None:
    fast = Curve.of({1: 1.0, 2: 1.2, 4: 1.8, 8: 3.2})
    slow = Curve.of({1: 3.0, 2: 5.6})
    passes = accumulated([fast, slow, slow], 61)
    assert sum(map(sum, passes)) == 61
    assert passes[0][0] == 8
    rows = synchronised([fast, slow], 64, 0.5)
    assert sum(map(sum, rows)) == 64


def test_dear_communication_asks_for_fewer_passes() -> None:
    few, many = (len(synchronised([FAST, SLOW], 24, seconds)) for seconds in (100.0, 0.0))
    assert few == 2 <= many  # no more than 8 + 4 fit into a pass


def test_no_device_is_without_work() -> None:
    slow = linear(100.0, 100.0, 4)
    for zero in range(4):
        found = allocate([FAST, slow], 9, zero, 0.1)
        assert all(found.passes) and sum(map(sum, found.passes)) == 9
    with pytest.raises(ValueError, match="not enough for 2 devices"):
        allocate([FAST, slow], 1, 0)
