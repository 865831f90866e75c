"""1F1B: Megatron's own order, with unequal replicas and slack in the number of microbatches in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_het.features.zero_bubble.passes import chunks_held

from ..candidate import Candidate
from ..estimates import Estimate, Pipeline, StageTimes, Unit, divided_alike
from ..operating import OperatingPoints
from .base import Place, Schedule

# Interleaved 1F1B: several chunks per stage, in groups of as many microbatches as there are stages.


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

    def waits_s(
        self, estimator: OperatingPoints, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]
    ) -> float:
        """A group of fewer microbatches than stages takes as long as a whole one, too."""
        lacking_s = [-stage.microbatches[0] % len(stages) * (stage.forward_s + stage.backward_s) for stage in stages]
        return super().waits_s(estimator, candidate, stages, ways) + max(lacking_s)

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """SlimPipe, Table 2."""
        count, v = len(candidate.stages), candidate.chunks
        return min(float(stage.microbatches[i]), (2 * (count - 1 - s) + (v - 1) * count + 1) / candidate.chunks_of(s))

    def expected_in_flight(self, like: Candidate, place: Place) -> float:
        """SlimPipe, Table 2."""
        v = like.chunks
        return min(place.microbatches, (2 * place.after + (v - 1) * place.stages + 1) / v)


# ZB-V and V-Half: two chunks per stage in a V.  Plans that ask for them are priced; the search does not try them.


class VShaped(Schedule):
    """The first stage has the embedding and the output layer, and all stages hold about as much.

    Args:
        name: Of the schedule.
    """

    has_order = False

    def __init__(self, name: str) -> None:
        self._name = name

    def in_flight(self, candidate: Candidate, stage: StageTimes, s: int, i: int) -> float:
        """Half of the chunks that the building block holds."""
        held = chunks_held(self._name, len(candidate.stages))[s]
        return min(float(stage.microbatches[i]), held / candidate.chunks)


MISMATCH_WITH_SLACK = (0.01, 0.003, 0.0, 0.03)


class OneFOneB(Schedule):
    """One forward, one backward."""

    name = "1f1b"
    is_stock = True
    has_slack = True
    has_depths = True

    def mismatch(self, candidate: Candidate) -> tuple[float, float, float, float]:
        """Less is lost where more microbatches are in flight."""
        return MISMATCH_WITH_SLACK if candidate.slack > 0 else super().mismatch(candidate)

    def waits_s(
        self, estimator: OperatingPoints, candidate: Candidate, stages: Sequence[StageTimes], ways: Sequence[float]
    ) -> float:
        """Seconds in which stages that meet for the output layer of every microbatch wait for each other.

        Between two meetings a stage begins with a backward for which the stage before waits, or ends with a forward
        that has come from two stages before.
        """
        if not candidate.rows or len(stages) == 1:
            return 0.0
        units, layers = [stage.units[0] for stage in stages], [stage.layers for stage in candidate.stages]
        forward = [unit.layer_f * n for unit, n in zip(units, layers)]
        backward = [unit.layer_b * n for unit, n in zip(units, layers)]
        pairs = zip(ways, forward, forward[1:], backward, backward[1:])
        apart_s = max([max(b + way + b2, f + f2 + max(f, f2) + 2 * way) for way, f, f2, b, b2 in pairs])
        if len(stages) % 3 == 0:  # embeddings of the next microbatch fall between the same two meetings
            apart_s += forward[0]
        ends_s = max([unit.ends_s(*candidate.ends_of(s)) for s, unit in enumerate(units)])
        least_s = max([f + b for f, b in zip(forward, backward)])
        least_s = max([least_s, *[period - ends_s for period in self.periods_s(candidate, stages, ways)]])
        return (max([stage.microbatches[0] for stage in stages]) - 1) * max(0.0, apart_s - least_s)

    def vocabulary_loss_s(self, like: Candidate, unit: Unit, stages: int, layers: float) -> float:
        """Returns what the meetings of stages take longer than a forward and a backward of each."""
        return layers * max(unit.layer_b - unit.layer_f, unit.layer_f)

    def ends(
        self,
        estimator: OperatingPoints,
        candidate: Candidate,
        stages: Sequence[StageTimes],
        transfers: Sequence[float],
        found: Pipeline,
    ) -> list[float]:
        """A later stage ends earlier by the backwards that the stage before it still holds."""
        if estimator.runtime.transfers_in_turn:
            return super().ends(estimator, candidate, stages, transfers, found)
        ends, before, ahead = [], 0.0, 0.0
        for s, stage in enumerate(stages):
            if s:
                ahead = max(before, ahead + _lead(stages[s - 1], stage, transfers[s - 1]))
            ends.append(max(found.end_s - ahead, found.earliest[s]) if s else found.end_s - before)
            before += stage.backward_s + (transfers[s] if s < len(transfers) else 0.0)
        return ends

    def parameters(self, candidate: Candidate, estimate: Estimate, alike: bool) -> dict[str, object]:
        """Depths, where links are slow, and slack, where stages do not route the microbatches in the same way."""
        found = super().parameters(candidate, estimate, alike)
        if not found and not alike:
            found = {"slack": 0.0 if divided_alike(candidate, estimate.microbatches) else candidate.slack}
        return {**found, "depths": list(candidate.depths)} if candidate.depths else found


def _lead(earlier: StageTimes, stage: StageTimes, transfer_s: float) -> float:
    """How long before the earlier stage a stage can end: the backwards it holds, less its last round trip."""
    left = min([min(held, k) * b for held, k, b in zip(earlier.in_flight, earlier.microbatches, earlier.replica_b)])
    return left - max([f + b for f, b in zip(stage.replica_f, stage.replica_b)]) - 2 * transfer_s
