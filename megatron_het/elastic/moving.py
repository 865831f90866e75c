"""Moving state between ranks of any two plans: who sends which ranges to whom, and the sending.

Every member says what it holds and what it needs.  From that each of them works out the same messages: a needed range
comes from the rank itself if it holds it, else from a holder, and different receivers begin with different holders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_het.elastic.links import Links
from megatron_het.elastic.pieces import PARAMETER, StateError
from megatron_het.elastic.ranges import Piece, Runs, common

_MESSAGE_BYTES = 64 * 2**20  # bounds the extra memory of the exchange
_FEW_RUNS = 32  # up to here slices are copied one by one

Held = Sequence[tuple[Piece, torch.Tensor]]


@dataclass
class _Move:
    """Elements that go from a piece of one rank to a piece of another (or the same)."""

    sender: int
    receiver: int
    source: int
    target: int
    taken: Runs
    put: Runs

    @property
    def size(self) -> int:
        return int(self.taken[:, 2].sum())


class Holdings:
    """Holds what all members hold, and who gives what to whom.

    Args:
        held: Pieces by member.
    """

    def __init__(self, held: Sequence[Sequence[Piece]]) -> None:
        self._held = held
        self._by_name: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for member, pieces in enumerate(held):
            for i, piece in enumerate(pieces):
                self._by_name[piece.name][member].append(i)
        self._runs: dict[tuple[int, int], Runs] = {}
        self._moves: dict[int, tuple[list[_Move], list[Piece]]] = {}

    def moves(self, receiver: int, needed: Sequence[Piece]) -> tuple[list[_Move], list[Piece]]:
        """Returns what a member gets from whom, in one order for everybody, and what nobody has.

        A member always needs the same.
        """
        if receiver not in self._moves:
            self._moves[receiver] = self._find_moves(receiver, needed)
        return self._moves[receiver]

    def _find_moves(self, receiver: int, needed: Sequence[Piece]) -> tuple[list[_Move], list[Piece]]:
        found: list[_Move] = []
        missing: list[Piece] = []
        for target, piece in enumerate(needed):
            left = piece.runs()
            for sender, source in self._holders(piece, receiver):
                if not len(left):
                    break
                put, taken, left = common(left, self._runs_of(sender, source))
                if len(put):
                    found.append(_Move(sender, receiver, source, target, taken, put))
            if len(left):
                missing.append(piece)
        return found, missing

    def _holders(self, piece: Piece, receiver: int) -> Iterator[tuple[int, int]]:
        """Members and their pieces of the same tensor: the receiver itself, then the others, in an order of its own."""
        by_member = self._by_name.get(piece.name, {})
        members = sorted(by_member)
        turned = members[receiver % len(members) :] + members[: receiver % len(members)] if members else []
        for member in sorted(turned, key=lambda m: m != receiver):
            for index in by_member[member]:
                if self._held[member][index].shape == piece.shape and self._held[member][index].dtype == piece.dtype:
                    yield member, index

    def _runs_of(self, member: int, index: int) -> Runs:
        if (member, index) not in self._runs:
            self._runs[member, index] = self._held[member][index].runs()
        return self._runs[member, index]

    def kinds(self) -> dict[str, list[str]]:
        """Kinds of optimizer state with their data types, by parameter name."""
        found: dict[str, set[str]] = defaultdict(set)
        for pieces in self._held:
            for piece in pieces:
                if piece.kind not in (PARAMETER, "main"):
                    found[piece.key].add(f"{piece.kind}:{piece.dtype}")
        return {key: sorted(names) for key, names in found.items()}


def missing_names(missing: Sequence[Piece]) -> str:
    """Names of pieces that nobody holds, for a message."""
    names = sorted({f"{piece.key} ({piece.kind})" for piece in missing})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@torch.no_grad()
def move(links: Links, held: Held, needed: Held, holdings: Holdings, needs: Sequence[Sequence[Piece]]) -> int:
    """Fill the needed tensors.  Collective over the members.

    Args:
        links: Between the members.
        held: What this member holds.
        needed: What it needs, with the tensors to fill.
        holdings: Of all members.
        needs: Pieces that each member needs.

    Returns:
        Bytes that this member sent to others.

    Raises:
        StateError: Nobody holds something that is needed.
    """
    mine: list[_Move] = []
    for receiver, pieces in enumerate(needs):
        if receiver == links.rank:
            found, missing = holdings.moves(receiver, pieces)
            if missing:
                raise StateError(f"no rank that is left holds {missing_names(missing)}")
            mine.extend(found)
        else:
            own_names = {piece.name for piece, _ in held}
            if any(piece.name in own_names for piece in pieces):
                mine.extend(m for m in holdings.moves(receiver, pieces)[0] if m.sender == links.rank)
    for local in (m for m in mine if m.sender == m.receiver):
        _write(needed[local.target][1], local.put, _read(held[local.source][1], local.taken))
    sent = 0
    outgoing = _batches([m for m in mine if m.sender == links.rank != m.receiver], lambda m: held[m.source][0])
    incoming = _batches([m for m in mine if m.receiver == links.rank != m.sender], lambda m: needed[m.target][0])
    for turn in range(_turns(links, max(len(outgoing), len(incoming)))):
        messages = [
            (peer, _pack([(held[m.source][1], m.taken) for m in batch]))
            for (_, peer), batch in (outgoing[turn] if turn < len(outgoing) else {}).items()
        ]
        arriving = incoming[turn] if turn < len(incoming) else {}
        buffers = {
            pair: torch.empty(sum(m.size for m in batch), dtype=needed[batch[0].target][1].dtype)
            for pair, batch in arriving.items()
        }
        links.swap(messages, [(peer, buffers[peer, me]) for peer, me in arriving])
        sent += sum(tensor.nbytes for _, tensor in messages)
        for pair, batch in arriving.items():
            at = 0
            for m in batch:
                _write(needed[m.target][1], m.put, buffers[pair][at : at + m.size])
                at += m.size
    return sent


def _turns(links: Links, own: int) -> int:
    """How many turns the exchange has: as many as the busiest member needs."""
    return max(int(turns) for turns in links.gather(own))


def _batches(moves: Sequence[_Move], piece_of: Any) -> list[dict[tuple[int, int], list[_Move]]]:
    """Moves in turns of bounded size; in a turn one message of one data type per pair of members.

    Both ends of a pair see the same moves in the same order, so that they cut them alike.
    """
    turns: list[dict[tuple[int, int], list[_Move]]] = []
    place: dict[tuple[int, int], tuple[int, int, str]] = {}
    for m in moves:
        pair, piece = (m.sender, m.receiver), piece_of(m)
        size = m.size * getattr(torch, piece.dtype).itemsize
        turn, filled, dtype = place.get(pair, (0, 0, piece.dtype))
        if dtype != piece.dtype or (filled and filled + size > _MESSAGE_BYTES):
            turn, filled = turn + 1, 0
        place[pair] = turn, filled + size, piece.dtype
        while len(turns) <= turn:
            turns.append({})
        turns[turn].setdefault(pair, []).append(m)
    return turns


def _pack(parts: Sequence[tuple[torch.Tensor, Runs]]) -> torch.Tensor:
    """One flat message in host memory."""
    return torch.cat([_read(tensor, runs) for tensor, runs in parts]).cpu()


def _read(tensor: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Elements of a flat tensor, one run after the other."""
    if len(runs) <= _FEW_RUNS:
        parts = [tensor[first : first + length] for _, first, length in runs.tolist()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensor[_index(runs).to(tensor.device)]


def _write(tensor: torch.Tensor, runs: Runs, values: torch.Tensor) -> None:
    """Put values into a flat tensor, one run after the other."""
    values = values.to(tensor.device)
    if len(runs) > _FEW_RUNS:
        tensor[_index(runs).to(tensor.device)] = values
        return
    at = 0
    for _, first, length in runs.tolist():
        tensor[first : first + length] = values[at : at + length]
        at += length


def _index(runs: Runs) -> torch.Tensor:
    """The elements of the runs, one by one."""
    lengths = runs[:, 2]
    begins = np.repeat(runs[:, 1] - np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    return torch.from_numpy(begins + np.arange(int(lengths.sum())))
