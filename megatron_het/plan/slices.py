"""Schedules over slices of the sequence, and what goes with them, as far as a plan speaks of them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_het.plan.schema import Plan

SLICED_SCHEDULES = ("seq1f1b", "slimpipe", "terapipe")
"""Schedules that cut sequences; their plans have the schedule parameter ``slices``."""


def is_sliced(plan: Plan) -> bool:
    """Whether the plan's schedule runs slices of sequences."""
    return plan.schedule.name in SLICED_SCHEDULES


VOCABULARY = "vocabulary"
"""Schedule parameter: embedding, output layer and loss are split over all stages."""


OFFLOAD = "offload_activations"
"""Schedule parameter: share of the activations that wait on the host, 0 for none."""


def offload_ratio(plan: Plan) -> float:
    """Share of each forward's activations that wait on the host (SlimPipe, section 6.5)."""
    return float(plan.schedule.parameters.get(OFFLOAD, 0.0))


def splits_vocabulary(plan: Plan) -> bool:
    """Whether all stages share the output layer (SlimPipe, section 4.3)."""
    return bool(plan.schedule.parameters.get(VOCABULARY, False))
def cuts_sequences(plan: Plan) -> bool:
    """Whether forward passes run parts of sequences: slices, or what one context-parallel rank holds."""
    return is_sliced(plan) or plan.context_parallel > 1


def slices_of(plan: Plan) -> int:
    """Slices per sequence; 1 for schedules that do not cut sequences."""
    return plan.schedule.parameters.get("slices", 1) if is_sliced(plan) else 1


EXCHANGE_PARAMETERS = ("context_exchange", "exchange_units", "exchange_keep", "exchange_idle")
"""Schedule parameters of the attention context exchange."""


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """The attention context exchange of a plan (SlimPipe, section 4.2).

    Attributes:
        units: Exchange units per slice.
        keep: Keys and values stay at the helper until their microbatch is done, instead of being sent
            again for every pass.
        idle: Devices without a pass of their own in a slot help too.
    """

    units: int = 2
    keep: bool = False
    idle: bool = False


def exchange_of(plan: Plan) -> ExchangeOptions | None:
    """The plan's context exchange, None without one."""
    parameters = plan.schedule.parameters
    if not is_sliced(plan) or not parameters.get("context_exchange", False):
        return None
    names = {name.removeprefix("exchange_"): name for name in EXCHANGE_PARAMETERS[1:]}
    given = {field: parameters[name] for field, name in names.items() if name in parameters}
    return ExchangeOptions(**given)
