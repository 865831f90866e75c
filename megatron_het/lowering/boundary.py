"""Stage boundaries: which ranks exchange which part of an activation.  Pure arithmetic.

An activation is ``[s, b, h]``.  On a replica with TP size n every rank holds all of it, or, with
sequence parallelism, rank t holds the t-th of n equal intervals of the sequence.  The pieces that
travel are the intersections of the sender's intervals with the receiver's; each element reaches
each receiving rank exactly once.  Activations and gradients use the same function with the two
sides exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[lo, hi)`` of the sequence go from world rank ``src`` to world rank ``dst``."""

    src: int
    dst: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a boundary: the ranks of a replica and whether they split the sequence."""

    ranks: tuple[int, ...]
    sequence_parallel: bool

    def interval(self, tp_rank: int, seq_length: int) -> tuple[int, int]:
        """The interval of the sequence that a rank of this side holds."""
        n = len(self.ranks)
        if not self.sequence_parallel or n == 1:
            return 0, seq_length
        return tp_rank * seq_length // n, (tp_rank + 1) * seq_length // n


def pieces(sender: Side, receiver: Side, seq_length: int) -> list[Piece]:
    """All pieces of one transfer, ordered by receiver, then sender.

    When the sender's ranks all hold the whole sequence, receiver j is served by sender j mod n,
    so that the load spreads over the sender's links.
    """
    replicated = not sender.sequence_parallel or len(sender.ranks) == 1
    found = []
    for j, dst in enumerate(receiver.ranks):
        want_lo, want_hi = receiver.interval(j, seq_length)
        for i, src in enumerate(sender.ranks):
            if replicated and i != j % len(sender.ranks):
                continue
            have_lo, have_hi = sender.interval(i, seq_length)
            lo, hi = max(want_lo, have_lo), min(want_hi, have_hi)
            if lo < hi:
                found.append(Piece(src, dst, lo, hi))
    return found
