"""Which part of a full parameter a tensor-parallel rank holds, and what two ranks have in common.

Megatron splits a parameter along ``partition_dim``.  A plain parameter is cut into n equal
intervals.  A gated one (SwiGLU's fused gate and up projection, ``partition_stride`` 2) is
``[gate, up]`` in full and ``[gate_t, up_t]`` on rank t.  Fused QKV weights are stored group by
group, so cutting them into n intervals keeps whole query groups together as long as TP divides
the number of groups, which plans guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Local rows ``[local, local + length)`` are full rows ``[full, full + length)``."""

    local: int
    full: int
    length: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows that two shards share: at ``mine`` in the one and at ``theirs`` in the other."""

    mine: int
    theirs: int
    length: int


def segments(full_size: int, tp: int, tp_rank: int, stride: int = 1) -> list[Segment]:
    """The segments of a shard in local order.

    Args:
        full_size: Size of the full parameter along the partition dimension.
        tp: Tensor-parallel size.
        tp_rank: Rank within it.
        stride: Number of blocks that are each split over the ranks (2 for gated weights).
    """
    if full_size % (tp * stride):
        raise ValueError(f"{full_size} rows cannot be split into {stride} blocks over TP {tp}")
    block = full_size // stride
    length = block // tp
    return [Segment(i * length, i * block + tp_rank * length, length) for i in range(stride)]


def overlaps(mine: list[Segment], theirs: list[Segment]) -> list[Overlap]:
    """Common rows of two shards, in ascending order of the full parameter.

    Both sides compute the same list (with the roles exchanged), which is what makes a flat message
    without headers possible.
    """
    found = []
    for a in sorted(mine, key=lambda s: s.full):
        for b in sorted(theirs, key=lambda s: s.full):
            lo, hi = max(a.full, b.full), min(a.full + a.length, b.full + b.length)
            if lo < hi:
                found.append(Overlap(a.local + lo - a.full, b.local + lo - b.full, hi - lo))
    return found
