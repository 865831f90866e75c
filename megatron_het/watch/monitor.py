"""From the samples of all ranks to findings, and to the figures that a better plan is made from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_het.lowering.programs import costs_of
from megatron_het.plan import Placement, Plan, plan_hash
from megatron_het.schedule.cost import Costs
from megatron_het.store import Documents, StoreError
from megatron_het.watch.drift import DriftWatch, Finding, Subject

if TYPE_CHECKING:  # it imports torch
    from megatron_het.report.timeline import Past, Record


# Samples: what a rank says about itself once and about every iteration, in small texts that travel over the store.


# How samples reach the rank that compares them: over the job's store.
#
# Nobody waits.  A rank overwrites its own few places in turn, so that the store does not grow, and the reader takes
# an iteration when everybody has written it.


_GREETING_S, _GLANCE_S = 10.0, 0.25
_AWAY = 20
"""After a question without an answer nothing is asked for so many times as long as that took: 5 % are lost at most."""
PLACES = 8
"""Iterations that are kept of every rank."""


class Board:
    """Places in the job's store.

    An answer comes soon, or a sample is dropped and nothing is asked for a while: training waits for no watch.

    Args:
        store: Of the job.
        prefix: Of all keys.
    """

    def __init__(self, store: Documents, prefix: str = "het/watch") -> None:
        self._store = store.under(prefix)
        self._away_until_s = 0.0

    def greet(self, rank: int, text: str) -> None:
        """Write what a rank says about itself, once.

        Raises:
            StoreError: Nobody answers.
        """
        self._store.write(f"hello/{rank}/0", text, patience_s=_GREETING_S)

    def post(self, name: str, rank: int, text: str, place: int = 0) -> None:
        """Write what a rank says under a name; what was there is gone."""
        self._soon(lambda: self._store.write(f"{name}/{rank}/{place}", text, patience_s=_GLANCE_S, tries_again=False))

    def read(self, name: str, ranks: list[int], place: int = 0) -> list[str] | None:
        """Returns what all of the ranks have said under a name; None if somebody has said nothing yet."""
        keys = [f"{name}/{rank}/{place}" for rank in ranks]
        found = self._soon(lambda: self._store.texts(*keys, patience_s=_GLANCE_S, tries_again=False))
        if found is None or any(text is None for text in found):
            return None
        return [text for text in found if text is not None]

    def _soon(self, ask: Callable[[], Any]) -> Any:
        """The answer; None where it does not come soon."""
        start_s = time.monotonic()
        if start_s < self._away_until_s:
            return None
        try:
            return ask()
        except StoreError:
            now_s = time.monotonic()
            self._away_until_s = now_s + _AWAY * (now_s - start_s)
            return None


MOST_TRANSFERS = 16
"""Transfers per iteration and pair of ranks that are told; of more, so many evenly spread ones."""
_MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Hello:
    """Holds what a rank says once.

    Attributes:
        rank: World rank.
        device: Number of its replica, counted through the stages.
        host: Name of its machine.
        clock: Ranks with equal ones read one clock.
        predicted_s: Seconds of an iteration by kind of operation, as the plan says.
    """

    rank: int
    device: int
    host: str
    clock: str
    predicted_s: Mapping[str, float]

    def encode(self) -> str:
        """Returns JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Hello:
        """From JSON."""
        return cls(**json.loads(text))


Arrived = tuple[float, float, float]
"""When a receive was posted, when the waiting for it began and when it ended; seconds of the receiver's clock."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds what a rank measured in one iteration.

    Attributes:
        iteration: Its number.
        elapsed_s: From its start to the start of the next one.
        measured_s: Seconds by kind of operation, without waiting for transfers.
        sent: By peer, when sends were posted.
        received: By peer, the receives, in the order in which they were posted.
        counts: By peer, how many receives there were; not all of them are told.
    """

    iteration: int
    elapsed_s: float
    measured_s: Mapping[str, float]
    sent: Mapping[int, Sequence[float]] = field(default_factory=dict)
    received: Mapping[int, Sequence[Arrived]] = field(default_factory=dict)
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
    def decode(cls, text: str | bytes) -> Sample:
        """From JSON."""
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


