"""Multi-token prediction under plans: training and the losses in the log equal those of one process."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from testing.cases import Case, common_flags
from testing.compare import Differences, compare
from testing.lab import Lab
from testing.runner import Finished, Job
from testing.zorse_cases import MinistageLab
from tests.functional.selected import cases_of, tiers

BAR = 1e-5
BY_NAME, FULL = cases_of("mtp")


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
    lab, made = lab_of(MinistageLab), cases_of("mtp-updates")[0]["window-undo"]
    case = replace(made, chosen={"window": dict(made.plan.schedule.parameters)})
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
    cases = list(cases_of("mtp-packed")[0].values())
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
