"""Pairwise (all-pairs) selection of test cases: every two values that can occur together do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """All pairs of (parameter, value) in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def pairwise(
    parameters: Mapping[str, Sequence[Any]], is_valid: Callable[[Row], bool], rng: random.Random, *, tries: int = 400
) -> tuple[list[Row], set[Pair]]:
    """Greedily choose rows until all pairs are covered.

    Args:
        parameters: Values of each parameter.
        is_valid: Whether a complete row can be run.
        rng: Source of chance.
        tries: Random rows that are tried for a pair before it counts as impossible.

    Returns:
        The rows, and the pairs of which no valid row was found.
    """
    names = list(parameters)
    uncovered = {
        frozenset(((a, va), (b, vb)))
        for a, b in itertools.combinations(names, 2)
        for va in parameters[a]
        for vb in parameters[b]
    }
    rows: list[Row] = []
    impossible: set[Pair] = set()
    while uncovered:
        wanted = min(uncovered, key=lambda pair: sorted(map(repr, pair)))
        candidates: list[Row] = []
        for _ in range(tries):
            row = {name: rng.choice(parameters[name]) for name in names} | dict(wanted)
            if is_valid(row):
                candidates.append(row)
                if len(candidates) == 30:
                    break
        if not candidates:
            impossible.add(wanted)
            uncovered.discard(wanted)
            continue
        best = max(candidates, key=lambda row: len(pairs_of(row) & uncovered))
        rows.append(best)
        uncovered -= pairs_of(best)
    return rows, impossible