def sample_of(past: Past, iteration: int, elapsed_s: float, kinds: Set[Any]) -> Sample:
    """The sample of an iteration whose times are all there.

    Args:
        past: Its records and transfers.
        iteration: Its number.
        elapsed_s: From its start to the start of the next one.
        kinds: The kinds of operations that are compared.
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
    """At most ``MOST_TRANSFERS`` of them, evenly spread; the same places for equal lengths."""
    count = len(values)
    if count <= MOST_TRANSFERS:
        return values
    return [values[i * count // MOST_TRANSFERS] for i in range(MOST_TRANSFERS)]


def events_of(records: Sequence[Record]) -> list[list[Any]]:
    """An iteration's operations for a trace: kind, microbatch, slice, chunk, peer, start, stop, waited (seconds)."""
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


# What transfers took, from the marks of both of their ends.
#
# A transfer begins when both ends are posted.  It has ended when a receiver that waited goes on; the end of a receive
# for which nobody had to wait is not known, and such a transfer held nobody up.  So the seconds of a transfer are
#
#     end of the wait - max(send posted, receive posted)
#
# and neither the sender's compute nor the receiver's is part of them.  Ranks of one machine read one clock.  Between
# machines the difference of the clocks is taken from the transfers themselves, as NTP does it: the least of (end - send
# posted) in one direction is the link plus the difference, in the other direction the link less the difference.
# Nothing is sent for it, and clocks may run apart.  What a link takes is then known for both directions together only,
# and both get the mean.


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
        clocks: By rank; see :class:`~megatron_het.watch.monitor.Hello`.
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


FORMAT, VERSION = "megatron_het.watch", 1
WARM_UP = 2
"""Iterations of a run that are not looked at: caches are cold, and the second one may be metered."""


def identity(plan: Plan) -> str:
    """The hash of a plan whatever it says about the watch itself."""
    kept = {name: value for name, value in plan.schedule.parameters.items() if not name.startswith("watch")}
    return plan_hash(replace(plan, schedule=replace(plan.schedule, parameters=kept)))


@dataclass(frozen=True, slots=True)
class Settings:
    """How the watch decides; see :class:`~megatron_het.watch.drift.DriftWatch`."""

    smoothing: int = 5
    threshold: float = 0.15


