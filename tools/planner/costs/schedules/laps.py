"""How long the ministages of a pipeline take in one direction (Zorse, section 4.1.1)."""

from __future__ import annotations

from collections.abc import Sequence


def laps_s(
    one_s: Sequence[Sequence[float]], all_s: Sequence[Sequence[float]], transfers_s: Sequence[float], busiest_s: float
) -> float:
    """Seconds from the first start of the first stage to the last end of the last one.

    A stage begins a ministage when it has ended the one before and the first microbatch has arrived.  It
    ends when it has done all microbatches, the last of which arrives when the stage before has ended.

    Args:
        one_s: ``[stage][ministage]``, one microbatch.
        all_s: ``[stage][ministage]``, all microbatches of the slowest replica.
        transfers_s: One transfer over each boundary; from the last stage back to the first it takes the longest.
        busiest_s: All transfers of a ministage over the busiest link.
    """
    count = len(one_s)
    ways = [max(transfers_s, default=0.0), *transfers_s]
    end = [0.0] * count
    first, last = 0.0, 0.0  # when the first and the last microbatch leave the stage before
    for c in range(len(one_s[0])):
        for s in range(count):
            way = ways[s] if count > 1 and (s or c) else 0.0
            begin = max(end[s], first + way)
            end[s] = max(begin + max(all_s[s][c], busiest_s if c else 0.0), last + way + one_s[s][c] if s else 0.0)
            first, last = begin + one_s[s][c], end[s]
        if count == 1:
            first = 0.0
    return end[-1]


def mean_s(times: Sequence[Sequence[float]], microbatches: Sequence[int]) -> list[float]:
    """The mean over kinds of replicas, weighted by what each runs."""
    whole = sum(microbatches)
    return [sum(t * k for t, k in zip(column, microbatches)) / whole for column in zip(*times)]
