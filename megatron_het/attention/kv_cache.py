"""The chunked key-value cache of one layer.

A chunk holds the keys and values of one slice of one microbatch (grouped queries not expanded) and
lives in a slot of a fixed pool: taken in the slice's forward, given back in its backward.  Slices
of a microbatch are released last in, first out; several microbatches may hold chunks at once.

The pool is one slab of equal slots.  Every other microbatch grows from the top end, so that a
microbatch's slots mostly form one contiguous run and its prefix is one view, without concatenating
anything.  Where they do not, the prefix is several views.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch


class CacheError(RuntimeError):
    """Chunks were used out of order, or the pool is too small: an error of the schedule."""


@dataclass(frozen=True, slots=True)
class Run:
    """Chunks that lie next to each other.

    Attributes:
        keys: ``[len(slices) * slice_tokens, b, groups, d]``, a view of the slab.
        values: The same of the values.
        slices: Index of the slice in each chunk of the run, in the order of the views.
        skipped_tokens: Tokens left out at the start of the only slice of the run; a run of one slice may leave
            out tokens at its end too.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slices: tuple[int, ...]
    skipped_tokens: int = 0


def _widened(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of keys and values in the type in which they are added up."""
    keys, values = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts)
    return keys, values


@dataclass(slots=True)
class _Sequence:
    """What one microbatch holds: ``batch`` sequences, the i-th slice of them in ``slots[i]``."""

    grows_up: bool
    batch: int
    slots: list[int] = field(default_factory=list)
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class KVCache:
    """Keys and values of one layer, by microbatch and slice.

    Args:
        slots: Chunks in the pool.  The schedule says how many are needed at once.
        batch: Sequences of the largest microbatch; by default all have as many as the first.
    """

    def __init__(self, slots: int, batch: int | None = None) -> None:
        self.slots = slots
        self._batch = batch
        self._free = set(range(slots))
        self._sequences: dict[int, _Sequence] = {}
        self._opened = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._slice_tokens = 0

    @property
    def live_chunks(self) -> int:
        """Chunks in use."""
        return self.slots - len(self._free)

    @property
    def pool_bytes(self) -> int:
        """Size of the slab, 0 before its first use."""
        if self._keys is None or self._values is None:
            return 0
        return self._keys.nbytes + self._values.nbytes

    def tensors(self) -> list[torch.Tensor]:
        """The slab and the gradients collected so far."""
        slabs = [tensor for tensor in (self._keys, self._values) if tensor is not None]
        return slabs + [t for s in self._sequences.values() for pair in s.gradients.values() for t in pair]

    def append(self, microbatch: int, index: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Copy a slice's keys and values into the pool; once only, so that recomputation is safe.

        Args:
            microbatch: Global index of the microbatch.
            index: Index of the slice; the one after the last cached one, or a cached one.
            key: ``[slice_tokens, b, groups, d]``.
            value: The same of the values.  Both are copied: they are views of larger tensors.

        Returns:
            Whether it is new: False in a recomputed forward.

        Raises:
            CacheError: A slice was left out, another shape, or no slot is free.
        """
        sequence = self._sequences.get(microbatch)
        if sequence is None:
            if not self._sequences:
                # Sides decide in which order keys are attended to, hence how sums round: every iteration, the
                # first one after a resumption too, begins at the same side.
                self._opened = 0
            sequence = self._sequences[microbatch] = _Sequence(self._opened % 2 == 0, key.shape[1])
            self._opened += 1
        if index < len(sequence.slots):
            return False
        if index > len(sequence.slots):
            raise CacheError(f"microbatch {microbatch}: slice {index} after {len(sequence.slots)} cached slices")
        if not self._free:
            raise CacheError(
                f"microbatch {microbatch} slice {index}: all {self.slots} chunks of the key-value pool are in use"
            )
        keys, values = self._slab(key, value)
        slot = min(self._free) if sequence.grows_up else max(self._free)
        self._free.remove(slot)
        sequence.slots.append(slot)
        keys[self._span(slot), : sequence.batch].copy_(key)
        values[self._span(slot), : sequence.batch].copy_(value)
        return True

    def attended(
        self, microbatch: int, index: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that a slice itself attends to.

        Args:
            microbatch: Global index of the microbatch.
            index: Index of the slice, which is cached.
            key: As it was appended.
            value: As it was appended.
        """
        return key, value

    def own(self, microbatch: int, index: int) -> Run:
        """The chunk of one slice."""
        sequence = self._sequences[microbatch]
        return self._run(((sequence.slots[index], index),), sequence.batch)

    def prefix(self, microbatch: int, index: int, skipped_tokens: int = 0) -> Sequence[Run]:
        """The chunks of the slices before one, as few contiguous runs as they form.

        Args:
            microbatch: Global index of the microbatch.
            index: Index of the slice.
            skipped_tokens: Tokens at the start of the sequence to leave out.
        """
        return self.runs(microbatch, skipped_tokens, index * self._slice_tokens)

    def runs(self, microbatch: int, start: int, stop: int) -> Sequence[Run]:
        """Tokens ``[start, stop)`` of a sequence, as few contiguous runs as they form, in any order."""
        sequence = self._sequences[microbatch]
        slots, batch = sequence.slots, sequence.batch
        whole: list[int] = []
        parts: list[Run] = []
        for piece, lo, hi in self._pieces(start, stop):
            if hi - lo == self._slice_tokens:
                whole.append(piece)
            else:
                run = self._run(((slots[piece], piece),), batch)
                parts.append(Run(run.keys[lo:hi], run.values[lo:hi], run.slices, lo))
        found: list[list[tuple[int, int]]] = []
        for slot, piece in sorted((slots[i], i) for i in whole):
            if found and found[-1][-1][0] == slot - 1:
                found[-1].append((slot, piece))
            else:
                found.append([(slot, piece)])
        return [self._run(tuple(chunks), batch) for chunks in found] + parts

    def copy_tokens(
        self, microbatch: int, start: int, stop: int, out: torch.Tensor, groups: slice = slice(None)
    ) -> None:
        """Copy the keys and values of tokens ``[start, stop)`` of a sequence.

        Args:
            microbatch: Global index of the microbatch.
            start: First token.
            stop: End of the tokens; all of them are cached.
            out: ``[2, stop - start, b, groups, d]``: keys, then values.
            groups: Which key-value groups.
        """
        for piece, lo, hi in self._pieces(start, stop):
            run = self.own(microbatch, piece)
            first = piece * self._slice_tokens + lo - start
            out[0, first : first + hi - lo].copy_(run.keys[lo:hi, :, groups])
            out[1, first : first + hi - lo].copy_(run.values[lo:hi, :, groups])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(slice, first row, end row) of every slice that tokens ``[start, stop)`` touch."""
        tokens = self._slice_tokens
        for piece in range(start // tokens, -(-stop // tokens)):
            yield piece, max(start - piece * tokens, 0), min(stop - piece * tokens, tokens)

    def check_last(self, microbatch: int, index: int) -> None:
        """Raise unless a slice is the last one cached, the only one whose backward may run."""
        held = len(self._sequences[microbatch].slots) if microbatch in self._sequences else 0
        if held != index + 1:
            raise CacheError(
                f"backward of microbatch {microbatch} slice {index} while {held} slices are cached: "
                "slices must go backward last first, each once"
            )

    def add_gradient(
        self,
        microbatch: int,
        run: Run,
        grad_keys: torch.Tensor,
        grad_values: torch.Tensor,
        sequences: slice | None = None,
    ) -> None:
        """Add a later slice's contribution to the gradients of cached chunks.

        Totals are in at least fp32: there is one addition per later slice.

        Args:
            microbatch: Global index of the microbatch.
            run: The chunks, as ``runs`` gave them.
            grad_keys: Gradient of the run's keys.
            grad_values: The same of the values.
            sequences: Of the microbatch, those that the gradients are of; None for all.
        """
        tokens = self._slice_tokens
        if grad_keys.shape[0] < tokens:  # a run of its own
            (piece,) = run.slices
            lo = run.skipped_tokens
            self._add(microbatch, piece, lo, lo + grad_keys.shape[0], grad_keys, grad_values, sequences)
            return
        if grad_keys.shape[1] < self._sequences[microbatch].batch:
            for i, piece in enumerate(run.slices):
                rows = slice(i * tokens, (i + 1) * tokens)
                self._add(microbatch, piece, 0, tokens, grad_keys[rows], grad_values[rows], sequences)
            return
        # All chunks in one call: there are many, and each is small.
        gradients = self._sequences[microbatch].gradients
        totals: list[torch.Tensor] = []
        added: list[torch.Tensor] = []
        parts = zip(grad_keys.split(tokens), grad_values.split(tokens), strict=True)
        for piece, part in zip(run.slices, parts, strict=True):
            if piece in gradients:
                totals += gradients[piece]
                added += part
            else:
                gradients[piece] = _widened(*part)
        if totals:
            torch._foreach_add_(totals, added)

    def add_token_gradient(
        self, microbatch: int, start: int, stop: int, grad_keys: torch.Tensor, grad_values: torch.Tensor
    ) -> None:
        """Add a later slice's contribution to the gradients of tokens ``[start, stop)``."""
        row = 0
        for piece, lo, hi in self._pieces(start, stop):
            part = slice(row, row + hi - lo)
            self._add(microbatch, piece, lo, hi, grad_keys[part], grad_values[part])
            row += hi - lo

    def _add(
        self,
        microbatch: int,
        piece: int,
        lo: int,
        hi: int,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
        sequences: slice | None = None,
    ) -> None:
        """The first contribution to a whole chunk is kept as it is; later ones are added to it."""
        sequence = self._sequences[microbatch]
        gradients = sequence.gradients
        if piece not in gradients and hi - lo == self._slice_tokens and grad_key.shape[1] == sequence.batch:
            gradients[piece] = _widened(grad_key, grad_value)
            return
        if piece not in gradients:
            rows = self._slice_tokens, sequence.batch
            gradients[piece] = _widened(*(part.new_zeros((*rows, *part.shape[2:])) for part in (grad_key, grad_value)))
        for total, part in zip(gradients[piece], (grad_key, grad_value), strict=True):
            total[lo:hi, sequences or slice(None)].add_(part)

    def release(self, microbatch: int, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Give the last slice's chunk back.

        Returns:
            The gradients of its keys and values from all later slices, in at least fp32; None for the
            last slice.

        Raises:
            CacheError: It is not the last one.
        """
        self.check_last(microbatch, index)
        sequence = self._sequences[microbatch]
        self._free.add(sequence.slots.pop())
        gradient = sequence.gradients.pop(index, None)
        if not sequence.slots:
            del self._sequences[microbatch]
        return gradient

    def settle(
        self, microbatch: int, run: Run, grad_keys: torch.Tensor, grad_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the last slice's chunk back.

        Args:
            microbatch: Global index of the microbatch.
            run: The chunk, as ``own`` gave it.
            grad_keys: What the slice itself adds to the gradient of its keys.
            grad_values: The same of the values.

        Returns:
            The gradients of what was appended, from this slice and all later ones.
        """
        later = self.release(microbatch, run.slices[0])
        return (grad_keys, grad_values) if later is None else (grad_keys + later[0], grad_values + later[1])

    def drop(self, microbatch: int) -> None:
        """Give all chunks of a microbatch back, without a backward pass (evaluation)."""
        self._free.update(self._sequences.pop(microbatch).slots)

    def check_empty(self) -> None:
        """Raise if any chunk is in use."""
        if self._sequences:
            held = {m: len(s.slots) for m, s in self._sequences.items()}
            raise CacheError(f"key-value chunks left at the end of the step (microbatch: slices): {held}")

    def clear(self) -> None:
        """Forget everything and free the slab, after a failed step or for another batch shape."""
        self._sequences.clear()
        self._free = set(range(self.slots))
        self._keys = self._values = None

    def _slab(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slabs, made at the first use."""
        tokens, batch, *rest = key.shape
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                part.new_empty((self.slots * tokens, self._batch or batch, *part.shape[2:])) for part in (key, value)
            )
            self._slice_tokens = tokens
        most = self._keys.shape[1]
        fits = batch == most or (self._batch is not None and batch < most)
        if tokens != self._slice_tokens or not fits or list(self._keys.shape[2:]) != rest:
            raise CacheError(
                f"keys of shape {tuple(key.shape)} for a pool of chunks {(self._slice_tokens, *self._keys.shape[1:])}"
            )
        return self._keys, self._values

    def _span(self, slot: int) -> slice:
        return slice(slot * self._slice_tokens, (slot + 1) * self._slice_tokens)

    def _run(self, chunks: tuple[tuple[int, int], ...], batch: int) -> Run:
        assert self._keys is not None and self._values is not None
        span = slice(chunks[0][0] * self._slice_tokens, (chunks[-1][0] + 1) * self._slice_tokens)
        return Run(self._keys[span, :batch], self._values[span, :batch], tuple(piece for _, piece in chunks))
