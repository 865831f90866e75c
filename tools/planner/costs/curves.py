"""One kind of pass that a profile has measured, at any micro batch size between and beyond those measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..inputs.profile_schema import LayerKind, LayerTiming
from .monotone import interpolated


class Kind(NamedTuple):
    """Holds what the points of one curve over the micro batch size have in common."""

    gpu: str
    layer: LayerKind
    tp: int
    recompute: str
    ep: int = 1
    windowed: bool = False

    @property
    def words(self) -> str:
        """How it differs from a plain layer."""
        dense = " without experts" if self.layer == "dense" else ""
        return dense + (" with a sliding window" if self.windowed else "")

    def repeats(self, measured: str) -> bool:
        """Whether the backward repeats a forward that was not repeated when it was measured.

        Args:
            measured: Recomputation of the points.
        """
        return self.layer in ("layer", "dense") and self.recompute == "full" != measured


class Pass(NamedTuple):
    """Seconds of one pass: of the layer, and what comes once per pass however many layers it goes through."""

    forward_s: float
    backward_s: float
    fixed_forward_s: float
    fixed_backward_s: float


def pass_at(points: Sequence[LayerTiming], kind: Kind, batch: int, overhead: float) -> Pass:
    """One pass of this kind.

    Args:
        points: Of this kind, or of the same without recomputation; by micro batch size.
        overhead: See ``Runtime.profile_overhead_s``.
    """
    forward = _at(points, batch, lambda t: t.forward_s, overhead)
    backward = _at(points, batch, lambda t: t.backward_s, overhead)
    fixed_f = min(_at(points, batch, lambda t: t.fixed_forward_s, 0.0), forward)
    fixed_b = min(_at(points, batch, lambda t: t.fixed_backward_s, 0.0), backward)
    forward, backward = forward - fixed_f, backward - fixed_b
    if kind.repeats(points[0].recompute):
        backward, fixed_b = backward + forward, fixed_b + fixed_f
    return Pass(forward, backward, fixed_f, fixed_b)


def without_sequences(points: Sequence[LayerTiming], kind: Kind) -> Pass:
    """What is left of a pass without any sequence, by the two smallest micro batches; nothing where there is one."""
    if len(points) < 2:
        return Pass(0.0, 0.0, 0.0, 0.0)
    a, b = points[0].micro_batch_size, points[1].micro_batch_size
    small, large = (pass_at(points, kind, batch, 0.0) for batch in (a, b))
    forward, backward, *_ = (max(0.0, (b * x - a * y) / (b - a)) for x, y in zip(small, large))
    return Pass(forward, backward, 0.0, 0.0)


def _at(points: Sequence[LayerTiming], batch: int, value: Callable[[LayerTiming], float], overhead: float) -> float:
    """A time at one micro batch size; see ``Runtime.profile_overhead_s`` for ``overhead``."""
    sizes = [t.micro_batch_size for t in points]
    times = [value(t) for t in points]
    if batch in sizes:
        found = times[sizes.index(batch)]
    elif batch > sizes[-1] or len(points) == 1:
        found = times[-1] * batch / sizes[-1]
    elif batch < sizes[0]:
        found = times[0]
    else:
        found = interpolated(sizes, times, batch)
    if not overhead:
        return found
    best = batch * min(t / n for t, n in zip(times, sizes) if n >= min(batch, sizes[-1]))
    return found - min(overhead, found) * max(0.0, 1 - best / found) if found else 0.0
