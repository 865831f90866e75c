"""Performance curves: seconds of a pass over the sequences in it (Poplar, section 3.2, figure 6)."""

from __future__ import annotations

import bisect
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Seconds of one forward and backward of one device, linear between measured sizes and never falling.

    Poplar draws a cubic spline; between noisy points a spline swings, and a larger pass could be predicted to be
    faster than a smaller one.

    Attributes:
        sizes: Measured sizes, ascending; the last one is the largest pass that fits the device's memory.
        seconds: Of each.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Curve:
        """The curve through measured points, raised where a larger pass was measured to be faster.

        Raises:
            ValueError: No point, or a time that is not positive.
        """
        if not points or min(points.values()) <= 0 or min(points) < 1:
            raise ValueError(f"a curve needs positive sizes and times, found {dict(points)}")
        sizes = tuple(sorted(points))
        seconds: list[float] = []
        for size in sizes:
            seconds.append(max(points[size], seconds[-1] if seconds else 0.0))
        return cls(sizes, tuple(seconds))

    @classmethod
    def of_passes(cls, points: Mapping[int, Sequence[float]]) -> Curve:
        """The curve through the mean times of repeated passes.

        An iteration is a sum of passes.  A device that is shared by turns does a short pass at full speed or waits a
        whole turn within it: the median would leave out the turns of the others.

        Args:
            points: Seconds of the passes of each size.

        Raises:
            ValueError: As for :meth:`of`, or a size without a pass.
        """
        if not all(points.values()):
            raise ValueError(f"a curve needs a pass of every size, found {dict(points)}")
        return cls.of({size: statistics.fmean(found) for size, found in points.items()})

    @property
    def largest(self) -> int:
        """Sequences of the largest pass that fits."""
        return self.sizes[-1]

    def at(self, size: int) -> float:
        """Seconds of a pass of ``size`` sequences; 0 for none.

        Raises:
            ValueError: The pass is larger than what fits.
        """
        if size > self.largest:
            raise ValueError(f"a pass of {size} sequences does not fit; the largest has {self.largest}")
        if size <= 0:
            return 0.0
        if size <= self.sizes[0]:
            return self.seconds[0] * size / self.sizes[0]
        i = bisect.bisect_left(self.sizes, size)
        (a, b), (x, y) = self.sizes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        return x + (y - x) * (size - a) / (b - a)

    @functools.cached_property
    def best(self) -> int:
        """The pass with the most sequences per second; of equal ones the smallest."""
        return max(range(1, self.largest + 1), key=lambda size: (size / self.at(size), -size))

    def passes(self, count: int) -> list[int]:
        """Sizes of the passes that do ``count`` sequences in the least time, largest first."""
        if count <= self.best:
            return [count] if count else []
        full, rest = divmod(count, self.best)
        ways = [[self.best] * full + ([rest] if rest else [])]
        if rest and self.best + rest <= self.largest:
            ways.append([self.best + rest] + [self.best] * (full - 1))
        for number in {full, full + 1}:  # of nearly equal size
            even, more = divmod(count, number)
            if even + bool(more) <= self.largest:
                ways.append([even + 1] * more + [even] * (number - more))
        return min(ways, key=lambda way: sum(map(self.at, way)))

    def seconds_of(self, count: int) -> float:
        """Seconds in which ``count`` sequences are done."""
        return sum(map(self.at, self.passes(count)))
