"""Which tokens of a rank the units of the context exchange are, whether slices are of equal length or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron_het.schedule.cutting import Bounds


class Units:
    """Every slice has as many exchange units; those of a longer one have more tokens.

    Slices have multiples of what the ranks that share them divide into units of whole tokens
    (``features/slices/spec.py: token_unit``), so that nothing here is rounded.

    Args:
        units: Of a slice.
        parts: What each world rank holds of a slice of nominal length, in tokens.
        nominal: That length.
        bounds: Where the slices of a microbatch begin, and its end.
    """

    def __init__(self, units: int, parts: Mapping[int, int], nominal: int, bounds: Callable[[int], Bounds]) -> None:
        self.units = units
        self._parts, self._nominal, self._bounds = parts, nominal, bounds

    def slice(self, microbatch: int, index: int) -> tuple[int, int]:
        """Tokens ``[first, end)`` of the sequence that a slice has."""
        first, end = self._bounds(microbatch)[index : index + 2]
        return first, end

    def slice_tokens(self, microbatch: int, index: int) -> int:
        """Tokens of a slice on all ranks that share it."""
        first, end = self.slice(microbatch, index)
        return end - first

    def first(self, rank: int, microbatch: int, unit: int) -> int:
        """The first token of a unit, as a world rank counts the tokens that it holds; the end of the unit before.

        Args:
            rank: Who has the keys and values.
            microbatch: Of which sequence.
            unit: From the start of the sequence.
        """
        index, within = divmod(unit, self.units)
        bounds, part = self._bounds(microbatch), self._parts[rank]
        first = bounds[index] * part // self._nominal
        if not within:
            return first
        return first + (bounds[index + 1] - bounds[index]) * part // self._nominal * within // self.units

    def tokens(self, rank: int, microbatch: int, start: int, stop: int) -> int:
        """How many tokens units ``[start, stop)`` of a rank have."""
        return self.first(rank, microbatch, stop) - self.first(rank, microbatch, start)
