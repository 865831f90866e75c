"""The interpolation over the micro batch size is SciPy's monotone cubic."""

import random

import pytest
from scipy.interpolate import PchipInterpolator

from tools.planner.costs.layercost import interpolated


@pytest.mark.parametrize("count", [2, 3, 4, 9])
def test_it_is_that_of_scipy(count: int):
    rng = random.Random(count)
    for kind in range(60):
        xs = sorted(rng.sample(range(1, 200), count))
        ys = [rng.choice((0.0, 1.0, rng.uniform(-2, 2))) for _ in xs]
        ys = sorted(ys) if kind % 3 else ys
        whole = PchipInterpolator(xs, ys)
        for x in [*xs, *(rng.uniform(xs[0], xs[-1]) for _ in range(12))]:
            assert interpolated(xs, ys, x) == pytest.approx(float(whole(x)), rel=1e-12, abs=1e-12)


def test_it_does_not_overshoot():
    """Where measured times rise, all between them rises."""
    xs, ys = [1, 2, 4, 8], [1.0, 1.01, 5.0, 5.02]
    found = [interpolated(xs, ys, 1 + 7 * i / 100) for i in range(101)]
    assert found == sorted(found) and found[0] == 1.0 and found[-1] == pytest.approx(5.02)
