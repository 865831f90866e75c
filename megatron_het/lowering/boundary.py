"""Stage boundaries: which ranks exchange which part of an activation.  Pure arithmetic.

An activation is ``[s, b, h]``.  The context-parallel ranks of a replica hold blocks of the sequence
(``plan/parts.py``).  Of these, each of n TP ranks holds all, or, with sequence parallelism, the t-th of n equal
intervals.  The pieces that travel are the intersections of what the sender holds with what the receiver needs;
each element reaches each receiving rank exactly once, whatever the sizes of both sides.  Activations and gradients
use the same function with the two sides exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_het.plan.parts import Blocks, token_blocks


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that go from world rank ``src`` to world rank ``dst``.

    Attributes:
        src: Who has them.
        dst: Who gets them.
        sent: First of them in the sender's tensor.
        received: First of them in the receiver's tensor.
        length: How many.
    """

    src: int
    dst: int
    sent: int
    received: int
    length: int

    def rows(self, *, sending: bool) -> tuple[int, int]:
        """First and end of the elements in the tensor of the rank that sends, or of the one that receives."""
        first = self.sent if sending else self.received
        return first, first + self.length


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a boundary: the ranks of a replica and how they divide a sequence.

    Attributes:
        groups: TP ranks by context-parallel rank.
        divided: Whether the TP ranks of a group divide what the group holds.
        shares: How the groups divide a sequence, as in ``plan/parts.py``.
        grain: What the tokens of every group are a multiple of.
    """

    groups: tuple[tuple[int, ...], ...]
    divided: bool
    shares: tuple[int, ...] = (1,)
    grain: int = 1

    @property
    def is_divided(self) -> bool:
        """Whether the TP ranks of a group hold different elements."""
        return self.divided and len(self.groups[0]) > 1

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """(world rank, context-parallel rank, TP rank) of all ranks, group by group."""
        for part, group in enumerate(self.groups):
            for tp_rank, rank in enumerate(group):
                yield rank, part, tp_rank

    def blocks(self, tokens: int) -> list[Blocks]:
        """Returns what each context-parallel rank holds of ``tokens`` elements."""
        return list(token_blocks(self.shares, tokens, self.grain))

    def held(self, blocks: Blocks, tp_rank: int) -> Blocks:
        """Returns what a TP rank holds of the blocks of its group, in the order of its tensor."""
        if not self.is_divided:
            return blocks
        n, whole = len(self.groups[0]), sum(end - first for first, end in blocks)
        lo, hi = tp_rank * whole // n, (tp_rank + 1) * whole // n
        found, before = [], 0
        for first, end in blocks:
            a, b = max(lo - before, 0), min(hi - before, end - first)
            if a < b:
                found.append((first + a, first + b))
            before += end - first
        return found

    def length(self, rank: int, tokens: int) -> int:
        """Elements that a world rank of this side holds."""
        blocks = self.blocks(tokens)
        return next(
            sum(b - a for a, b in self.held(blocks[part], t)) for other, part, t in self.ranks() if other == rank
        )


def pieces(sender: Side, receiver: Side, tokens: int) -> list[Piece]:
    """All pieces of one transfer, ordered by receiver, then sender, then place.

    When the TP ranks of a sender's group all hold the same, receiver j is served by sender j mod n,
    so that the load spreads over the sender's links.

    Args:
        sender: Who has the elements.
        receiver: Who needs them.
        tokens: How many elements there are.
    """
    has, needs = sender.blocks(tokens), receiver.blocks(tokens)
    found: list[Piece] = []
    for dst, part, j in receiver.ranks():
        wanted = receiver.held(needs[part], j)
        for src, other, i in sender.ranks():
            if sender.is_divided or i == j % len(sender.groups[0]):
                found += _common(src, dst, sender.held(has[other], i), wanted)
    return found


def _common(src: int, dst: int, has: Blocks, wants: Blocks) -> list[Piece]:
    """Returns what two ranks have in common; neighbours in both tensors are one piece."""
    found: list[Piece] = []
    for (sent, have), (received, want) in itertools.product(_placed(has), _placed(wants)):
        lo, hi = max(have[0], want[0]), min(have[1], want[1])
        if lo >= hi:
            continue
        piece = Piece(src, dst, sent + lo - have[0], received + lo - want[0], hi - lo)
        last = found[-1] if found else None
        if last and last.rows(sending=True)[1] == piece.sent and last.rows(sending=False)[1] == piece.received:
            found[-1] = Piece(src, dst, last.sent, last.received, last.length + piece.length)
        else:
            found.append(piece)
    return found


def _placed(blocks: Blocks) -> Iterator[tuple[int, tuple[int, int]]]:
    """Blocks with the place of their first element in the tensor that holds them."""
    at = 0
    for first, end in blocks:
        yield at, (first, end)
        at += end - first
