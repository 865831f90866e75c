"""The checks of a single feature, and what a check has to say."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from megatron_het.features import FEATURES, features_of
from megatron_het.plan import Plan, PlanError


def refusal(reason: str | None) -> AbstractContextManager[Any]:
    """A block that refuses a plan for this reason, or does not for None."""
    return nullcontext() if reason is None else pytest.raises(PlanError, match=reason)


def check_feature(name: str, plan: Plan, args: Any) -> None:
    """As at a start: the plan against the feature, then the arguments if the feature is on."""
    next(feature for feature in FEATURES if feature.name == name).check(plan)
    for feature, options in features_of(plan):
        if feature.name == name:
            feature.check_arguments(plan, options, args)
