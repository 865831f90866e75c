"""Devices that slow each other down: passes are faster while the others wait."""

import pytest

from megatron_het.schedule import Shape, generate
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.simulate import simulate
from tools.planner.simulate.simulation import others_busy, simulate_beside


def pipeline(microbatches: int):
    return generate(
        "1f1b", Shape(layers=((1,), (1,)), route=((0,) * microbatches, (0,) * microbatches), replicas=(1, 1))
    )


def costs(first: float, second: float) -> Costs:
    return Costs(forward_s=((first,), (second,)), backward_s=((first,), (second,)))


def test_nothing_overlaps_with_one_microbatch() -> None:
    program = pipeline(1)
    assert others_busy(simulate(program, costs(1, 1))) == pytest.approx([0, 0])
    assert simulate_beside(program, costs(1, 1), [0.7, 0.5]).makespan_s == pytest.approx(2 * 0.7 + 2 * 0.5)


def test_a_short_stage_leaves_a_long_one_alone() -> None:
    """The second stage has a quarter of the work: the first is alone for most of its time, the second never."""
    program = pipeline(32)
    first, second = others_busy(simulate(program, costs(4, 1)))
    assert first == pytest.approx(0.25, abs=0.02)
    assert second > 0.95
    whole, found = (simulate_beside(program, costs(4, 1), [share, share]).makespan_s for share in (1.0, 0.8))
    assert 0.82 < found / whole < 0.86


def test_without_a_measurement_nothing_changes() -> None:
    program = pipeline(4)
    assert simulate_beside(program, costs(2, 1), [1.0, 1.0]).makespan_s == simulate(program, costs(2, 1)).makespan_s
