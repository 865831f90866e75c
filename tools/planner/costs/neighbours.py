"""Devices of one machine that slow each other down while they are busy: processes on cores that share memory.

A profile is taken with all devices busy, and each layer once more with the others waiting.  In a pipeline devices wait
for each other, so how fast an operation is depends on how often the others are busy beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from megatron_het.schedule.cost import Costs
from megatron_het.schedule.ir import Program
from megatron_het.schedule.simulate import Result, simulate

ROUNDS = 3
"""Simulations after the first; each takes the overlaps of the one before."""
_SCALED = ("forward_s", "backward_s", "attention_forward_s", "attention_backward_s")


def simulate_beside(program: Program, costs: Costs, shares: Sequence[float]) -> Result:
    """Simulate operations that take less time while other devices wait.

    Args:
        program: What runs.
        costs: As measured with all devices busy.
        shares: By device, time of an operation while all others wait over its time while all are busy.
    """
    result = simulate(program, costs)
    if min(shares) == 1:
        return result
    for _ in range(ROUNDS):
        factors = [share + (1 - share) * busy for share, busy in zip(shares, others_busy(result), strict=True)]
        result = simulate(program, _scaled(costs, factors))
    return result


def others_busy(result: Result) -> list[float]:
    """By device, the mean share of the other devices that compute while it computes."""
    spans = [[(result.start_s[i], result.end_s[i]) for i in queue] for queue in result.compute_queues]
    total = len(spans)
    edges = sorted(
        chain.from_iterable(
            ((start, 1, device), (end, -1, device)) for device, mine in enumerate(spans) for start, end in mine
        )
    )
    active, now = [0] * total, 0.0
    own, beside = [0.0] * total, [0.0] * total
    for at, step, device in edges:
        busy = [d for d in range(total) if active[d]]
        for d in busy:
            own[d] += at - now
            beside[d] += (at - now) * (len(busy) - 1)
        active[device], now = active[device] + step, at
    return [b / o / (total - 1) if o and total > 1 else 1.0 for b, o in zip(beside, own, strict=True)]


def _scaled(costs: Costs, factors: Sequence[float]) -> Costs:
    """Passes of every device, times its factor."""
    changes: dict[str, Any] = {
        name: tuple(tuple(x * factor for x in row) for row, factor in zip(rows, factors, strict=True))
        for name in _SCALED
        if (rows := getattr(costs, name))
    }
    return replace(costs, **changes)
