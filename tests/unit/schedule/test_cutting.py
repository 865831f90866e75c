"""Where sequences are cut: lengths that add up, multiples of a unit, and equal work."""

import random
from dataclasses import replace

import pytest

from megatron_het.lowering.programs import assemble
from megatron_het.schedule import Costs, Kind, Link, Memory, Shape
from megatron_het.schedule.cutting import Cutting, Starts
from megatron_het.schedule.memory import memory_use
from megatron_het.schedule.simulate import simulate


def pairs(starts: Starts, first: int, end: int, window: int | None = None) -> int:
    """Keys that the queries of some tokens see, counted one by one."""
    found = 0
    for token in range(first, end):
        seen = token - max(s for s in starts if s <= token) + 1
        found += seen if window is None else min(seen, window + 1)
    return found


@pytest.mark.parametrize(("length", "slices", "unit"), [(64, 5, 1), (60, 7, 4), (64, 4, 2), (12, 12, 1)])
def test_equal_lengths_spread_what_is_left(length: int, slices: int, unit: int) -> None:
    bounds = Cutting(length, slices, unit).bounds()
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert bounds[0] == 0 and bounds[-1] == length and len(sizes) == slices
    assert min(sizes) > 0 and max(sizes) - min(sizes) <= unit and all(size % unit == 0 for size in sizes)
    assert Cutting(length, slices, unit).is_even == (len(set(sizes)) == 1)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("starts", [((0,),), ((0, 5, 6, 70),), ((0, 50), (0, 11, 12, 13, 90))])
def test_work_is_what_is_counted(starts: tuple[Starts, ...], window: int | None) -> None:
    cutting = Cutting(96, 4, 1, keys_per_token=3.0, window_tokens=window, window_share=1.0 if window else 0.0)
    for end in range(0, 97, 7):
        wanted = end + sum(pairs(own, 0, end, window) for own in starts) / len(starts) / 3.0
        assert cutting.work(starts, end) == pytest.approx(wanted)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_slices_of_equal_work(seed: int, unit: int) -> None:
    """As equal as a token more or less allows, and far more so than slices of equal length."""
    rng = random.Random(seed)
    length, slices = 512, 8
    starts = tuple((0, *sorted(rng.sample(range(1, length), 5))) for _ in range(2))
    cutting = Cutting(length, slices, unit, keys_per_token=20.0)

    def spread(bounds: tuple[int, ...]) -> float:
        done = [cutting.work(starts, end) for end in bounds]
        works = [b - a for a, b in zip(done, done[1:], strict=False)]
        return max(works) - min(works)

    bounds = cutting.bounds(starts)
    dearest = 1 + length / 20.0
    assert spread(bounds) <= 2 * unit * dearest < spread(Cutting(length, slices).bounds())
    assert all(bound % unit == 0 for bound in bounds) and bounds[-1] == length


def test_every_slice_has_a_unit() -> None:
    """However short the end of a document would make it."""
    cutting = Cutting(8, 8, 1, keys_per_token=0.01)
    assert cutting.bounds() == tuple(range(9))
    assert Cutting(16, 7, 2, keys_per_token=0.01).bounds()[-3:] == (12, 14, 16)


def test_the_simulator_knows_what_slices_have() -> None:
    """Durations, messages and memory go by the tokens and the attention of every slice of every microbatch."""
    shape = Shape.uniform(2, 2, slices=2)
    cutting = Cutting(8, 2, keys_per_token=1.0)
    parts = (cutting.parts(), Cutting(8, 2).parts(((0, 4),)))
    costs = Costs(
        ((8.0,),) * 2,
        ((16.0,),) * 2,
        ((36.0,),) * 2,
        ((72.0,),) * 2,
        parts=parts,
        message_bytes=80.0,
        link=lambda a, b: Link(0.0, 8.0),
        memory=Memory(activation_bytes=((100.0,),) * 2, kv_bytes=((10.0,),) * 2),
    )
    result = simulate(assemble(shape, "slimpipe"), costs)
    found = {
        (op.microbatch, op.slice, op.kind): end - start
        for op, start, end in zip(result.graph.ops, result.start_s, result.end_s, strict=True)
        if op.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.RECV_FORWARD)
    }
    first = cutting.bounds()[1]
    assert first == 5  # 5 + 15 of 8 + 36
    assert found[0, 0, Kind.FORWARD] == pytest.approx(5 + 15) and found[0, 1, Kind.FORWARD] == pytest.approx(3 + 21)
    assert found[1, 0, Kind.BACKWARD] == found[1, 1, Kind.BACKWARD] == pytest.approx(2 * (4 + 10))
    assert found[0, 0, Kind.RECV_FORWARD] == pytest.approx(80 * 5 / 8 / 8)
    use = memory_use(result)[1]  # the first slice of the second microbatch beside that of the first one
    assert use.peak_of("kv") == pytest.approx(11.25) and use.peak_of("activations") == pytest.approx(112.5)
    with pytest.raises(ValueError, match=r"parts: of \[2\] slices for 2 microbatches"):
        replace(costs, parts=parts[:1]).check(shape)
