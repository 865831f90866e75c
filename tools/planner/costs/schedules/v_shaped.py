"""ZB-V and V-Half: two chunks per stage in a V.  Plans that ask for them are priced; the search does not try them."""

from __future__ import annotations

from megatron_het.schedule.generators import chunks_held

from ..candidate import Candidate
from ..estimates import StageTimes
from .base import Schedule


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
