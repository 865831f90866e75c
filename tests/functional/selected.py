"""The cases of one file that a session has selected: run side by side, and compared with one process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

from benchmarks.cases import Case
from benchmarks.compare import Differences, compare
from benchmarks.lab import Lab
from benchmarks.runner import Finished


def tiers(names: Iterable[str], full: Collection[str]) -> list[Any]:
    """Parameters of a test, of which those in ``full`` are for the full tier only."""
    found = list(names)
    assert set(full) <= set(found), sorted(set(full) - set(found))
    return [pytest.param(name, marks=pytest.mark.full) if name in full else name for name in found]


def run_selected(by_name: Mapping[str, Case], lab: Lab, request: pytest.FixtureRequest) -> dict[str, Finished]:
    """The runs of the cases that selected tests of the asking file have as their ``name``, two at a time."""
    wanted = [
        item.callspec.params.get("name")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    selected = [case for name, case in by_name.items() if name in wanted]
    for case in selected:
        lab.reference(case)
    jobs = [lab.job(case) for case in selected]
    return {done.job.name: done for done in lab.runner.run_all(jobs, at_once=2)}


def compared(case: Case, done: Finished, lab: Lab) -> Differences:
    """How far a run of a case is from one process of stock Megatron."""
    return compare(done.check().job.log_dir, case.plan, lab.reference(case))
