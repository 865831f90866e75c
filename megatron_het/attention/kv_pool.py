"""The memory of a key-value cache: one slab, of which chunks of different length take rows.

A chunk is given the first free rows that it fits into, from the bottom or from the top of the slab.  Chunks that are
taken from one side, and given back last first, lie next to each other.  Where none of the free rows are long
enough, though together they are, a chunk gets memory of its own.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch


class CacheError(RuntimeError):
    """Chunks were used out of order, or the pool is too small: an error of the schedule."""


@dataclass(slots=True, eq=False)
class Place:
    """Rows of the pool.

    Attributes:
        keys: ``[rows, batch, ...]``.
        values: The same of the values.
        at: First row in the slab; -1 with memory of its own.
    """

    keys: torch.Tensor
    values: torch.Tensor
    at: int


class KVPool:
    """Keys and values of the chunks of one layer.

    Args:
        slots: Chunks that fit into the pool, by the length of the first one; :meth:`reserve` says it in rows.
        batch: Sequences of the largest microbatch; by default all have as many as the first.
    """

    def __init__(self, slots: int, batch: int | None = None) -> None:
        self._slots = slots
        self._batch = batch
        self._reserved = 0
        self._rows = 0
        self._taken: list[tuple[int, int]] = []
        self._held_rows = 0
        self._apart: list[Place] = []
        self.slabs: tuple[torch.Tensor, torch.Tensor] | None = None
        """``[rows, batch, ...]`` of keys and of values; None before the first use."""

    @property
    def nbytes(self) -> int:
        """Size of the pool, 0 before its first use."""
        apart = [part for place in self._apart for part in (place.keys, place.values)]
        return sum(tensor.nbytes for tensor in (*(self.slabs or ()), *apart))

    def tensors(self) -> list[torch.Tensor]:
        """Returns what the pool holds in memory."""
        return [*(self.slabs or ()), *(part for place in self._apart for part in (place.keys, place.values))]

    def reserve(self, rows: int) -> None:
        """Have room for so many rows at once; nothing may be held.  The pool never becomes smaller."""
        if self._held_rows:
            raise CacheError("the key-value pool is given another size while it is in use")
        self._reserved = max(self._reserved, rows)
        if self.slabs is not None and self._reserved > self._rows:
            self.slabs = None

    def take(self, key: torch.Tensor, value: torch.Tensor, *, from_bottom: bool = False, at: int = -1) -> Place:
        """Copy keys and values into the pool.

        Args:
            key: ``[rows, batch, ...]``.
            value: The same of the values.
            from_bottom: Which side of the slab to search from.
            at: The first row, if those are free; -1 for any.

        Raises:
            CacheError: Another shape than the pool's, or no room.
        """
        keys, values = self._slab(key, value)
        rows, batch = key.shape[:2]
        if self._held_rows + rows > self._rows:
            raise CacheError(f"all {self._rows} rows of the key-value pool are in use or reserved: {rows} more needed")
        self._held_rows += rows
        if at < 0 or not self.are_free(at, rows):
            at = self._free(rows, from_bottom)
        if at < 0:
            place = Place(key.clone(), value.clone(), at)
            self._apart.append(place)
            return place
        bisect.insort(self._taken, (at, at + rows))
        place = Place(keys[at : at + rows, :batch], values[at : at + rows, :batch], at)
        place.keys.copy_(key)
        place.values.copy_(value)
        return place

    def give(self, place: Place) -> None:
        """Give rows back."""
        rows = place.keys.shape[0]
        self._held_rows -= rows
        if place.at < 0:
            self._apart.remove(place)
        else:
            del self._taken[bisect.bisect_left(self._taken, (place.at, place.at + rows))]

    def are_free(self, at: int, rows: int) -> bool:
        """Whether rows from ``at`` on are there, and nobody's."""
        after = bisect.bisect_left(self._taken, (at, at))
        is_below = after == len(self._taken) or at + rows <= self._taken[after][0]
        return 0 <= at <= self._rows - rows and is_below and (not after or self._taken[after - 1][1] <= at)

    def move(self, place: Place, at: int) -> Place:
        """Copy a chunk to free rows, from ``at`` on, and give its own back."""
        self._held_rows -= place.keys.shape[0]  # it is counted once
        moved = self.take(place.keys, place.values, at=at)
        self._held_rows += place.keys.shape[0]
        self.give(place)
        return moved

    def clear(self) -> None:
        """Forget everything and free the slab."""
        self._taken.clear()
        self._apart.clear()
        self._held_rows, self.slabs = 0, None

    def _free(self, rows: int, from_bottom: bool) -> int:
        """First row of the free ones that a chunk gets; -1 if there are none next to each other."""
        if from_bottom:
            low = 0
            for first, end in self._taken:
                if first - low >= rows:
                    break
                low = end
            return low if low + rows <= self._rows else -1
        high = self._rows
        for first, end in reversed(self._taken):
            if high - end >= rows:
                break
            high = first
        return high - rows if high >= rows else -1

    def _slab(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slabs, made at the first use."""
        rows, batch, *rest = key.shape
        if self.slabs is None:
            self._rows = self._reserved or self._slots * rows
            most = self._batch or batch
            self.slabs = (
                key.new_empty((self._rows, most, *key.shape[2:])),
                value.new_empty((self._rows, most, *value.shape[2:])),
            )
        keys, values = self.slabs
        fits = batch == keys.shape[1] or (self._batch is not None and batch < keys.shape[1])
        if not fits or list(keys.shape[2:]) != rest:
            raise CacheError(f"keys of shape {tuple(key.shape)} for a pool of {(self._rows, *keys.shape[1:])}")
        return keys, values
