"""What transfers took, from the marks of both of their ends.

A transfer begins when both ends are posted.  It has ended when a receiver that waited goes on; the end of a receive for
which nobody had to wait is not known, and such a transfer held nobody up.  So the seconds of a transfer are

    end of the wait - max(send posted, receive posted)

and neither the sender's compute nor the receiver's is part of them.  Ranks of one machine read one clock.  Between
machines the difference of the clocks is taken from the transfers themselves, as NTP does it: the least of
(end - send posted) in one direction is the link plus the difference, in the other direction the link less the
difference.  Nothing is sent for it, and clocks may run apart.  What a link takes is then known for both directions
together only, and both get the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from megatron_het.watch.samples import Arrived, Sample

BLOCKED_S = 50e-6
"""Who waited for less did not wait for the transfer."""

Edge = tuple[int, int]
"""(source, destination), world ranks."""


class Moved(NamedTuple):
    """The transfers of an edge in one iteration.

    Attributes:
        seconds: Median of those for which the receiver waited.
        waited_for: How many these are in the whole iteration, as far as the told ones say.
    """

    seconds: float
    waited_for: float


def moved(samples: Mapping[int, Sample], clocks: Mapping[int, str]) -> dict[Edge, Moved]:
    """Transfers of one iteration, by edge; edges without a known end are left out.

    Args:
        samples: Of the same iteration, by rank.
        clocks: By rank; see :class:`~megatron_het.watch.samples.Hello`.
    """
    pairs = {edge: found for edge in _edges(samples) if (found := _paired(samples, *edge))}
    out: dict[Edge, Moved] = {}
    for (source, target), found in pairs.items():
        back = pairs.get((target, source))
        if clocks[source] == clocks[target]:
            times = _times(found, 0.0)
        elif back:
            ahead_s = _ahead(found, back)
            both = [_times(found, ahead_s), _times(back, -ahead_s)]
            times = sorted(both[0] + both[1]) if all(both) else []
        else:
            continue
        if times:
            total = samples[target].counts.get(source, len(found))
            out[source, target] = Moved(median(times), min(len(times), len(found)) * total / len(found))
    return out


def _edges(samples: Mapping[int, Sample]) -> list[Edge]:
    return [(peer, rank) for rank, sample in samples.items() for peer in sample.received if peer in samples]


_Ends = list[tuple[float, Arrived]]
"""When the send was posted, and the receive's marks."""


def _paired(samples: Mapping[int, Sample], source: int, target: int) -> _Ends:
    """Both ends of every transfer; none where the two ranks tell of different numbers of them."""
    sent, received = samples[source].sent.get(target, ()), samples[target].received[source]
    return list(zip(sent, received)) if len(sent) == len(received) else []


def _times(ends: _Ends, ahead_s: float) -> list[float]:
    """Seconds of the transfers whose end is known.

    Args:
        ends: Of one edge.
        ahead_s: How far the receiver's clock is ahead of the sender's.
    """
    return [
        max(0.0, ended - max(sent + ahead_s, posted))
        for sent, (posted, waited, ended) in ends
        if ended - waited >= BLOCKED_S
    ]


def _ahead(there: _Ends, back: _Ends) -> float:
    """How far the clock of the receiver of ``there`` is ahead, in seconds."""
    forth = min(marks[2] - sent for sent, marks in there)
    return (forth - min(marks[2] - sent for sent, marks in back)) / 2
