"""The memory of a key-value cache: one slab, of which chunks of different length take rows.

A chunk is placed in the first free range that is long enough, from the bottom or from the top of the slab.  Chunks
that are placed from one side, and freed last in, first out, are contiguous.  If the free rows suffice only together,
not in one range, a chunk gets memory of its own.
"""

import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Gradients of cached keys and values, added up until the backward of their own slice.
#
# Every later slice adds to the gradients of all chunks before it.  Contiguous chunks have their gradients in
# one tensor, in the order of the pool: a later slice adds with one call for the keys and one for the values, however
# many chunks there are.

Part = tuple[int, int, int]  # slice, first and end row of its chunk
Pair = tuple[Tensor, Tensor]  # of keys and of values, ``[rows, b, ...]``
Addition = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def add_(keys: Tensor, values: Tensor, more_keys: Tensor, more_values: Tensor) -> None:
    """Add to keys and values in place, with one fused kernel if there is one for the device and the types."""
    if not keys.is_cuda:
        keys.add_(more_keys)
        values.add_(more_values)
        return
    tensors = keys, values, more_keys, more_values
    fused = None
    if type(keys) is Tensor and all(t.is_contiguous() for t in tensors):  # not in a dry run
        fused = fused_addition(keys.device, keys.dtype, more_keys.dtype)
    if fused is not None:
        fused(*tensors)
    else:
        torch._foreach_add_([keys, values], [more_keys, more_values])


@functools.lru_cache(maxsize=16)
def fused_addition(device: torch.device, dtype: torch.dtype, more_dtype: torch.dtype) -> Addition | None:
    """The kernel that adds to two tensors at once, after a trial; None without Triton, or if the trial fails."""
    try:
        from megatron_het.attention.fused_addition import add_pair

        # Multiples of 16, as training has: Triton compiles another kernel for other sizes and addresses.
        total, more = (torch.full((2, 1504), 0.5, device=device, dtype=kind) for kind in (dtype, more_dtype))
        add_pair(total[0], total[1, :704], more[0], more[1, :704])
        is_right = bool((total.float().sum(1) == torch.tensor([1504.0, 1104.0], device=device)).all())
    except Exception:  # no Triton, no compiler, an unsupported device: plain additions are used instead
        return None
    return add_pair if is_right else None


def _widened(keys: Tensor, values: Tensor) -> Pair:
    """Gradients in at least fp32, the type of their sums, and not as views of larger tensors."""
    keys, values = (
        t.clone() if wide is t.dtype and t.untyped_storage().nbytes() > t.nbytes else t.to(wide)
        for t in (keys, values)
        for wide in (torch.promote_types(t.dtype, torch.float32),)
    )
    return keys, values


@dataclass(frozen=True, slots=True)
class _Total:
    """Gradient sums of contiguous rows of chunks, in the order of ``parts``."""

    parts: tuple[Part, ...]
    keys: Tensor
    values: Tensor

    def rows_of(self, parts: tuple[Part, ...], rows: int) -> slice | None:
        """Position of ``parts``, which have ``rows`` rows together; None if they are not here as one range."""
        if parts[0] not in self.parts:
            return None
        first = self.parts.index(parts[0])
        if self.parts[first : first + len(parts)] != parts:
            return None
        start = sum(hi - lo for _, lo, hi in self.parts[:first])
        return slice(start, start + rows)


class GradientTotals:
    """Holds the gradient sums of one microbatch's chunks from later slices, by slice.

    Args:
        rows_of: Returns how many rows the chunk of a slice has.
    """

    def __init__(self, batch: int, rows_of: Callable[[int], int]) -> None:
        self._batch = batch
        self._rows_of = rows_of
        self._of: dict[int, Pair] = {}
        self._totals: list[_Total] = []

    def add(self, parts: tuple[Part, ...], grad_keys: Tensor, grad_values: Tensor, sequences: slice | None) -> None:
        """Add a later slice's contribution; the first one to whole chunks is kept as it is.

        Args:
            parts: Rows of chunks, in the order of the gradients.
            grad_keys: ``[rows, b, ...]``.
            sequences: The microbatch's sequences to which the gradients belong; None for all.
        """
        if grad_keys.shape[1] == self._batch:
            for total in self._totals:
                rows = total.rows_of(parts, grad_keys.shape[0])
                if rows is not None:
                    add_(total.keys[rows], total.values[rows], grad_keys, grad_values)
                    return
        sizes = [hi - lo for _, lo, hi in parts]
        if grad_keys.shape[1] == self._batch and all(
            piece not in self._of and rows == self._rows_of(piece)
            for (piece, _, _), rows in zip(parts, sizes, strict=True)
        ):
            total = _Total(parts, *_widened(grad_keys, grad_values))
            self._totals.append(total)
            pairs = zip(total.keys.split(sizes), total.values.split(sizes), strict=True)
            self._of.update(zip((piece for piece, _, _ in parts), pairs, strict=True))
            return
        batch = sequences or slice(None)
        for (piece, lo, hi), *pair in zip(parts, grad_keys.split(sizes), grad_values.split(sizes), strict=True):
            if piece not in self._of:
                shape = self._rows_of(piece), self._batch
                keys, values = (part.new_zeros((*shape, *part.shape[2:])) for part in pair)
                self._of[piece] = _widened(keys, values)
            whole_keys, whole_values = self._of[piece]
            add_(whole_keys[lo:hi, batch], whole_values[lo:hi, batch], *pair)

    def take(self, piece: int) -> Pair | None:
        """Removes and returns the gradients of a slice's chunk; None if there are none."""
        return self._of.pop(piece, None)

    def tensors(self) -> list[Tensor]:
        """Returns all gradient sums."""
        return [tensor for pair in self._of.values() for tensor in pair]


