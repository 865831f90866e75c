"""Shards of parameters under different TP sizes."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_het.lowering.ranks import overlaps, segments

TPS = (1, 2, 3, 4, 6)


@pytest.mark.parametrize(("tp", "stride"), list(itertools.product(TPS, (1, 2))))
def test_segments_tile_the_full_parameter(tp: int, stride: int) -> None:
    rows = [r for t in range(tp) for s in segments(24, tp, t, stride) for r in range(s.full, s.full + s.length)]
    assert sorted(rows) == list(range(24))


@pytest.mark.parametrize(("a", "b", "stride"), list(itertools.product(TPS, TPS, (1, 2))))
def test_overlaps_move_every_row_of_one_class_into_the_other(a: int, b: int, stride: int) -> None:
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
