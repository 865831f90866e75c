"""Features that a plan can ask for beyond a schedule: one description each.  No torch.

A new feature is a module of this folder, its place in ``FEATURES``, and, where it does something on a rank, a folder
of its own that ``Feature.runtime`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_het.features.activation_offload.spec import ActivationOffload
from megatron_het.features.base import Feature
from megatron_het.features.context_exchange.spec import ContextExchange
from megatron_het.features.context_parallel.spec import ContextParallel
from megatron_het.features.documents.spec import Documents
from megatron_het.features.experts.spec import Experts
from megatron_het.features.initial_weights.spec import InitialWeights
from megatron_het.features.layer_graphs.spec import LayerGraphs
from megatron_het.features.mtp.spec import MultiTokenPrediction
from megatron_het.features.optimizers.spec import Optimizers
from megatron_het.features.slices.spec import Slices
from megatron_het.features.thrifty_layers.spec import ThriftyLayers
from megatron_het.features.vocab_parallel.spec import Vocabulary
from megatron_het.features.watch.spec import Watch
from megatron_het.features.window.spec import Window
from megatron_het.features.zero_bubble.spec import ZeroBubble
from megatron_het.plan import Plan

FEATURES: tuple[Feature, ...] = (
    Slices(),
    ContextParallel(),
    ContextExchange(),
    Documents(),
    Vocabulary(),
    Window(),
    ActivationOffload(),
    ThriftyLayers(),
    ZeroBubble(),
    MultiTokenPrediction(),
    InitialWeights(),
    Experts(),
    Optimizers(),
    Watch(),
    LayerGraphs(),
)
"""All features, in the order of their flags, checks and passes."""


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
    return plan.model.embeds_twice and not any(feature.holds_rows_once for feature, _ in features_of(plan))


def attention_units(plan: Plan) -> int:
    """Parts of a slice in which devices attend for each other; 0 where none does."""
    return max(feature.attention_units(options) for feature, options in features_of(plan))


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
