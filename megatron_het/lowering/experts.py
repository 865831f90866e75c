"""Which experts of a layer a rank holds, which part of each, and what their parameters are called.

A layer's experts are divided over the ranks of one replica: its TP group is cut into EP parts one after the other, each
of which has its own experts, and the ranks of a part cut these like a TP group of their own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_het.lowering.shards import Segment, segments
from megatron_het.plan import Cut

_NAME = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")


class ExpertName(NamedTuple):
    """The name of a parameter of one expert, around the expert's number.

    Attributes:
        before: Of the layer and, in grouped layers, of the parameter.
        expert: Its number, on this rank or in the layer.
        after: Of the parameter, in layers of one module per expert.
    """

    before: str
    expert: int
    after: str

    def of(self, expert: int) -> str:
        """The same parameter of another expert."""
        return f"{self.before}{expert}{self.after}"


def expert_name(name: str) -> ExpertName | None:
    """The parts of a parameter's name; None if it belongs to no single expert."""
    match = _NAME.fullmatch(name)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def held_experts(experts: int, cut: Cut, tp_rank: int) -> range:
    """Numbers in the layer of the experts that a rank holds.

    Args:
        experts: Of a layer.
        cut: Of the replica.
        tp_rank: Of the rank.
    """
    each = experts // cut.ep
    first = tp_rank // cut.expert_tp * each
    return range(first, first + each)


def expert_segments(full_size: int, cut: Cut, tp_rank: int, stride: int, expert: int, experts: int) -> list[Segment]:
    """The segments that a rank holds of a parameter of one expert; none of an expert that it does not hold.

    Args:
        full_size: Size of the full parameter along the partition dimension.
        cut: Of the replica.
        tp_rank: Of the rank.
        stride: As of :func:`segments`.
        expert: Number in the layer.
        experts: Of the layer.
    """
    if expert not in held_experts(experts, cut, tp_rank):
        return []
    return segments(full_size, cut.expert_tp, tp_rank % cut.expert_tp, stride)
