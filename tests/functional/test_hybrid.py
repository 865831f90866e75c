"""Hybrid models under plans equal stock Megatron in one process, and a GPTModel of the same layers.

``benchmarks/parity.py --model hybrid`` has more plans, of every schedule.
"""

import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from testing.cases import Case, build_plan
from testing.compare import Differences, compare, plan_losses, reference_losses
from testing.feature_cases import as_hybrid, packed
from testing.lab import Lab
from testing.runner import Finished
from tests.functional.selected import cases_of, compared, new_case, tiers

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
BAR = 1e-5
TWIN_BAR = 1e-6
_BALANCING = re.compile(r"seq_load_balancing_loss: (\S+)")


def hybrid(name: str, family: str, sizes: list[list[int]], layers: list[list[int]], **plan: Any) -> Case:
    return as_hybrid(new_case(name, sizes, [2] * len(sizes), **plan), family, layers)


BY_NAME, FULL = cases_of("hybrid")


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences, lab: Lab, finished: dict[str, Finished]) -> None:
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    if name == "experts":
        ours, stock = finished[name].log(), (lab.reference(BY_NAME[name]) / "rank-0.log").read_text(encoding="utf-8")
        logged = [list(map(float, _BALANCING.findall(log))) for log in (ours, stock)]
        assert len(logged[0]) == lab.steps
        logged = [values[:1] + values[2:] for values in logged]  # stock Megatron's second line counts the first one too
        assert logged[0] == pytest.approx(logged[1], rel=1e-4)


_PACKED = ("--dataloader-inter-document-masking", "--reset-position-ids")
PACKED = {name: replace(case, extra=_PACKED) for name, case in cases_of("hybrid-packed")[0].items()}


@pytest.mark.parametrize("name", tiers(PACKED, cases_of("hybrid-packed")[1]))
def test_recurrent_layers_begin_anew_with_documents(name: str, lab: Lab) -> None:
    case = PACKED[name]
    one = hybrid(f"{name}-one", case.family, [[1]], [[4]])
    one = replace(one, extra=_PACKED, plan=replace(one.plan, model=case.plan.model))
    runs = [done.check() for done in lab.runner.run_all([lab.job(one), lab.job(case)], at_once=2)]
    folders = {done.job.name: done.job.log_dir for done in runs}
    found = compare(folders[case.name], case.plan, folders[one.name])
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    carried = packed(replace(case, extra=()), "by token, with positions", case.family)
    assert compare(folders[case.name], case.plan, lab.reference(carried)).gradient > 100 * BAR


TWINS = list(cases_of("hybrid-twins")[0].values())
GPT = Case("gpt", build_plan([[1], [1]], [1, 1], random.Random("gpt")))


@pytest.mark.parametrize("twins", [TWINS[:3], pytest.param(TWINS[3:], marks=pytest.mark.full)], ids=["some", "others"])
def test_a_gpt_model_and_its_hybrid_twin_train_alike(twins: list[Case], lab: Lab) -> None:
    """From one checkpoint, that of stock Megatron's GPTModel."""
    expected = reference_losses(lab.reference(GPT))
    weights = ("--load", str(lab.checkpoint(GPT.weights)))
    jobs = {case.name: (case, lab.job(case, *weights)) for case in twins}
    for done in lab.runner.run_all([job for _, job in jobs.values()], at_once=2):
        case, log_dir = jobs[done.job.name][0], done.check().job.log_dir
        found = plan_losses(log_dir, case.plan)["losses"]
        assert found == pytest.approx(expected["losses"], rel=TWIN_BAR), case.name


def relayed(lab: Lab, legs: list[tuple[Case, int]]) -> list[float]:
    """Losses of one training under one plan after the other, each up to that step, from the one's checkpoint."""
    found: list[float] = []
    loaded: tuple[str, ...] = ()
    for case, last in legs:
        job = lab.job(case)
        folder = str(job.log_dir / "checkpoint")
        argv = [*job.argv, *loaded, "--save", folder, "--save-interval", str(last), "--exit-interval", str(last)]
        if loaded:
            argv = [word for word in argv if word not in ("--finetune", "--no-load-optim", "--no-load-rng")]
        done = lab.runner.run(replace(job, argv=tuple(argv)))
        found += plan_losses(done.job.log_dir, case.plan)["losses"]
        loaded = ("--load", folder)
    return found


def test_a_checkpoint_goes_to_the_hybrid_twin_and_back(lab: Lab) -> None:
    """With the state of the optimizer: as if one of them had trained all the time."""
    found = relayed(lab, [(GPT, 1), (TWINS[0], 2), (GPT, lab.steps)])
    assert found == pytest.approx(reference_losses(lab.reference(GPT))["losses"], rel=BAR)


@pytest.mark.full
@pytest.mark.parametrize("names", [("delta-mixed", "delta-window"), ("mamba-slices-tp", "mamba-window")])
def test_a_checkpoint_of_recurrent_layers_moves_between_plans(names: tuple[str, str], lab: Lab) -> None:
    """From mixed TP, or slices, to a parameter window and back: heads are cut otherwise, state of the optimizer too."""
    first, second = (BY_NAME[name] for name in names)
    found = relayed(lab, [(first, 1), (second, 2), (first, lab.steps)])
    assert found == pytest.approx(reference_losses(lab.reference(first))["losses"], rel=BAR)


@pytest.mark.full
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH is not set: no Megatron-LM checkout")
def test_a_checkouts_own_script_runs_under_a_plan(lab: Lab) -> None:
    case = replace(BY_NAME["experts"], name="own-script")
    job = lab.job(case)
    script = replace(job, entry="megatron_het.run:main", argv=(f"{CHECKOUT}/pretrain_hybrid.py", *job.argv))
    found = compared(case, lab.runner.run(script), lab)
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
