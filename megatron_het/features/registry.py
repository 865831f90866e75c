"""All features, and questions about the features of a plan for code that knows none of them by name."""

import difflib
import functools
import inspect
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_het.features.base import Feature, Option
from megatron_het.plan import ModelShape, Plan, PlanError, Replica
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.generators import GENERATORS, generate
from megatron_het.schedule.generators.listing import ORDERS
from megatron_het.schedule.ir import PLACEMENTS, Shape

FEATURES: list[Feature] = []  # all features, in the order of their flags, checks and passes; the package fills it


def features_of(plan: Plan) -> Iterator[tuple[Feature, Any]]:
    """The features of a checked plan, each with its options."""
    for feature in FEATURES:
        options = feature.options_of(plan)
        if options is not None:
            yield feature, options


def tied_copies(plan: Plan) -> bool:
    """Whether the stages of the first and of the last chunk hold copies of the same weights.

    They do not if a feature gives every row of the vocabulary to one stage only.
    """
    return plan.model.embeds_twice and not rows_are_shared(plan)


def rows_are_shared(plan: Plan) -> bool:
    """Whether each stage has rows of the vocabulary, and every row is on one stage."""
    return any(feature.holds_rows_once for feature, _ in features_of(plan))


def attention_units(plan: Plan) -> int:
    """Exchange units per slice of the context exchange; 0 without it."""
    return max((feature.attention_units(options) for feature, options in features_of(plan)), default=0)


def options_of(plan: Plan, name: str) -> Any | None:
    """The options of one feature of a checked plan; None where the feature is off. Raises KeyError."""
    return feature(name).options_of(plan)


def feature(name: str) -> Feature:
    """A feature by its name; raises KeyError where there is none."""
    return {known.name: known for known in FEATURES}[name]


def switches(schedule: str) -> dict[str, Any]:
    """The plan parameters that switch on the features whose first schedule is this one."""
    mine = [f.switch for f in FEATURES if f.switch is not None and (f.schedules or ())[:1] == (schedule,)]
    return {switch.parameter: True for switch in mine}


def host_parameters(schedule: str) -> dict[str, Any]:
    """The plan parameters that offload as much as possible to main memory."""
    options = [o for f in FEATURES if f.goes_with(schedule) for o in f.parameters]
    return {o.parameter: o.on_host for o in options if o.on_host is not None}


def cutting_of(plan: Plan, args: Any = None) -> Cutting:
    """The plan's cutting of sequences; a trivial one without a feature that cuts them.

    Args:
        args: Megatron's arguments, for slices of equal work and for windows; None for nominal lengths alone.
    """
    found = (feature.cutting(plan, args) for feature in FEATURES)
    length = plan.model.seq_length
    return next((cutting for cutting in found if cutting is not None), Cutting(length, 1, length))


def cuts_sequences(plan: Plan) -> bool:
    """Whether forward passes run parts of sequences: slices, or the part of one context-parallel rank."""
    return any(feature.cutting(plan, None) is not None for feature in FEATURES)


def slice_tokens(plan: Plan) -> int:
    """Tokens of a slice of nominal length; of the sequence without slices."""
    return cutting_of(plan).nominal


def part_grain(plan: Plan, replica: Replica) -> int:
    """Returns the number of which every context-parallel rank's tokens are a multiple.

    TP ranks divide the tokens under sequence parallelism, and the context exchange divides them into units.
    """
    divided = replica.tp if plan.training.sequence_parallel else 1
    return math.lcm(divided, max(attention_units(plan), 1))


def runs_of_a_layer(args: Any) -> int:
    """The largest number of times that one layer runs in a pass, from Megatron's arguments."""
    return max(feature.runs_of_a_layer(args) for feature in FEATURES)


def extra_layers(model: Any) -> int:
    """Number of layers beyond ``num_layers``; see :meth:`Feature.extra_layers`."""
    return sum(feature.extra_layers(model) for feature in FEATURES)


