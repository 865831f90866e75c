"""Pieces as intervals, against the elements that indexing the whole tensor gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_het.elastic.pieces import Piece, common


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    block = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    size = int(np.prod(block))
    start = draw(st.integers(0, size - 1))
    return Piece("w", "main", "float32", shape, offset, block, start, draw(st.integers(start + 1, size)))


def elements(piece: Piece) -> list[int]:
    """The whole tensor's elements that the piece holds, in its order."""
    whole = np.arange(int(np.prod(piece.shape))).reshape(piece.shape)
    cut = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.block, strict=True))
    return whole[cut].reshape(-1)[piece.start : piece.stop].tolist()


def listed(runs: np.ndarray, column: int) -> list[int]:
    return [int(row[column]) + i for row in runs for i in range(int(row[2]))]


@given(st.data())
def test_runs_are_the_elements_of_the_piece(data: st.DataObject):
    piece = data.draw(pieces(data.draw(shapes())))
    runs = piece.runs()
    assert listed(runs, 0) == elements(piece)
    assert listed(runs, 1) == list(range(piece.size))


@given(st.data())
def test_what_two_pieces_share(data: st.DataObject):
    shape = data.draw(shapes())
    mine, theirs = data.draw(pieces(shape)), data.draw(pieces(shape))
    put, taken, left = common(mine.runs(), theirs.runs())
    shared = set(elements(mine)) & set(elements(theirs))
    assert set(listed(put, 0)) == shared and listed(put, 0) == listed(taken, 0)
    assert [elements(mine)[i] for i in listed(put, 1)] == listed(put, 0)
    assert [elements(theirs)[i] for i in listed(taken, 1)] == listed(put, 0)
    assert set(listed(left, 0)) == set(elements(mine)) - shared


def test_a_piece_is_json_and_back():
    piece = Piece("w", "exp_avg", "float32", (4, 6), (0, 2), (4, 3), 1, 7)
    assert Piece.from_json(piece.to_json()) == piece
    assert piece.name == ("w", "exp_avg") and piece.size == 6
