"""Hybrid models under plans equal stock Megatron in one process, and a GPTModel of the same layers.

``benchmarks/parity.py --model hybrid`` has more plans, of every schedule.
"""

import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from megatron_het.plan import ScheduleSpec
from testing.cases import Case, build_plan
from testing.compare import Differences, compare, plan_losses, reference_losses
from testing.feature_cases import as_hybrid, packed
from testing.lab import Lab
from testing.runner import Finished
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import compared, new_case, tiers

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
BAR = 1e-5
TWIN_BAR = 1e-6
_BALANCING = re.compile(r"seq_load_balancing_loss: (\S+)")


def hybrid(name: str, family: str, sizes: list[list[int]], layers: list[list[int]], **plan: Any) -> Case:
    return as_hybrid(new_case(name, sizes, [2] * len(sizes), **plan), family, layers)


def cut(name: str, family: str, layers: list[list[int]], **row: Any) -> Case:
    return as_hybrid(sliced_case({**PLAIN, **row}, name, random.Random(name)), family, layers)


IN_SLICES = ScheduleSpec("slimpipe", {"slices": 4})
IN_A_V, LOOPED, ZB_H1 = ScheduleSpec("zb-v"), ScheduleSpec("interleaved"), ScheduleSpec("zb-h1")
WINDOW = ScheduleSpec("ministage", {"window": True})
_TP = {"sequence_parallel": True}
_EXCHANGE = {"context_exchange": True}
CASES = [
    # No experts on the first stage, whose log of the balancing loss has the length of the others'.
    hybrid("experts", "hybrid-experts", [[1], [2, 1]], [[1], [3]], even_routing=False),
    cut("exchange", "hybrid", [[5], [3]], exchange=_EXCHANGE),
    # A chunk without layers, between others.
    hybrid("window", "hybrid-latent", [[1], [1]], [[1, 0], [3, 4]], schedule=WINDOW, distributed_optimizer=True),
    hybrid("later", "hybrid-later", [[1], [1]], [[3, 1], [2, 2]], schedule=IN_A_V),
    cut("latent-slices", "hybrid-latent-experts", [[3, 1], [2, 2]], chunks=2, recompute="full"),
    hybrid("later-slices", "hybrid-later", [[1], [1]], [[3], [5]], schedule=IN_SLICES),
    # Without sequence parallelism every TP rank has the whole gradient of the norm of compressed queries.
    hybrid("latent-tp", "hybrid-latent", [[2], [1]], [[3], [1]]),
    cut("vocabulary", "hybrid-norms", [[5], [3]], vocabulary=True, tp=2),
    hybrid("interleaved", "hybrid-norms", [[2], [1, 1]], [[1, 3], [2, 2]], schedule=LOOPED, tied=True, **_TP),
    hybrid("selective", "hybrid", [[2], [1]], [[3], [1]], recompute="selective", sequence_parallel=True),
]
DELTA, MAMBA, NEMOTRON = "hybrid-delta", "hybrid-mamba", "hybrid-mamba-experts"
RECURRENT = [
    hybrid("delta-1f1b", DELTA, [[1], [1, 1]], [[1], [3]]),
    hybrid("delta-replicas", DELTA, [[1, 1], [1]], [[2], [2]], distributed_optimizer=True),
    hybrid("delta-interleaved", DELTA, [[1], [1]], [[1, 1], [1, 1]], schedule=LOOPED),
    hybrid("delta-zb-v", DELTA, [[1], [1]], [[1, 1], [1, 1]], schedule=IN_A_V),
    hybrid("delta-window", DELTA, [[1], [1]], [[1, 1], [1, 1]], schedule=WINDOW, distributed_optimizer=True),
    hybrid("delta-recompute", DELTA, [[1], [1]], [[3], [1]], recompute="full"),
    hybrid("delta-gpipe", DELTA, [[1], [1]], [[1], [3]], schedule=ScheduleSpec("gpipe")),
    hybrid("mamba-1f1b", MAMBA, [[1], [1, 1]], [[1], [3]]),
    hybrid("mamba-zb-h1", MAMBA, [[1], [1]], [[2], [2]], schedule=ZB_H1),
    hybrid("mamba-v-half", MAMBA, [[1], [1]], [[1, 1], [1, 1]], schedule=ScheduleSpec("v-half")),
    hybrid("mamba-interleaved", MAMBA, [[1, 1], [1]], [[1, 1], [1, 1]], schedule=LOOPED),
    hybrid("mamba-window", MAMBA, [[1], [1]], [[2, 1], [1, 0]], schedule=WINDOW, distributed_optimizer=True),
    # TP cuts heads, and with them the parts of the input projection.
    hybrid("delta-tp", DELTA, [[2], [1]], [[1], [3]], sequence_parallel=True),
    hybrid("delta-mixed", DELTA, [[2, 1], [1]], [[3], [1]], distributed_optimizer=True),
    hybrid("mamba-tp", MAMBA, [[1], [2]], [[1], [3]]),
    hybrid("mamba-mixed", MAMBA, [[2, 1], [1]], [[3], [1]], even_routing=False),
    hybrid("mamba-experts", NEMOTRON, [[1], [2]], [[1], [3]]),
    hybrid("mamba-experts-interleaved", NEMOTRON, [[1], [1, 1]], [[1, 1], [1, 1]], schedule=LOOPED),
]
# The state passes from slice to slice.
RECURRENT_SLICES = [
    cut("delta-slices", DELTA, [[1], [3]]),
    cut("delta-slices-chunks", DELTA, [[1, 1], [1, 1]], chunks=2, slices=8),
    cut("delta-slices-full", DELTA, [[3], [1]], recompute="full", microbatches=3),
    cut("delta-slices-tp", DELTA, [[2], [2]], tp=2, recompute="selective"),
    cut("delta-slices-exchange", DELTA, [[5], [3]], exchange=_EXCHANGE),
    cut("delta-seq1f1b", DELTA, [[1], [3]], schedule="seq1f1b", parameters={"slices": 3}),
    cut("delta-terapipe", DELTA, [[1], [3]], schedule="terapipe", parameters={"slices": 7}, tp=2),
    cut("mamba-slices", MAMBA, [[3], [1]], microbatches=4),
    cut("mamba-slices-vocabulary", MAMBA, [[1], [3]], vocabulary=True, offload=0.5),
    cut("mamba-slices-full", MAMBA, [[1, 1], [1, 1]], recompute="full", chunks=2),
    cut("mamba-slices-tp", MAMBA, [[2], [2]], tp=2, distributed_optimizer=True),
    cut("mamba-slices-work", MAMBA, [[5], [3]], parameters={"slice_lengths": "work"}, slices=16),
    hybrid("mamba-slices-mixed", MAMBA, [[2, 1], [1]], [[1], [3]], schedule=IN_SLICES),
    cut("mamba-experts-slices", NEMOTRON, [[1], [3]]),
]
# Context-parallel ranks have parts of the tokens outside of these layers, and some of the heads within.
RECURRENT_SHARED = [
    cut("delta-cp-slices", DELTA, [[1], [3]], cp=2, recompute="full"),
    cut("mamba-cp", MAMBA, [[3], [1]], cp=2, schedule="1f1b", tp=2),  # two ranks with one group
    hybrid("mamba-cp-unequal", MAMBA, [[1], [1]], [[1], [3]], cp=[[3], [2]], shares=(2, 1, 1)),
    cut("delta-cp-exchange", DELTA, [[4, 4], [4, 4]], cp=2, slices=8, chunks=2, exchange=_EXCHANGE),
    hybrid("mamba-cp-mixed", MAMBA, [[2, 1], [1]], [[1], [3]], cp=[[1, 2], [3]], shares=(2, 1), schedule=IN_SLICES),
]
# Up to the last token of a document: Megatron's recurrent layers do not know it, and go on into the next one.
RECURRENT_MASKED = [
    packed(hybrid("mamba-masked", MAMBA, [[1], [1]], [[1], [3]]), "by token", MAMBA),
    packed(cut("delta-masked-slices", DELTA, [[3], [1]], cp=2), "by token, with positions", DELTA),
]
CASES += RECURRENT + RECURRENT_SLICES + RECURRENT_SHARED + RECURRENT_MASKED
BY_NAME = {case.name: case for case in CASES}
FULL = {case.name for case in RECURRENT + RECURRENT_SLICES + RECURRENT_SHARED + RECURRENT_MASKED} - {
    "delta-mixed",
    "mamba-slices-full",
    "mamba-cp-unequal",
} | {"latent-slices", "later-slices", "vocabulary", "interleaved", "selective"}


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
# Plans of packed documents.  Stock Megatron in one process has none without its kernels; one process under a plan has.
_WHOLE_BY_WORK = {"slice_lengths": "work", "cp_documents": "whole"}
RECURRENT_PACKED = [
    hybrid("mamba-packed", MAMBA, [[2], [1]], [[1], [3]], schedule=IN_SLICES),
    cut("delta-packed-work", DELTA, [[1], [3]], cp=2, slices=3, microbatches=6, parameters=_WHOLE_BY_WORK),
    hybrid("delta-packed-zb", DELTA, [[1], [1]], [[3], [1]], schedule=ZB_H1),
    cut("mamba-packed-full", MAMBA, [[1, 1], [1, 1]], recompute="full", chunks=2),
]
PACKED = {case.name: replace(case, extra=_PACKED) for case in RECURRENT_PACKED}


