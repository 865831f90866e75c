"""Compute orders of our own schedules, and what shapes they refuse."""

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_helpers import full, peaks, run

from megatron_het.features.context_exchange.passes import PassCosts, add_exchange, level, plan_exchange
from megatron_het.schedule import Costs, Kind, Link, Op, Program, Shape, add_transfers, generate
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.generators.one_f_one_b import in_flight_limits
from megatron_het.schedule.simulate import simulate
from megatron_het.schedule.validate import check, validate


def test_slimpipe_order() -> None:
    """Groups of 2p slices per chunk, the rest at the end; the backward exactly reversed within the microbatch."""
    program = generate("slimpipe", Shape.uniform(2, 2, slices=6, chunks=2))
    forward = [(op.microbatch, op.chunk, op.slice) for op in program.ops[1] if op.kind == Kind.FORWARD]
    one = [(c, s) for group in (range(4), range(4, 6)) for c in (0, 1) for s in group]
    assert forward == [(m, c, s) for m in (0, 1) for c, s in one]
    backward = [(op.microbatch, op.chunk, op.slice) for op in program.ops[1] if op.kind == Kind.BACKWARD]
    assert backward == [(m, c, s) for m in (0, 1) for c, s in reversed(one)]
    for stage in range(2):
        kinds = [op.kind for op in program.ops[stage]]
        assert kinds.index(Kind.BACKWARD) == 6 * 2 + 2 * (1 - stage)


def test_faster_replicas_get_ahead() -> None:
    """A replica with more microbatches may have more in flight; speeds shape the order."""
    shape = Shape(((1,), (1,)), ((0, 0, 1, 0, 0, 1), (0,) * 6), (2, 1))
    program = generate("1f1b", shape, speeds=(2.0, 1.0, 3.0))
    for d, own in ((0, [0, 1, 3, 4]), (1, [2, 5])):
        assert [op.microbatch for op in program.ops[d] if op.kind == Kind.FORWARD] == own


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("2f2b", Shape.uniform(2, 2), "unknown .*1f1b.*slimpipe"),
        ("1f1b", Shape.uniform(2, 2, chunks=2), "exactly one chunk"),
        ("1f1b", Shape.uniform(2, 2, slices=2), "slices = 2"),
        ("gpipe", Shape.uniform(2, 2, slices=2), "slices = 2"),
        ("interleaved", Shape.uniform(4, 6, chunks=2), "leave a group of 2"),
        ("ministage", Shape.uniform(2, 2, slices=2), "slices = 2"),
        ("slimpipe", Shape.uniform(4, 2, slices=6, chunks=2), "a multiple of the 4 stages"),
        ("slimpipe", Shape(((1, 1), (1,)), ((0,), (0,)), (1, 1), 3), "with 2 chunks .* a multiple of the 2 stages"),
        ("seq1f1b", Shape(((1, 1), (1,)), ((0,), (0,)), (1, 1), 2), "one chunk per stage only"),
        ("seq1f1b", Shape.uniform(2, 2, slices=2, chunks=2), "one chunk per stage only"),
        ("zb-v", Shape.uniform(2, 2, chunks=2), "must be v"),
        ("zb-v", Shape.uniform(2, 2, placement="v"), "exactly 2 chunk"),
        ("v-half", Shape.uniform(2, 2, chunks=2, slices=2, placement="v"), "slices = 2"),
    ],
)
def test_shapes_that_do_not_fit(name: str, shape: Shape, message: str) -> None:
    with pytest.raises(ValueError, match=f"schedule.*{name}.*: .*{message}"):
        generate(name, shape)


@pytest.mark.parametrize(
    ("name", "parameter", "values", "message"),
    [
        ("1f1b", "slack", (-0.1, float("inf"), "much"), "slack"),
        ("1f1b", "depths", ((1,), (1, 0), (1, 2, 3), (1.5, 1), ("1", 1)), "one positive whole number per boundary"),
        ("1f1b", "speeds", ((1.0, 1.0),), "2 values for 3 devices"),
        ("1f1b", "speeds", ((1.0, 0.0, 1.0),), "is not positive"),
        *((name, "order", ("fastest", 3, None), "one of greedy, alternating") for name in ("1f1b", "interleaved")),
        ("slimpipe", "order", ("fastest", 3, None), "one of greedy, alternating"),
    ],
)
def test_parameters_that_mean_nothing(name: str, parameter: str, values: tuple[object, ...], message: str) -> None:
    shape = Shape.uniform(3, 6, slices=3 if name == "slimpipe" else 1)
    for value in values:
        with pytest.raises(ValueError, match=message):
            generate(name, shape, **{parameter: value})


def test_imports_without_torch_and_numpy() -> None:
    code = (
        "import sys, megatron_het.schedule, megatron_het.schedule.view.cli\n"
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich', 'megatron'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def most_held(ops: Sequence[Op]) -> int:
    """The most chunks of microbatches between their forward and their backward, or its weight gradients."""
    held = itertools.accumulate(
        (op.kind == Kind.FORWARD) - (op.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)) for op in ops
    )
    return max(held)


