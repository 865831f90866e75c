"""Schedules over slices of the sequence, and what goes with them, as far as a plan speaks of them."""

from __future__ import annotations

from megatron_het.plan.schema import Plan

SLICED_SCHEDULES = ("seq1f1b", "slimpipe", "terapipe")
"""Schedules that cut sequences; their plans have the schedule parameter ``slices``."""


def is_sliced(plan: Plan) -> bool:
    """Whether the plan's schedule runs slices of sequences."""
    return plan.schedule.name in SLICED_SCHEDULES


VOCABULARY = "vocabulary"
"""Schedule parameter: the output layer is split over all stages."""


OFFLOAD = "offload_activations"
"""Schedule parameter: share of the activations that wait on the host, 0 for none."""


def offload_ratio(plan: Plan) -> float:
    """Share of each forward's activations that wait on the host (SlimPipe, section 6.5)."""
    return float(plan.schedule.parameters.get(OFFLOAD, 0.0))


def splits_vocabulary(plan: Plan) -> bool:
    """Whether all stages share the output layer (SlimPipe, section 4.3)."""
    return bool(plan.schedule.parameters.get(VOCABULARY, False))


def slices_of(plan: Plan) -> int:
    """Slices per sequence; 1 for schedules that do not cut sequences."""
    return plan.schedule.parameters.get("slices", 1) if is_sliced(plan) else 1
