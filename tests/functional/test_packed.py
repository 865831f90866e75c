"""Packed documents, sliding windows and softmax offsets under plans equal stock Megatron in one process.

``benchmarks/parity.py --model packed`` and ``--model attention`` have more plans, of every schedule.
"""

import functools
import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan, with_schedule
from testing.compare import Differences, compare
from testing.feature_cases import packed
from testing.lab import Lab
from testing.runner import words
from testing.slimpipe_cases import PLAIN, SlicedCase, sliced_case, with_context_parallel_sizes
from tests.functional.selected import new_case, tiers

BAR = 1e-5
_SLICED = {**PLAIN, "layers": 5}
_EXCHANGE = {"context_exchange": True, "exchange_units": 4}
_KEEPING = {"context_exchange": True, "exchange_keep": True, "exchange_idle": True}
_WHOLE = {"cp_documents": "whole"}
_TWO = build_plan([[1], [1]], [3, 2], random.Random(0))


def _sliced(documents: str, family: str, name: str, **row: Any) -> SlicedCase:
    return packed(sliced_case({**_SLICED, **row}, name, random.Random(0)), documents, family)


def _windows(name: str, **row: Any) -> SlicedCase:
    return replace(sliced_case({**_SLICED, **row}, name, random.Random(0)), family="gpt-oss")


def _of_sizes(case: SlicedCase, sizes: list[list[int]], shares: tuple[int, ...]) -> SlicedCase:
    stages = with_context_parallel_sizes(case.plan.stages, sizes, shares)
    return replace(case, plan=replace(case.plan, stages=stages))


_DATASET, _TOKEN = "by dataset", "by token"
_WORK: dict[str, Any] = {"parameters": {"slice_lengths": "work"}}
_OF_WORK: dict[str, Any] = {"tp": 2, **_WORK}
_UNCUT: dict[str, Any] = {"schedule": "1f1b", "microbatches": 6, "parameters": _WHOLE}
_WHOLE_OF_WORK: dict[str, Any] = {"microbatches": 6, "parameters": {"slice_lengths": "work", **_WHOLE}}
_RECOMPUTED: dict[str, Any] = {"sequence_parallel": True, "recompute": "full"}
_IN_FIVE = ScheduleSpec("seq1f1b", {"slices": 5, "slice_lengths": "work"})
_llama = functools.partial(_sliced, _DATASET, "llama")
_CASES = [
    packed(
        new_case(
            "documents-in-three-stages", [[2], [1, 2], [1]], [2, 2, 1], even_routing=False, sequence_parallel=True
        ),
        _DATASET,
        "gpt",
    ),
    _sliced(_TOKEN, "softmax-offset", "documents-in-slices", chunks=2, recompute="full", exchange=_EXCHANGE),
    _windows("windows-in-slices", slices=8, tp=2, exchange=_KEEPING),
    _sliced(_DATASET, "off-by-one", "documents-exchanged", cp=2, slices=4, exchange=_KEEPING),
    _windows("windows-with-context-parallelism", cp=2, schedule="1f1b"),
    _llama("documents-in-slices-of-equal-work", slices=7, vocabulary=True, offload=0.75, **_OF_WORK),
    _sliced(
        _TOKEN, "softmax-offset", "documents-with-context-parallelism", cp=2, slices=3, recompute="selective", **_WORK
    ),
    _llama("documents-of-equal-work-exchanged", slices=7, recompute="full", exchange=_KEEPING, **_OF_WORK),
    packed(
        new_case("documents-of-equal-work-mixed-tp", [[1], [2, 1]], [3, 2], schedule=_IN_FIVE, **_RECOMPUTED),
        "by token, with positions",
        "qk-norm",
    ),
    _sliced(_DATASET, "gpt", "whole-documents", cp=4, **_UNCUT),
    _sliced(_TOKEN, "softmax-offset", "whole-documents-with-tp", cp=2, tp=2, **_UNCUT),
    _of_sizes(
        _llama("whole-documents-on-unequal-ranks", cp=2, slices=3, vocabulary=True, **_WHOLE_OF_WORK),
        [[1], [2]],
        (3, 1),
    ),
]
BY_NAME = {case.name: case for case in _CASES}
FULL = words(
    """
    windows-in-slices windows-with-context-parallelism whole-documents-with-tp documents-with-context-parallelism
    documents-of-equal-work-exchanged documents-of-equal-work-mixed-tp
    """
)


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
