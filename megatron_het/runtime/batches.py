"""What the FORWARD operations of an iteration read, and what of it is needed ahead of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_het.lowering.ranks import RankOp
from megatron_het.schedule.cutting import Bounds, SlicePart, Starts


class Batches:
    """A FORWARD reads a microbatch from its first token to its last."""

    def __init__(self) -> None:
        self._ahead: dict[tuple[int, int], Mapping[str, Any]] = {}

    def iterator(self, op: RankOp, data_iterator: Any) -> Any:
        """The data iterator to give to the training script for a FORWARD."""
        ahead = self._ahead.pop((op.microbatch, op.chunk), None)
        return data_iterator if ahead is None else iter([ahead])

    def peek(self, op: RankOp, data_iterator: Iterator[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns what the FORWARD of an operation will read, ahead of it (first TP rank)."""
        found = self._ahead[op.microbatch, op.chunk] = next(data_iterator)
        return found

    def rows(self, rows: int, op: RankOp) -> int:
        """Rows of the activations of an operation's pass, given those of a pass of nominal length."""
        return rows

    def part(self, op: RankOp) -> tuple[int, int]:
        """Tokens of an operation's pass, if all ranks that share it had as many as this one, and of its sequence.

        Or numbers in proportion.
        """
        return 1, 1

    def starts(self, microbatch: int) -> tuple[Starts, ...] | None:
        """Where the documents of each sequence of a microbatch begin; None if it does not matter."""
        return None

    def bounds(self, microbatch: int) -> Bounds:
        """Where the slices of a microbatch begin, and its end; none without slices."""
        return ()

    def slice_parts(self, microbatch: int, units: int) -> tuple[SlicePart, ...]:
        """What every slice of a microbatch is of it, with so many exchange units per slice; none without slices."""
        return ()

    def finish(self) -> None:
        """All operations of the iteration are done."""
