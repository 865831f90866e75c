"""Shards of parameters under different TP sizes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_het.lowering.ranks import Stride, overlaps, segments, stride_of

TPS = (1, 2, 3, 4, 6)


STRIDES = (1, 2, (2, 2, 1, 1, 6))


@pytest.mark.parametrize(("tp", "stride"), [*itertools.product(TPS, (1, 2)), (1, STRIDES[2]), (2, STRIDES[2])])
def test_segments_tile_the_full_parameter(tp: int, stride: Stride) -> None:
    rows = [r for t in range(tp) for s in segments(24, tp, t, stride) for r in range(s.full, s.full + s.length)]
    assert sorted(rows) == list(range(24))


@pytest.mark.parametrize(("a", "b", "stride"), [*itertools.product(TPS, TPS, (1, 2)), (1, 2, STRIDES[2])])
def test_overlaps_move_every_row_of_one_class_into_the_other(a: int, b: int, stride: Stride) -> None:
    full = torch.arange(24)

    def local(tp: int, t: int) -> torch.Tensor:
        return torch.cat([full[s.full : s.full + s.length] for s in segments(24, tp, t, stride)])

    for t in range(b):
        target = torch.full((24 // b,), -1)
        for u in range(a):
            source = local(a, u)
            for o in overlaps(segments(24, b, t, stride), segments(24, a, u, stride)):
                assert (target[o.mine : o.mine + o.length] == -1).all()
                target[o.mine : o.mine + o.length] = source[o.theirs : o.theirs + o.length]
        assert torch.equal(target, local(b, t))


def test_both_sides_compute_the_same_list() -> None:
    """A flat message without headers needs sender and receiver to agree on the order."""
    for a, b, t, u in itertools.product((2, 3), (4, 6), range(2), range(4)):
        x, y = segments(24, a, t, 2), segments(24, b, u, 2)
        there = [(o.mine, o.theirs, o.length) for o in overlaps(x, y)]
        back = [(o.theirs, o.mine, o.length) for o in overlaps(y, x)]
        assert there == back


def test_gated_weights_are_not_cut_like_plain_ones() -> None:
    assert segments(8, 2, 0, stride=2) != segments(8, 2, 0, stride=1)
    with pytest.raises(ValueError, match="cannot be split"):
        segments(6, 4, 0)
    with pytest.raises(ValueError, match="cannot be split"):
        segments(6, 2, 0, (5, 1))


def test_each_part_of_a_projection_is_cut_over_the_ranks() -> None:
    """As Mamba's projection, of 8 + 8 + 4 + 4 + 2 rows: the first half of each part, then the second one."""
    of_rank = SimpleNamespace(partition_sizes=[4, 4, 2, 2, 1], partition_stride=1)
    parts = [segments(26, 2, t, stride_of(of_rank)) for t in (0, 1)]
    rows = [[r for s in own for r in range(s.full, s.full + s.length)] for own in parts]
    assert rows[0] == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 20, 21, 24]
    assert sorted(rows[0] + rows[1]) == list(range(26))
    assert stride_of(SimpleNamespace(partition_stride=2)) == 2 and stride_of(SimpleNamespace()) == 1
