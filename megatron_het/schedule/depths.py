"""How many microbatches 1F1B has in flight across slow links.

Under 1F1B a stage has one microbatch more in flight than the stage after it.  Where a transfer between the two takes
long, each microbatch waits there and back, and both stages idle.  More microbatches in flight before the slow boundary
fill that time, at the price of their activations.  How many is decided here, boundary by boundary, by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

FASTER = 0.005
"""Other depths must shorten the iteration by this share, because they take memory."""
SAME = 0.001
"""Depths that lengthen the iteration by no more than this share are as good, and the smaller one is taken."""
NOTICEABLE = 0.1
"""A boundary is slow if the way there and back takes more than this share of the slowest stage's time."""
_MORE = (0, 1, 2)
_MOST_STEPS = 8
"""Simulations with which depths are made smaller again, at most."""
_ALMOST_FREE, _HALF = 0.1, 0.5


def published_depths(stage_s: Sequence[float], transfer_s: Sequence[float], slow: Sequence[bool]) -> tuple[int, ...]:
    """The rule of HARP (EuroSys 2026), as a baseline.

    Args:
        stage_s: Seconds that each stage needs for one microbatch, forward and backward.
        transfer_s: Seconds of a transfer across each boundary between stages.
        slow: Which boundaries lie between clusters.

    Returns:
        For each boundary, how many microbatches more the stage before it has in flight: 1, and across clusters 1
        where the transfer takes less than a tenth of the slowest stage's time, 2 below a half, else 3, on top of it.
    """
    longest = max(stage_s)
    out = []
    for seconds, is_slow in zip(transfer_s, slow, strict=True):
        more = 1 if seconds < _ALMOST_FREE * longest else 2 if seconds < _HALF * longest else 3
        out.append(1 + (more if is_slow else 0))
    return tuple(out)


def choose_depths(
    stage_s: Sequence[float], transfer_s: Sequence[float], time_of: Callable[[tuple[int, ...]], float | None]
) -> tuple[int, ...]:
    """The depths with which the iteration is shortest, the smallest ones of those.

    Args:
        stage_s: Seconds that each stage needs for one microbatch, forward and backward.
        transfer_s: Seconds of a transfer across each boundary between stages.
        time_of: Simulated seconds of an iteration with these depths; None where they do not fit into memory.

    Returns:
        One number per boundary, 1 for Megatron's order; ``()`` where no other depths shorten the iteration.
    """
    plain = (1,) * len(transfer_s)
    longest = max(stage_s)
    slow = [b for b, seconds in enumerate(transfer_s) if 2 * seconds > NOTICEABLE * longest]
    if not slow:
        return ()
    search = _Search(time_of)
    start = search.time(plain)
    best = plain
    hidden = {b: ceil(2 * transfer_s[b] / longest) for b in slow}
    for more in _MORE:
        best = search.better(best, tuple(1 + hidden[b] + more if b in hidden else 1 for b in range(len(plain))))
    rule = published_depths(stage_s, transfer_s, [b in hidden for b in range(len(plain))])
    best = search.better(best, rule)
    if start is not None and search.seconds(best) > start * (1 - FASTER):
        return ()
    best = _smallest(search, best, hidden)
    return best if best != plain else ()


def _smallest(search: _Search, best: tuple[int, ...], hidden: Mapping[int, int]) -> tuple[int, ...]:
    """Depths that are as fast and smaller.

    Boundaries whose transfers hide behind equally many microbatches have one depth, so that a long pipeline needs no
    more simulations than a short one.
    """
    steps = _MOST_STEPS
    for level in sorted(set(hidden.values()), reverse=True):
        alike = [b for b, needed in hidden.items() if needed == level]
        while steps and all(best[b] > 1 for b in alike):
            steps -= 1
            smaller = tuple(depth - (b in alike) for b, depth in enumerate(best))
            if search.seconds(smaller) > search.seconds(best) * (1 + SAME):
                break
            best = smaller
    return best


class _Search:
    """Simulated times, each made once."""

    def __init__(self, time_of: Callable[[tuple[int, ...]], float | None]) -> None:
        self._time_of = time_of
        self._known: dict[tuple[int, ...], float | None] = {}

    def time(self, depths: tuple[int, ...]) -> float | None:
        """Seconds, None where the depths do not fit."""
        if depths not in self._known:
            self._known[depths] = self._time_of(depths)
        return self._known[depths]

    def seconds(self, depths: tuple[int, ...]) -> float:
        """Seconds, without end where the depths do not fit."""
        found = self.time(depths)
        return float("inf") if found is None else found

    def better(self, best: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        """The faster of two."""
        return other if self.seconds(other) < self.seconds(best) else best