class Monitor:
    """Compares what ranks measure with what their plan predicts.

    Args:
        plan: With the costs of its prediction.
        hellos: Of all ranks.
        settings: How to decide.
        slices: How many slices a sequence is sent in.
    """

    def __init__(self, plan: Plan, hellos: Sequence[Hello], settings: Settings, slices: int = 1) -> None:
        costs = costs_of(plan)
        assert costs is not None, "without costs there is nothing to compare with"
        self._plan, self._costs, self._settings = plan, costs, settings
        self._placement = Placement(plan)
        self._hellos = {hello.rank: hello for hello in hellos}
        self._clocks = {hello.rank: hello.clock for hello in hellos}
        self._slices = slices
        self._replicas = [(s, q) for s, stage in enumerate(plan.stages) for q in range(len(stage.replicas))]
        self._links: dict[tuple[int, int], Subject] = {}
        devices = [self._device_subject(number) for number in range(len(self._replicas))]
        self._devices = dict(enumerate(devices))
        self.watch = DriftWatch(
            [*devices, *self._link_subjects(costs)], smoothing=settings.smoothing, threshold=settings.threshold
        )
        self.last: dict[str, Any] = {}
        """Figures of the latest iteration: seconds, largest factors."""
        self._seen = 0
        self._iteration = 0
        self._transfers: dict[tuple[int, int], Moved] = {}

    # -- subjects --------------------------------------------------------------------------------

    def _device_subject(self, number: int) -> Subject:
        stage, q = self._replicas[number]
        replica = self._placement.replica(stage, q)
        first = self._hellos[replica.ranks[0]]
        place = f"stage {stage}, replica {q}, {replica.device or 'device'} on {first.host}"
        return Subject(self._name(number), "device", self._kind(number), first.predicted_s, place)

    def _name(self, number: int) -> str:
        """The ranks of a replica, in words."""
        ranks = self._placement.replica(*self._replicas[number]).ranks
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"

    def _kind(self, number: int) -> str:
        return self._placement.replica(*self._replicas[number]).device or "device"

    def _link_subjects(self, costs: Costs) -> list[Subject]:
        """One per directed pair of devices that exchange activations."""
        assert self._plan.predicted is not None and self._plan.predicted.costs is not None
        size = costs.message_bytes / self._slices
        for link in self._plan.predicted.costs.links:
            for a, b in link.pairs:
                hosts = [self._hellos[self._placement.replica(*self._replicas[n]).ranks[0]].host for n in (a, b)]
                group = f"{self._kind(a)} -> {self._kind(b)}{' in one machine' if hosts[0] == hosts[1] else ''}"
                predicted = {"transfer": link.latency_s + size / link.bytes_per_s}
                name = f"{self._name(a)} -> {self._name(b)}"
                place = f"{hosts[0]} -> {hosts[1]}"
                self._links[a, b] = Subject(name, "link", group, predicted, place, (self._name(a), self._name(b)))
        return list(self._links.values())

    # -- iterations ------------------------------------------------------------------------------

    def add(self, samples: Mapping[int, Sample]) -> list[Finding]:
        """One iteration of all ranks; what is new, and what has ended."""
        self._seen += 1
        first = next(iter(samples.values()))
        self._iteration = first.iteration
        iteration_s = max(sample.elapsed_s for sample in samples.values())
        if self._seen <= WARM_UP:
            return []
        devices = {self._name(n): self._of_device(n, samples) for n in self._devices}
        self._transfers = self._of_links(moved(samples, self._clocks))
        links = {self._links[edge].name: (one.seconds, one.waited_for) for edge, one in self._transfers.items()}
        findings = self.watch.add(first.iteration, iteration_s, devices, links)
        self.last = self._figures(iteration_s, devices)
        return findings

    def _of_device(self, number: int, samples: Mapping[int, Sample]) -> dict[str, float]:
        """Seconds by operation, of the rank of a replica that took longest."""
        ranks = self._placement.replica(*self._replicas[number]).ranks
        rows = [samples[rank].measured_s for rank in ranks]
        return {operation: max(row.get(operation, 0.0) for row in rows) for row in rows for operation in row}

    def _of_links(self, found: Mapping[Edge, Moved]) -> dict[tuple[int, int], Moved]:
        """Transfers between devices, of the pair of ranks that took longest."""
        out: dict[tuple[int, int], Moved] = {}
        for (source, target), one in found.items():
            edge = self._hellos[source].device, self._hellos[target].device
            if edge in self._links and (edge not in out or one.seconds > out[edge].seconds):
                out[edge] = one
        return out

    def _figures(self, iteration_s: float, devices: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        assert self._plan.predicted is not None
        factors = {}
        for number, subject in self._devices.items():
            expected = sum(subject.predicted_s.values())
            if expected:
                factors[number] = sum(devices[subject.name].values()) / expected
        links = {edge: one.seconds / self._links[edge].predicted_s["transfer"] for edge, one in self._transfers.items()}
        return {
            "iteration_s": iteration_s,
            "predicted_iteration_s": self._plan.predicted.iteration_s,
            "devices": factors,
            "links": links,
        }

    # -- for a better plan -----------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Everything that was measured, as JSON values: what ``het-plan replan`` reads."""
        assert self._plan.predicted is not None
        active = list(self.watch.active.values())
        return {
            "format": FORMAT,
            "version": VERSION,
            "plan_hash": identity(self._plan),
            "iteration": self._iteration,
            "predicted_iteration_s": self._plan.predicted.iteration_s,
            "iteration_s": self.watch.iteration_s,
            "findings": [finding.to_json() for finding in [*self.watch.ended, *active]],
            "devices": [self._device_json(n, subject) for n, subject in self._devices.items()],
            "links": [self._link_json(edge, subject) for edge, subject in self._links.items()],
        }

    def _device_json(self, number: int, subject: Subject) -> dict[str, Any]:
        stage, q = self._replicas[number]
        replica = self._placement.replica(stage, q)
        return {
            "device": number,
            "stage": stage,
            "replica": q,
            "ranks": list(replica.ranks),
            "kind": replica.device,
            "host": self._hellos[replica.ranks[0]].host,
            "operations": _operations_json(subject),
        }

    def _link_json(self, edge: tuple[int, int], subject: Subject) -> dict[str, Any]:
        return {
            "source": edge[0],
            "target": edge[1],
            "message_bytes": self._costs.message_bytes / self._slices,
            **_operations_json(subject).get("transfer", {"predicted_s": subject.predicted_s["transfer"]}),
        }


def _operations_json(subject: Subject) -> dict[str, dict[str, float]]:
    return {
        operation: {
            "predicted_s": subject.predicted_s[operation],
            "measured_s": subject.now_s(operation),
            "reference_s": subject.reference_s.get(operation, subject.now_s(operation)),
        }
        for operation in subject.recent
    }
