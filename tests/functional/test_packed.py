"""Packed documents, sliding windows and softmax offsets under plans equal stock Megatron in one process.

``benchmarks/parity.py --model packed`` and ``--model attention`` have more plans, of every schedule.
"""

import random
from dataclasses import replace

import pytest

from testing.cases import Case, build_plan, with_schedule
from testing.compare import Differences, compare
from testing.lab import Lab
from tests.functional.selected import cases_of, tiers

BAR = 1e-5
_TWO = build_plan([[1], [1]], [3, 2], random.Random(0))


BY_NAME, FULL = cases_of("packed")


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found


def test_windows_end_at_documents(lab: Lab) -> None:
    """Stock Megatron in one process cannot do both; one process under a plan can."""
    both = ("--dataloader-inter-document-masking", "--reset-position-ids")
    one = Case("documents-and-windows", build_plan([[1]], [5], random.Random(0)), family="gpt-oss", extra=both)
    sliced = with_schedule(replace(one, plan=_TWO), "slimpipe", 1, {"slices": 4})
    runs = [done.check() for done in lab.runner.run_all([lab.job(one), lab.job(sliced)], at_once=2)]
    folders = {done.job.world_size: done.job.log_dir for done in runs}
    found = compare(folders[2], sliced.plan, folders[1])
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found


@pytest.mark.parametrize(
    ("name", "accident"),
    [
        ("documents-in-three-stages", "one_document"),
        ("windows-in-slices", "wide_window"),
        ("whole-documents", "other_ranks"),
    ],
)
def test_the_comparison_can_fail(name: str, accident: str, lab: Lab) -> None:
    case = replace(BY_NAME[name], name=f"{name}-broken")
    found = lab.differences(case, observe=f"tests.functional.break_documents:{accident}")
    assert found.gradient > 100 * BAR, found