@pytest.mark.parametrize("name", tiers(PACKED, set(PACKED) - {"delta-packed-work"}))
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


# A hybrid model of four layers, from the checkpoint of a GPTModel of two.
TWINS = [
    hybrid("twin-1f1b", "hybrid", [[1], [1, 1]], [[3], [1]], even_routing=False),
    hybrid("twin-slices", "hybrid", [[1], [1]], [[1], [3]], schedule=IN_SLICES),
    hybrid("twin-tp", "hybrid", [[2], [1]], [[1], [3]], sequence_parallel=True),
    hybrid("twin-mixed", "hybrid", [[2, 1], [1]], [[2], [2]]),
    hybrid("twin-interleaved", "hybrid", [[1], [1]], [[1, 1], [1, 1]], schedule=LOOPED),
    hybrid("twin-zb-v", "hybrid", [[1], [1]], [[1, 1], [1, 1]], schedule=IN_A_V),
    hybrid("twin-window", "hybrid", [[1], [1]], [[1, 1], [1, 1]], schedule=WINDOW, distributed_optimizer=True),
    hybrid("twin-zb-h1", "hybrid", [[1], [1]], [[3], [1]], schedule=ZB_H1),
    cut("twin-vocabulary", "hybrid", [[1], [3]], vocabulary=True),
    cut("twin-exchange", "hybrid", [[2], [2]], exchange=_EXCHANGE),
]
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
    """With the state of the optimizer, and over a split vocabulary: as if one of them had trained all the time."""
    by_name = {case.name: case for case in TWINS}
    found = relayed(lab, [(GPT, 1), (by_name["twin-vocabulary"], 2), (by_name["twin-1f1b"], 3), (GPT, lab.steps)])
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
