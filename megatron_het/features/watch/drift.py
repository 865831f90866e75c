"""Drift: measured against predicted seconds of devices and links, iteration by iteration.

Devices of one kind, and links between the same kinds, form a *group*.  Every figure is the median over a small window,
so that one slow iteration says nothing.  When the first window is full, each subject gets its *reference*: what it
took then, unless it took much longer than the others of its group, which then are the reference.  The group's
deviation from the plan at that time says whether the plan's figures of this kind are right.

Later a figure is compared with its reference.  What the whole group has in common (the lower median of its members)
is about the kind; what remains is about the subject.  Where all operations are slower by about one factor, it is the
device; where one kind of operation is, it is this operation.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

# What a watch finds, in words.

What = Literal["device", "operation", "link", "profile"]
"""A device that computes slower, one kind of operation of one device, a link, or figures of a whole kind that the plan
was made from."""


@dataclass(slots=True)
class Finding:
    """One thing that is not as planned."""

    what: What  # which sort of thing
    name: str  # its name: ``rank 2``, ``rank 0 -> rank 1``, ``a100``, ``a100 -> l40s``
    factor: float  # how many times as long it takes as before (device, operation, link), or as planned
    since: int  # first iteration in which it was so; 0 for the whole run
    found: int  # iteration after which it was known
    kind: str = ""  # kind of device, or kinds of both ends
    operation: str = ""  # kind of operation, "" for all
    place: str = ""  # more words about where, e.g. stage, replica and host.
    ended: int | None = None  # iteration after which it was over; None while it lasts

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns what makes it the same finding."""
        return self.what, self.name, self.operation

    def text(self) -> str:
        """One sentence."""
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
SIGNIFICANT = 0.1  # operations below this share of a subject's time are not asked whether they drift alike


@dataclass(slots=True)
class Subject:
    """A device or a link."""

    name: str
    what: What  # ``device`` or ``link``
    group: str  # subjects with equal ones are alike
    predicted_s: Mapping[str, float]  # by operation: seconds per iteration of a device, per transfer of a link
    place: str = ""  # more words about where it is
    ends: tuple[str, ...] = ()  # names of the devices of a link
    weight: float = 1.0
    recent: dict[str, deque[tuple[int, float]]] = field(default_factory=dict)
    reference_s: dict[str, float] = field(default_factory=dict)
    odd_since: int | None = None
    """The iteration from which it took much longer than its group when references were given, 0 for the first one that
    the watch has looked at; None if it did not."""

    def now_s(self, operation: str) -> float:
        """The smoothed figure."""
        return median(seconds for _, seconds in self.recent[operation])

    def is_full(self) -> bool:
        """Whether there is a window of every operation."""
        return bool(self.recent) and all(len(row) == row.maxlen for row in self.recent.values())


class DriftWatch:
    """Follows subjects.

    Args:
        subjects: All devices and links.
        smoothing: Iterations whose median counts.
        threshold: Smallest drift that is named: 0.15 is 15 % longer.
        device_share: Smallest excess of a device, as a share of the iteration.
        link_share: The same of a link.
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
        """By group and operation, measured over predicted, as far as the group has it in common."""
        self.active: dict[tuple[str, str, str], Finding] = {}
        self.ended: list[Finding] = []

    @property
    def iteration_s(self) -> float:
        """The smoothed time of an iteration."""
        return median(self._iterations_s) if self._iterations_s else 0.0

    def add(
        self,
        iteration: int,
        iteration_s: float,
        devices: Mapping[str, Mapping[str, float]],
        links: Mapping[str, tuple[float, float]],
    ) -> list[Finding]:
        """One iteration.

        Args:
            iteration_s: Its time.
            devices: By name and operation, seconds.
            links: By name: seconds of a transfer, and how many transfers were waited for.

        Returns:
            What is new, and what has ended.
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
        for key in sorted(self._groups):  # devices come before links, which they may explain
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
        """Give references to those that have none."""
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
        """Since when a subject has been slower than its group; a link may have been waited for late in the run only."""
        limit = subject.reference_s[operation] * (1 + self._threshold / 2)
        slow = next(iteration for iteration, seconds in subject.recent[operation] if seconds > limit)
        since = 0 if slow == self._first else slow
        subject.odd_since = since if subject.odd_since is None else min(subject.odd_since, since)

    def _common(self, ready: Sequence[Subject]) -> dict[str, float]:
        """By operation, by what the whole group has drifted; 1 for a single subject."""
        out = {}
        for operation in _operations(ready):
            factors = [s.now_s(operation) / s.reference_s[operation] for s in ready if operation in s.reference_s]
            out[operation] = lower_median(factors) if len(factors) > 1 else 1.0
        return out

    def _kind_findings(
        self, key: tuple[str, str], ready: Sequence[Subject], common: Mapping[str, float], iteration: int
    ) -> Iterator[Finding]:
        """Figures of the whole kind that are not as planned."""
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
        """A subject that has left its reference by more than its group has."""
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
        """Factor from which a drift is named; lower for one that has been, so that names do not flicker."""
        names = (subject.what, subject.name, ""), ("operation", subject.name, operation)
        return 1 + self._threshold * (0.5 if any(name in self.active for name in names) else 1.0)

    def _since(self, subject: Subject, should: Mapping[str, float], operations: Sequence[str]) -> int:
        """The first iteration of the window with the drift, or what was said before; 0 where it was always so."""
        for key in ((subject.what, subject.name, ""), ("operation", subject.name, operations[0])):
            if key in self.active:
                return self.active[key].since
        if subject.odd_since is not None:
            return subject.odd_since
        rows = [subject.recent[op] for op in operations]
        limit = sum(should[op] for op in operations) * (1 + self._threshold / 2)
        return next((row[0][0] for row in zip(*rows) if sum(seconds for _, seconds in row) > limit), rows[0][0][0])

    def _explained(self, link: Subject, known: Mapping[tuple[str, str, str], Finding]) -> bool:
        """Whether a slow end explains a slow link: who is stopped does not move data either."""
        for name in link.ends:
            if any(key[1] == name and key[0] in ("device", "operation") for key in known):
                return True
            device = self.subjects.get(("device", name))
            if device is None or not device.reference_s:
                continue
            latest = [sum(row[-k][1] for row in device.recent.values()) for k in (1, 2)]
            if min(latest) > (1 + self._threshold) * sum(device.reference_s.values()):
                return True  # its window will say so
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
    """The median; of an even number of values the lower one of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def _operations(subjects: Sequence[Subject]) -> list[str]:
    return list(dict.fromkeys(operation for s in subjects for operation in s.recent))
