"""How long the documents of a packed sequence are, and what that leaves of attention.

A model file, or ``--document-lengths``, says it as a mean, for lengths that fall off exponentially, or as a sample of
lengths.  Sequences are filled with documents drawn from it, as Megatron's datasets fill them: one after the other, and
a document that does not fit goes on in the next sequence.
"""

from __future__ import annotations

import functools
import itertools
import random

from megatron_het.plan.placement import token_blocks
from megatron_het.safe_io import FileError, read_text
from megatron_het.safe_io.reading import shown
from megatron_het.schedule.cutting import Cutting, Span, Starts, rows_that_see

from ..errors import PlannerError, from_file_error

Lengths = int | tuple[int, ...]
"""A mean, or a sample."""
_SEED, _SEQUENCES, _MOST_DOCUMENTS = 0, 64, 50_000
_MOST_PAIRS = 4_000  # pairs of ranks in a slice that are looked at
MOST_LENGTHS, LONGEST = 100_000, 1 << 40


def read_lengths(given: str) -> Lengths:
    """Returns what ``--document-lengths`` says: a number, or a file of numbers between spaces, lines or commas.

    Raises:
        PlannerError: It is neither.
    """
    hint = "Give a mean, or a file with the lengths of some documents in tokens"
    try:
        words = [given] if given.isdecimal() else read_text(given).strip().strip("[]").replace(",", " ").split()
        found = tuple(int(word) for word in words)
        if problem := lengths_problem(found):
            raise ValueError(problem)
    except FileError as error:
        raise from_file_error(error, hint) from None
    except ValueError as error:
        raise PlannerError("--document-lengths", given, None, str(error), hint) from None
    return found[0] if given.isdecimal() else found


def lengths_problem(lengths: Lengths) -> str:
    """Returns what is wrong with lengths; "" if nothing is."""
    sample = (lengths,) if isinstance(lengths, int) else lengths
    if not 1 <= len(sample) <= MOST_LENGTHS:
        return f"{len(sample)} lengths of documents, where there must be 1 to {MOST_LENGTHS}"
    wrong = next((length for length in sample if not 1 <= length <= LONGEST), None)
    return "" if wrong is None else f"a document of {shown(wrong)} tokens, where there must be 1 to {LONGEST}"


@functools.lru_cache(maxsize=8)
def drawn(lengths: Lengths, seq_length: int) -> tuple[Starts, ...]:
    """Where the documents of some sequences begin; the same ones in every call."""
    rng = random.Random(_SEED)
    mean = lengths if isinstance(lengths, int) else sum(lengths) / len(lengths)
    count = max(1, min(_SEQUENCES, int(_MOST_DOCUMENTS * mean / seq_length)))
    found: list[Starts] = []
    at, starts = 0, [0]
    while len(found) < count:
        # The first sequence begins within a document, as all later ones do.
        at += max(1, round(rng.expovariate(1 / lengths)) if isinstance(lengths, int) else rng.choice(lengths))
        while at >= seq_length:
            found.append(tuple(starts))
            at, starts = at - seq_length, [0]
        if at:
            starts.append(at)
    return tuple(found[:count])


def share_left(lengths: Lengths, seq_length: int, window: int | None, windowed_layers: float) -> float:
    """Pairs of a query and a key that it sees, in the mean of sequences and layers, over those of whole sequences.

    Args:
        lengths: Of the documents.
        seq_length: Tokens of a sequence.
        window: Keys that a query sees in layers with a sliding window, its own with them; None without.
        windowed_layers: Share of such layers.
    """
    shares = shares_left(lengths, seq_length, window, windowed_layers)
    return sum(shares) / len(shares)


def shares_left(lengths: Lengths, seq_length: int, window: int | None, windowed_layers: float) -> list[float]:
    """Computes the share that is left for every sequence that is drawn.

    Args:
        lengths: Of the documents.
        seq_length: Tokens of a sequence.
        window: Keys that a query sees in layers with a sliding window, its own with them; None without.
        windowed_layers: Share of such layers.
    """
    share = 0.0 if window is None else windowed_layers
    cutting = Cutting(seq_length, 1, window_tokens=None if window is None else window - 1, window_share=share)
    whole = cutting.keys((0,), seq_length)
    return [cutting.keys(starts, seq_length) / whole for starts in drawn(lengths, seq_length)]


@functools.lru_cache(maxsize=256)
def share_sent(lengths: Lengths | None, seq_length: int, cp: int, slices: int, window: int | None = None) -> float:
    """Share of its queries that a context-parallel rank sends to another one, in the mean: those that see its keys.

    Args:
        lengths: Of the documents; None if a sequence is one.
        seq_length: Tokens of a sequence.
        cp: Ranks.
        slices: Of a sequence, equally long.
        window: Keys that a query sees, its own with them; None for all of its document.
    """
    tokens = max(seq_length // slices // (2 * cp), 1) * 2 * cp
    blocks = token_blocks((1,) * cp, tokens)
    count = max(1, _MOST_PAIRS // (slices * cp * cp))
    sent, drawn_ones = 0, ((0,),) if lengths is None else drawn(lengths, seq_length)[:count]
    earlier = None if window is None else window - 1
    for starts in drawn_ones:
        held: list[list[Span]] = [[] for _ in range(cp)]
        for first in range(0, slices * tokens, tokens):
            placed = [[(first + a, first + b) for a, b in own] for own in blocks]
            for rank, own in enumerate(placed):
                held[rank] += own
            for owner, holder in itertools.permutations(range(cp), 2):
                for block in placed[owner]:
                    sent += sum(b - a for a, b in rows_that_see(block, held[holder], (starts,), earlier))
    return sent / (len(drawn_ones) * slices * tokens * (cp - 1))
