"""Parts that the ranks of a plan hold: rows of a split vocabulary, and tokens of a slice.  Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_het.plan.schema import Plan

# Which stage holds how many rows of a split vocabulary (beyond SlimPipe, section 4.3, which divides them equally).
#
# A fast stage may hold more rows (``vocabulary_shares`` of the schedule), so that all stages take as long for their
# parts of the output layer.

PARAMETER = "vocabulary_shares"
"""Of the plan's schedule: one whole number per stage."""
_MOST_PARTS = 256
"""Rows are given to stages in so many equal parts at most; so checkpoints have few pieces per rank."""


def vocabulary_shares(plan: Plan) -> tuple[int, ...] | None:
    """Returns what each stage holds of the rows, relative to the others; None if all hold as many."""
    given = plan.schedule.parameters.get(PARAMETER)
    return None if given is None else tuple(given)


def tp_unit(plan: Plan) -> int:
    """Rows of a stage are a multiple of this, so that every TP size of the plan divides them."""
    return math.lcm(*(r.tp for s in plan.stages for r in s.replicas))


def stage_rows(plan: Plan, total: int) -> tuple[int, ...]:
    """Rows of the vocabulary on each stage.

    Args:
        plan: Its stages, and their shares if it has any.
        total: Rows of the whole vocabulary, padded.

    Returns:
        One number per stage, together ``total``: as near the shares as equal parts of the rows allow, each at least
        one part and a multiple of all TP sizes.

    Raises:
        ValueError: The rows do not divide so.
    """
    stages, tp, shares = len(plan.stages), tp_unit(plan), vocabulary_shares(plan)
    if shares is None:
        if total % (stages * tp):
            raise ValueError(f"a vocabulary of {total} rows does not divide over {stages} stages of {tp} TP ranks")
        return (total // stages,) * stages
    parts = 0 if total % tp else _parts(total // tp)
    if parts < stages:
        raise ValueError(
            f"a vocabulary of {total} rows has {parts} equal parts that {tp} TP ranks divide, for {stages} stages"
        )
    return tuple(count * (total // parts) for count in _rounded(parts, shares))


def _parts(units: int) -> int:
    """The largest divisor up to ``_MOST_PARTS``."""
    return next(parts for parts in range(min(units, _MOST_PARTS), 0, -1) if units % parts == 0)


def _rounded(parts: int, shares: Sequence[int]) -> list[int]:
    """Parts by shares, at least one each; what rounding leaves over goes where most was cut off."""
    spare, total = parts - len(shares), sum(shares)
    counts = [1 + spare * share // total for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda s: (-(spare * shares[s] % total), s))
    for s in by_rest[: parts - sum(counts)]:
        counts[s] += 1
    return counts


# Which tokens of a slice the context-parallel ranks of a replica hold.

Blocks = Sequence[tuple[int, int]]
"""Blocks ``[first, end)`` of tokens."""


def block_step(grain: int) -> int:
    """Tokens that blocks are a multiple of, so that the two blocks of a rank are a multiple of ``grain``."""
    return grain // math.gcd(grain, 2)


def least_tokens(parts: int, grain: int) -> int:
    """The fewest tokens of a slice of which each of ``parts`` ranks gets two blocks."""
    return 2 * block_step(grain) * parts if parts > 1 else grain


def token_blocks(shares: Sequence[int], tokens: int, grain: int = 1) -> list[tuple[tuple[int, int], ...]]:
    """The blocks of ``tokens`` tokens that each context-parallel rank holds, in order.

    The first half of the tokens is cut by the shares, and the second half is its mirror image: rank k has the k-th
    block from the start and the k-th from the end.  A token attends to the tokens before it, so the two blocks of a
    rank attend to ``tokens`` / 2 others in the mean, whatever the rank.  Work in attention is thus as the shares say,
    like all other work.

    Args:
        shares: How much each rank gets, relative to the others; positive.
        tokens: Tokens of a slice, or of a sequence that is not cut into slices.  A multiple of 2 and of ``grain``, and
            at least ``least_tokens``, where there are several ranks.
        grain: What the tokens of every rank are a multiple of.
    """
    if len(shares) == 1:
        return [((0, tokens),)]
    half, total, step = tokens // 2, sum(shares), block_step(grain)
    edges, given = [0], 0
    for k, share in enumerate(shares[:-1]):
        given += share
        wanted = (2 * half * given + total * step) // (2 * total * step) * step
        most = (half // step - (len(shares) - 1 - k)) * step
        edges.append(max(edges[-1] + step, min(wanted, most)))
    edges.append(half)
    return [((a, b), (tokens - b, tokens - a)) for a, b in zip(edges, edges[1:], strict=False)]


def part_tokens(blocks: Blocks) -> int:
    """Tokens of some blocks."""
    return sum(end - first for first, end in blocks)
