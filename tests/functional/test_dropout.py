"""With random numbers, a plan with a layout that stock Megatron has gives stock Megatron's losses."""

import random
import re
from pathlib import Path

import pytest

from megatron_het.plan import save_plan
from testing.cases import Case, build_plan, common_flags, with_schedule, words
from testing.lab import Lab
from testing.runner import Job
from tests.functional.selected import new_case, tiers

STEPS = 3
_SHARING = build_plan([[2], [2]], [1, 1], random.Random(0), sequence_parallel=True)
DROPOUT, RANDOM = words("--attention-dropout 0.1 --hidden-dropout 0.1"), "--moe-router-force-biased 0.5"


CASES = {
    "stages and replicas": (
        Case("stages and replicas", build_plan([[1, 1], [1, 1]], [2, 2], random.Random(0))),
        "--pipeline-model-parallel-size 2",
    ),
    # One draw of one TP rank from the generator that all have alike, and their masks would differ.
    "TP": (Case("TP", build_plan([[2]], [4], random.Random(0))), "--tensor-model-parallel-size 2"),
    "chunks": (
        with_schedule(Case("chunks", _SHARING), "interleaved", 2, {}),
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "random experts": (
        new_case("random experts", [[1, 1], [1, 1]], [2, 2], family="mixtral", ep=[[2, 2], [2, 2]], extra=RANDOM),
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
    ),
}


def losses(lab: Lab, folder: Path, case: Case, *flags: str) -> list[float]:
    argv = (*common_flags(case.weights, extra=case.extra, steps=STEPS), *lab.data_flags(), *DROPOUT, *flags)
    log = lab.runner.run(Job(folder.name, case.plan.world_size, argv, folder)).log()
    found = re.findall(r"lm loss( value)?: (\S+)", log)
    values = [float(value) for _, value in found]
    if "--het-plan" not in flags:  # stock Megatron logs the mean of both as the second one
        first, second = [i for i, (is_evaluation, _) in enumerate(found) if not is_evaluation][:2]
        values[second] = 2 * values[second] - values[first]
    return values


@pytest.mark.parametrize("name", tiers(CASES, ["TP"]))
def test_what_is_drawn_is_that_of_stock_megatron(name: str, lab: Lab, tmp_path: Path):
    case, layout = CASES[name]
    save_plan(case.plan, tmp_path / "plan.json")
    under_plan = ("--het-plan", str(tmp_path / "plan.json"), "--het-init", "stock", "--het-transport", "gloo")
    expected = losses(lab, tmp_path / "stock", case, *layout.split())
    found = losses(lab, tmp_path / "plan", case, *under_plan)
    assert len(expected) > STEPS
    assert found == pytest.approx(expected, rel=1.5e-6)  # digits of the log, twice
