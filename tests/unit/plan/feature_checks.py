"""The checks of a single feature."""

from typing import Any

from megatron_het.features import FEATURES, features_of
from megatron_het.plan import Plan


def check_feature(name: str, plan: Plan, args: Any) -> None:
    """As at a start: the plan against the feature, then the arguments if the feature is on."""
    next(feature for feature in FEATURES if feature.name == name).check(plan)
    for feature, options in features_of(plan):
        if feature.name == name:
            feature.check_arguments(plan, options, args)
