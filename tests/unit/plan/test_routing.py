"""Zorse's routing of microbatches between stages of unequal replicas."""

from __future__ import annotations

import pytest

from megatron_het.plan import PlanError
from megatron_het.plan.placement import route, shares


def test_shares_make_the_busiest_replica_finish_early() -> None:
    assert shares([1.0, 3.0, 3.0], 12) == [8, 2, 2]
    assert shares([1.0, 1.0], 5) in ([3, 2], [2, 3])
    assert shares([1.0, 100.0], 4) == [3, 1]  # everybody takes part


@pytest.mark.parametrize("total", [3, 4, 7, 12])
def test_shares_are_the_best_there_are(total: int) -> None:
    seconds = [1.0, 2.5, 1.7]
    best = min(
        max(count * second for count, second in zip((a, b, total - a - b), seconds, strict=True))
        for a in range(1, total - 1)
        for b in range(1, total - a)
    )
    found = shares(seconds, total)
    assert sum(found) == total
    assert max(c * s for c, s in zip(found, seconds, strict=True)) == pytest.approx(best)


def test_the_first_completed_goes_to_the_replica_with_the_most_work_left() -> None:
    # Stage 0 completes 0, 1, 2, ... in order.  Stage 1: remaining work is 6, 5, ..., 1 on the fast
    # replica and 6, 3 on the slow one.
    first, second = route([[1.0], [1.0, 3.0]], 8)
    assert first == [tuple(range(8))]
    assert second == [(0, 2, 3, 4, 6, 7), (1, 5)]


def test_completion_times_decide_not_microbatch_numbers() -> None:
    # Replica 1 of stage 0 is slow, so its microbatches reach stage 1 late.
    first, second = route([[1.0, 10.0], [1.0, 1.0]], 4, counts=[[2, 2], [3, 1]])
    assert first == [(2, 3), (0, 1)]
    # Completed: 2 (1 s), 3 (2 s), 0 (10 s), 1 (20 s); work left in stage 1: 3, 2, 1 and 1.
    assert second == [(0, 2, 3), (1,)]


def test_bad_times_and_counts_are_refused() -> None:
    with pytest.raises(PlanError, match="positive"):
        shares([1.0, 0.0], 4)
    with pytest.raises(PlanError, match="fewer"):
        shares([1.0, 1.0, 1.0], 2)
    with pytest.raises(PlanError, match="add up"):
        route([[1.0, 1.0]], 4, counts=[[1, 2]])
