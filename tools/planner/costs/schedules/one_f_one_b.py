"""1F1B: Megatron's own order, with unequal replicas and slack in the number of microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from ..candidate import Candidate
from ..estimates import Estimate, Pipeline, StageTimes, Unit, divided_alike
from ..operating import OperatingPoints
from .base import Schedule

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

    def vocabulary_loss_s(self, like: Candidate, unit: Unit, stages: int, layers: float) -> float:
        """Returns a forward of another stage before each backward, less the stage's part of the output layer."""
        return max(0.0, layers * unit.layer_f - unit.head_f / stages)

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
