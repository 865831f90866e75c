"""What the slices of a sequence take besides the whole of it, by a profile: each is a pass of its own.

``docs/costs.md`` has the terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..inputs.profile_schema import LayerTiming
from .curves import Kind, Pass, pass_at, without_sequences

Points = Mapping[Kind, Sequence[LayerTiming]]


class SlicePrices:
    """Of one profile.

    Args:
        points: Of whole sequences.
        slices: Of each kind, by tokens of each sequence in a pass.
        length: Tokens of a sequence.
        overhead: See ``Runtime.profile_overhead_s``.
    """

    def __init__(
        self, points: Points, slices: Mapping[Kind, Mapping[int, Sequence[LayerTiming]]], length: int, overhead: float
    ) -> None:
        self._points, self._slices, self._length, self._overhead = points, slices, length, overhead

    def more(self, kind: Kind, batch: int, slices: int, attention: tuple[float, float]) -> tuple[Pass, bool]:
        """What all slices take besides the whole sequence, nothing at least, and whether these slices were measured.

        Shorter slices than those measured take no less than they do, for each slice after the first.

        Args:
            attention: Seconds of a whole sequence's attention, forward and backward, to all keys before.
        """
        points = self._points.get(kind) or self._points.get(kind._replace(recompute="none"))
        if not points:
            return Pass(0.0, 0.0, 0.0, 0.0), False
        whole = pass_at(points, kind, batch, self._overhead)
        cut = self._slices.get(kind) or self._slices.get(kind._replace(recompute="none")) or {}
        exact = cut.get(self._length // slices) if self._length % slices == 0 else None
        if exact:
            return self._measured(exact, kind, batch, slices, whole, attention), True
        each = without_sequences(points, kind)
        found = Pass(*[(slices - 1) * s for s in (*each[:2], *whole[2:])])
        longer = [tokens for tokens in cut if tokens * slices > self._length > tokens]
        if longer:
            parts = self._length // min(longer)
            known = self._measured(cut[min(longer)], kind, batch, parts, whole, attention)
            found = Pass(*[max(a, b * (slices - 1) / (parts - 1)) for a, b in zip(found, known)])
        return found, False

    def _measured(
        self,
        points: Sequence[LayerTiming],
        kind: Kind,
        batch: int,
        slices: int,
        whole: Pass,
        attention: tuple[float, float],
    ) -> Pass:
        """Besides attention to earlier slices, which is the whole sequence's: a slice by itself has its own keys."""
        one = pass_at(points, kind, batch, self._overhead)
        # A window hides most of what is in earlier slices, so that those by themselves attend to as much.
        missing = (0.0, 0.0) if kind.windowed else tuple(a - a / slices for a in attention)
        times = [slices * mine - w + m for mine, w, m in zip(one[:2], whole[:2], missing)]
        return Pass(*[max(0.0, t) for t in (*times, *(slices * f - w for f, w in zip(one[2:], whole[2:])))])


def mean_of(found: Sequence[tuple[float, Pass]]) -> Pass:
    """Of several kinds of layers, by share."""
    total = sum(share for share, _ in found)
    return Pass(*[sum(share * times[i] for share, times in found) / total for i in range(4)])
