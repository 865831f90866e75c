"""More microbatches in flight across slow links, for finalists under 1F1B."""

from __future__ import annotations

from dataclasses import replace

from megatron_het.lowering.programs import schedule_shape
from megatron_het.schedule.depths import choose_depths

from ..build import build_plan, seats
from ..errors import PlannerError
from ..estimate import Estimator
from ..schedules import schedule_of
from ..simulation import block_s, costs_of
from .goal import Goal
from .outcome import Found


def deeper(estimator: Estimator, goal: Goal, found: Found) -> Found:
    """The finalist with as many microbatches in flight as make it fastest and fit into memory.

    Args:
        found: Simulated, in the order that suits it best.
    """
    candidate = found.candidate
    if len(candidate.stages) < 2 or not schedule_of(candidate).has_depths:
        return found
    tried = {(1,) * (len(candidate.stages) - 1): found}

    def time_of(depths: tuple[int, ...]) -> float | None:
        if depths not in tried:
            other = candidate.with_(depths=depths)
            estimate = estimator.estimate(other)
            if estimate is None or not estimator.fits(estimate) or goal.violation(other, estimate) > 0:
                return None
            try:
                seconds = block_s(estimator, other, estimate)
            except PlannerError:
                return None
            tried[depths] = replace(found, candidate=other, estimate=estimate, simulated_s=seconds)
        return tried[depths].iteration_s

    try:
        stages, transfers = _seconds(estimator, found)
    except PlannerError:
        return found
    chosen = choose_depths(stages, transfers, time_of)
    return tried[chosen] if chosen else found


def _seconds(estimator: Estimator, found: Found) -> tuple[list[float], list[float]]:
    """By stage, seconds between two microbatches when all its replicas work; by boundary, of the slowest transfer.

    Raises:
        PlannerError: the schedule cannot run this shape.
    """
    whole, block = found.candidate, found.candidate.block()
    plan = build_plan(estimator, whole, found.estimate, one_block=True)
    costs = costs_of(estimator, whole, block, found.estimate, plan, seats(estimator.cluster, block.stages) or [])
    shape = schedule_shape(plan)
    rates = [0.0] * shape.stages
    for d, device in enumerate(shape.devices):
        rates[device.stage] += 1 / max(1e-12, costs.forward_s[d][0] + costs.backward_s[d][0])
    transfers = [0.0] * (shape.stages - 1)
    for s in range(shape.stages - 1):
        for pair in set(zip(shape.route[s], shape.route[s + 1], strict=True)):
            link = costs.link(shape.first_device[s] + pair[0], shape.first_device[s + 1] + pair[1])
            transfers[s] = max(transfers[s], link.latency_s + costs.message_bytes / link.bytes_per_s)
    return [1 / rate for rate in rates], transfers
