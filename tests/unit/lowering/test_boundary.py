"""Boundaries between stages: every element reaches every receiver exactly once."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.lowering.programs import choose_transport
from megatron_het.lowering.ranks import Piece, Side, Stride, overlaps, pieces, segments, stride_of
from megatron_het.plan.placement import least_tokens, part_tokens, token_blocks

SEQ = 24


def rows_of(side: Side, tokens: int) -> dict[int, list[int]]:
    """The elements that each rank holds, in the order of its tensor."""
    blocks = side.blocks(tokens)
    return {
        rank: [element for a, b in side.held(blocks[part], t) for element in range(a, b)]
        for rank, part, t in side.ranks()
    }


def check(sender: Side, receiver: Side, tokens: int) -> list[Piece]:
    """Every receiver gets every element of its own once, from the place where the sender has it."""
    found, has, needs = pieces(sender, receiver, tokens), rows_of(sender, tokens), rows_of(receiver, tokens)
    got: dict[int, dict[int, int]] = {rank: {} for rank in needs}
    for piece in found:
        for i in range(piece.length):
            assert piece.received + i not in got[piece.dst]
            got[piece.dst][piece.received + i] = has[piece.src][piece.sent + i]
    for rank, elements in needs.items():
        assert [got[rank][i] for i in range(len(elements))] == elements
        assert receiver.length(rank, tokens) == len(elements)
    return found


@pytest.mark.parametrize(
    ("m", "n", "send_sp", "receive_sp"),
    list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (False, True), (False, True))),
)
def test_every_receiver_gets_its_interval_exactly_once(m: int, n: int, send_sp: bool, receive_sp: bool) -> None:
    check(Side((tuple(range(m)),), send_sp), Side((tuple(range(10, 10 + n)),), receive_sp), SEQ)


@st.composite
def sides(draw: st.DrawFn, first: int) -> Side:
    tp, shares = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    groups = tuple(tuple(range(first + k * tp, first + (k + 1) * tp)) for k in range(len(shares)))
    grain = draw(st.sampled_from((1, 2)))
    return Side(groups, draw(st.booleans()), tuple(shares), grain * tp)


@given(sides(0), sides(100), st.integers(1, 4))
def test_context_parallel_sizes_and_parts_may_differ(sender: Side, receiver: Side, factor: int) -> None:
    check(sender, receiver, 96 * factor)


def test_with_sequence_parallel_on_both_sides_the_backward_is_the_transpose() -> None:
    a, b = Side(((0, 1),), True), Side(((2, 3, 4),), True)
    forward = pieces(a, b, SEQ)
    backward = [Piece(p.dst, p.src, p.received, p.sent, p.length) for p in pieces(b, a, SEQ)]
    assert sorted(backward, key=str) == sorted(forward, key=str)


def test_replicated_senders_share_the_load() -> None:
    found = pieces(Side(((0, 1),), False), Side(((2, 3, 4, 5),), False), SEQ)
    assert [(p.src, p.dst, p.rows(sending=True)) for p in found] == [
        (src, dst, (0, SEQ)) for src, dst in ((0, 2), (1, 3), (0, 4), (1, 5))
    ]


@pytest.mark.parametrize(("m", "n"), list(itertools.product((1, 2, 3), (1, 2, 3))))
@pytest.mark.parametrize("tokens", [18, 72, 180])
def test_what_travels_is_in_proportion_to_the_tokens(m: int, n: int, tokens: int) -> None:
    """Slices of other lengths have the pieces of one length, with unequal context-parallel parts too."""
    sides = Side((tuple(range(m)),), True), Side((tuple(range(10, 10 + n)), tuple(range(20, 20 + n))), True, (2, 1), n)
    nominal, times = 36, tokens / 36
    scaled = [
        Piece(p.src, p.dst, *(int(rows * times) for rows in (p.sent, p.received, p.length)))
        for p in pieces(*sides, nominal)
    ]
    assert scaled == pieces(*sides, tokens)


def test_equal_parts_travel_in_one_piece() -> None:
    """Each context-parallel rank talks to the one with the same part only, and sends its two blocks at once."""
    sender, receiver = (Side(((k,), (k + 1,), (k + 2,)), False, (2, 1, 1)) for k in (0, 10))
    assert pieces(sender, receiver, SEQ) == [Piece(0, 10, 0, 0, 12), Piece(1, 11, 0, 0, 6), Piece(2, 12, 0, 0, 6)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.sampled_from((1, 2, 3, 4, 8)), st.integers(0, 50))
def test_blocks_are_all_tokens_once_and_mirrored(shares: list[int], grain: int, more: int) -> None:
    even = grain if grain % 2 == 0 else 2 * grain
    tokens = -(-least_tokens(len(shares), grain) // even) * even + more * even
    held = token_blocks(shares, tokens, grain)
    assert sorted(t for blocks in held for a, b in blocks for t in range(a, b)) == list(range(tokens))
    for blocks in held:
        assert part_tokens(blocks) % grain == 0 and part_tokens(blocks) > 0
        if len(shares) > 1:
            (a, b), (c, d) = blocks
            assert (c, d) == (tokens - b, tokens - a)


def test_parts_are_as_the_shares_say() -> None:
    held = token_blocks((3, 2, 1), 120)
    assert [part_tokens(blocks) for blocks in held] == [60, 40, 20]
    # Attention: the mean place of a rank's tokens is the middle, so work is in proportion too.
    assert {sum(t for a, b in blocks for t in range(a, b)) / part_tokens(blocks) for blocks in held} == {59.5}


# The transport between stages is chosen by the validator, with a reason.


def test_the_transport_is_what_was_asked_for_or_what_the_device_and_its_backend_can_do() -> None:
    assert str(choose_transport("auto", "nccl", True)) == "nccl (no cycle of transfers is possible)"
    assert choose_transport("auto", "gloo", True).transport == "staged"
    assert choose_transport("auto", "gloo", False).transport == "gloo"
    assert str(choose_transport("staged", "nccl", True)) == "staged (as asked for)"
    with pytest.raises(ValueError, match="needs CUDA"):
        choose_transport("nccl", "gloo", False)
    with pytest.raises(ValueError, match="host tensors only"):
        choose_transport("gloo", "nccl", True)


# Shards of parameters under different TP sizes.

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
