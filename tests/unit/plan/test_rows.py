"""How many rows of a split vocabulary every stage has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.features.plan_checks import check_plan_alone
from megatron_het.plan import ModelShape, Plan, PlanError, Replica, ScheduleSpec, Stage, TrainingShape
from megatron_het.plan.placement import stage_rows

MODEL = ModelShape(3, 64, 8, 4, 32)


def plan(tp: tuple[int, ...], shares: Any = None, **parameters: Any) -> Plan:
    """A pipeline of one replica per stage."""
    stages, first = [], 0
    for size in tp:
        stages.append(Stage((1,), (Replica(tuple(range(first, first + size)), (0, 1)),)))
        first += size
    if shares is not None:
        parameters["vocabulary_shares"] = shares
    return Plan(MODEL, TrainingShape(1, 2), tuple(stages), ScheduleSpec("1f1b", parameters))


def test_equal_without_shares() -> None:
    assert stage_rows(plan((1, 2)), 64) == (32, 32)
    with pytest.raises(ValueError, match="66 rows does not divide over 2 stages of 2 TP ranks"):
        stage_rows(plan((1, 2)), 66)


def test_as_the_shares_say() -> None:
    assert stage_rows(plan((1, 1), [3, 1]), 64) == (48, 16)
    assert stage_rows(plan((1, 1, 1), [1, 1, 1]), 64) == (22, 21, 21)  # 64 does not divide by 3
    assert stage_rows(plan((1, 2), [1000, 1]), 64) == (62, 2)  # at least a row for each rank
    assert stage_rows(plan((1, 1), [2, 1]), 50304) == (33536, 16768)
    with pytest.raises(ValueError, match="65 rows has 0 equal parts that 2 TP ranks divide"):
        stage_rows(plan((1, 2), [2, 1]), 65)


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 50)), min_size=1, max_size=6), st.integers(2, 3000)
)
def test_all_rows_are_held_once(stages: list[tuple[int, int]], multiple: int) -> None:
    rows = 24 * multiple
    found = stage_rows(plan(tuple(tp for tp, _ in stages), [share for _, share in stages]), rows)
    assert sum(found) == rows and min(found) > 0
    assert all(held % tp == 0 for held, (tp, _) in zip(found, stages, strict=True))


@pytest.mark.parametrize("shares", [[1], [1, 0], [1, True], [1.5, 1], "1,2", [1, 2, 3], [[1], 1]])
def test_shares_that_mean_nothing(shares: Any) -> None:
    with pytest.raises(PlanError, match="vocabulary_shares.*one per stage"):
        check_plan_alone(plan((1, 1), shares, vocabulary=True))


def test_shares_of_a_vocabulary_that_is_whole() -> None:
    with pytest.raises(PlanError, match="vocabulary_shares.*option of the split vocabulary"):
        check_plan_alone(plan((1, 1), [1, 2]))
    check_plan_alone(plan((1, 1), [1, 2], vocabulary=True))
