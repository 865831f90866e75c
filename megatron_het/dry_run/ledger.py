"""The account of a rank's memory: every change of a storage's size, and when in the run it happened.

Categories are given after the fact, because only then it is known how long a storage lives: what outlives the
operation that made it is an activation, what does not is temporary.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, CACHE, TEMPORARIES, OTHER = "activations", "cache", "temporaries", "other"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, CACHE, TEMPORARIES, OTHER)


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of a run during which the same thing goes on.

    Attributes:
        iteration: Of training, from 0; -1 before the first one.
        label: What runs, e.g. the label of an operation.
        is_operation: Whether it is an operation of the program.
    """

    iteration: int
    label: str
    is_operation: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was held at once in a part of a run.

    Attributes:
        total_bytes: All categories together.
        label: What ran then.
        by_category: What each category held then.
        category_peaks: The most that each category held at any time.
    """

    total_bytes: int
    label: str
    by_category: Mapping[str, int]
    category_peaks: Mapping[str, int]


@dataclass
class Ledger:
    """Changes in the order in which they happened.

    A storage is known here by the number of its life: a storage that is freed and allocated again has several.
    """

    moments: list[Moment] = field(default_factory=lambda: [Moment(-1, "start", False)])
    _lives: array[int] = field(default_factory=lambda: array("q"))
    _changes: array[int] = field(default_factory=lambda: array("q"))
    _when: array[int] = field(default_factory=lambda: array("q"))
    _marked: dict[int, str] = field(default_factory=dict)
    _born: array[int] = field(default_factory=lambda: array("q"))
    _died: dict[int, int] = field(default_factory=dict)

    def begin(self, moment: Moment) -> None:
        """Something else goes on from here."""
        self.moments.append(moment)

    def open(self) -> int:
        """Number of a new life."""
        self._born.append(len(self.moments) - 1)
        return len(self._born) - 1

    def change(self, life: int, difference_bytes: int) -> None:
        """A storage has grown or shrunk."""
        self._lives.append(life)
        self._changes.append(difference_bytes)
        self._when.append(len(self.moments) - 1)

    def close(self, life: int) -> None:
        """A storage holds nothing any more."""
        self._died[life] = len(self.moments) - 1

    def mark(self, life: int, category: str) -> None:
        """Say what a storage is for, whenever it was or will be allocated."""
        self._marked[life] = category

    def category(self, life: int) -> str:
        """Returns what a storage is for, by mark or by its life."""
        marked = self._marked.get(life)
        if marked is not None:
            return marked
        born, died = self._born[life], self._died.get(life)
        if self.moments[born].is_operation and died != born:
            return ACTIVATIONS
        if self.moments[born].iteration < 0 and (died is None or self.moments[died].iteration >= 0):
            return OTHER
        return TEMPORARIES

    def peak(self, iteration: int) -> Peak:
        """The peak of an iteration, or of all that comes before the first (-1)."""
        now = dict.fromkeys(CATEGORIES, 0)
        most = defaultdict(int, now)
        total, highest, label, at_peak = 0, -1, "", dict(now)
        known: dict[int, str] = {}
        moment = -1
        for life, difference, when in zip(self._lives, self._changes, self._when, strict=True):
            if self.moments[when].iteration > iteration:
                break
            category = known.get(life)
            if category is None:
                category = known[life] = self.category(life)
            if when != moment:
                if self.moments[when].iteration == iteration and (
                    moment < 0 or self.moments[moment].iteration < iteration
                ):
                    total, highest, label, at_peak = sum(now.values()), sum(now.values()), "start", dict(now)
                    most = defaultdict(int, now)
                moment = when
            now[category] += difference
            total += difference
            if self.moments[when].iteration != iteration:
                continue
            if total > highest:
                highest, label, at_peak = total, self.moments[when].label, dict(now)
            most[category] = max(most[category], now[category])
        return Peak(max(highest, 0), label, at_peak, dict(most))
