"""Every layer of every pass runs in its recipe of fp8, and quantises its weights once per iteration."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_het.plan import Plan
from testing.cases import Case
from testing.combination_cases import case_of, pair_row
from testing.compare import compare, reported_losses
from testing.lab import Lab
from testing.runner import words
from tests.functional.selected import new_case, tiers

BAR = 1e-5
FLAGS = words(
    "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 "
    "--num-layers-at-end-in-bf16 1"
)


def made(name: str, **features: object) -> Case:
    case = case_of(pair_row(features.items()), name, 0)
    return replace(case, own=(*case.own, *FLAGS))


CASES = [
    made("fp8-slimpipe", schedule="slimpipe"),
    made("fp8-zb-v", schedule="zb-v"),
    made("fp8-interleaved", schedule="interleaved"),
    made("fp8-window", window="exact"),
    made("fp8-ZeRO-3", window="ZeRO-3"),
]
BY_NAME = {case.name: case for case in CASES}
FULL = {"fp8-interleaved", "fp8-window"}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_layers_run_in_their_recipe(name: str, lab: Lab) -> None:
    case = BY_NAME[name]
    job = lab.job(case, observe="tests.functional.fp8_layers:observe")
    lab.runner.run(job)
    layers, seen = case.plan.model.num_layers, set()
    for rank in range(case.plan.world_size):
        found = json.loads((job.log_dir / f"fp8-{rank}.json").read_text())
        for passes in found["passes"]:
            number, recipe = map(int, passes.split())
            assert recipe == (-1 if number in (0, layers - 1) else number)
            seen.add(number)
        times = {count for iteration in found["quantised"] for count in iteration.values()}
        if "ZeRO" in name:  # parameters are freed between passes, and their copies with them
            assert times
        elif "window" not in name:
            assert times <= {1}
    assert seen == set(range(layers))
    figures = compare(job.log_dir, case.plan, lab.reference(case))
    assert max(figures.loss, figures.validation) <= BAR, figures


MIXED = new_case("mixed", [[1], [2, 1]], [2, 3], distributed_optimizer=True, even_routing=False).plan
ALONE = new_case("alone", [[1, 1]], [5], distributed_optimizer=True).plan
KEPT = words("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather")


def test_weights_kept_in_fp8(lab: Lab, tmp_path: Path) -> None:
    """Their main parameters begin, and go on, as without; a checkpoint goes on under another plan."""

    def losses(name: str, plan: Plan, *more: str, keeps: bool = True) -> dict[int, float]:
        folder = tmp_path / name
        setup = ("tests.functional.fp8_layers:keep", {"out": str(folder)}) if keeps else None
        plan = replace(plan, training=replace(plan.training, precision="bf16"))
        job = lab.training(plan, folder, *more, steps=4, every=2, precision="bf16", setup=setup)
        lab.runner.run(job)
        if keeps:
            assert all(int((folder / f"weights-{rank}.json").read_text()) for rank in range(plan.world_size))
        return reported_losses(folder)

    kept, plain = losses("kept", MIXED, *KEPT), losses("plain", MIXED, keeps=False)
    resumed = losses("resumed", ALONE, *KEPT, "--load", str(tmp_path / "kept" / "checkpoints"), "--ckpt-step", "2")
    assert list(kept) == list(plain) == [1, 2, 3, 4] and list(resumed) == [3, 4]
    assert kept == pytest.approx(plain, rel=2e-3) and kept != plain
    assert resumed == pytest.approx({i: kept[i] for i in resumed}, rel=1e-3)
