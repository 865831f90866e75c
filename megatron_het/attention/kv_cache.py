"""The chunked key-value cache of one layer.

A chunk holds the keys and values of one slice of one microbatch (grouped queries not expanded), or those of its last
tokens where later slices read no others.  It lives in rows of a fixed pool: taken in the slice's forward, given back
in its backward.  Slices of a microbatch are released last in, first out; several microbatches may hold chunks at once.

Every other microbatch grows from the top end of the pool, so that a microbatch's chunks mostly form one contiguous
run and its prefix is one view, without concatenating anything.  Where they do not, the prefix is several views.

Kernels that align a causal mask bottom-right need a slice's own keys last, in one view with the earlier ones.  If the
rows after a microbatch's chunks are not free, its last chunk moves to the other end of them and the next chunk takes
its rows.  It moves back when the next chunk is released: two copies of a chunk, whatever the length of the prefix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_het.attention.kv_pool import CacheError, GradientTotals, KVPool, Part, Place, add_


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous rows of the pool, of one or more chunks."""

    keys: Tensor  # ``[rows, b, groups, d]``, a view of the pool
    values: Tensor
    parts: tuple[Part, ...]  # slice and rows of its chunk, for each chunk in the views, in their order

    @property
    def slices(self) -> tuple[int, ...]:
        """Index of the slice of each part."""
        return tuple(piece for piece, _, _ in self.parts)


@dataclass(slots=True)
class _Chunk:
    """Chunk of a slice with the tokens ``[begin, end)``, of which it holds ``[first, end)``."""

    begin: int
    first: int
    end: int
    place: Place | None
    before: Sequence[Run] | None = None  # the runs of all chunks before it, cached at their first use
    line: Run | None = None  # all chunks up to it as one view, cached at its first use


def _span(chunk: _Chunk) -> tuple[int, int]:
    """First and end row of a chunk in the slab; (-1, -1) if it has none there."""
    place = chunk.place
    return (-1, -1) if place is None or place.at < 0 else (place.at, place.at + place.keys.shape[0])


@dataclass(slots=True)
class _Sequence:
    """Cache of one microbatch with ``batch`` sequences; ``chunks[i]`` belongs to slice i."""

    grows_up: bool
    batch: int
    chunks: list[_Chunk] = field(default_factory=list)
    totals: GradientTotals = field(init=False)

    def __post_init__(self) -> None:
        chunks = self.chunks  # the closure must not refer to this object: a reference cycle would keep its memory
        self.totals = GradientTotals(self.batch, lambda piece: chunks[piece].end - chunks[piece].first)


