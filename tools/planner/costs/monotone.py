"""Interpolation by cubics that rise and fall with the points: Fritsch and Carlson's, with slopes as PCHIP has them.

The same as SciPy's ``PchipInterpolator``, whose import takes longer than many a search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at ``x``.

    Args:
        xs: Two or more, ascending.
        ys: As many.
        x: Between the first and the last of them.
    """
    steps = [b - a for a, b in zip(xs, xs[1:])]
    rises = [(b - a) / step for a, b, step in zip(ys, ys[1:], steps)]
    i = min(max(bisect_right(xs, x) - 1, 0), len(steps) - 1)
    left, right = _slope(steps, rises, i), _slope(steps, rises, i + 1)
    step, t = steps[i], (x - xs[i]) / steps[i]
    bend = (left + right - 2 * rises[i]) * step
    return ys[i] + t * (step * left + t * ((rises[i] - left) * step - bend + t * bend))


def _slope(steps: Sequence[float], rises: Sequence[float], i: int) -> float:
    """At point ``i``: a harmonic mean of the rises beside it, none at a turn."""
    if len(steps) == 1:
        return rises[0]
    if i == 0:
        return _at_an_end(steps[0], steps[1], rises[0], rises[1])
    if i == len(steps):
        return _at_an_end(steps[-1], steps[-2], rises[-1], rises[-2])
    before, after = rises[i - 1], rises[i]
    if before * after <= 0:
        return 0.0
    one, other = 2 * steps[i] + steps[i - 1], steps[i] + 2 * steps[i - 1]
    return (one + other) / (one / before + other / after)


def _at_an_end(step: float, following: float, rise: float, next_rise: float) -> float:
    """Of the parabola through three points, as far as the cubic stays monotone with it."""
    slope = ((2 * step + following) * rise - step * next_rise) / (step + following)
    if slope * rise <= 0:
        return 0.0
    return 3 * rise if rise * next_rise <= 0 and abs(slope) > 3 * abs(rise) else slope
