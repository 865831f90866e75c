"""Every refusal that depends on the plan alone.  Start-up and the planner's commands ask here; no torch."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields

from megatron_het.config_slices import check_slices_plan
from megatron_het.config_vocabulary import check_offload_plan, check_vocabulary_plan
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.slices import EXCHANGE_PARAMETERS, OFFLOAD, VOCABULARY, is_sliced
from megatron_het.runtime.window_options import SCHEDULE, WindowOptions, check_window_plan
from megatron_het.schedule.generators import GENERATORS

SIMULATED_ONLY = ("v-half", "zb-h1", "zb-v")
"""Schedules that split backward passes, for which the executor has no operations."""
_FROM_THE_PLAN = ("shape", "forward_only", "speeds")


def check_plan_alone(plan: Plan) -> None:
    """Refuse a plan that no run can have, whatever its arguments.

    Args:
        plan: A plan that does not contradict itself (``plan.validate.check_plan``).

    Raises:
        PlanError: The first thing that does not fit.
    """
    _check_name(plan.schedule.name)
    check_slices_plan(plan)
    _check_parameters(plan)
    _check_chunks(plan)
    check_vocabulary_plan(plan)
    check_offload_plan(plan)
    check_window_plan(plan)


def _check_name(name: str) -> None:
    known = ", ".join(sorted(set(GENERATORS) - set(SIMULATED_ONLY)))
    if name in SIMULATED_ONLY:
        raise PlanError(
            "schedule.name", name, "splits backward passes, which can be simulated but not executed",
            f"Use one of {known}",
        )
    if name not in GENERATORS:
        raise PlanError("schedule.name", name, "there is no such schedule", f"Use one of {known}")


def generator_parameters(name: str) -> tuple[str, ...]:
    """What a plan may tell a schedule's generator, besides its shape."""
    return tuple(p for p in inspect.signature(GENERATORS[name]).parameters if p not in _FROM_THE_PLAN)


def _check_parameters(plan: Plan) -> None:
    """Names of all parameters, and values of those that only the generator reads."""
    name, parameters = plan.schedule.name, plan.schedule.parameters
    known = [*generator_parameters(name), VOCABULARY, OFFLOAD]
    if is_sliced(plan):
        known += ["slices", *EXCHANGE_PARAMETERS]
    if name == SCHEDULE:
        known += ["window", *(f.name for f in fields(WindowOptions))]
    for given, value in parameters.items():
        if given not in known:
            raise PlanError(
                f"schedule.parameters.{given}", value, f"schedule {name} has no such parameter",
                f"It has {', '.join(known)}",
            )
    slack, group = parameters.get("slack", 0.0), parameters.get("group")
    is_number = isinstance(slack, int | float) and not isinstance(slack, bool)
    if not (is_number and math.isfinite(slack) and slack >= 0):
        raise PlanError("schedule.parameters.slack", slack, "must be a number, at least 0")
    if group is not None and (not isinstance(group, int) or isinstance(group, bool)):
        raise PlanError("schedule.parameters.group", group, "must be a whole number of microbatches")


def _check_chunks(plan: Plan) -> None:
    chunks = {len(s.layers) for s in plan.stages}
    if len(chunks) > 1:
        raise PlanError(
            "stages[*].layers", sorted(chunks), "all stages need the same number of chunks: "
            "Megatron's layout has one number of virtual stages", "Give a stage chunks of 0 layers",
        )
    if plan.model.tied_embeddings and len(plan.stages) == 1 and chunks != {1}:
        raise PlanError(
            "model.tied_embeddings", True, "the embedding and the output layer of a single stage are "
            "in different chunks and cannot share their weights",
            "Add --untie-embeddings-and-output-weights, or use one chunk",
        )
