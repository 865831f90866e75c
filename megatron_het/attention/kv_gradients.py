"""Gradients of cached keys and values, added up until the backward of their own slice.

Every later slice adds to the gradients of all chunks before it.  Chunks that lie next to each other keep theirs in one
tensor, in the order of the pool: a later slice adds with one call for the keys and one for the values, however
many chunks there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

Part = tuple[int, int, int]
"""Slice, first and end row of its chunk."""
Pair = tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values, ``[rows, b, ...]``."""


Addition = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def add_(keys: torch.Tensor, values: torch.Tensor, more_keys: torch.Tensor, more_values: torch.Tensor) -> None:
    """Add to keys and values in place: by one kernel where there is one for the device and the types."""
    if not keys.is_cuda:
        keys.add_(more_keys)
        values.add_(more_values)
        return
    tensors = keys, values, more_keys, more_values
    fused = None
    if type(keys) is torch.Tensor and all(t.is_contiguous() for t in tensors):  # not in a dry run
        fused = fused_addition(keys.device, keys.dtype, more_keys.dtype)
    if fused is not None:
        fused(*tensors)
    else:
        torch._foreach_add_([keys, values], [more_keys, more_values])


@functools.lru_cache(maxsize=16)
def fused_addition(device: torch.device, dtype: torch.dtype, more_dtype: torch.dtype) -> Addition | None:
    """The kernel that adds to two tensors at once, after a trial; None without Triton, or where the trial fails."""
    try:
        from megatron_het.attention.fused_addition import add_pair

        total, more = (torch.full((2, 1500), 0.5, device=device, dtype=kind) for kind in (dtype, more_dtype))
        add_pair(total[0], total[1, :700], more[0], more[1, :700])
        is_right = bool((total.sum(1) == total.new_tensor([1500.0, 1100.0])).all())
    except Exception:  # no Triton, no compiler, a device that it does not know: there is another way
        return None
    return add_pair if is_right else None


def _widened(keys: torch.Tensor, values: torch.Tensor) -> Pair:
    """Gradients in the type in which they are added up, in memory of their own."""
    keys, values = (
        t.clone() if wide is t.dtype and t.untyped_storage().nbytes() > t.nbytes else t.to(wide)
        for t in (keys, values)
        for wide in (torch.promote_types(t.dtype, torch.float32),)
    )
    return keys, values


@dataclass(frozen=True, slots=True)
class _Total:
    """Gradients of neighbouring rows of chunks, in the order of ``parts``."""

    parts: tuple[Part, ...]
    keys: torch.Tensor
    values: torch.Tensor

    def rows_of(self, parts: tuple[Part, ...], rows: int) -> slice | None:
        """Where so many rows are that other parts have; None if they are not here, next to each other."""
        if parts[0] not in self.parts:
            return None
        first = self.parts.index(parts[0])
        if self.parts[first : first + len(parts)] != parts:
            return None
        start = sum(hi - lo for _, lo, hi in self.parts[:first])
        return slice(start, start + rows)


class GradientTotals:
    """Holds what the later slices of one microbatch have added up, by slice.

    Args:
        batch: Sequences of the microbatch.
        rows_of: How many rows the chunk of a slice has.
    """

    def __init__(self, batch: int, rows_of: Callable[[int], int]) -> None:
        self._batch = batch
        self._rows_of = rows_of
        self._of: dict[int, Pair] = {}
        self._totals: list[_Total] = []

    def add(
        self, parts: tuple[Part, ...], grad_keys: torch.Tensor, grad_values: torch.Tensor, sequences: slice | None
    ) -> None:
        """Add a later slice's contribution; the first one to whole chunks is kept as it is.

        Args:
            parts: Rows of chunks, in the order of the gradients.
            grad_keys: ``[rows, b, ...]``.
            grad_values: The same of the values.
            sequences: Of the microbatch, those that the gradients are of; None for all.
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
        """The gradients of a slice's chunk, which goes; None if there are none."""
        return self._of.pop(piece, None)

    def tensors(self) -> list[torch.Tensor]:
        """Returns what is held."""
        return [tensor for pair in self._of.values() for tensor in pair]