class KVCache:
    """Keys and values of one layer, by microbatch and slice.

    Tokens are numbered in the order of appending: those of the sequence, or of a context-parallel rank's part of it.

    Args:
        slots: Chunks in the pool: the largest number that the schedule holds at once.
        batch: Sequences of the largest microbatch; by default all have as many as the first.
        in_line: Whether the last chunk is placed after the earlier ones in memory, if possible.
    """

    expands = False  # whether keys and values are computed from the held tensors at every use

    def __init__(self, slots: int, batch: int | None = None, *, in_line: bool = False) -> None:
        self.slots = slots
        self._in_line = in_line
        self._pool = KVPool(slots, batch)
        self._sequences: dict[int, _Sequence] = {}
        self._opened = 0

    @property
    def pool_bytes(self) -> int:
        """Size of the pool, 0 before its first use."""
        return self._pool.nbytes

    def tensors(self) -> list[Tensor]:
        """The pool and the gradients collected so far."""
        totals = [tensor for sequence in self._sequences.values() for tensor in sequence.totals.tensors()]
        return [*self._pool.tensors(), *totals]

    def reserve(self, rows: int) -> None:
        """Size the pool for ``rows`` tokens at once, in place of equal slots; the cache must be empty."""
        self._pool.reserve(rows)

    def append(self, microbatch: int, index: int, key: Tensor, value: Tensor, unread: int = 0) -> bool:
        """Copy a slice's keys and values into the pool; once only, so that recomputation is safe.

        Args:
            index: Index of the slice: that of the last cached one plus 1, or of a cached one.
            key: ``[tokens, b, groups, d]``.
            value: ``[tokens, b, groups, d]``.  Both are copied, because they are views of larger tensors.
            unread: Number of tokens at the start that no later slice reads; they are not held.

        Returns:
            Whether the slice is new: False in a recomputed forward.

        Raises:
            CacheError: A slice was skipped, the shape differs from the pool's, or the pool is full.
        """
        sequence = self._sequences.get(microbatch)
        if sequence is None:
            if not self._sequences:
                # The side of the pool determines the order of the keys, hence the rounding of sums.  So every
                # iteration, including the first one after a resumption, begins at the same side.
                self._opened = 0
            sequence = self._sequences[microbatch] = _Sequence(self._opened % 2 == 0, key.shape[1])
            self._opened += 1
        chunks = sequence.chunks
        if index < len(chunks):
            return False
        if index > len(chunks):
            raise CacheError(f"microbatch {microbatch}: slice {index} after {len(chunks)} cached slices")
        tokens, begin = key.shape[0], chunks[-1].end if chunks else 0
        place = None
        if unread < tokens:
            at = self._row_in_line(sequence, tokens - unread) if self._in_line else -1
            try:
                place = self._pool.take(key[unread:], value[unread:], from_bottom=sequence.grows_up, at=at)
            except CacheError as error:
                raise CacheError(f"microbatch {microbatch} slice {index}: {error}") from None
        chunks.append(_Chunk(begin, begin + unread, begin + tokens, place))
        return True

    def _row_in_line(self, sequence: _Sequence, rows: int) -> int:
        """First row for the next chunk after a microbatch's others, moving its last one if needed; -1 without room."""
        ends = [_span(chunk) for chunk in sequence.chunks]
        if not ends or min(ends)[0] < 0:
            return -1
        (first, last), end = ends[-1], max(end for _, end in ends)
        if self._pool.are_free(end, rows):
            return end
        low = min(ends)[0] - (last - first)
        fits = rows <= last - first or self._pool.are_free(end, rows - last + first)
        place = sequence.chunks[-1].place
        if last != end or not fits or place is None or not self._pool.are_free(low, last - first):
            return -1
        sequence.chunks[-1].place = self._pool.move(place, low)
        return first

    def _bring_up(self, sequence: _Sequence) -> None:
        """Move the last chunk back to the end of the others, if those rows are free."""
        ends = [_span(chunk) for chunk in sequence.chunks]
        if len(ends) < 2 or min(ends)[0] < 0:
            return
        (first, last), end = ends[-1], max(end for _, end in ends[:-1])
        place = sequence.chunks[-1].place
        if first < end and place is not None and self._pool.are_free(end, last - first):
            sequence.chunks[-1].place = self._pool.move(place, end)

    def begin_of(self, microbatch: int, index: int) -> int:
        """First token of a slice that is cached, or is the next one to be cached."""
        chunks = self._sequences[microbatch].chunks if microbatch in self._sequences else ()
        return chunks[index].begin if index < len(chunks) else chunks[-1].end if chunks else 0

    def begins(self, microbatch: int) -> tuple[int, ...]:
        """First token of every cached slice."""
        sequence = self._sequences.get(microbatch)
        return () if sequence is None else tuple(chunk.begin for chunk in sequence.chunks)

    def shown(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values for attention, from appended tensors; they are the same here."""
        return key, value

    def of_appended(self, key: Tensor, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the appended tensors, from those of the keys and values for attention (``shown``)."""
        return grad_keys, grad_values

    def line(self, microbatch: int, index: int) -> tuple[Run, Run | None] | None:
        """The chunks up to a slice as one view with the slice's own last, and the part of the view before it.

        Returns:
            None if the chunks are not in this order in memory; for the first slice the second part is None.
        """
        sequence = self._sequences[microbatch]
        if index >= len(sequence.chunks):
            return None
        chunk, size = sequence.chunks[index], sequence.chunks[index].end - sequence.chunks[index].begin
        # Earlier chunks do not move until this slice's backward, but its own chunk may not have come back to its place.
        if (
            chunk.line is None
            or chunk.place is None
            or chunk.line.keys[-size:].data_ptr() != chunk.place.keys.data_ptr()
        ):
            found = self.runs(microbatch, 0, chunk.end)
            if len(found) > 1 or found[0].parts[-1][0] != index:
                return None
            chunk.line = found[0]
        whole = chunk.line
        if not index:
            return whole, None
        return whole, Run(whole.keys[:-size], whole.values[:-size], whole.parts[:-1])

    def in_order(self, microbatch: int, start: int, stop: int) -> Run:
        """Tokens ``[start, stop)`` of a sequence, all held, in their order; copied if they are not contiguous."""
        runs = self.runs(microbatch, start, stop)
        parts = tuple(self._parts(microbatch, start, stop))
        if len(runs) == 1 and runs[0].parts == parts:
            return runs[0]
        found = [run for _, run in self._by_chunk(microbatch, start, stop)]
        return Run(torch.cat([run.keys for run in found]), torch.cat([run.values for run in found]), parts)

    def joined(self, microbatch: int, index: int, unread: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the tensors appended for a slice: its unread tokens joined with the held ones.

        Args:
            unread: Keys ``[unread, b, groups, d]`` and values of the tokens that are not held; empty if all are held.
        """
        place = self._sequences[microbatch].chunks[index].place
        if place is None:
            key, value = unread
        elif not unread:
            key, value = place.keys, place.values
        else:
            key, value = torch.cat((unread[0], place.keys)), torch.cat((unread[1], place.values))
        return key, value

    def prefix(self, microbatch: int, index: int, skipped_tokens: int = 0) -> Sequence[Run]:
        """The chunks of the slices before one, without the first ``skipped_tokens``, as few contiguous runs."""
        chunks = self._sequences[microbatch].chunks if microbatch in self._sequences else ()
        if skipped_tokens or index >= len(chunks):
            return self.runs(microbatch, skipped_tokens, self.begin_of(microbatch, index))
        found = chunks[index].before
        if found is None:  # in the forward; the backward finds the same chunks
            found = chunks[index].before = self.runs(microbatch, 0, chunks[index].begin)
        return found

    def runs(self, microbatch: int, start: int, stop: int) -> Sequence[Run]:
        """Tokens ``[start, stop)`` of a sequence, all held, as few contiguous runs as possible, in any order.

        Raises:
            CacheError: Some of them are not held.
        """
        apart: list[Run] = []
        found: list[list[tuple[int, int, Part]]] = []
        chunks, batch = self._sequences[microbatch].chunks, self._sequences[microbatch].batch
        rows = []
        for part in self._parts(microbatch, start, stop):
            piece, lo, hi = part
            place = chunks[piece].place
            assert place is not None
            if place.at < 0:
                apart.append(Run(place.keys[lo:hi], place.values[lo:hi], (part,)))
            else:
                rows.append((place.at + lo, place.at + hi, part))
        for first, end, part in sorted(rows):
            if found and found[-1][-1][1] == first:
                found[-1].append((first, end, part))
            else:
                found.append([(first, end, part)])
        runs = []
        for group in found:
            assert self._pool.slabs is not None
            keys, values = (slab[group[0][0] : group[-1][1], :batch] for slab in self._pool.slabs)
            runs.append(Run(keys, values, tuple(part for _, _, part in group)))
        return runs + apart

    def copy_tokens(self, microbatch: int, start: int, stop: int, out: Tensor, groups: slice = slice(None)) -> None:
        """Copy the held keys and values among the tokens ``[start, stop)`` of a sequence.

        Args:
            start: First token.
            stop: End of the tokens; all of them belong to cached slices.
            out: ``[2, stop - start, b, groups, d]``: keys, then values.  Rows of tokens that are not held are not
                written.
            groups: Which key-value groups.
        """
        for first, run in self._by_chunk(microbatch, start, stop, gaps=True):
            keys, values = self.shown(run.keys, run.values)
            rows = slice(first - start, first - start + keys.shape[0])
            out[0, rows].copy_(keys[:, :, groups])
            out[1, rows].copy_(values[:, :, groups])

    def _parts(self, microbatch: int, start: int, stop: int, gaps: bool = False) -> Iterator[Part]:
        """Yields the rows of chunks that hold tokens ``[start, stop)``; with ``gaps`` some tokens may not be held."""
        at = start
        for piece, chunk in enumerate(self._sequences[microbatch].chunks):
            if at >= stop:
                return
            if chunk.end > at:
                if chunk.first > at and not gaps:
                    raise CacheError(f"microbatch {microbatch}: tokens {at} to {chunk.first - 1} are not held")
                first, end = max(at, chunk.first), min(stop, chunk.end)
                if first < end:
                    yield piece, first - chunk.first, end - chunk.first
                at = end

    def _by_chunk(self, microbatch: int, start: int, stop: int, gaps: bool = False) -> Iterator[tuple[int, Run]]:
        """Yields the tokens ``[start, stop)`` in order, chunk by chunk: first token, and a run of the chunk's rows."""
        chunks = self._sequences[microbatch].chunks
        for piece, lo, hi in self._parts(microbatch, start, stop, gaps):
            place = chunks[piece].place
            assert place is not None
            yield chunks[piece].first + lo, Run(place.keys[lo:hi], place.values[lo:hi], ((piece, lo, hi),))

    def check_last(self, microbatch: int, index: int) -> None:
        """Raise unless a slice is the last one cached, the only one whose backward may run."""
        held = len(self._sequences[microbatch].chunks) if microbatch in self._sequences else 0
        if held != index + 1:
            raise CacheError(
                f"backward of microbatch {microbatch} slice {index} while {held} slices are cached: "
                "slices must go backward last first, each once"
            )

    def add_gradient(
        self, microbatch: int, run: Run, grad_keys: Tensor, grad_values: Tensor, sequences: slice | None = None
    ) -> None:
        """Add a later slice's contribution to the gradients of cached chunks.

        Totals are in at least fp32: there is one addition per later slice.  The first contribution to a whole chunk
        is kept as it is.

        Args:
            run: The chunks, as a run that ``runs`` has returned.
            grad_keys: Gradient of the run's keys.
            sequences: The microbatch's sequences to which the gradients belong; None for all.
        """
        self._sequences[microbatch].totals.add(run.parts, grad_keys, grad_values, sequences)

    def add_token_gradient(
        self, microbatch: int, start: int, stop: int, grad_keys: Tensor, grad_values: Tensor
    ) -> None:
        """Add a later slice's contribution to the gradients of the held tokens among ``[start, stop)``."""
        for first, run in self._by_chunk(microbatch, start, stop, gaps=True):
            part = slice(first - start, first - start + run.keys.shape[0])
            self.add_gradient(microbatch, run, grad_keys[part], grad_values[part])

    def release(self, microbatch: int, index: int) -> tuple[Tensor, Tensor] | None:
        """Free the last slice's chunk.

        Returns:
            The gradients of its held keys and values from all later slices, in at least fp32; None if
            there are none.

        Raises:
            CacheError: The slice is not the last one.
        """
        self.check_last(microbatch, index)
        sequence = self._sequences[microbatch]
        gradients = sequence.totals.take(index)
        chunk = sequence.chunks.pop()
        if chunk.place is not None:
            self._pool.give(chunk.place)
        if self._in_line:
            self._bring_up(sequence)
        if not sequence.chunks:
            del self._sequences[microbatch]
        return gradients

    def settle(self, microbatch: int, index: int, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
        """Free the last slice's chunk, and complete the gradients of its appended tensors.

        Args:
            grad_keys: The slice's own contribution to the gradient of the appended keys; changed in place.

        Returns:
            The gradients of the appended keys and values, from this slice and all later ones.
        """
        later = self.release(microbatch, index)
        if later is not None:
            rows = later[0].shape[0]  # the held tokens are the last ones of the slice
            whole = rows == grad_keys.shape[0]
            add_(*((grad_keys, grad_values) if whole else (grad_keys[-rows:], grad_values[-rows:])), *later)
        return grad_keys, grad_values

    def drop(self, microbatch: int) -> None:
        """Free all chunks of a microbatch without a backward pass (evaluation)."""
        for chunk in self._sequences.pop(microbatch).chunks:
            if chunk.place is not None:
                self._pool.give(chunk.place)

    def check_empty(self) -> None:
        """Raise if any chunk is in use."""
        if self._sequences:
            held = {m: len(s.chunks) for m, s in self._sequences.items()}
            raise CacheError(f"key-value chunks left at the end of the step (microbatch: slices): {held}")

    def clear(self) -> None:
        """Empty the cache and free the slab, after a failed step or for another batch shape."""
        self._sequences.clear()
        self._pool.clear()
