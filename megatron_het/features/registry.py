"""All features, and what others ask of the features of a plan without knowing which ones there are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_het.features.base import Feature
from megatron_het.plan import Plan, Replica
from megatron_het.schedule.cutting import Cutting

FEATURES: list[Feature] = []
"""All features, in the order of their flags, checks and passes; the package fills it."""


def features_of(plan: Plan) -> Iterator[tuple[Feature, Any]]:
    """The features of a checked plan, each with its options."""
    for feature in FEATURES:
        options = feature.options_of(plan)
        if options is not None:
            yield feature, options


def tied_copies(plan: Plan) -> bool:
    """Whether the stages of the first and of the last chunk hold copies of the same weights.

    A feature may have every row held once, by one stage.
    """
    return plan.model.embeds_twice and not rows_are_shared(plan)


def rows_are_shared(plan: Plan) -> bool:
    """Whether each stage has rows of the vocabulary, and every row is on one stage."""
    return any(feature.holds_rows_once for feature, _ in features_of(plan))


def attention_units(plan: Plan) -> int:
    """Parts of a slice in which devices attend for each other; 0 where none does."""
    return max((feature.attention_units(options) for feature, options in features_of(plan)), default=0)


def options_of(plan: Plan, name: str) -> Any | None:
    """The options of one feature of a checked plan; None where the feature is off.

    Raises:
        KeyError: There is no feature of this name.
    """
    return feature(name).options_of(plan)


def feature(name: str) -> Feature:
    """A feature by its name.

    Raises:
        KeyError: There is no feature of this name.
    """
    return {known.name: known for known in FEATURES}[name]


def switches(schedule: str) -> dict[str, Any]:
    """The parameters of a plan that switch on what only this schedule can have."""
    mine = [f.switch for f in FEATURES if f.switch is not None and (f.schedules or ())[:1] == (schedule,)]
    return {switch.parameter: True for switch in mine}


def host_parameters(schedule: str) -> dict[str, Any]:
    """The parameters of a plan with which as much as possible waits in main memory."""
    options = [o for f in FEATURES if f.goes_with(schedule) for o in f.parameters]
    return {o.parameter: o.on_host for o in options if o.on_host is not None}


def cutting_of(plan: Plan, args: Any = None) -> Cutting:
    """Where the plan cuts sequences; nowhere without a feature that does.

    Args:
        plan: Checked.
        args: Megatron's arguments, for slices of equal work and for windows; None for nominal lengths alone.
    """
    found = (feature.cutting(plan, args) for feature in FEATURES)
    length = plan.model.seq_length
    return next((cutting for cutting in found if cutting is not None), Cutting(length, 1, length))


def cuts_sequences(plan: Plan) -> bool:
    """Whether forward passes run parts of sequences: slices, or what one context-parallel rank holds."""
    return any(feature.cutting(plan, None) is not None for feature in FEATURES)


def slice_tokens(plan: Plan) -> int:
    """Tokens of a slice of nominal length; of the sequence without slices."""
    return cutting_of(plan).nominal


def part_grain(plan: Plan, replica: Replica) -> int:
    """Returns what the tokens of every context-parallel rank of a replica are a multiple of.

    TP ranks divide them under sequence parallelism, and devices attend for each other in units of them.
    """
    divided = replica.tp if plan.training.sequence_parallel else 1
    return math.lcm(divided, max(attention_units(plan), 1))


def runs_of_a_layer(args: Any) -> int:
    """How often one layer runs in a pass at most, as Megatron's arguments say."""
    return max(feature.runs_of_a_layer(args) for feature in FEATURES)


def packing_argument(args: Any) -> str:
    """Megatron's argument that asks for documents that do not see each other; "" if none does."""
    return next(filter(None, (feature.packing_argument(args) for feature in FEATURES)), "")


def packing_flags() -> frozenset[str]:
    """The flags with which a user says what a document is."""
    return frozenset[str]().union(*(feature.packing_flags for feature in FEATURES))