class CacheError(RuntimeError):
    """Chunks were used out of order, or the pool is too small: an error of the schedule."""


@dataclass(slots=True, eq=False)
class Place:
    """Rows of the pool."""

    keys: Tensor  # ``[rows, batch, ...]``
    values: Tensor
    at: int  # first row in the slab; -1 with memory of its own


@dataclass(eq=False)
class KVPool:
    """Keys and values of the chunks of one layer."""

    slots: int  # chunks that fit into the pool, as long as the first one; :meth:`reserve` sets the size in rows
    batch: int | None = None  # sequences of the largest microbatch; by default all have as many as the first

    def __post_init__(self) -> None:
        self._reserved = 0
        self._rows = 0
        self._taken: list[tuple[int, int]] = []
        self._held_rows = 0
        self._apart: list[Place] = []
        self.slabs: tuple[Tensor, Tensor] | None = None
        """``[rows, batch, ...]`` of keys and of values; None before the first use."""

    @property
    def nbytes(self) -> int:
        """Size of the pool, 0 before its first use."""
        apart = [part for place in self._apart for part in (place.keys, place.values)]
        return sum(tensor.nbytes for tensor in (*(self.slabs or ()), *apart))

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the pool."""
        return [*(self.slabs or ()), *(part for place in self._apart for part in (place.keys, place.values))]

    def reserve(self, rows: int) -> None:
        """Size the pool for at least ``rows`` rows; it must be empty.  The pool never becomes smaller."""
        if self._held_rows:
            raise CacheError("the key-value pool is given another size while it is in use")
        self._reserved = max(self._reserved, rows)
        if self.slabs is not None and self._reserved > self._rows:
            self.slabs = None

    def take(self, key: Tensor, value: Tensor, *, from_bottom: bool = False, at: int = -1) -> Place:
        """Copy keys and values into the pool.

        Args:
            key: ``[rows, batch, ...]``.
            from_bottom: Which side of the slab to search from.
            at: The first row, if these rows are free; -1 for any.

        Raises:
            CacheError: The shape differs from the pool's, or there is no room.
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
        """Free the rows of a chunk."""
        rows = place.keys.shape[0]
        self._held_rows -= rows
        if place.at < 0:
            self._apart.remove(place)
        else:
            del self._taken[bisect.bisect_left(self._taken, (place.at, place.at + rows))]

    def are_free(self, at: int, rows: int) -> bool:
        """Whether the rows from ``at`` on exist and are free."""
        after = bisect.bisect_left(self._taken, (at, at))
        is_below = after == len(self._taken) or at + rows <= self._taken[after][0]
        return 0 <= at <= self._rows - rows and is_below and (not after or self._taken[after - 1][1] <= at)

    def move(self, place: Place, at: int) -> Place:
        """Copy a chunk to free rows, from ``at`` on, and free its old ones."""
        self._held_rows -= place.keys.shape[0]  # count the chunk only once while it has both
        moved = self.take(place.keys, place.values, at=at)
        self._held_rows += place.keys.shape[0]
        self.give(place)
        return moved

    def clear(self) -> None:
        """Empty the pool and free the slab."""
        self._taken.clear()
        self._apart.clear()
        self._held_rows, self.slabs = 0, None

    def _free(self, rows: int, from_bottom: bool) -> int:
        """First row of the first free range of ``rows`` rows from one side; -1 if there is none."""
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

    def _slab(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The slabs of keys and values, allocated at the first use."""
        rows, batch, *rest = key.shape
        if self.slabs is None:
            self._rows = self._reserved or self.slots * rows
            most = self.batch or batch
            self.slabs = (
                key.new_empty((self._rows, most, *key.shape[2:])),
                value.new_empty((self._rows, most, *value.shape[2:])),
            )
        keys, values = self.slabs
        fits = batch == keys.shape[1] or (self.batch is not None and batch < keys.shape[1])
        if not fits or list(keys.shape[2:]) != rest:
            raise CacheError(f"keys of shape {tuple(key.shape)} for a pool of {(self._rows, *keys.shape[1:])}")
        return keys, values
