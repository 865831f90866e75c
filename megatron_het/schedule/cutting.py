"""Where sequences are cut into slices: equal lengths, or lengths of equal work.

A token's work is that of its layer without attention, which is the same for all, and the attention to the keys that
it sees.  The second part grows towards the end of a document.  Slices of equal work are therefore long where
documents begin, and short at the end of long ones.
"""

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Starts = tuple[int, ...]  # where the documents of a sequence begin, ascending; the first one at token 0
Span = tuple[int, int]  # tokens ``[first, end)`` of a sequence
Bounds = tuple[int, ...]  # slice i has the tokens ``[bounds[i], bounds[i + 1])``


@dataclass(frozen=True, slots=True)
class SlicePart:
    """Holds what of a sequence's work is in a slice."""

    tokens: float  # share of the tokens
    attention: float  # share of the attention of a sequence that is one document
    # the same of its attention to each exchange unit before the slice, from the start of the sequence
    units: tuple[float, ...] = ()
    rest: float = 0.0  # what the rest of its layers takes, in the same measure; 0 where slices are not cut by it


Parts = Sequence[Sequence[SlicePart]]  # what slices are of their sequences, by microbatch and slice


@dataclass(frozen=True, slots=True)
class Cutting:
    """How every sequence is cut."""

    length: int
    slices: int  # slices of a sequence
    # every slice has a multiple of so many tokens, so that the ranks that share it get equal parts; divides ``length``
    unit: int = 1
    # how many keys a query attends to in the time that the rest of its layers takes; 0 for slices of equal length
    keys_per_token: float = 0.0
    window_tokens: int | None = None  # how many earlier tokens a query sees in layers with a sliding window
    window_share: float = 0.0  # share of the layers that have one
    by_work: bool = False  # whether lengths are of equal work, also where ``keys_per_token`` is not known yet

    @property
    def nominal(self) -> int:
        """Tokens of a slice to which those of others are put in proportion."""
        return max(self.length // self.slices // self.unit, 1) * self.unit

    @property
    def is_even(self) -> bool:
        """Whether all slices of all sequences are equally long."""
        return not (self.by_work or self.keys_per_token) and self.length == self.slices * self.nominal

    def bounds(self, starts: Sequence[Starts] | None = None) -> Bounds:
        """Where the slices of a microbatch begin, and its end.

        Args:
            starts: Where the documents of each of its sequences begin; None if a sequence is one document.
        """
        if not self.keys_per_token:
            units = self.length // self.unit
            return tuple(i * units // self.slices * self.unit for i in range(self.slices + 1))
        return _of_equal_work(self, tuple(starts or ((0,),)))

    def work(self, starts: Sequence[Starts] | None, end: int) -> float:
        """Work of the tokens before ``end``, in tokens without attention; the mean of the sequences."""
        documents = starts or ((0,),)
        return end + sum(self.keys(own, end) for own in documents) / len(documents) / (self.keys_per_token or 1.0)

    def keys(self, starts: Starts, end: int) -> float:
        """Pairs of a query before ``end`` and a key that it sees, in the mean of the layers."""
        whole = _pairs(starts, end, None)
        if not self.window_share or self.window_tokens is None:
            return whole
        return whole + self.window_share * (_pairs(starts, end, self.window_tokens) - whole)

    def parts(self, starts: Sequence[Starts] | None = None, units: int = 0) -> tuple[SlicePart, ...]:
        """Returns each slice's part of a microbatch, as simulator and context exchange count work (``Costs.parts``).

        Args:
            starts: Where the documents of each of its sequences begin; None if a sequence is one document.
            units: Exchange units of a slice; 0 without exchange.
        """
        bounds, documents = self.bounds(starts), starts or ((0,),)
        whole = self.keys((0,), self.length) * len(documents)
        done = [sum(self.keys(own, end) for own in documents) / whole for end in bounds]
        found = []
        for i, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            edges = [
                a + (b - a) * unit // units for a, b in itertools.pairwise(bounds[: i + 1]) for unit in range(units)
            ]
            spans = itertools.pairwise((*edges, first))
            seen = tuple(sum(self.seen(own, (first, end), span) for own in documents) / whole for span in spans)
            rest = (end - first) * self.keys_per_token * len(documents) / whole
            found.append(SlicePart((end - first) / self.length, done[i + 1] - done[i], seen, rest))
        return tuple(found)

    def seen(self, starts: Starts, rows: tuple[int, int], keys: tuple[int, int]) -> float:
        """Pairs of a query of ``rows`` and a key of ``keys``, all before them, that it sees; the mean of the layers."""
        # Only the document in which the rows begin has keys before them.
        index = bisect.bisect_right(starts, rows[0])
        rows = rows[0], min(rows[1], starts[index]) if index < len(starts) else rows[1]
        keys = max(keys[0], starts[index - 1]), keys[1]
        if keys[0] >= keys[1]:
            return 0.0
        whole = (rows[1] - rows[0]) * (keys[1] - keys[0])
        if not self.window_share or self.window_tokens is None:
            return whole
        return whole + self.window_share * (_near_pairs(rows, keys, self.window_tokens) - whole)


def documents_in(rows: Span, starts: Starts) -> tuple[Span, ...]:
    """The parts of some tokens that belong to one document each."""
    first, end = rows
    bounds = [first, *starts[bisect.bisect_right(starts, first) : bisect.bisect_left(starts, end)], end]
    return tuple(zip(bounds, bounds[1:], strict=False))


def rows_that_see(
    rows: Span, keys: Sequence[Span], documents: Sequence[Starts], window_tokens: int | None = None
) -> tuple[Span, ...]:
    """The queries that see any of some keys, in any sequence.

    Args:
        rows: Queries.
        keys: Spans of tokens, each of which lies before the queries or after them.
        documents: Where the documents of each sequence begin.
        window_tokens: How many earlier tokens a query sees at most; None for all.
    """
    found: list[Span] = []
    for starts in set(documents):
        for lo, hi in documents_in(rows, starts):
            begin = starts[bisect.bisect_right(starts, lo) - 1]
            begin = begin if window_tokens is None else max(begin, lo - window_tokens)
            last = max((end for _, end in keys if begin < end <= lo), default=None)
            if last is not None:
                found.append((lo, hi if window_tokens is None else min(hi, last + window_tokens)))
    merged: list[Span] = []
    for first, end in sorted(found):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


@functools.lru_cache(maxsize=256)
def _before(starts: Starts, most: int | None) -> tuple[int, ...]:
    """Pairs of the documents before each."""
    found = [0]
    for first, end in zip(starts, starts[1:], strict=False):
        found.append(found[-1] + _triangle(end - first, most))
    return tuple(found)


def _pairs(starts: Starts, end: int, most: int | None) -> int:
    index = bisect.bisect_right(starts, max(end - 1, 0)) - 1
    return _before(starts, most)[index] + _triangle(end - starts[index], most)


def _near_pairs(rows: tuple[int, int], keys: tuple[int, int], most: int) -> int:
    """Pairs of a query and a key that is at most ``most`` tokens before it."""
    # The first queries see all keys, and every one after them one less.
    whole = min(max(keys[0] + most + 1 - rows[0], 0), rows[1] - rows[0])
    begin, end = rows[0] + whole, min(rows[1], keys[1] + most)
    fewer = (2 * (keys[1] + most) - begin - end + 1) * (end - begin) // 2 if begin < end else 0
    return whole * (keys[1] - keys[0]) + fewer


def _triangle(tokens: int, most: int | None) -> int:
    """Pairs of the first ``tokens`` queries of a document."""
    near = tokens if most is None else min(tokens, most + 1)
    return near * (near + 1) // 2 + (tokens - near) * near


@functools.lru_cache(maxsize=256)
def _of_equal_work(cutting: Cutting, starts: tuple[Starts, ...]) -> Bounds:
    units, slices = cutting.length // cutting.unit, cutting.slices
    whole = cutting.work(starts, cutting.length)
    bounds = [0]
    for i in range(1, slices):
        # Every slice has a unit at least, the later ones too.
        low, high = bounds[-1] + 1, units - (slices - i)
        at = bisect.bisect_left(
            range(low, high), whole * i / slices, key=lambda unit: cutting.work(starts, unit * cutting.unit)
        )
        bounds.append(_nearest(cutting, starts, whole * i / slices, low, low + at))
    return tuple(unit * cutting.unit for unit in (*bounds, units))


def _nearest(cutting: Cutting, starts: tuple[Starts, ...], wanted: float, low: int, unit: int) -> int:
    """Chooses, of a unit and the one before it, the end that is nearer to the work that is wanted."""
    if unit == low:
        return unit
    before, after = (cutting.work(starts, end * cutting.unit) for end in (unit - 1, unit))
    return unit - 1 if wanted - before < after - wanted else unit
