"""The chunked key-value cache of one layer.

A chunk holds the keys and values of one slice of one microbatch (grouped queries not expanded), or those of its last
tokens where later slices read no others.  It lives in rows of a fixed pool: taken in the slice's forward, given back
in its backward.  Slices of a microbatch are released last in, first out; several microbatches may hold chunks at once.

Every other microbatch grows from the top end of the pool, so that a microbatch's chunks mostly form one contiguous
run and its prefix is one view, without concatenating anything.  Where they do not, the prefix is several views.

Kernels that align a causal mask bottom-right want a slice's own keys last, in one view with those before.  Where the
rows after a microbatch's are not free, its last chunk makes room for the next one by going down to the other end.  It
comes up again when the next one is given back.  Two copies of a chunk, whatever the length of its prefix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_het.attention.kv_pool import CacheError, GradientTotals, KVPool, Part, Place, add_


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of chunks that lie next to each other."""

    keys: Tensor  # ``[rows, b, groups, d]``, a view of the pool
    values: Tensor
    parts: tuple[Part, ...]  # what the rows are, in the order of the views

    @property
    def slices(self) -> tuple[int, ...]:
        """Index of the slice of each part."""
        return tuple(piece for piece, _, _ in self.parts)


@dataclass(slots=True)
class _Chunk:
    """Holds the tokens ``[begin, end)`` of a slice: those from ``first`` on."""

    begin: int
    first: int
    end: int
    place: Place | None
    before: Sequence[Run] | None = None  # the runs of all chunks before it, once they have been asked for
    line: Run | None = None  # all chunks up to it as one view, once it has been asked for


def _span(chunk: _Chunk) -> tuple[int, int]:
    """Rows of the slab that a chunk has; negative ones where it has none."""
    place = chunk.place
    return (-1, -1) if place is None or place.at < 0 else (place.at, place.at + place.keys.shape[0])


@dataclass(slots=True)
class _Sequence:
    """Holds the cache of one microbatch: ``batch`` sequences, the i-th slice of them in ``chunks[i]``."""

    grows_up: bool
    batch: int
    chunks: list[_Chunk] = field(default_factory=list)
    totals: GradientTotals = field(init=False)

    def __post_init__(self) -> None:
        chunks = self.chunks  # not this object, which would refer to itself
        self.totals = GradientTotals(self.batch, lambda piece: chunks[piece].end - chunks[piece].first)


