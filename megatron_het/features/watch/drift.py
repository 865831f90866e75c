"""Drift: measured against predicted seconds of devices and links, iteration by iteration.

Devices of one kind, and links between the same kinds, form a *group*.  Every time is the median over a small window,
so that one slow iteration has no effect.  When its first window is full, each subject (device or link) gets its
*reference*: its time then or, if that was much longer than in the rest of the group, the group's typical time.  The
group's deviation from the plan at that time shows whether the plan's figures of this kind are right.

Later each time is compared with its reference.  The drift common to the group (the lower median of its members) is
attributed to the kind, and the rest to the subject.  If all operations of a device drift by about one factor, the
finding is the device; if one kind of operation drifts, it is this operation.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

# Findings, and their texts.

What = Literal["device", "operation", "link", "profile"]
"""Subject of a finding: a device, one kind of operation of a device, a link, or the profile of a kind of device or
link."""


@dataclass(slots=True)
class Finding:
    """A drift of a device, operation, link or profile."""

    what: What
    name: str  # name of the subject: ``rank 2``, ``rank 0 -> rank 1``, ``a100``, ``a100 -> l40s``
    factor: float  # measured time over its reference (device, operation, link), or over the planned time (profile)
    since: int  # first iteration with the drift; 0 for the whole run
    found: int  # iteration after which the drift was detected
    kind: str = ""  # kind of device, or kinds of both ends
    operation: str = ""  # kind of operation, "" for all
    place: str = ""  # stage, replica and host of a device; hosts of a link
    ended: int | None = None  # iteration after which the drift was over; None while it lasts

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the identity of the finding, the same in every iteration."""
        return self.what, self.name, self.operation

    def text(self) -> str:
        """Returns a sentence about the finding."""
        since = f" since iteration {self.since}" if self.since else " since the start"
        where = f" ({self.place})" if self.place else ""
        times = f"{self.factor:.2f} times"
        if self.what == "device":
            return f"{self.name}{where} computes slowly{since}: every operation takes {times} as long as it should"
        if self.what == "operation":
            return f"{self.name}{where}{since}: {self.operation} takes {times} as long as it should"
        if self.what == "link":
            return f"the link {self.name}{where} is slow{since}: a transfer takes {times} as long as it should"
        what = f"{self.operation} on {self.name}" if self.operation else f"every operation on {self.name}"
        return f"the plan's figures of {self.name} are wrong{since}: {what} takes {times} the planned time"

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self)


UNIFORM = 0.4  # all operations drift alike if each has at least this share of the mean drift
SIGNIFICANT = 0.1  # operations with less than this share of a subject's time are ignored in that test


@dataclass(slots=True)
class Subject:
    """A device or a link."""

    name: str
    what: What  # ``device`` or ``link``
    group: str  # subjects of the same group are compared with each other
    predicted_s: Mapping[str, float]  # by operation: seconds per iteration of a device, per transfer of a link
    place: str = ""  # stage, replica and host of a device; hosts of a link
    ends: tuple[str, ...] = ()  # names of the devices of a link
    weight: float = 1.0  # transfers per iteration of a link for which a receiver waited
    recent: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    reference_s: dict[str, float] = field(default_factory=dict)
    odd_since: int | None = None
    """First slow iteration, if the subject was much slower than its group when it got its reference; 0 if that is the
    first iteration that the watch has compared.  None if the subject was not slower."""

    def now_s(self, operation: str) -> float:
        """Median of the window's seconds."""
        return median(seconds for _, seconds in self.recent[operation])

    def is_full(self) -> bool:
        """Whether the windows of all operations are full."""
        return bool(self.recent) and all(len(row) == row.maxlen for row in self.recent.values())


