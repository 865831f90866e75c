"""What the slices of an iteration see, where documents or sliding windows limit it, for those who attend for others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_het.attention.reach import Reach, Span
from megatron_het.features.context_exchange.helper import Reached
from megatron_het.features.context_exchange.spec import Units
from megatron_het.lowering.boundary import Side
from megatron_het.lowering.ranks import RankOp
from megatron_het.plan import Placement
from megatron_het.plan.parts import part_tokens
from megatron_het.schedule.cutting import Starts


class Limits:
    """Of one iteration.

    Args:
        placement: The plan's lookup tables.
        side: How the replica of a world rank divides a slice.
        units: Which tokens slices and their exchange units are.
        windows: By layer of the model with attention, how many earlier tokens a query sees; None for all.
        starts: Where the documents of each sequence of a microbatch begin; None if documents do not matter.
    """

    def __init__(
        self,
        placement: Placement,
        side: Callable[[int], Side],
        units: Units,
        windows: Sequence[int | None],
        starts: Callable[[int], tuple[Starts, ...] | None],
    ) -> None:
        self._placement, self._side = placement, side
        self._units, self._windows, self._starts = units, windows, starts
        self._first_layers = first_layers(placement)

    def reached(self, op: RankOp, layer: int, ranges: Sequence[Span]) -> Reached:
        """Returns what an ATTEND_HELP attends to.

        Args:
            op: For the pass of the rank ``op.peer``.
            layer: Of the owner's chunk.
            ranges: Units of the owner, in the order of their keys and values.
        """
        where = self._placement.locate(op.peer)
        first, end = self._units.slice(op.microbatch, op.slice)
        blocks = self._side(op.peer).blocks(end - first)
        count = len(blocks)
        # Rows are those of the other ranks that share the slice, from the next one on, and then the owner's.
        ranks = [(where.cp_rank + k) % count for k in range(1, count + 1)]
        rows = tuple((first + a, first + b) for rank in ranks for a, b in blocks[rank])
        keys = tuple(span for units in ranges for span in self._spans(op, where.cp_rank, units))
        window = self._windows[self._first_layers[where.stage, op.chunk] + layer]
        return Reached(Reach(self._starts(op.microbatch), window), rows, keys)

    def _spans(self, op: RankOp, part: int, units: Span) -> Iterator[Span]:
        """Tokens of the sequence that are in some units of an operation's owner, which is a context-parallel rank."""
        each, side = self._units.units, self._side(op.peer)
        start, stop = (self._units.first(op.peer, op.microbatch, unit) for unit in units)
        for index in range(units[0] // each, -(-units[1] // each)):
            first, end = self._units.slice(op.microbatch, index)
            own, begin = side.blocks(end - first)[part], self._units.first(op.peer, op.microbatch, index * each)
            lo, hi = max(start - begin, 0), min(stop - begin, part_tokens(own))
            before = 0
            for a, b in own:
                left, right = max(lo - before, 0), min(hi - before, b - a)
                if left < right:
                    yield first + a + left, first + a + right
                before += b - a


def first_layers(placement: Placement) -> Mapping[tuple[int, int], int]:
    """Index of the first layer of every (stage, chunk) among those of the model that have attention."""
    found: dict[tuple[int, int], int] = {}
    layers, counts = 0, placement.plan.attention_layers
    for stage, chunk in placement.path:
        found[stage, chunk] = layers
        layers += counts[stage][chunk]
    return found
