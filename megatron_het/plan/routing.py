"""Which replica of each stage runs which microbatch: Zorse's rule (section 4.2).

All of it is computed when a plan is made, from measured or modelled times.  A replica's *share* is how
many microbatches it runs; the rule says which ones: the i-th microbatch that a stage completes goes to
the replica of the next stage with the i-th most remaining work.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_het.plan.errors import PlanError


def shares(seconds: Sequence[float], total: int) -> list[int]:
    """Microbatches per replica so that the busiest one is done as early as possible, at least one each.

    Args:
        seconds: Time of one microbatch on each replica, forward and backward.
        total: Microbatches of the stage.

    Raises:
        PlanError: A time that is not positive, or fewer microbatches than replicas.
    """
    if any(not second > 0 for second in seconds):
        raise PlanError("seconds", list(seconds), "times of microbatches must be positive")
    if total < len(seconds):
        raise PlanError("microbatches", total, f"are fewer than the {len(seconds)} replicas of a stage")
    counts = [1] * len(seconds)
    ends = [(2 * second, q) for q, second in enumerate(seconds)]  # if it took one more
    heapq.heapify(ends)
    for _ in range(total - len(seconds)):
        end, q = heapq.heappop(ends)
        counts[q] += 1
        heapq.heappush(ends, (end + seconds[q], q))
    return counts


def route(
    seconds: Sequence[Sequence[float]], total: int, counts: Sequence[Sequence[int]] | None = None
) -> list[list[tuple[int, ...]]]:
    """Microbatch ids of every replica of every stage.

    Args:
        seconds: ``seconds[s][q]``: time of one microbatch on replica q of stage s.
        total: Microbatches of an iteration.
        counts: Shares per stage and replica; by default those of :func:`shares`.

    Returns:
        ``ids[s][q]``, ascending.
    """
    completed = [(0.0, m) for m in range(total)]  # all are there for the first stage
    ids: list[list[tuple[int, ...]]] = []
    for s, row in enumerate(seconds):
        wanted = shares(row, total) if counts is None else counts[s]
        if sum(wanted) != total:
            raise PlanError(f"counts[{s}]", list(wanted), f"do not add up to {total} microbatches")
        # One place per microbatch: a replica with n of them has work for n, n - 1, ..., 1 left.
        places = sorted(
            (-left * second, q)
            for q, (count, second) in enumerate(zip(wanted, row, strict=True))
            for left in range(count, 0, -1)
        )
        mine: list[list[int]] = [[] for _ in row]
        free_s = [0.0] * len(row)
        ends: list[tuple[float, int]] = []
        for (ready_s, m), (_, q) in zip(sorted(completed), places, strict=True):
            free_s[q] = max(free_s[q], ready_s) + row[q]
            ends.append((free_s[q], m))
            mine[q].append(m)
        ids.append([tuple(sorted(own)) for own in mine])
        completed = ends
    return ids