class DriftWatch:
    """Finds drift of devices and links.

    Args:
        subjects: All devices and links.
        smoothing: Size of the window in iterations.
        threshold: Smallest drift that is reported: 0.15 is 15 % longer.
        device_share: Smallest excess of a device that is reported, as a share of the iteration.
        link_share: Smallest excess of a link that is reported, as a share of the iteration.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        *,
        smoothing: int = 5,
        threshold: float = 0.15,
        device_share: float = 0.01,
        link_share: float = 0.03,
    ) -> None:
        self.subjects = {(s.what, s.name): s for s in subjects}
        self._smoothing, self._threshold = smoothing, threshold
        self._shares = {"device": device_share, "link": link_share}
        self._groups: dict[tuple[str, str], list[Subject]] = {}
        for subject in subjects:
            self._groups.setdefault((subject.what, subject.group), []).append(subject)
        self._iterations_s: deque[float] = deque(maxlen=smoothing)
        self._first: int | None = None
        self.profile: dict[tuple[str, str], dict[str, float]] = {}
        """By group and operation: measured over predicted time, the lower median of the group at the reference."""
        self.active: dict[tuple[str, str, str], Finding] = {}
        self.ended: list[Finding] = []

    @property
    def iteration_s(self) -> float:
        """Median of the window's iteration times; 0 before the first iteration."""
        return median(self._iterations_s) if self._iterations_s else 0.0

    def add(
        self,
        iteration: int,
        iteration_s: float,
        devices: Mapping[str, Mapping[str, float]],
        links: Mapping[str, tuple[float, float]],
    ) -> list[Finding]:
        """Add the times of an iteration.

        Args:
            iteration_s: Time of the iteration.
            devices: Seconds by name and operation.
            links: By name: seconds of a transfer, and number of transfers for which the receiver waited.

        Returns:
            Findings that are new or have ended.
        """
        self._iterations_s.append(iteration_s)
        self._first = iteration if self._first is None else self._first
        for name, row in devices.items():
            self._put(self.subjects["device", name], iteration, row)
        for name, (seconds, count) in links.items():
            subject = self.subjects["link", name]
            subject.weight = count
            self._put(subject, iteration, {"transfer": seconds})
        found: dict[tuple[str, str, str], Finding] = {}
        for key in sorted(self._groups):  # devices before links, because a slow device may explain a slow link
            for finding in self._group_findings(key, iteration, found):
                found[finding.key] = finding
        return self._changes(found, iteration)

    def _put(self, subject: Subject, iteration: int, row: Mapping[str, float]) -> None:
        for operation, seconds in row.items():
            if subject.predicted_s.get(operation, 0.0) > 0:
                recent = subject.recent.setdefault(operation, deque(maxlen=self._smoothing))
                recent.append((iteration, seconds))

    # -- one group -------------------------------------------------------------------------------

    def _group_findings(
        self, key: tuple[str, str], iteration: int, known: Mapping[tuple[str, str, str], Finding]
    ) -> Iterator[Finding]:
        ready = [s for s in self._groups[key] if s.is_full()]
        if not ready:
            return
        self._refer(key, ready)
        common = self._common(ready)
        yield from self._kind_findings(key, ready, common, iteration)
        for subject in ready:
            if subject.what == "link" and self._explained(subject, known):
                continue
            finding = self._subject_finding(subject, common, iteration)
            if finding is not None:
                yield finding

    def _refer(self, key: tuple[str, str], ready: Sequence[Subject]) -> None:
        """Set the reference of subjects that have none, and the group's profile."""
        fresh = [s for s in ready if not s.reference_s]
        if not fresh:
            return
        for operation in _operations(ready):
            factors = {
                s.name: (s.reference_s.get(operation) or s.now_s(operation)) / s.predicted_s[operation]
                for s in ready
                if operation in s.recent
            }
            common = lower_median(list(factors.values()))
            self.profile.setdefault(key, {})[operation] = common
            for s in fresh:
                if operation in s.recent:
                    odd = len(ready) > 1 and factors[s.name] / common >= 1 + 2 * self._threshold
                    s.reference_s[operation] = s.predicted_s[operation] * (common if odd else factors[s.name])
                    if odd:
                        self._mark_odd(s, operation)

    def _mark_odd(self, subject: Subject, operation: str) -> None:
        """Set :attr:`Subject.odd_since`, which may be late in the run for a link that was seldom waited for."""
        limit = subject.reference_s[operation] * (1 + self._threshold / 2)
        slow = next(iteration for iteration, seconds in subject.recent[operation] if seconds > limit)
        since = 0 if slow == self._first else slow
        subject.odd_since = since if subject.odd_since is None else min(subject.odd_since, since)

    def _common(self, ready: Sequence[Subject]) -> dict[str, float]:
        """The group's common drift from its references, as a factor by operation; 1 for a single subject."""
        out = {}
        for operation in _operations(ready):
            factors = [s.now_s(operation) / s.reference_s[operation] for s in ready if operation in s.reference_s]
            out[operation] = lower_median(factors) if len(factors) > 1 else 1.0
        return out

    def _kind_findings(
        self, key: tuple[str, str], ready: Sequence[Subject], common: Mapping[str, float], iteration: int
    ) -> Iterator[Finding]:
        """Yields findings about a kind: operations whose times in the whole group differ from the plan."""
        what, group = key
        least_s = self._shares[what] * self.iteration_s
        off: dict[str, float] = {}
        for operation, factor in self.profile[key].items():
            now = factor * common.get(operation, 1.0)
            excess_s = max(s.predicted_s.get(operation, 0.0) * s.weight for s in ready) * abs(now - 1)
            named = any(("profile", group, name) in self.active for name in (operation, ""))
            bar = 1 + self._threshold * (0.5 if named else 1.0)
            if (now > bar or now < 1 / bar) and excess_s >= least_s:
                off[operation] = now
        if not off:
            return
        if len(off) == len(self.profile[key]) and max(off.values()) / min(off.values()) < 1 + 2 * self._threshold:
            yield Finding("profile", group, sum(off.values()) / len(off), 0, iteration, group)
            return
        for operation, factor in off.items():
            yield Finding(
                what="profile", name=group, factor=factor, since=0, found=iteration, kind=group, operation=operation
            )

    def _subject_finding(self, subject: Subject, common: Mapping[str, float], iteration: int) -> Finding | None:
        """Returns the finding of a subject that has drifted beyond the common drift of its group, or None."""
        should = {op: seconds * common[op] for op, seconds in subject.reference_s.items()}
        now = {op: subject.now_s(op) for op in should}
        total = sum(should.values())
        factor = sum(now.values()) / total
        each = {op: now[op] / should[op] for op in should if should[op] >= SIGNIFICANT * total}
        worst = max(each, key=lambda op: now[op] - should[op])
        least_s = self._shares[subject.what] * self.iteration_s
        matters = (sum(now.values()) - total) * subject.weight >= least_s and factor >= self._bar(subject, "")
        if matters and min(each.values()) - 1 >= UNIFORM * (factor - 1):
            since = self._since(subject, should, list(should))
            return Finding(subject.what, subject.name, factor, since, iteration, subject.group, place=subject.place)
        if (now[worst] - should[worst]) * subject.weight < least_s or each[worst] < self._bar(subject, worst):
            return None
        since = self._since(subject, should, [worst])
        return Finding(
            what="operation",
            name=subject.name,
            factor=each[worst],
            since=since,
            found=iteration,
            kind=subject.group,
            operation=worst,
            place=subject.place,
        )

    def _bar(self, subject: Subject, operation: str) -> float:
        """Smallest factor that is reported; lower for an active finding, so that findings do not flicker."""
        names = (subject.what, subject.name, ""), ("operation", subject.name, operation)
        return 1 + self._threshold * (0.5 if any(name in self.active for name in names) else 1.0)

    def _since(self, subject: Subject, should: Mapping[str, float], operations: Sequence[str]) -> int:
        """First iteration with the drift: of the active finding, else ``odd_since``, else the first in the window."""
        for key in ((subject.what, subject.name, ""), ("operation", subject.name, operations[0])):
            if key in self.active:
                return self.active[key].since
        if subject.odd_since is not None:
            return subject.odd_since
        rows = [subject.recent[op] for op in operations]
        limit = sum(should[op] for op in operations) * (1 + self._threshold / 2)
        return next((row[0][0] for row in zip(*rows) if sum(seconds for _, seconds in row) > limit), rows[0][0][0])

    def _explained(self, link: Subject, known: Mapping[tuple[str, str, str], Finding]) -> bool:
        """Whether one of its devices is slow, which explains a slow link: a stopped process moves no data."""
        for name in link.ends:
            if any(key[1] == name and key[0] in ("device", "operation") for key in known):
                return True
            device = self.subjects.get(("device", name))
            if device is None or not device.reference_s:
                continue
            latest = [sum(row[-k][1] for row in device.recent.values()) for k in (1, 2)]
            if min(latest) > (1 + self._threshold) * sum(device.reference_s.values()):
                return True  # slow in the last two iterations, before the window's median shows it
        return False

    # -- findings --------------------------------------------------------------------------------

    def _changes(self, found: Mapping[tuple[str, str, str], Finding], iteration: int) -> list[Finding]:
        changes = []
        for key, finding in found.items():
            if key in self.active:
                self.active[key].factor = finding.factor
            else:
                self.active[key] = finding
                changes.append(finding)
        for key in [k for k in self.active if k not in found]:
            over = self.active.pop(key)
            over.ended = iteration
            self.ended.append(over)
            changes.append(over)
        return changes


def lower_median(values: Sequence[float]) -> float:
    """The median; the lower of the two middle values for an even number of values."""
    return sorted(values)[(len(values) - 1) // 2]


def _operations(subjects: Sequence[Subject]) -> list[str]:
    return list(dict.fromkeys(operation for s in subjects for operation in s.recent))