class KVCache:
    """Keys and values of one layer, by microbatch and slice.

    Tokens are counted as they are appended: those of the sequence, or of a context-parallel rank's part of it.

    Args:
        slots: Chunks in the pool.  The schedule says how many are needed at once.
        batch: Sequences of the largest microbatch; by default all have as many as the first.
        in_line: Whether the last chunk comes after those before it in memory, where that is possible.
    """

    expands = False  # whether what is attended to is made of what is held, at every use

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
        """Have room for so many tokens at once, in place of equal slots; nothing may be held."""
        self._pool.reserve(rows)

    def append(self, microbatch: int, index: int, key: Tensor, value: Tensor, unread: int = 0) -> bool:
        """Copy a slice's keys and values into the pool; once only, so that recomputation is safe.

        Args:
            index: Index of the slice; the one after the last cached one, or a cached one.
            key: ``[tokens, b, groups, d]``.
            value: The same of the values.  Both are copied: they are views of larger tensors.
            unread: How many tokens at the start no later slice reads; they are not held.

        Returns:
            Whether it is new: False in a recomputed forward.

        Raises:
            CacheError: A slice was left out, another shape, or the pool is full.
        """
        sequence = self._sequences.get(microbatch)
        if sequence is None:
            if not self._sequences:
                # Sides decide in which order keys are attended to, hence how sums round: every iteration, the
                # first one after a resumption too, begins at the same side.
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
        """First row of the next chunk after all others of a microbatch; -1 where there is no room."""
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
        """Let the last chunk come up to the end of the others."""
        ends = [_span(chunk) for chunk in sequence.chunks]
        if len(ends) < 2 or min(ends)[0] < 0:
            return
        (first, last), end = ends[-1], max(end for _, end in ends[:-1])
        place = sequence.chunks[-1].place
        if first < end and place is not None and self._pool.are_free(end, last - first):
            sequence.chunks[-1].place = self._pool.move(place, end)

    def begin_of(self, microbatch: int, index: int) -> int:
        """First token of a slice, whether it is cached or the next one to be."""
        chunks = self._sequences[microbatch].chunks if microbatch in self._sequences else ()
        return chunks[index].begin if index < len(chunks) else chunks[-1].end if chunks else 0

    def begins(self, microbatch: int) -> tuple[int, ...]:
        """First token of every cached slice."""
        sequence = self._sequences.get(microbatch)
        return () if sequence is None else tuple(chunk.begin for chunk in sequence.chunks)

    def shown(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that are attended to, of what is appended."""
        return key, value

    def of_appended(self, key: Tensor, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what is appended, of those of what is attended to (``shown``)."""
        return grad_keys, grad_values

    def line(self, microbatch: int, index: int) -> tuple[Run, Run | None] | None:
        """The chunks up to a slice as one view in which the slice's own is last, and the part of it before that.

        Returns:
            None where they do not lie so; None as the part before the first slice.
        """
        sequence = self._sequences[microbatch]
        if index >= len(sequence.chunks):
            return None
        chunk, size = sequence.chunks[index], sequence.chunks[index].end - sequence.chunks[index].begin
        # The chunks before it stay where they are until its backward; it may not find its place at the front again.
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
        """Tokens ``[start, stop)`` of a sequence, all of them held, in their order; copied where they lie apart."""
        runs = self.runs(microbatch, start, stop)
        parts = tuple(self._parts(microbatch, start, stop))
        if len(runs) == 1 and runs[0].parts == parts:
            return runs[0]
        found = [run for _, run in self._by_chunk(microbatch, start, stop)]
        return Run(torch.cat([run.keys for run in found]), torch.cat([run.values for run in found]), parts)

    def joined(self, microbatch: int, index: int, unread: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns what was appended of a slice: what is not held, and what is.

        Args:
            unread: Keys ``[unread, b, groups, d]`` and values; nothing if all are held.
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
        """The chunks of the slices before one, less so many first tokens, as few contiguous runs as they form."""
        chunks = self._sequences[microbatch].chunks if microbatch in self._sequences else ()
        if skipped_tokens or index >= len(chunks):
            return self.runs(microbatch, skipped_tokens, self.begin_of(microbatch, index))
        found = chunks[index].before
        if found is None:  # in the forward; the backward finds the same chunks
            found = chunks[index].before = self.runs(microbatch, 0, chunks[index].begin)
        return found

    def runs(self, microbatch: int, start: int, stop: int) -> Sequence[Run]:
        """Tokens ``[start, stop)`` of a sequence, all of them held, as few contiguous runs as they form, in any order.

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
        """Copy the keys and values of tokens ``[start, stop)`` of a sequence, as far as they are held.

        Args:
            start: First token.
            stop: End of the tokens; all of them are of cached slices.
            out: ``[2, stop - start, b, groups, d]``: keys, then values.  Rows of tokens that are not held stay as they
                are.
            groups: Which key-value groups.
        """
        for first, run in self._by_chunk(microbatch, start, stop, gaps=True):
            keys, values = self.shown(run.keys, run.values)
            rows = slice(first - start, first - start + keys.shape[0])
            out[0, rows].copy_(keys[:, :, groups])
            out[1, rows].copy_(values[:, :, groups])

    def _parts(self, microbatch: int, start: int, stop: int, gaps: bool = False) -> Iterator[Part]:
        """The rows of every chunk that tokens ``[start, stop)`` touch; with ``gaps`` some of them may not be held."""
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
        """Tokens ``[start, stop)`` in their order, a run for each chunk with its first token."""
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
            run: The chunks, as ``runs`` gave them.
            grad_keys: Gradient of the run's keys.
            sequences: Of the microbatch, those that the gradients are of; None for all.
        """
        self._sequences[microbatch].totals.add(run.parts, grad_keys, grad_values, sequences)

    def add_token_gradient(
        self, microbatch: int, start: int, stop: int, grad_keys: Tensor, grad_values: Tensor
    ) -> None:
        """Add a later slice's contribution to the gradients of tokens ``[start, stop)``, as far as they are held."""
        for first, run in self._by_chunk(microbatch, start, stop, gaps=True):
            part = slice(first - start, first - start + run.keys.shape[0])
            self.add_gradient(microbatch, run, grad_keys[part], grad_values[part])

    def release(self, microbatch: int, index: int) -> tuple[Tensor, Tensor] | None:
        """Give the last slice's chunk back.

        Returns:
            The gradients of what is held of its keys and values from all later slices, in at least fp32; None if
            there are none.

        Raises:
            CacheError: It is not the last one.
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
        """Give the last slice's chunk back.

        Args:
            grad_keys: What the slice itself adds to the gradient of what was appended as keys; may be changed.

        Returns:
            The gradients of what was appended, from this slice and all later ones.
        """
        later = self.release(microbatch, index)
        if later is not None:
            rows = later[0].shape[0]  # those that are held are the last ones
            whole = rows == grad_keys.shape[0]
            add_(*((grad_keys, grad_values) if whole else (grad_keys[-rows:], grad_values[-rows:])), *later)
        return grad_keys, grad_values

    def drop(self, microbatch: int) -> None:
        """Give all chunks of a microbatch back, without a backward pass (evaluation)."""
        for chunk in self._sequences.pop(microbatch).chunks:
            if chunk.place is not None:
                self._pool.give(chunk.place)

    def check_empty(self) -> None:
        """Raise if any chunk is in use."""
        if self._sequences:
            held = {m: len(s.chunks) for m, s in self._sequences.items()}
            raise CacheError(f"key-value chunks left at the end of the step (microbatch: slices): {held}")

    def clear(self) -> None:
        """Forget everything and free the slab, after a failed step or for another batch shape."""
        self._sequences.clear()
        self._pool.clear()
