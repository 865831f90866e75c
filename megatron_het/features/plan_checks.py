"""Every refusal that depends on the plan alone.  Start-up and the planner's commands ask here; no torch."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from collections.abc import Sequence

from megatron_het.features import FEATURES, features_of, tied_copies
from megatron_het.features.base import Option
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.generators import GENERATORS, generate
from megatron_het.schedule.generators.listing import ORDERS
from megatron_het.schedule.ir import PLACEMENTS, Shape

MOST_SLACK = 1000
MOST_DEPTH = 1000
_FROM_THE_PLAN = ("shape", "forward_only", "speeds")
_GENERATOR_OPTIONS = (
    Option(
        "slack",
        float,
        accepts=lambda value, plan: 0 <= value <= MOST_SLACK,
        problem=f"must be a number, at least 0 and at most {MOST_SLACK}",
    ),
    Option("order", str, choices=ORDERS, problem=f"must be one of {', '.join(ORDERS)}"),
    Option("group", int, problem="must be a whole number of microbatches"),
    Option(
        "depths",
        list,
        accepts=lambda value, plan: (
            len(value) == len(plan.stages) - 1 and all(1 <= depth <= MOST_DEPTH for depth in value)
        ),
        problem=lambda plan: (
            f"must be a list of {len(plan.stages) - 1} whole numbers, one per boundary between stages, each of 1 to "
            f"{MOST_DEPTH}"
        ),
    ),
)
"""Values that only generators read."""


@functools.cache
def runnable_schedules() -> tuple[str, ...]:
    """Names of the schedules whose operations the executor or a feature can execute; the rest can be simulated."""
    featured = {name for feature in FEATURES for name in feature.runs}
    return tuple(name for name in sorted(GENERATORS) if name in featured or _executors_of(name) == {"compute"})


def _executors_of(schedule: str) -> set[str]:
    """Who executes the operations that a generator makes, from the smallest shape that it takes."""
    for stages, placement, chunks, slices in itertools.product((2, 1), PLACEMENTS, (1, 2), (1, 2)):
        shape = Shape.uniform(stages, 4, slices=slices, chunks=chunks, placement=placement)
        try:
            program = generate(schedule, shape)
        except ValueError:  # another shape, then
            continue
        return {op.kind.executor for ops in program.ops for op in ops}
    raise AssertionError(f"schedule {schedule} takes none of the shapes that are tried here")


def check_plan_alone(plan: Plan) -> None:
    """Refuse a plan that no run can have, whatever its arguments.

    Args:
        plan: A plan that does not contradict itself (``plan.validate.check_plan``).

    Raises:
        PlanError: The first thing that does not fit.
    """
    _check_name(plan.schedule.name)
    _check_parameters(plan)
    for feature in FEATURES:
        feature.check(plan)
    if plan.path[0] != plan.path[-1] and tied_copies(plan):
        for feature, options in features_of(plan):
            feature.check_copies(plan, options)


def _check_name(name: str) -> None:
    known = ", ".join(runnable_schedules())
    if name in GENERATORS and name not in runnable_schedules():
        raise PlanError(
            "schedule.name",
            name,
            "splits backward passes, which can be simulated but not executed",
            f"Use one of {known}",
        )
    if name not in GENERATORS:
        raise PlanError("schedule.name", name, "there is no such schedule", f"Use one of {known}")


def generator_parameters(name: str) -> tuple[str, ...]:
    """Returns what a plan may tell a schedule's generator, besides its shape."""
    return tuple(p for p in inspect.signature(GENERATORS[name]).parameters if p not in _FROM_THE_PLAN)


def schedule_parameters(name: str) -> tuple[str, ...]:
    """All that a plan may say of a schedule: to its generator, and of the features that go with it."""
    features = [o.parameter for f in FEATURES if f.goes_with(name) for o in f.parameters]
    return (*generator_parameters(name), *features)


def _check_parameters(plan: Plan) -> None:
    """Names of all parameters, and values of those that only the generator reads."""
    name, parameters = plan.schedule.name, plan.schedule.parameters
    known = schedule_parameters(name)
    for given in parameters:
        if given not in known:
            raise _unknown(plan, given, known)
    for option in _GENERATOR_OPTIONS:
        if option.parameter in parameters:
            option.check(parameters[option.parameter], plan)


def _unknown(plan: Plan, given: str, known: Sequence[str]) -> PlanError:
    """The refusal of a parameter that the schedule does not have."""
    hint = ""
    for feature in FEATURES:
        for option in feature.parameters:
            if option.parameter == given:
                error = feature.elsewhere(plan, option)
                if error is not None:
                    return error
                hint = f"Schedules that have it: {', '.join(feature.schedules or ())}. "
    nearest = difflib.get_close_matches(given, known, n=1)
    if nearest and not hint:
        hint = f"Did you mean {nearest[0]}? "
    name, value = plan.schedule.name, plan.schedule.parameters[given]
    return PlanError(
        f"schedule.parameters.{given}",
        value,
        f"schedule {name} has no such parameter",
        f"{hint}Schedule {name} is run with the parameters {', '.join(known)}",
    )
