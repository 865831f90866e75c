"""Optimizers of matrices (Lion, Muon) under plans: training and checkpoints are those of one process."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cases import MUON_FLAGS, SMALL_STEPS, Case, Weights
from benchmarks.expert_cases import divided
from benchmarks.lab import Lab
from benchmarks.runner import Finished
from benchmarks.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import compared
from tests.functional.test_checkpoint import SAVED_AT, STEPS, Train, plan, train
from tests.functional.test_elastic_state import run
from tests.functional.test_flags import make

pytest.importorskip("emerging_optimizers", reason="megatron-het[optimizers] is not installed")
__all__ = ["train"]  # a fixture
BAR = 1e-5
LION = f"--optimizer lion {' '.join(SMALL_STEPS)}"
MUON = " ".join(MUON_FLAGS)
SLICED = sliced_case({**PLAIN, "vocabulary": True}, "lion-split-vocabulary", random.Random(0))


def with_divided_experts(case: Case, sizes: list[list[int]]) -> Case:
    return replace(case, plan=divided(case.plan, sizes), family="deepseek")


CASES = [
    make("lion-mixed-tp", [[1], [2, 1]], [2, 3], LION, even_routing=False, tied=True, sequence_parallel=True),
    replace(SLICED, extra=tuple(LION.split())),
    make("muon", [[1], [1, 1]], [2, 3], MUON, even_routing=False, tied=True),
    make("muon-mixed-tp", [[1], [2, 1]], [2, 3], MUON, even_routing=False, overlap=True),
    make("muon-distributed", [[2], [1]], [2, 3], f"{MUON} --muon-tp-mode distributed", sequence_parallel=True),
    make("muon-beside-lion", [[1], [1, 1]], [2, 3], f"{MUON} --muon-scalar-optimizer lion", family="gpt"),
    with_divided_experts(
        make("muon-experts", [[1], [2, 2]], [2, 3], MUON, even_routing=False, sequence_parallel=True), [[1], [2, 2]]
    ),
]
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", list(BY_NAME))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]) -> None:
    found = compared(BY_NAME[name], finished[name], lab)
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


PLANS = [plan("first", [[1], [2, 1]], [2, 3], tied=True), plan("second", [[2, 1], [1], [1]], [1, 2, 2], tied=True)]
WEIGHTS = Weights(tied=True)


@pytest.mark.parametrize("flags", [LION, MUON], ids=["lion", "muon"])
def test_a_checkpoint_is_resumed_anywhere(flags: str, train: Train) -> None:
    words = flags.split()
    whole = train(PLANS[0], WEIGHTS, *words)
    for under in (PLANS[1], None):
        resumed = train(under, WEIGHTS, *words, "--ckpt-step", str(SAVED_AT), load=whole.checkpoints)
        assert sorted(resumed.losses) == list(range(SAVED_AT + 1, STEPS + 1))
        for iteration, loss in resumed.losses.items():
            assert loss == pytest.approx(whole.losses[iteration], rel=BAR, abs=0.0), iteration
    fresh = train(PLANS[1], WEIGHTS, *words, "--ckpt-step", str(SAVED_AT), "--no-load-optim", load=whole.checkpoints)
    assert fresh.losses[STEPS] != pytest.approx(whole.losses[STEPS], rel=BAR, abs=0.0), "there was no state to load"


@pytest.mark.parametrize("flags", [LION, MUON], ids=["lion", "muon"])
def test_state_moves_between_plans(flags: str, lab: Lab, tmp_path: Path) -> None:
    words = tuple(flags.split())
    (whole,) = run(lab, tmp_path / "whole", WEIGHTS, [(PLANS[0], [0, 1, 2, 3], None)], more=words)
    changes = [(PLANS[0], [0, 1, 2, 3], 3), (PLANS[1], [1, 2, 3, 4, 5], None)]
    found = run(lab, tmp_path / "changed", WEIGHTS, changes, more=words)
    assert [min(losses) for losses in found] == [1, 4]
    for losses in found:
        for iteration, loss in losses.items():
            assert loss == pytest.approx(whole[iteration], rel=BAR, abs=0.0), iteration