def test_slack_shortens_pipelines_of_unequal_width() -> None:
    """One fast device feeds four slow ones: with slack they find their next input waiting; the limit holds."""
    shape = Shape(layers=((3,), (12,)), route=((0,) * 16, (0, 1, 2, 3) * 4), replicas=(1, 4))
    seconds = []
    for slack in (0.0, 0.5, 1.0):
        program = generate("1f1b", shape, slack=slack)
        limits = in_flight_limits(shape, slack)
        assert limits == [1 + round(4 * (1 + slack)), 1, 1, 1, 1]
        assert [most_held(program.compute(d)) for d in range(5)] == limits
        forward_s, backward_s = ((1.0,), *[(4.0,)] * 4), ((2.0,), *[(8.0,)] * 4)
        costs = Costs(forward_s, backward_s, message_bytes=1.0, link=lambda a, b: Link(0.0, 2.0))
        seconds.append(simulate(add_transfers(program), costs).makespan_s)
    assert seconds[2] <= seconds[1] < seconds[0]
    assert seconds[0] > 1.1 * seconds[2]


def test_slack_changes_nothing_where_stages_divide_alike() -> None:
    shape = Shape(layers=((2,),) * 3, route=((0, 1, 0, 1, 0, 1),) * 3, replicas=(2, 2, 2))
    assert generate("1f1b", shape, slack=0.0) == generate("1f1b", shape) == generate("1f1b", shape, slack=2.0)
    uniform = Shape.uniform(4, 8)
    assert generate("1f1b", uniform, slack=0.0) == generate("1f1b", uniform)


ROUTES = [((0, 1, 0, 1, 0, 1), (0,) * 6), ((0, 0, 0, 1, 1, 1), (0, 0, 1, 0, 0, 1)), ((1, 0) * 3, (0, 1) * 3, (0,) * 6)]


@pytest.mark.parametrize("name", ["zb-v", "v-half"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 0.5, 1.0, 1.0)])
def test_a_v_with_replicas_holds_no_more_than_one_pipeline(
    name: str, route: tuple[tuple[int, ...], ...], speeds: tuple[float, ...] | None
) -> None:
    """Replicas with unequal shares: no device holds more chunks than in a pipeline without replicas."""
    stages = len(route)
    shape = Shape(((2, 1),) * stages, route, tuple(max(row) + 1 for row in route), placement="v")
    if speeds is not None:
        speeds = speeds[: len(shape.devices)]
    for forward_only in (False, True):
        program = generate(name, shape, forward_only=forward_only, speeds=speeds)
        assert validate(add_transfers(program, speeds=speeds)) == []
    alone = generate(name, Shape.uniform(stages, 24, chunks=2, placement="v"))
    bound = max(map(most_held, alone.ops))
    assert max(map(most_held, generate(name, shape, speeds=speeds).ops)) <= bound


def test_equal_replicas_of_a_v_run_as_pipelines_alone() -> None:
    """Two replicas that share the microbatches have the order of one, each with its own microbatches."""
    alone = generate("zb-v", Shape.uniform(3, 6, chunks=2, placement="v"))
    both = generate("zb-v", Shape(((1, 1),) * 3, ((0, 1) * 6,) * 3, (2,) * 3, placement="v"))
    for device, ops in zip(both.devices, both.ops, strict=True):
        own = [op._replace(microbatch=2 * op.microbatch + device.replica) for op in alone.ops[device.stage]]
        assert list(ops) == own


# ZB-H1 against 1F1B in the simulator: less idle time within the same memory, also on mixed stages.


@given(st.integers(2, 6), st.integers(1, 3))
def test_its_bubble_is_a_third_of_that_of_1f1b(stages: int, rounds: int) -> None:
    """Forward and both halves of the backward take equally long: (p - 1) instead of 3 (p - 1) passes are idle."""
    shape = Shape.uniform(stages, stages * rounds)
    half, plain = run(full("zb-h1", shape)), run(full("1f1b", shape))
    assert plain.bubble_fraction == pytest.approx((stages - 1) / shape.microbatches)
    assert half.bubble_fraction < plain.bubble_fraction
    if rounds > 1:
        assert half.bubble_fraction == pytest.approx((stages - 1) / (3 * shape.microbatches))
    assert max(peaks(half)) <= max(peaks(plain)) + 1e-9  # ZB-H1 keeps to the memory of 1F1B's first stage


def test_it_is_faster_on_mixed_stages() -> None:
    shape = Shape(((3,), (2,), (2,)), ((0, 0) * 4, (0, 1) * 4, (0, 0) * 4), (1, 2, 1))
    speeds = (2.0, 0.7, 0.7, 1.4)
    costs = replace(
        Costs.of(shape, layer_forward_s=(0.5, 1.4, 1.4, 0.7), layer_backward_s=(1.0, 2.8, 2.8, 1.4)),
        message_bytes=1.0,
        link=lambda a, b: Link(0.05, 10.0),
    )
    seconds = {}
    for name in ("1f1b", "zb-h1"):
        program = add_transfers(generate(name, shape, speeds=speeds), speeds=speeds)
        assert validate(program) == []
        seconds[name] = simulate(program, costs).makespan_s
    assert seconds["1f1b"] > 1.05 * seconds["zb-h1"]


# The context exchange between unequal devices: slots as short as they can be, whatever gives and takes.


LINEAR_S, ATTENTION_S, SLICES = 1.0, 2.0, 8  # of one layer and a whole sequence, forward, on the fast device


def _shares(units: int, devices: int) -> Iterator[list[int]]:
    if devices == 1:
        yield [units]
        return
    for own in range(units + 1):
        yield from ([own, *others] for others in _shares(units - own, devices - 1))


_DEVICES = st.tuples(st.integers(0, 5), st.integers(0, 20), st.integers(1, 9))


@given(st.lists(_DEVICES, min_size=1, max_size=4))
def test_nothing_ends_earlier(devices: list[tuple[int, int, int]]) -> None:
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
