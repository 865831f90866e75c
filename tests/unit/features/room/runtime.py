"""Notes on a rank."""

from collections.abc import Mapping

from megatron_het.lowering.ranks import RankOp
from megatron_het.runtime.feature import Call, Handler, Iteration, OpenContext, RuntimeFeature
from megatron_het.schedule.ir import Kind


class Notes(RuntimeFeature):
    """Writes them down."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def handlers(self) -> Mapping[Kind, Handler]:
        """One kind."""
        return {Kind.NOTE: self._note}

    def _note(self, op: RankOp, call: Call, state: Iteration) -> None:
        self.written.append((op.microbatch, call.sequences(op.microbatch)))


def open_feature(context: OpenContext) -> RuntimeFeature:
    """Nothing to open."""
    return Notes()
