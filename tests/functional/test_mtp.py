"""Multi-token prediction under plans: training and the losses in the log equal those of one process."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan, common_flags, with_schedule
from testing.compare import compare
from testing.families import ALL_FAMILIES
from testing.feature_cases import packed, with_expert_parallel
from testing.lab import Lab
from testing.runner import Finished, Job, words
from testing.slimpipe_cases import with_context_parallel
from testing.zorse_cases import MinistageLab
from tests.functional.selected import tiers

BAR = 1e-5


def make(name: str, sizes: list[list[int]], layers: list[int], family: str = "later-tokens", **options: Any) -> Case:
    """A case; what is not an option of a case is one of its plan."""
    of_case = {key: options.pop(key) for key in ("overlap", "own") if key in options}
    plan = build_plan(sizes, layers, random.Random(name), **{"even_routing": False, **options})
    flags = ALL_FAMILIES[family]
    later = int(flags[flags.index("--mtp-num-layers") + 1])
    return Case(name, replace(plan, model=replace(plan.model, mtp_num_layers=later)), family=family, **of_case)


def windowed(case: Case, layers: list[tuple[int, ...]], schedule: str = "ministage", **parameters: Any) -> Case:
    """A case with ministages of so many layers in each stage."""
    stages = tuple(replace(s, layers=row) for s, row in zip(case.plan.stages, layers, strict=True))
    return replace(
        case, plan=replace(case.plan, stages=stages, schedule=ScheduleSpec(schedule, {"window": True, **parameters}))
    )


def cut(case: Case, name: str, schedule: str, chunks: int = 1, cp: int = 1, **parameters: Any) -> Case:
    """The case with sequences cut into slices, or shared by so many context-parallel ranks."""
    shared = replace(case.plan, stages=with_context_parallel(case.plan.stages, cp)) if cp > 1 else case.plan
    return replace(with_schedule(replace(case, plan=shared), schedule, chunks, parameters), name=name)


_EXCHANGE = {"context_exchange": True, "exchange_keep": True, "exchange_idle": True}
_WINDOW = {"even_routing": True, "distributed_optimizer": True}


def _shared_window() -> Case:
    """Ministages whose sequences two ranks share."""
    case = windowed(make("window-shared", [[1, 1], [1]], [3, 2], **_WINDOW), [(2, 1), (1, 1)], offload=True)
    return replace(case, plan=replace(case.plan, stages=with_context_parallel(case.plan.stages, 2)))


BY_NAME = {
    case.name: case
    for case in (
        make("mixed-tp", [[1], [2, 1]], [2, 3], sequence_parallel=True, distributed_optimizer=True),
        make("one-stage", [[1, 1]], [5], recompute="full"),
        replace(
            with_schedule(make("tied", [[1, 1], [1]], [1, 2], tied=True, overlap=True), "interleaved", 2, {}),
            name="tied",
        ),
        replace(
            with_schedule(make("in-a-v", [[2, 1], [1]], [2, 1], distributed_optimizer=True), "zb-v", 2, {}),
            name="in-a-v",
        ),
        windowed(
            make("window-mixed-tp", [[1, 1], [2, 1]], [3, 2], sequence_parallel=True, **_WINDOW),
            [(2, 1), (1, 1)],
            offload=True,
        ),
        windowed(
            make("window-tied", [[1, 1], [1, 1]], [3, 2], tied=True, recompute="full", **_WINDOW),
            [(1, 2), (2, 0)],
            per_layer=False,
            offload_optimizer=True,
        ),
        windowed(
            make("window-one-stage-has-both-copies", [[1, 1], [1]], [3, 2], **_WINDOW), [(2, 1), (2,)], prefetch=0
        ),
        windowed(make("window-zero-3", [[1, 1]], [5], **_WINDOW), [(3, 2)], "data-parallel", zero=3),
        cut(make("", [[1], [2, 1]], [3, 2], sequence_parallel=True), "slices-mixed-tp", "slimpipe", slices=5),
        cut(
            make("", [[1], [1]], [2, 1], tied=True, recompute="full"),
            "slices-exchanged",
            "slimpipe",
            chunks=2,
            slices=8,
            **_EXCHANGE,
        ),
        cut(
            make("", [[1], [1]], [3, 2], distributed_optimizer=True, recompute="selective"),
            "shared-slices-of-equal-work",
            "seq1f1b",
            cp=2,
            slices=3,
            slice_lengths="work",
        ),
        cut(make("", [[1, 1], [2]], [3, 2], sequence_parallel=True), "context-parallel", "1f1b", cp=2),
        cut(make("", [[1], [1]], [2, 1], tied=True), "shared-in-a-v", "zb-v", chunks=2, cp=2),
        cut(
            make("", [[1], [1]], [1, 4], "later-tokens-experts"),  # no experts on the first stage
            "experts-in-slices",
            "slimpipe",
            slices=4,
            offload_activations=0.75,
        ),
        _shared_window(),
        make("repeated", [[1], [2]], [2, 3], "later-tokens-repeated", sequence_parallel=True),
        cut(
            make("", [[1], [1]], [2, 3], "later-tokens-repeated", recompute="full"),
            "repeated-in-shared-slices",
            "slimpipe",
            cp=2,
            slices=3,
            slice_lengths="work",
        ),
        packed(make("documents", [[1, 1], [2]], [3, 2], sequence_parallel=True), "by token", "later-tokens"),
        packed(
            cut(make("", [[1], [1]], [3, 2]), "documents-in-slices", "terapipe", slices=4),
            "by token, with positions",
            "later-tokens",
        ),
        make("experts", [[1], [2, 1]], [1, 4], "later-tokens-experts", sequence_parallel=True),
    )
}
BY_NAME["experts"] = replace(BY_NAME["experts"], plan=with_expert_parallel(BY_NAME["experts"].plan, [[1], [2, 1]]))
FULL = words(
    """
    one-stage in-a-v window-tied window-zero-3 slices-mixed-tp context-parallel shared-in-a-v window-shared
    repeated-in-shared-slices documents experts
    """
)


def logged(log: str) -> list[float]:
    return [float(value) for value in re.findall(r"mtp_\d loss: (\S+)", log)]


def logged_by_stock(folder: Path, case: Case, steps: int) -> list[float]:
    """Of every iteration: the second line of stock Megatron's log has the means with the first."""
    found, layers = logged((folder / "rank-0.log").read_text()), case.plan.model.mtp_num_layers
    assert len(found) == steps * layers
    means = [2 * second - first for first, second in zip(found[:layers], found[layers:])]
    return [*found[:layers], *means[:layers], *found[2 * layers :]]


