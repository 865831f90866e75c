"""Messages of the ranks over the job's store: a greeting at the start, and a sample of every iteration."""

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_het.store import Documents, StoreError

if TYPE_CHECKING:  # ``report`` imports torch
    from megatron_het.report import Past, Record

# Transport of samples to the comparing rank: the job's store.
#
# No rank waits for another.  Each rank overwrites its few keys in turn, so that the store does not grow, and the
# reader takes an iteration when all ranks have written it.


_GREETING_S, _GLANCE_S = 10.0, 0.25
_AWAY = 20
"""After a failed request none is sent for 20 times its duration, so that at most 5 % of the time is lost."""
PLACES = 8  # iterations of every rank in the store


class Board:
    """Writes and reads the watch's keys in the job's store.

    Except in :meth:`greet`, a request has a short time limit, and after a failure requests are dropped for a while.
    """

    def __init__(self, store: Documents, prefix: str = "het/watch") -> None:
        self._store = store.under(prefix)
        self._away_until_s = 0.0

    def greet(self, rank: int, text: str) -> None:
        """Write a rank's greeting; raises StoreError if the store does not answer."""
        self._store.write(f"hello/{rank}/0", text, patience_s=_GREETING_S)

    def post(self, name: str, rank: int, text: str, place: int = 0) -> None:
        """Write a rank's text under a name, over an earlier one at that place."""
        self._soon(lambda: self._store.write(f"{name}/{rank}/{place}", text, patience_s=_GLANCE_S, tries_again=False))

    def read(self, name: str, ranks: list[int], place: int = 0) -> list[str] | None:
        """Returns the texts of the ranks under a name; None if one is missing or the store does not answer."""
        keys = [f"{name}/{rank}/{place}" for rank in ranks]
        found = self._soon(lambda: self._store.texts(*keys, patience_s=_GLANCE_S, tries_again=False))
        if found is None or any(text is None for text in found):
            return None
        return [text for text in found if text is not None]

    def _soon(self, ask: Callable[[], Any]) -> Any:
        """The answer of a request; None if it failed, or if a request has failed recently."""
        start_s = time.monotonic()
        if start_s < self._away_until_s:
            return None
        try:
            return ask()
        except StoreError:
            now_s = time.monotonic()
            self._away_until_s = now_s + _AWAY * (now_s - start_s)
            return None


MOST_TRANSFERS = 16  # transfers per iteration and pair of ranks in a sample; of more, an evenly spaced selection
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Hello:
    """Greeting of a rank."""

    rank: int
    device: int  # number of the rank's replica, counted over all stages
    host: str  # host name
    clock: str  # identifies the clock; equal for ranks that read the same one
    predicted_s: Mapping[str, float]  # predicted seconds of an iteration by kind of operation

    def encode(self) -> str:
        """Returns the greeting as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> "Hello":
        """The greeting from JSON."""
        return cls(**json.loads(text))


Arrived = tuple[float, float, float]
"""Times of a receive: posted, wait began, wait ended; in seconds of the receiver's clock."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A rank's measurements of one iteration."""

    iteration: int
    elapsed_s: float  # from the iteration's start to the next one's
    measured_s: Mapping[str, float]  # seconds by kind of operation, without waits for transfers
    sent: Mapping[int, Sequence[float]] = field(default_factory=dict)  # times of posted sends, by peer
    # receives by peer, in the order in which they were posted
    received: Mapping[int, Sequence[Arrived]] = field(default_factory=dict)
    # number of receives by peer, including those that ``received`` omits
    counts: Mapping[int, int] = field(default_factory=dict)

    def encode(self) -> str:
        """Returns JSON with whole microseconds."""
        return json.dumps(
            {
                "i": self.iteration,
                "t": _us(self.elapsed_s),
                "k": {kind: _us(seconds) for kind, seconds in self.measured_s.items()},
                "s": {peer: [_us(t) for t in times] for peer, times in self.sent.items()},
                "r": {peer: [[_us(t) for t in marks] for marks in found] for peer, found in self.received.items()},
                "n": dict(self.counts),
            },
            separators=(",", ":"),
        )

    @classmethod
    def decode(cls, text: str | bytes) -> "Sample":
        """The sample from JSON."""
        body = json.loads(text)
        return cls(
            body["i"],
            body["t"] / _MICRO,
            {kind: us / _MICRO for kind, us in body["k"].items()},
            {int(peer): [us / _MICRO for us in times] for peer, times in body["s"].items()},
            {int(peer): [(a / _MICRO, b / _MICRO, c / _MICRO) for a, b, c in v] for peer, v in body["r"].items()},
            {int(peer): count for peer, count in body["n"].items()},
        )


def _us(seconds: float) -> int:
    return round(seconds * _MICRO)


def sample_of(past: "Past", iteration: int, elapsed_s: float, kinds: Set[Any]) -> Sample:
    """The sample of an iteration whose times are all known.

    Args:
        past: Records and transfers of the iteration.
        elapsed_s: From the iteration's start to the next one's.
        kinds: Kinds of operations that are compared.
    """
    measured: dict[str, float] = {}
    for record in past.records:
        kind = record.op.kind
        if kind in kinds:
            seconds = record.stop_s - record.start_s - record.wait_s
            measured[kind.name] = measured.get(kind.name, 0.0) + seconds
    sent: dict[int, list[float]] = {}
    for departure in past.departures:
        sent.setdefault(departure.peer, []).append(departure.posted)
    received: dict[int, list[Arrived]] = {}
    for arrival in past.arrivals:
        if arrival.ended is not None:
            marks = (arrival.posted, arrival.waited, arrival.ended)
            received.setdefault(arrival.peer, []).append(marks)
    return Sample(
        iteration,
        elapsed_s,
        measured,
        {peer: spread(times) for peer, times in sent.items()},
        {peer: spread(marks) for peer, marks in received.items()},
        {peer: len(marks) for peer, marks in received.items()},
    )


def spread[T](values: Sequence[T]) -> Sequence[T]:
    """At most ``MOST_TRANSFERS`` evenly spaced values; the same positions for equal lengths."""
    count = len(values)
    if count <= MOST_TRANSFERS:
        return values
    return [values[i * count // MOST_TRANSFERS] for i in range(MOST_TRANSFERS)]


def events_of(records: "Sequence[Record]") -> list[list[Any]]:
    """An iteration's operations for a trace: kind, microbatch, slice, chunk, peer; start, stop, wait in seconds."""
    return [
        [
            r.op.kind.name,
            r.op.microbatch,
            r.op.slice,
            r.op.chunk,
            r.op.peer,
            round(r.start_s, 6),
            round(r.stop_s, 6),
            round(r.wait_s, 6),
        ]
        for r in records
    ]
