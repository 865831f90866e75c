"""Training from scratch starts from the same weights under every plan, bit for bit."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec, save_plan
from testing.cases import Case, common_flags, words
from testing.lab import Lab
from testing.runner import Job
from tests.functional.selected import new_case, tiers

# One step without a change of any parameter, then a checkpoint.
STEP = words("--lr 0 --min-lr 0 --weight-decay 0 --save-interval 1 --exit-interval 1 --het-transport gloo")
WINDOW = ScheduleSpec("ministage", {"window": True})
VOCABULARY = ScheduleSpec("slimpipe", {"slices": 4, "vocabulary": True})


def case(name: str, sizes: list[list[int]], layers: list[Any], **more: Any) -> Case:
    return new_case(name, sizes, layers, distributed_optimizer=True, **more)


CASES = {
    found.name: found
    for found in (
        case("mixed-tp", [[1], [2, 1]], [2, 3], even_routing=False, sequence_parallel=True),
        case("three-stages", [[2], [1, 1], [1]], [1, 1, 3]),
        case("window", [[1, 1], [1, 1]], [(2, 2), (3, 3)], schedule=WINDOW),
        case("vocabulary", [[1], [1]], [2, 3], schedule=VOCABULARY),
        case("tied", [[2, 1], [1]], [1, 4], tied=True),
        case("experts", [[4], [2, 1]], [3, 2], family="sequence-balance", ep=[[2], [2, 1]], sequence_parallel=True),
        case("in-a-v", [[2, 1], [1]], [(2, 2), (1, 1)], schedule=ScheduleSpec("zb-v"), tied=True),
        # The copies of the embedding are in two ministages of one rank, which are built one after the other.
        case("window-tied", [[1], [1]], [(1, 2), (2,)], schedule=WINDOW, tied=True),
    )
}


def checkpoint(lab: Lab, case: Case, *more: str) -> Path:
    folder = lab.folder / "from-scratch" / f"{case.name}{'-'.join(more)}"
    folder.mkdir(parents=True)
    save_plan(case.plan, folder / "plan.json")
    flags = (*common_flags(case.weights, steps=2), *lab.data_flags(), "--het-plan", str(folder / "plan.json"))
    argv = (*flags, *STEP, "--dist-ckpt-optim-fully-reshardable", "--save", str(folder / "checkpoint"), *more)
    lab.runner.run(Job(folder.name, case.plan.world_size, argv, folder))
    return folder / "checkpoint" / "iter_0000001"


@pytest.fixture(scope="module")
def alone(lab: Lab) -> Callable[[Case], Path]:
    """What a plan of one rank starts with, for the model of a case."""

    @functools.cache
    def of_model(tied: bool, layers: int, family: str) -> Path:
        found = case(f"alone-{layers}-{tied}-{family}", [[1]], [layers], tied=tied)
        return checkpoint(lab, replace(found, family=family))

    return lambda case: of_model(case.plan.model.tied_embeddings, case.plan.model.num_layers, case.family)


def first_loss(checkpoint: Path) -> float:
    logs = [log.read_text() for log in checkpoint.parents[1].glob("rank-*.log")]
    (found,) = [float(loss) for log in logs for loss in re.findall(r"\| lm loss: (\S+)", log)]
    return found


def difference(lab: Lab, first: Path, second: Path, out: Path) -> float:
    options = {"first": str(first), "second": str(second), "out": str(out)}
    compare = ("testing.zorse_cases:compare_parameters", options)
    lab.runner.run(Job("compare", 1, (), out.parent, "testing.probe:nothing", compare), check=False)
    return json.loads(out.read_text())["difference"]


@pytest.mark.parametrize("name", tiers(CASES, ["three-stages", "experts", "in-a-v"]))
def test_the_weights_are_those_of_one_rank(name: str, lab: Lab, alone: Callable[[Case], Path], tmp_path: Path):
    found, expected = checkpoint(lab, CASES[name]), alone(CASES[name])
    assert difference(lab, found, expected, tmp_path / "found.json") == 0
    assert first_loss(found) == pytest.approx(first_loss(expected), rel=1e-5)  # of copies that are not saved, too


def test_copies_start_alike_in_megatrons_own_way(lab: Lab, tmp_path: Path):
    """The copy of the embedding, which Megatron fills with zeros, is in a ministage that is built after the first."""
    tied = checkpoint(lab, CASES["window-tied"], "--het-init", "stock")
    case = CASES["window-tied"]
    plain = replace(case, plan=replace(case.plan, schedule=ScheduleSpec("ministage")), name="plain-tied")
    without = checkpoint(lab, plain, "--het-init", "stock")
    assert difference(lab, tied, without, tmp_path / "found.json") == 0
    assert first_loss(tied) == pytest.approx(first_loss(without), rel=1e-5)


def test_megatrons_own_way_differs(lab: Lab, alone: Callable[[Case], Path], tmp_path: Path):
    """Else the test above could not fail."""
    found = checkpoint(lab, CASES["three-stages"], "--het-init", "stock")
    assert difference(lab, found, alone(CASES["three-stages"]), tmp_path / "found.json") > 0.1
