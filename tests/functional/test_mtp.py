"""Multi-token prediction under plans: training and the losses in the log equal those of one process."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, common_flags
from testing.compare import Differences, compare
from testing.feature_cases import packed
from testing.lab import Lab
from testing.runner import Finished, Job, words
from testing.zorse_cases import MinistageLab
from tests.functional.selected import new_case, tiers

BAR = 1e-5
_EXCHANGE = {"context_exchange": True, "exchange_keep": True, "exchange_idle": True}
_DIVIDED: dict[str, Any] = {"distributed_optimizer": True}
_WINDOW: dict[str, Any] = {"even_routing": True, **_DIVIDED}
_TP: dict[str, Any] = {"sequence_parallel": True}


def make(name: str, sizes: list[list[int]], layers: list[Any], family: str = "later-tokens", **options: Any) -> Case:
    return new_case(name, sizes, layers, family=family, **{"even_routing": False, **options})


def windowed(name: str = "ministage", **parameters: Any) -> ScheduleSpec:
    return ScheduleSpec(name, {"window": True, **parameters})


def slices(count: int, name: str = "slimpipe", **parameters: Any) -> ScheduleSpec:
    return ScheduleSpec(name, {"slices": count, **parameters})


CHUNKS = [(2, 1), (1, 1)]
_TWO, _REPEATED = [[1], [1]], "later-tokens-repeated"
_AT_ONCE = windowed(per_layer=False, offload_optimizer=True)
_WORK, _SHARED = slices(3, "seq1f1b", slice_lengths="work"), slices(3, slice_lengths="work")
BY_NAME = {
    case.name: case
    for case in (
        make("mixed-tp", [[1], [2, 1]], [2, 3], distributed_optimizer=True, **_TP),
        make("one-stage", [[1, 1]], [5], recompute="full"),
        make("tied", [[1, 1], [1]], [(1, 1), (2, 2)], schedule=ScheduleSpec("interleaved"), tied=True, overlap=True),
        make("in-a-v", [[2, 1], [1]], [(2, 2), (1, 1)], schedule=ScheduleSpec("zb-v"), distributed_optimizer=True),
        make("window-mixed-tp", [[1, 1], [2, 1]], CHUNKS, schedule=windowed(offload=True), **_TP, **_WINDOW),
        make(
            "window-tied", [[1, 1], [1, 1]], [(1, 2), (2, 0)], schedule=_AT_ONCE, tied=True, recompute="full", **_WINDOW
        ),
        make(
            "window-one-stage-has-both-copies", [[1, 1], [1]], [(2, 1), (2,)], schedule=windowed(prefetch=0), **_WINDOW
        ),
        make("window-zero-3", [[1, 1]], [(3, 2)], schedule=windowed("data-parallel", zero=3), **_WINDOW),
        make("slices-mixed-tp", [[1], [2, 1]], [3, 2], schedule=slices(5), seed="", **_TP),
        make("slices-exchanged", _TWO, [(2, 2), (1, 1)], schedule=slices(8, **_EXCHANGE), tied=True, recompute="full"),
        make("shared-slices-of-equal-work", _TWO, [3, 2], cp=2, schedule=_WORK, recompute="selective", **_DIVIDED),
        make("context-parallel", [[1, 1], [2]], [3, 2], cp=2, seed="", **_TP),
        make("shared-in-a-v", [[1], [1]], [(2, 2), (1, 1)], cp=2, schedule=ScheduleSpec("zb-v"), tied=True),
        # No experts on the first stage.
        make("experts-in-slices", _TWO, [1, 4], "later-tokens-experts", schedule=slices(4, offload_activations=0.75)),
        # Ministages whose sequences two ranks share.
        make("window-shared", [[1, 1], [1]], CHUNKS, cp=2, schedule=windowed(offload=True), **_WINDOW),
        make("repeated", [[1], [2]], [2, 3], _REPEATED, **_TP),
        make("repeated-in-shared-slices", _TWO, [2, 3], _REPEATED, cp=2, schedule=_SHARED, recompute="full"),
        packed(make("documents", [[1, 1], [2]], [3, 2], **_TP), "by token", "later-tokens"),
        packed(
            make("documents-in-slices", [[1], [1]], [3, 2], schedule=slices(4, "terapipe")),
            "by token, with positions",
            "later-tokens",
        ),
        make("experts", [[1], [2, 1]], [1, 4], "later-tokens-experts", ep=[[1], [2, 1]], **_TP),
    )
}
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
    made = make("window-undo", [[1, 1], [1, 1]], CHUNKS, schedule=windowed(**parameters), **_WINDOW)
    case = replace(made, chosen={"window": parameters})
    found = lab.differences(case, gradients=False)
    assert max(found.loss, found.validation) <= BAR, found
    assert lab.parameter_difference(case) <= BAR


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences, lab: Lab, finished: dict[str, Finished]):
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    stock = logged_by_stock(lab.reference(BY_NAME[name]), BY_NAME[name], lab.steps)
    assert logged(finished[name].log()) == pytest.approx(stock, rel=BAR)


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
            make("packed-in-slices", [[1], [2]], [3, 2], schedule=slices(4), **_TP),
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
