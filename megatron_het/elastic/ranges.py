"""Ranges of parameters: which elements of a whole tensor a rank holds, and what two ranks have in common.

A rank holds *pieces*: a block of the whole tensor, as tensor parallelism cuts it, and of the block a run of elements
in row-major order, as the distributed optimizer cuts it.  Both are the same thing seen from the whole tensor: a list
of intervals of its elements.  What one plan leaves and the next one needs is compared as such intervals, so that no
plan has to know another one's cuts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Runs = npt.NDArray[np.int64]
"""``[n, 3]``, ascending: first element in the whole tensor, first element in the piece, number of elements."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of a block of a whole tensor.

    Attributes:
        key: Global name of the parameter.
        kind: ``parameter``, ``main`` (fp32 main parameter), or the optimizer's name of the state, such as ``exp_avg``.
        dtype: Name of the data type, such as ``float32``.
        shape: Of the whole tensor.
        offset: Of the block's first element, per dimension.
        block: Shape of the block, with as many dimensions as the whole.
        start: First element of the block that is in the piece, in row-major order.
        stop: After the last one.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: tuple[int, ...]
    start: int
    stop: int

    @property
    def name(self) -> tuple[str, str]:
        """Pieces with the same name are parts of the same tensor."""
        return self.key, self.kind

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Piece:
        """The piece that :meth:`to_json` described."""
        lists = {name: tuple(values[name]) for name in ("shape", "offset", "block")}
        return Piece(**{**values, **lists})

    def runs(self) -> Runs:
        """The piece as intervals of the whole tensor's elements, in row-major order."""
        shape, block = self.shape or (1,), self.block or (1,)
        offset = self.offset or (0,)
        inner, dim = 1, len(shape)
        while dim > 0:  # trailing dimensions that are whole, and the first one that is not
            dim -= 1
            inner *= block[dim]
            if block[dim] != shape[dim]:
                break
        outer = math.prod(block[:dim])
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        base = sum(o * s for o, s in zip(offset, strides, strict=True))
        starts = np.full(outer, base, dtype=np.int64)
        if outer > 1:
            index = np.unravel_index(np.arange(outer), block[:dim])
            for d in range(dim):
                starts += index[d].astype(np.int64) * strides[d]
        local = np.arange(outer, dtype=np.int64) * inner
        first, last = np.maximum(local, self.start), np.minimum(local + inner, self.stop)
        kept = first < last
        found = np.stack([starts + first - local, first - self.start, last - first], axis=1)
        return found[kept]


def common(mine: Runs, theirs: Runs) -> tuple[Runs, Runs, Runs]:
    """Returns what two pieces of one tensor share.

    Returns:
        The shared runs as they lie in mine, the same runs as they lie in theirs, and what is left of mine.
    """
    if not len(mine) or not len(theirs):
        empty = np.empty((0, 3), dtype=np.int64)
        return empty, empty, mine
    if np.array_equal(mine[:, 0], theirs[:, 0]) and np.array_equal(mine[:, 2], theirs[:, 2]):  # equal cuts
        return mine, theirs, mine[:0]
    bounds = [mine[:, 0], mine[:, 0] + mine[:, 2], theirs[:, 0], theirs[:, 0] + theirs[:, 2]]
    edges = np.unique(np.concatenate(bounds))
    starts, lengths = edges[:-1], np.diff(edges)
    a, in_mine = _containing(mine, starts)
    b, in_theirs = _containing(theirs, starts)
    both, rest = in_mine & in_theirs, in_mine & ~in_theirs

    def at(runs: Runs, which: npt.NDArray[np.int64], selected: npt.NDArray[np.bool_]) -> Runs:
        rows = runs[which[selected]]
        begin = starts[selected]
        return np.stack([begin, rows[:, 1] + begin - rows[:, 0], lengths[selected]], axis=1)

    return at(mine, a, both), at(theirs, b, both), at(mine, a, rest)


def _containing(runs: Runs, starts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """For each start the index of the run before or at it, and whether the start lies in the run."""
    index = np.searchsorted(runs[:, 0], starts, side="right") - 1
    found = np.maximum(index, 0)
    return found, (index >= 0) & (starts < runs[found, 0] + runs[found, 2])
