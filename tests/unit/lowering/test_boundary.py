"""Boundaries between stages: every element reaches every receiver exactly once."""

from __future__ import annotations

import itertools

import pytest

from megatron_het.lowering.boundary import Piece, Side, pieces

SEQ = 24


@pytest.mark.parametrize(
    ("m", "n", "send_sp", "receive_sp"),
    list(itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (False, True), (False, True))),
)
def test_every_receiver_gets_its_interval_exactly_once(m: int, n: int, send_sp: bool, receive_sp: bool) -> None:
    sender = Side(tuple(range(m)), send_sp)
    receiver = Side(tuple(range(10, 10 + n)), receive_sp)
    found = pieces(sender, receiver, SEQ)
    for j, dst in enumerate(receiver.ranks):
        lo, hi = receiver.interval(j, SEQ)
        tokens = [t for p in found if p.dst == dst for t in range(p.lo, p.hi)]
        assert sorted(tokens) == list(range(lo, hi))
    for p in found:
        lo, hi = sender.interval(p.src, SEQ)
        assert lo <= p.lo < p.hi <= hi


def test_with_sequence_parallel_on_both_sides_the_backward_is_the_transpose() -> None:
    a, b = Side((0, 1), True), Side((2, 3, 4), True)
    forward = pieces(a, b, SEQ)
    backward = pieces(b, a, SEQ)
    assert sorted((p.dst, p.src, p.lo, p.hi) for p in backward) == sorted((p.src, p.dst, p.lo, p.hi) for p in forward)


def test_replicated_senders_share_the_load() -> None:
    found = pieces(Side((0, 1), False), Side((2, 3, 4, 5), False), SEQ)
    assert found == [Piece(0, 2, 0, SEQ), Piece(1, 3, 0, SEQ), Piece(0, 4, 0, SEQ), Piece(1, 5, 0, SEQ)]


@pytest.mark.parametrize(("m", "n"), list(itertools.product((1, 2, 3), (1, 2, 3))))
@pytest.mark.parametrize("tokens", [6, 12, 42])
def test_what_travels_is_in_proportion_to_the_tokens(m: int, n: int, tokens: int) -> None:
    """Slices of other lengths have the pieces of one length, as long as all ranks get equal parts."""
    sides = Side(tuple(range(m)), True), Side(tuple(range(10, 10 + n)), True)
    nominal = pieces(*sides, SEQ)
    scaled = [Piece(p.src, p.dst, p.lo * tokens // SEQ, p.hi * tokens // SEQ) for p in nominal]
    assert scaled == pieces(*sides, tokens)