@pytest.mark.full
def test_updates_inside_the_iteration(lab_of: Callable[[type[MinistageLab]], MinistageLab]):
    """Ministages are updated at once and saved: the copy of the embedding waits for that of the first ministage."""
    lab, parameters = lab_of(MinistageLab), {"update": "undo", "offload": True}
    made = make("window-undo", [[1, 1], [1, 1]], [3, 2], **_WINDOW)
    case = replace(windowed(made, [(2, 1), (1, 1)], **parameters), chosen={"window": parameters})
    found = lab.differences(case, gradients=False)
    assert max(found.loss, found.validation) <= BAR, found
    assert lab.parameter_difference(case) <= BAR


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]):
    case, done = BY_NAME[name], finished[name].check()
    reference = lab.reference(case)
    found = compare(done.job.log_dir, case.plan, reference)
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    assert logged(done.log()) == pytest.approx(logged_by_stock(reference, case, lab.steps), rel=BAR)


def within_documents(lab: Lab, case: Case, folder: Path) -> Path:
    """The folder of one process of stock Megatron that predicts nothing beyond the end of a document."""
    weights, clip, extra = case.reference
    flags = (*common_flags(weights, clip, extra, steps=lab.steps), *lab.start_flags(weights, extra))
    setup = ("tests.functional.later_tokens:within_documents", {"out": str(folder), "gradients": True})
    lab.runner.run(Job("one", 1, flags, folder, setup=setup))
    return folder


def test_packed_documents_end_predictions(lab: Lab, tmp_path: Path):
    """Documents as the dataset knows them, whole and in slices that TP ranks share."""
    cases = [
        packed(case, "by dataset", "later-tokens")
        for case in (
            make("packed", [[1, 1], [1]], [3, 2], recompute="full"),
            cut(make("", [[1], [2]], [3, 2], sequence_parallel=True), "packed-in-slices", "slimpipe", slices=4),
        )
    ]
    reference = within_documents(lab, cases[0], tmp_path / "one")
    accident = "tests.functional.later_tokens:beyond_documents"
    jobs = [*map(lab.job, cases), lab.job(replace(cases[1], name="broken"), observe=accident)]
    by_name = {done.job.name: done.check() for done in lab.runner.run_all(jobs, at_once=2)}
    expected = logged_by_stock(reference, cases[0], lab.steps)
    for case in cases:
        done = by_name[case.name]
        found = compare(done.job.log_dir, case.plan, reference)
        assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, (case.name, found)
        assert logged(done.log()) == pytest.approx(expected, rel=BAR)
    beyond = compare(by_name["broken"].job.log_dir, cases[1].plan, reference)
    assert beyond.gradient > 100 * BAR, beyond


@pytest.mark.parametrize(
    ("case", "accident"),
    [("slices-mixed-tp", "of_the_part"), pytest.param("context-parallel", "by_part", marks=pytest.mark.full)],
)
def test_the_comparison_can_fail(case: str, accident: str, lab: Lab) -> None:
    broken = replace(BY_NAME[case], name=f"{case}-broken")
    found = lab.differences(broken, observe=f"tests.functional.later_tokens:{accident}")
    assert found.gradient > 100 * BAR, found
