"""Schedules over slices of the sequence, as far as a plan speaks of them."""

from __future__ import annotations

from megatron_het.plan.schema import Plan

SLICED_SCHEDULES = ("seq1f1b", "slimpipe", "terapipe")
"""Schedules that cut sequences; their plans have the schedule parameter ``slices``."""


def is_sliced(plan: Plan) -> bool:
    """Whether the plan's schedule runs slices of sequences."""
    return plan.schedule.name in SLICED_SCHEDULES


def slices_of(plan: Plan) -> int:
    """Slices per sequence; 1 for schedules that do not cut sequences."""
    return plan.schedule.parameters.get("slices", 1) if is_sliced(plan) else 1
