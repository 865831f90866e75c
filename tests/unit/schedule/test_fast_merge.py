"""The quick merge of 1F1B's orders decides as the general one does."""

import random

import pytest

from megatron_het.schedule.generators.listing import ORDERS, Speeds, in_order, merge, require_all
from megatron_het.schedule.generators.one_f_one_b import _orders, fast_merge, in_flight_limits
from megatron_het.schedule.ir import Kind, Shape


@pytest.mark.parametrize("order", ORDERS)
def test_it_decides_as_the_general_merge(order):
    rng = random.Random(7)
    ran = 0
    for _ in range(60):
        stages, microbatches = rng.randint(1, 4), rng.randint(4, 24)
        replicas = tuple(rng.randint(1, 4) for _ in range(stages))
        route = tuple(tuple(rng.randrange(n) for _ in range(microbatches)) for n in replicas)
        shape = Shape(tuple((rng.randint(0, 5),) for _ in range(stages)), route, replicas)
        speeds = [rng.choice((0.25, 0.5, 1.0)) for _ in shape.devices]
        forward, backward = _orders(shape, Kind.FORWARD), _orders(shape, Kind.BACKWARD)
        limits = [max(1, n - rng.randint(0, 1)) for n in in_flight_limits(shape, rng.choice((0.0, 0.5, 1.0)))]
        times = Speeds.of(shape, speeds)
        ways = fast_merge(shape, limits, [f for (f,) in times.forward_s], [b for (b,) in times.backward_s], order)
        try:
            wanted = merge(shape, forward, backward, limits, times, order)
        except ValueError as error:
            with pytest.raises(ValueError, match="waits forever") as caught:
                require_all(shape, ways, [2 * len(f) for f in forward], limits, order)
            assert str(caught.value) == str(error)
            continue
        ran += 1
        assert tuple(in_order(f, b, way) for f, b, way in zip(forward, backward, ways)) == wanted
    assert ran > 30
