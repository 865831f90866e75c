"""More microbatches in flight across slow links."""

from __future__ import annotations

import pytest
from schedule_helpers import full, peaks, run

from megatron_het.schedule import Kind, Link, Shape, generate
from megatron_het.schedule.depths import choose_depths, published_depths
from megatron_het.schedule.validate import validate

STAGE_S = 3.0


def seconds(shape: Shape, transfer_s: float, depths: tuple[int, ...] = (), slow: int = 0) -> float:
    """An iteration whose transfers across one boundary take long."""

    def link(source: int, target: int) -> Link:
        boundary = min(shape.devices[source].stage, shape.devices[target].stage)
        return Link(transfer_s if boundary == slow else 0.0, 1e30)

    return run(full("1f1b", shape, depths=depths), message_bytes=1.0, link=link).makespan_s


def warmups(shape: Shape, depths: tuple[int, ...]) -> list[int]:
    """Forwards before the first backward of each device."""
    program = generate("1f1b", shape, depths=depths)
    assert not validate(full("1f1b", shape, depths=depths))
    return [[op.kind for op in program.compute(d)].index(Kind.BACKWARD) for d in range(len(shape.devices))]


def test_the_warm_up_of_a_stage_grows_by_the_depths_after_it() -> None:
    assert warmups(Shape.uniform(3, 8), ()) == warmups(Shape.uniform(3, 8), (1, 1)) == [3, 2, 1]
    assert warmups(Shape.uniform(3, 8), (3, 1)) == [5, 2, 1]
    assert warmups(Shape.uniform(3, 8), (1, 3)) == [5, 4, 1]
    assert warmups(Shape.uniform(2, 2), (7,)) == [2, 1]


def test_replicas_that_divide_microbatches_differently_hold_more_too() -> None:
    routes = ((0,) * 12, (0, 1, 2) * 4)
    shape = Shape(layers=((1,), (1,)), route=routes, replicas=(1, 3))
    assert warmups(shape, (2,))[0] > warmups(shape, ())[0]


@pytest.mark.parametrize("depths", [(1,), (1, 0), (1, 2, 3), (1.5, 1), ("1", 1)])
def test_other_depths_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one positive whole number per boundary"):
        generate("1f1b", Shape.uniform(3, 8), depths=depths)


def test_depth_hides_a_transfer_of_half_a_stage() -> None:
    shape = Shape.uniform(2, 16)
    plain = seconds(shape, STAGE_S / 2)
    found = choose_depths((STAGE_S,) * 2, (STAGE_S / 2,), lambda d: seconds(shape, STAGE_S / 2, d))
    assert found == (2,)
    assert plain / seconds(shape, STAGE_S / 2, found) > 1.3
    # A microbatch's way there and back, and nothing else, is left of the transfers.
    assert seconds(shape, STAGE_S / 2, found) == pytest.approx(seconds(shape, 0.0) + STAGE_S)


def test_only_the_slow_boundary_is_deepened() -> None:
    shape = Shape.uniform(4, 16)
    found = choose_depths((STAGE_S,) * 4, (0.0, 2 * STAGE_S, 0.0), lambda d: seconds(shape, 2 * STAGE_S, d, slow=1))
    assert found[0] == found[2] == 1 and found[1] > 3
    shallower = (found[0], found[1] - 1, found[2])
    assert seconds(shape, 2 * STAGE_S, shallower, slow=1) > seconds(shape, 2 * STAGE_S, found, slow=1)


def test_nothing_changes_where_links_are_fast_or_nothing_fits() -> None:
    shape = Shape.uniform(2, 16)
    assert choose_depths((STAGE_S,) * 2, (0.001,), lambda d: pytest.fail("there is nothing to gain")) == ()
    time_of = lambda d: seconds(shape, STAGE_S, d) if sum(d) == 1 else None  # noqa: E731
    assert choose_depths((STAGE_S,) * 2, (STAGE_S,), time_of) == ()


def test_depth_costs_the_activations_of_its_microbatches() -> None:
    shape = Shape.uniform(2, 16)
    plain, deep = (peaks(run(full("1f1b", shape, depths=d))) for d in ((1,), (3,)))
    assert deep == pytest.approx([2 * plain[0], plain[1]])


def test_published_rule() -> None:
    stages = (1.0, 2.0, 1.0, 1.0)
    assert published_depths(stages, (0.1, 0.5, 1.5), (True, True, True)) == (2, 3, 4)
    assert published_depths(stages, (0.1, 0.5, 1.5), (False, True, False)) == (1, 3, 1)
