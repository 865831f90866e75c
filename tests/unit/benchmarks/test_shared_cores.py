"""Processes that share cores, as ``benchmarks.zorse_speed`` predicts them."""

import itertools

import pytest

from benchmarks.zorse_speed import simulate_shared
from megatron_het.schedule import Kind, Op, Shape, generate


def shared(route: tuple[tuple[int, ...], ...], replicas: tuple[int, ...], core: list[int], forward_s: float = 1.0):  # type: ignore[no-untyped-def]
    shape = Shape(layers=tuple((1,) for _ in replicas), route=route, replicas=replicas)
    program = generate("1f1b", shape)

    def work_s(device: int, op: Op) -> float:
        return forward_s if op.kind == Kind.FORWARD else 2 * forward_s

    return simulate_shared(program, work_s, core)


def test_two_busy_processes_share_a_core_and_then_one_has_it() -> None:
    # Replica 0 has one microbatch, replica 1 two: 3 s of work each way for the first, 6 for the second.
    result = shared(((0, 1, 1),), (2,), core=[0, 0])
    assert result.device_end_s[0] == pytest.approx(6.0)  # 3 s of work at half speed
    assert result.makespan_s == pytest.approx(9.0)  # all the work of one core, never idle
    apart = shared(((0, 1, 1),), (2,), core=[0, 1])
    assert apart.device_end_s == pytest.approx((3.0, 6.0))


def test_without_sharing_it_is_an_ordinary_pipeline() -> None:
    # 1F1B with p stages and m microbatches of 1 + 2 seconds: (m + p - 1) * 3.
    for stages, count in itertools.product((1, 2, 3), (3, 5)):
        route = tuple((0,) * count for _ in range(stages))
        result = shared(route, (1,) * stages, core=list(range(stages)))
        assert result.makespan_s == pytest.approx((count + stages - 1) * 3.0)


def test_a_transfer_delays_the_other_side() -> None:
    shape = Shape(layers=((1,), (1,)), route=((0,), (0,)), replicas=(1, 1))
    result = simulate_shared(generate("1f1b", shape), lambda d, op: 1.0, [0, 1], lambda a, b: 0.25)
    assert result.makespan_s == pytest.approx(4.5)


def test_a_core_is_faster_while_the_others_wait() -> None:
    """Two stages on two cores, one microbatch: nothing overlaps, so each operation takes 0.8 of its work."""
    program = generate("1f1b", Shape(layers=((1,), (1,)), route=((0,), (0,)), replicas=(1, 1)))
    alone = simulate_shared(program, lambda d, op: 1.0, [0, 1], alone=[0.8, 0.8])
    assert alone.makespan_s == pytest.approx(4 * 0.8)
    assert simulate_shared(program, lambda d, op: 1.0, [0, 1]).makespan_s == pytest.approx(4.0)
    # Four replicas of one stage are busy all the time: no core is ever alone.
    busy = generate("1f1b", Shape(layers=((1,),), route=((0, 1, 2, 3),), replicas=(4,)))
    together = simulate_shared(busy, lambda d, op: 1.0, [0, 1, 2, 3], alone=[0.8] * 4)
    assert together.makespan_s == pytest.approx(2.0)
