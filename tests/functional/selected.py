"""The cases of one file that a session has selected: run side by side, and compared with one process."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from testing.cases import Case
from testing.compare import Differences, compare
from testing.lab import Lab
from testing.runner import Finished


def tiers(names: Iterable[str], full: Collection[str]) -> list[Any]:
    """Parameters of a test, of which those in ``full`` are for the full tier only."""
    found = list(names)
    assert set(full) <= set(found), sorted(set(full) - set(found))
    return [pytest.param(name, marks=pytest.mark.full) if name in full else name for name in found]


def selected[T](by_name: Mapping[str, T], request: pytest.FixtureRequest) -> dict[str, T]:
    """Those that selected tests of the asking file have as their ``name``."""
    wanted = [
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return {name: value for name, value in by_name.items() if name in wanted}


def run_selected(by_name: Mapping[str, Case], lab: Lab, request: pytest.FixtureRequest) -> dict[str, Finished]:
    """The runs of the selected cases, two at a time."""
    cases = selected(by_name, request).values()
    for case in cases:
        lab.reference(case)
    return {done.job.name: done for done in lab.runner.run_all([lab.job(case) for case in cases], at_once=2)}


def compared(case: Case, done: Finished, lab: Lab) -> Differences:
    """How far a run of a case is from one process of stock Megatron."""
    return compare(done.check().job.log_dir, case.plan, lab.reference(case))
