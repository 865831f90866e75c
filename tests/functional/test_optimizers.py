"""Optimizers of matrices (Lion, Muon) under plans: training and checkpoints are those of one process."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_het.plan import Plan
from testing.cases import MUON_FLAGS, SMALL_STEPS, Case, Weights
from testing.compare import Differences
from testing.lab import Lab
from testing.slimpipe_cases import PLAIN, sliced_case
from testing.zorse_cases import with_shares
from tests.functional.selected import new_case, tiers
from tests.functional.test_checkpoint import (
    KINDS,
    SAVED_AT,
    STEPS,
    Train,
    assert_agree,
    assert_goes_on,
    plan,
    train,
    with_ministages,
)
from tests.functional.test_elastic_state import run

pytest.importorskip("emerging_optimizers", reason="megatron-het[optimizers] is not installed")
__all__ = ["train"]  # a fixture
BAR = 1e-5
LION = f"--optimizer lion {' '.join(SMALL_STEPS)}"
MUON = " ".join(MUON_FLAGS)
SLICED = sliced_case({**PLAIN, "vocabulary": True}, "lion-split-vocabulary", random.Random(0))
DIVIDED = {"distributed_optimizer": True}
EXPERTS, UNEVEN = [[1], [2, 2]], {"even_routing": False, "sequence_parallel": True}


def in_a_window(case: Case) -> Case:
    window = with_ministages(case.plan, ((1, 1), (2, 1)), offload=True, offload_optimizer=True)
    return replace(case, plan=with_shares(window, ((0, 1), (3, 1))))


CASES = [
    new_case("lion-mixed-tp", [[1], [2, 1]], [2, 3], extra=LION, even_routing=False, tied=True, sequence_parallel=True),
    replace(SLICED, extra=tuple(LION.split())),
    new_case(
        "lion-shards", [[1, 1], [2, 1]], [2, 3], extra=LION, overlap=True, own=("--overlap-param-gather",), **DIVIDED
    ),
    in_a_window(new_case("lion-window", [[1, 1], [2, 1]], [2, 3], extra=LION, even_routing=False, **DIVIDED)),
    new_case("muon", [[1], [1, 1]], [2, 3], extra=MUON, even_routing=False, tied=True),
    new_case("muon-mixed-tp", [[1], [2, 1]], [2, 3], extra=MUON, even_routing=False, overlap=True),
    new_case(
        "muon-distributed", [[2], [1]], [2, 3], extra=f"{MUON} --muon-tp-mode distributed", sequence_parallel=True
    ),
    new_case("muon-beside-lion", [[1], [1, 1]], [2, 3], extra=f"{MUON} --muon-scalar-optimizer lion", family="gpt"),
    new_case("muon-experts", EXPERTS, [2, 3], family="deepseek", extra=MUON, ep=EXPERTS, **UNEVEN),
]
BY_NAME = {case.name: case for case in CASES}
FULL = {"lion-split-vocabulary", "lion-shards", "muon", "muon-beside-lion", "muon-experts"}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


PLANS = {
    "whole": (
        plan("first", [[1], [2, 1]], [2, 3], tied=True),
        plan("second", [[2, 1], [1], [1]], [1, 2, 2], tied=True),
    ),
    # Updates inside the iteration, some of which are taken back, on shares of which one is empty.
    "shards": (KINDS["ministages"].first, plan("second", [[1], [2, 1]], [3, 2], **DIVIDED)),
}
SGD = "--optimizer sgd --lr 0.1 --min-lr 0.01"
TRAININGS = {"lion": ("whole", LION), "muon": ("whole", MUON), "lion-shards": ("shards", LION), "sgd": ("whole", SGD)}


@pytest.fixture(params=tiers(TRAININGS, {"lion"}))
def training(request: pytest.FixtureRequest) -> tuple[Plan, Plan, Weights, list[str]]:
    kind, flags = TRAININGS[request.param]
    first, second = PLANS[kind]
    return first, second, Weights(tied=first.model.tied_embeddings), flags.split()


def test_a_checkpoint_is_resumed_anywhere(training: tuple[Plan, Plan, Weights, list[str]], train: Train) -> None:
    first, second, weights, words = training
    whole = train(first, weights, *words)
    # Stock Megatron has Lion's state in another form than shards, and cannot load that of SGD.
    for under in (second,) if first.training.distributed_optimizer or SGD.split() == words else (second, None):
        assert_goes_on(train(under, weights, *words, "--ckpt-step", str(SAVED_AT), load=whole.checkpoints), whole)
    fresh = train(second, weights, *words, "--ckpt-step", str(SAVED_AT), "--no-load-optim", load=whole.checkpoints)
    assert fresh.losses[STEPS] != pytest.approx(whole.losses[STEPS], rel=BAR, abs=0.0), "there was no state to load"


def test_state_moves_between_plans(training: tuple[Plan, Plan, Weights, list[str]], lab: Lab, tmp_path: Path) -> None:
    first, second, weights, words = training
    more = tuple(words)
    (whole,) = run(lab, tmp_path / "whole", weights, [(first, list(range(first.world_size)), None)], more=more)
    changes = [(first, list(range(first.world_size)), 3), (second, list(range(1, 1 + second.world_size)), None)]
    found = run(lab, tmp_path / "changed", weights, changes, more=more)
    assert [min(losses) for losses in found] == [1, 4]
    for losses in found:
        assert_agree(losses, whole)
