"""The context exchange between unequal devices: slots as short as they can be, whatever gives and takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.features.context_exchange.passes import PassCosts, add_exchange, level, plan_exchange
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.generators import generate
from megatron_het.schedule.ir import Program, Shape
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.transfers import add_transfers
from megatron_het.schedule.validate import check

LINEAR_S, ATTENTION_S, SLICES = 1.0, 2.0, 8
"""Of one layer and a whole sequence, forward, on the fast device."""


def _shares(units: int, devices: int) -> Iterator[list[int]]:
    if devices == 1:
        yield [units]
        return
    for own in range(units + 1):
        yield from ([own, *others] for others in _shares(units - own, devices - 1))


_DEVICES = st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(1, 9))


@given(st.lists(_DEVICES, min_size=1, max_size=4))
def test_nothing_ends_earlier(devices: list[tuple[int, int, int]]) -> None:
    """Against all ways in which the units can be shared out."""
    loads = {d: load for d, (load, _, _) in enumerate(devices)}
    times = {d: (fixed, unit) for d, (_, fixed, unit) in enumerate(devices)}

    def last(units: list[int]) -> int:
        return max(times[d][0] + count * times[d][1] for d, count in enumerate(units))

    moves = level(loads, times)
    after, given_away = list(loads.values()), [0] * len(devices)
    for giver, taker, count in moves:
        after[giver] -= count
        given_away[giver] += count
        after[taker] += count
    assert last(after) == min(map(last, _shares(sum(loads.values()), len(devices))))
    assert all(count <= loads[d] for d, count in enumerate(given_away))
    assert not {giver for giver, _, _ in moves} & {taker for _, taker, _ in moves}


def _mixed(layers: tuple[tuple[int, ...], ...], slowness: tuple[int, ...]) -> tuple[Program, Costs, PassCosts]:
    """A pipeline of unequal devices, what it takes, and what the exchange is told of that."""
    shape = Shape(layers, ((0,) * 4,) * len(layers), (1,) * len(layers), SLICES)
    costs = Costs.of(
        shape,
        layer_forward_s=[LINEAR_S * times for times in slowness],
        layer_backward_s=[2 * LINEAR_S * times for times in slowness],
        attention_forward_s=[ATTENTION_S * times for times in slowness],
        attention_backward_s=[2 * ATTENTION_S * times for times in slowness],
        diagonal=0.5,
    )
    attention = [round(1e6 * ATTENTION_S * times / costs.attention_total(SLICES)) for times in slowness]
    rest = [
        round(1e6 * LINEAR_S * times * count / SLICES)
        for times, row in zip(slowness, layers, strict=True)
        for count in row
    ]
    return generate("slimpipe", shape), costs, PassCosts.of(shape, attention, rest)


@pytest.mark.parametrize("layers", [((4,), (4,)), ((5,), (3,)), ((3, 2), (2, 1))])
def test_a_fast_device_helps_a_slow_one_more(layers: tuple[tuple[int, ...], ...]) -> None:
    """A pipeline with a device of half the speed gains by the exchange, where equal units gain nothing."""
    program, costs, figures = _mixed(layers, (1, 2))

    def iteration_s(**options: Any) -> float:
        complete = add_transfers(add_exchange(program, helping=True, **options) if options else program)
        check(complete)
        return simulate(complete, costs).makespan_s

    without, levelled = iteration_s(), iteration_s(costs=figures)
    assert levelled < without / 1.08
    assert levelled < iteration_s(units=2) / 1.08


def test_slots_end_together() -> None:
    """With small units the passes of a slot take as long as each other where keys allow, not as many units."""
    program, _, figures = _mixed(((4,), (4,)), (1, 3))
    units = 8
    for slot in plan_exchange(program, units=units, costs=figures).slots:
        if len(slot.passes) < 2 or min(op.slice for op in slot.passes.values()) < SLICES // 2:
            continue
        times = figures.times(program.shape, slot.passes, 4, units)
        ends = [times[d][0] + (slot.after[d] - units) * times[d][1] for d in slot.passes]
        assert max(ends) - min(ends) <= max(unit for _, unit in times.values())
        assert slot.after[0] > slot.after[1]


LENGTH = 4096
_PACKED = [((0, 7, 900, 910, 2000),), ((0, 3000, 3100),), ((0,),), ((0, 64, 128, 2500, 4000),)]


@pytest.mark.parametrize("keys_per_token", [200.0, 2000.0])
@pytest.mark.parametrize("documents", [[((0,),)] * 4, _PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize(("stages", "slices", "chunks"), [(4, 8, 1), (4, 16, 1), (2, 4, 1), (4, 8, 2)])
def test_equal_work_is_left_as_it_is(
    stages: int, slices: int, chunks: int, documents: list[tuple[tuple[int, ...], ...]], keys_per_token: float
) -> None:
    """Slices of equal work have unequal attention; an exchange that evened that out would make passes unequal."""
    shape = Shape.uniform(stages, 4, slices=slices, chunks=chunks)
    cutting = Cutting(LENGTH, slices, 8, keys_per_token)
    parts = tuple(cutting.parts(starts, 2) for starts in documents)
    attention = cutting.keys((0,), LENGTH) / keys_per_token
    costs = Costs.of(
        shape,
        layer_forward_s=[LENGTH] * stages,
        layer_backward_s=[2 * LENGTH] * stages,
        attention_forward_s=[attention] * stages,
        attention_backward_s=[2 * attention] * stages,
        parts=parts,
    )
    program = generate("slimpipe", shape)

    def iteration_s(program: Program) -> float:
        complete = add_transfers(program)
        check(complete)
        return simulate(complete, costs).makespan_s

    without = iteration_s(program)
    assert iteration_s(add_exchange(program, helping=False, parts=parts)) <= 1.05 * without
    assert iteration_s(add_exchange(program, helping=True, parts=parts)) <= 1.02 * without
    for slot in plan_exchange(program, parts=parts).slots:  # the work of the very units that move
        after = list(slot.loads)
        for move in slot.moves:
            units = parts[move.microbatch][move.slice].units[move.start : move.stop]
            work = sum(units) * slices * slices  # in units of which all of a slice is seen, two per slice
            after[move.owner] -= work
            after[move.helper] += work
        assert after == pytest.approx(slot.after)


def test_units_of_unequal_work_are_given_in_runs() -> None:
    """Each helper gets neighbouring units, and about as much work as makes all ends equal."""
    moves = level({0: 6, 1: 0, 2: 0}, dict.fromkeys(range(3), (0.0, 1.0)), {0: [1, 1, 3, 4, 2, 2], 1: (), 2: ()})
    assert moves == [(0, 1, 3), (0, 2, 1)]  # 5, 4 and 4 of 13


def test_figures_have_to_fit() -> None:
    shape = Shape.uniform(2, 2, slices=4, chunks=2)
    assert PassCosts.of(shape, [1, 2], [3, 4, 5, 6]).rest == ((3, 4), (5, 6))
    with pytest.raises(ValueError, match="2 figures of attention and 3 of the rest"):
        PassCosts.of(shape, [1, 2], [3, 4, 5])
    with pytest.raises(ValueError, match="costs are not for pairs"):
        plan_exchange(generate("slimpipe", shape), pairs=True, costs=PassCosts.of(shape, [1, 2], [3, 4, 5, 6]))
