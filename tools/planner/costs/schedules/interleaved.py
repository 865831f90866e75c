"""Interleaved 1F1B: several chunks per stage, in groups of as many microbatches as there are stages."""

from __future__ import annotations

from collections.abc import Iterator

from ..candidate import Candidate
from ..estimates import StageTimes
from ..operating import OperatingPoints
from .base import Place, Schedule

CHUNKS = (2, 3, 4, 6, 8, 12, 16)


class Interleaved(Schedule):
    """Megatron's virtual stages."""

    name = "interleaved"
    is_stock = True
    needs_equal_widths = True
    fills_by_stages = True

    def runs(self, estimator: OperatingPoints, candidate: Candidate) -> bool:
        """Several stages, and microbatches in whole groups, in the plan and in each of its blocks."""
        if len(candidate.stages) == 1:
            return False  # chunks of a single stage follow each other as its layers do
        total = estimator.model.global_batch_size // candidate.micro_batch_size
        return total % (len(candidate.stages) * candidate.blocks) == 0

    def variants(self, estimator: OperatingPoints, plain: Candidate) -> Iterator[Candidate]:
        """With several numbers of chunks."""
        alike = len({sum(g.count for g in s.groups) for s in plain.stages}) == 1
        if len(plain.stages) < 2 or not alike or not self.runs(estimator, plain):
            return
        least = min(s.layers for s in plain.stages)
        for chunks in (n for n in CHUNKS if n <= least):
            yield plain.with_(schedule=self.name, chunks=chunks)

    def most_pieces(self, estimator: OperatingPoints) -> int:
        """A chunk per layer."""
        return estimator.model.num_layers

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """SlimPipe, Table 2."""
        count, v = len(candidate.stages), candidate.chunks
        return min(float(stage.microbatches[i]), (2 * (count - 1 - s) + (v - 1) * count + 1) / candidate.chunks_of(s))

    def expected_in_flight(self, like: Candidate, place: Place) -> float:
        """SlimPipe, Table 2."""
        v = like.chunks
        return min(place.microbatches, (2 * place.after + (v - 1) * place.stages + 1) / v)