def reads_tokens(args: Any, vp_stage: int | None) -> bool:
    """Whether this rank's chunk reads tokens although it does not have the embedding; needs Megatron."""
    return any(feature.reads_tokens(args, vp_stage) for feature in FEATURES)


def layer_flags(model: Any) -> dict[str, int]:
    """Megatron's flags, without leading hyphens, that set the number of layers beyond ``num_layers``."""
    return {flag: value for feature in FEATURES for flag, value in feature.layer_flags(model).items()}


def shrunk(model: ModelShape, like: ModelShape) -> ModelShape:
    """A tiny model with the smallest form of every feature that the larger model ``like`` has."""
    for feature in FEATURES:
        model = feature.shrink(model, like)
    return model


def packing_argument(args: Any) -> str:
    """Megatron's argument that asks for documents that do not see each other; "" if none does."""
    return next(filter(None, (feature.packing_argument(args) for feature in FEATURES)), "")


def packing_flags() -> frozenset[str]:
    """The flags that define the boundaries of documents."""
    return frozenset[str]().union(*(feature.packing_flags for feature in FEATURES))


# Every refusal that depends on the plan alone.  Start-up and the planner's commands call this; no torch.

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
"""Parameters that only generators read."""


@functools.cache
def runnable_schedules() -> tuple[str, ...]:
    """Names of the schedules whose operations the executor or a feature can execute; the rest can be simulated."""
    featured = {name for feature in FEATURES for name in feature.runs}
    return tuple(name for name in sorted(GENERATORS) if name in featured or _executors_of(name) == {"compute"})


def _executors_of(schedule: str) -> set[str]:
    """The executors of the operations that a generator makes, found with the smallest shape that it accepts."""
    for stages, placement, chunks, slices in itertools.product((2, 1), PLACEMENTS, (1, 2), (1, 2)):
        shape = Shape.uniform(stages, 4, slices=slices, chunks=chunks, placement=placement)
        try:
            program = generate(schedule, shape)
        except ValueError:  # the generator does not accept this shape
            continue
        return {op.kind.executor for ops in program.ops for op in ops}
    raise AssertionError(f"schedule {schedule} takes none of the shapes that are tried here")


def check_plan_alone(plan: Plan) -> None:
    """Refuse a plan that no training can run, whatever Megatron's arguments; raises PlanError.

    Args:
        plan: A consistent plan (``plan.validate.check_plan``).
    """
    name, known = plan.schedule.name, runnable_schedules()
    if name not in known:
        splits = "splits backward passes, which can be simulated but not executed"
        problem = splits if name in GENERATORS else "there is no such schedule"
        raise PlanError("schedule.name", name, problem, f"Use one of {', '.join(known)}")
    _check_parameters(plan)
    for feature in FEATURES:
        feature.check(plan)
    if plan.path[0] != plan.path[-1] and tied_copies(plan):
        for feature, options in features_of(plan):
            feature.check_copies(plan, options)


def schedule_parameters(name: str) -> tuple[str, ...]:
    """Names of all parameters that a plan may give for a schedule: its generator's, and those of its features."""
    features = [o.parameter for f in FEATURES if f.goes_with(name) for o in f.parameters]
    return (*(p for p in inspect.signature(GENERATORS[name]).parameters if p not in _FROM_THE_PLAN), *features)


def _check_parameters(plan: Plan) -> None:
    """Check the names of all parameters, and the values of those that only the generator reads."""
    name, parameters = plan.schedule.name, plan.schedule.parameters
    known = schedule_parameters(name)
    for given in parameters:
        if given not in known:
            raise _unknown(plan, given, known)
    for option in _GENERATOR_OPTIONS:
        if option.parameter in parameters:
            option.check(parameters[option.parameter], plan)


def _unknown(plan: Plan, given: str, known: Sequence[str]) -> PlanError:
    """The error for a parameter that the schedule does not have."""
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
    hint = f"{hint}Schedule {name} is run with the parameters {', '.join(known)}"
    return PlanError(f"schedule.parameters.{given}", value, f"schedule {name} has no such parameter", hint)
