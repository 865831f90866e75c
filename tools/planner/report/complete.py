"""A plan that was found, with all that is predicted of it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from megatron_het.plan import Plan

from ..costs.build import build_plan
from ..costs.estimate import Estimator
from ..search.outcome import Found
from ..simulate.simulation import with_costs

MOST_PRICED = 2_000_000
"""Compute operations of an iteration up to which a plan carries their costs: to price more takes minutes."""
PRICING_S = 2e-5
"""CPU seconds that this takes per operation, about."""


def complete(estimator: Estimator, found: Found, notes: str = "", left_s: float = inf) -> Plan:
    """The plan, the simulated time of its iteration, and the costs that a run under it compares itself with.

    Args:
        left_s: CPU seconds that are left; costs that take longer are left out.

    Raises:
        PlannerError: TP groups that do not fit into nodes, or a plan that contradicts itself.
    """
    made = build_plan(estimator, found.candidate, found.estimate, notes=notes)
    assert made.predicted is not None
    made = replace(made, predicted=replace(made.predicted, iteration_s=found.iteration_s))
    candidate = found.candidate
    operations = 2 * len(candidate.stages) * candidate.chunks * candidate.slices * made.num_microbatches
    if operations > MOST_PRICED or operations * PRICING_S > left_s:
        return made
    return with_costs(estimator, found.candidate, found.estimate, made)
