"""Packed documents, sliding windows and softmax offsets under plans equal stock Megatron in one process.

``benchmarks/parity.py --model packed`` and ``--model attention`` have more plans, of every schedule.
"""

import random
from dataclasses import replace

import pytest

from testing.cases import Case, build_plan, with_schedule
from testing.compare import compare
from testing.feature_cases import packed
from testing.lab import Lab
from testing.runner import Finished, words
from testing.slimpipe_cases import PLAIN, SlicedCase, sliced_case, with_context_parallel_sizes
from tests.functional.selected import compared, tiers

BAR = 1e-5
_SLICED = {**PLAIN, "layers": 5}
_WORK = {"slice_lengths": "work"}
_EXCHANGE = {"context_exchange": True, "exchange_units": 4}
_KEEPING = {"context_exchange": True, "exchange_keep": True, "exchange_idle": True}
_WHOLE = {"cp_documents": "whole"}
_TWO = build_plan([[1], [1]], [3, 2], random.Random(0))


def _of_sizes(case: SlicedCase, sizes: list[list[int]], shares: tuple[int, ...]) -> SlicedCase:
    """The case with other context-parallel sizes."""
    stages = with_context_parallel_sizes(case.plan.stages, sizes, shares)
    return replace(case, plan=replace(case.plan, stages=stages))


_CASES = [
    packed(
        Case(
            "documents-in-three-stages",
            build_plan([[2], [1, 2], [1]], [2, 2, 1], random.Random(0), even_routing=False, sequence_parallel=True),
        ),
        "by dataset",
        "gpt",
    ),
    packed(
        sliced_case(
            {**_SLICED, "chunks": 2, "recompute": "full", "exchange": _EXCHANGE},
            "documents-in-slices",
            random.Random(0),
        ),
        "by token",
        "softmax-offset",
    ),
    replace(
        sliced_case({**_SLICED, "slices": 8, "tp": 2, "exchange": _KEEPING}, "windows-in-slices", random.Random(0)),
        family="gpt-oss",
    ),
    packed(
        sliced_case({**_SLICED, "cp": 2, "slices": 4, "exchange": _KEEPING}, "documents-exchanged", random.Random(0)),
        "by dataset",
        "off-by-one",
    ),
    replace(
        sliced_case({**_SLICED, "cp": 2, "schedule": "1f1b"}, "windows-with-context-parallelism", random.Random(0)),
        family="gpt-oss",
    ),
    packed(
        sliced_case(
            {**_SLICED, "slices": 7, "tp": 2, "vocabulary": True, "offload": 0.75, "parameters": _WORK},
            "documents-in-slices-of-equal-work",
            random.Random(0),
        ),
        "by dataset",
        "llama",
    ),
    packed(
        sliced_case(
            {**_SLICED, "cp": 2, "slices": 3, "recompute": "selective", "parameters": _WORK},
            "documents-with-context-parallelism",
            random.Random(0),
        ),
        "by token",
        "softmax-offset",
    ),
    packed(
        sliced_case(
            {**_SLICED, "tp": 2, "recompute": "full", "exchange": _KEEPING, "parameters": {"slices": 7, **_WORK}},
            "documents-of-equal-work-exchanged",
            random.Random(0),
        ),
        "by dataset",
        "llama",
    ),
    packed(
        with_schedule(
            Case(
                "documents-of-equal-work-mixed-tp",
                build_plan([[1], [2, 1]], [3, 2], random.Random(0), sequence_parallel=True, recompute="full"),
            ),
            "seq1f1b",
            1,
            {"slices": 5, **_WORK},
        ),
        "by token, with positions",
        "qk-norm",
    ),
    packed(
        sliced_case(
            {**_SLICED, "cp": 4, "schedule": "1f1b", "microbatches": 6, "parameters": _WHOLE},
            "whole-documents",
            random.Random(0),
        ),
        "by dataset",
        "gpt",
    ),
    packed(
        sliced_case(
            {**_SLICED, "cp": 2, "tp": 2, "schedule": "1f1b", "microbatches": 6, "parameters": _WHOLE},
            "whole-documents-with-tp",
            random.Random(0),
        ),
        "by token",
        "softmax-offset",
    ),
    packed(
        _of_sizes(
            sliced_case(
                {**_SLICED, "cp": 2, "slices": 3, "vocabulary": True, "microbatches": 6, "parameters": _WHOLE | _WORK},
                "whole-documents-on-unequal-ranks",
                random.Random(0),
            ),
            [[1], [2]],
            (3, 1),
        ),
        "by dataset",
        "llama",
    ),
]
BY_NAME = {case.name: case for case in _CASES}
FULL = words(
    """
    windows-in-slices windows-with-context-parallelism whole-documents-with-tp documents-with-context-parallelism
    documents-of-equal-work-exchanged seq1f1b-documents-of-equal-work-mixed-tp
    """
)


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]) -> None:
    case = BY_NAME[name]
    found = compared(case, finished[name], lab)
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
