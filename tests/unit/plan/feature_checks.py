"""The checks of a single feature, and what a check has to say."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def refused(section: str) -> list[tuple[Any, ...]]:
    """The rows of a section of the refused flags."""
    text = Path(__file__).with_name("refused_flags.yaml").read_text(encoding="utf-8")
    return [tuple(row) for row in yaml.safe_load(text)[section]]
