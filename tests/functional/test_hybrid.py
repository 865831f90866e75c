"""Hybrid models under plans equal stock Megatron in one process, and a GPTModel of the same layers.

``benchmarks/parity.py --model hybrid`` has more plans, of every schedule.
"""

import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from testing.cases import Case, build_plan, with_schedule
from testing.compare import compare, plan_losses, reference_losses
from testing.feature_cases import as_hybrid, packed
from testing.lab import Lab
from testing.runner import Finished
from testing.slimpipe_cases import PLAIN, sliced_case, with_context_parallel_sizes
from tests.functional.selected import compared, tiers

CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
BAR = 1e-5
TWIN_BAR = 1e-6
_BALANCING = re.compile(r"seq_load_balancing_loss: (\S+)")


def dense(name: str, sizes: list[list[int]], **plan: Any) -> Case:
    return Case(name, build_plan(sizes, [2] * len(sizes), random.Random(name), **plan))


def sliced(name: str, **row: Any) -> Case:
    return sliced_case({**PLAIN, **row}, name, random.Random(name))


def in_chunks(case: Case, schedule: str, **parameters: Any) -> Case:
    return replace(with_schedule(case, schedule, 2, parameters), name=case.name)


def in_slices(case: Case) -> Case:
    return replace(with_schedule(case, "slimpipe", 1, {"slices": 4}), name=case.name)


_EXCHANGE = {"context_exchange": True}
CASES = [
    # No experts on the first stage, whose log of the balancing loss has the length of the others'.
    as_hybrid(dense("experts", [[1], [2, 1]], even_routing=False), "hybrid-experts", [[1], [3]]),
    as_hybrid(sliced("exchange", exchange=_EXCHANGE), "hybrid", [[5], [3]]),
    as_hybrid(
        in_chunks(dense("window", [[1], [1]], distributed_optimizer=True), "ministage", window=True),
        "hybrid-latent",
        [[1, 0], [3, 4]],  # a chunk without layers, between others
    ),
    as_hybrid(in_chunks(dense("later", [[1], [1]]), "zb-v"), "hybrid-later", [[3, 1], [2, 2]]),
    as_hybrid(sliced("latent-slices", chunks=2, recompute="full"), "hybrid-latent-experts", [[3, 1], [2, 2]]),
    as_hybrid(in_slices(dense("later-slices", [[1], [1]])), "hybrid-later", [[3], [5]]),
    # Without sequence parallelism every TP rank has the whole gradient of the norm of compressed queries.
    as_hybrid(dense("latent-tp", [[2], [1]]), "hybrid-latent", [[3], [1]]),
    as_hybrid(sliced("vocabulary", vocabulary=True, tp=2), "hybrid-norms", [[5], [3]]),
    as_hybrid(
        in_chunks(dense("interleaved", [[2], [1, 1]], sequence_parallel=True, tied=True), "interleaved"),
        "hybrid-norms",
        [[1, 3], [2, 2]],
    ),
    as_hybrid(dense("selective", [[2], [1]], recompute="selective", sequence_parallel=True), "hybrid", [[3], [1]]),
]
DELTA, MAMBA, NEMOTRON = "hybrid-delta", "hybrid-mamba", "hybrid-mamba-experts"
RECURRENT = [
    as_hybrid(dense("delta-1f1b", [[1], [1, 1]]), DELTA, [[1], [3]]),
    as_hybrid(dense("delta-replicas", [[1, 1], [1]], distributed_optimizer=True), DELTA, [[2], [2]]),
    as_hybrid(in_chunks(dense("delta-interleaved", [[1], [1]]), "interleaved"), DELTA, [[1, 1], [1, 1]]),
    as_hybrid(in_chunks(dense("delta-zb-v", [[1], [1]]), "zb-v"), DELTA, [[1, 1], [1, 1]]),
    as_hybrid(
        in_chunks(dense("delta-window", [[1], [1]], distributed_optimizer=True), "ministage", window=True),
        DELTA,
        [[1, 1], [1, 1]],
    ),
    as_hybrid(dense("delta-recompute", [[1], [1]], recompute="full"), DELTA, [[3], [1]]),
    as_hybrid(replace(with_schedule(dense("", [[1], [1]]), "gpipe", 1, {}), name="delta-gpipe"), DELTA, [[1], [3]]),
    as_hybrid(dense("mamba-1f1b", [[1], [1, 1]]), MAMBA, [[1], [3]]),
    as_hybrid(replace(with_schedule(dense("", [[1], [1]]), "zb-h1", 1, {}), name="mamba-zb-h1"), MAMBA, [[2], [2]]),
    as_hybrid(in_chunks(dense("mamba-v-half", [[1], [1]]), "v-half"), MAMBA, [[1, 1], [1, 1]]),
    as_hybrid(in_chunks(dense("mamba-interleaved", [[1, 1], [1]]), "interleaved"), MAMBA, [[1, 1], [1, 1]]),
    as_hybrid(
        in_chunks(dense("mamba-window", [[1], [1]], distributed_optimizer=True), "ministage", window=True),
        MAMBA,
        [[2, 1], [1, 0]],
    ),
    # TP cuts heads, and with them the parts of the input projection.
    as_hybrid(dense("delta-tp", [[2], [1]], sequence_parallel=True), DELTA, [[1], [3]]),
    as_hybrid(dense("delta-mixed", [[2, 1], [1]], distributed_optimizer=True), DELTA, [[3], [1]]),
    as_hybrid(dense("mamba-tp", [[1], [2]]), MAMBA, [[1], [3]]),
    as_hybrid(dense("mamba-mixed", [[2, 1], [1]], even_routing=False), MAMBA, [[3], [1]]),
    as_hybrid(dense("mamba-experts", [[1], [2]]), NEMOTRON, [[1], [3]]),
    as_hybrid(in_chunks(dense("mamba-experts-interleaved", [[1], [1, 1]]), "interleaved"), NEMOTRON, [[1, 1], [1, 1]]),
]
# The state passes from slice to slice.
RECURRENT_SLICES = [
    as_hybrid(sliced("delta-slices"), DELTA, [[1], [3]]),
    as_hybrid(sliced("delta-slices-chunks", chunks=2, slices=8), DELTA, [[1, 1], [1, 1]]),
    as_hybrid(sliced("delta-slices-full", recompute="full", microbatches=3), DELTA, [[3], [1]]),
    as_hybrid(sliced("delta-slices-tp", tp=2, recompute="selective"), DELTA, [[2], [2]]),
    as_hybrid(sliced("delta-slices-exchange", exchange=_EXCHANGE), DELTA, [[5], [3]]),
    as_hybrid(sliced("delta-seq1f1b", schedule="seq1f1b", parameters={"slices": 3}), DELTA, [[1], [3]]),
    as_hybrid(sliced("delta-terapipe", schedule="terapipe", parameters={"slices": 7}, tp=2), DELTA, [[1], [3]]),
    as_hybrid(sliced("mamba-slices", microbatches=4), MAMBA, [[3], [1]]),
    as_hybrid(sliced("mamba-slices-vocabulary", vocabulary=True, offload=0.5), MAMBA, [[1], [3]]),
    as_hybrid(sliced("mamba-slices-full", recompute="full", chunks=2), MAMBA, [[1, 1], [1, 1]]),
    as_hybrid(sliced("mamba-slices-tp", tp=2, distributed_optimizer=True), MAMBA, [[2], [2]]),
    as_hybrid(sliced("mamba-slices-work", parameters={"slice_lengths": "work"}, slices=16), MAMBA, [[5], [3]]),
    as_hybrid(in_slices(dense("mamba-slices-mixed", [[2, 1], [1]])), MAMBA, [[1], [3]]),
    as_hybrid(sliced("mamba-experts-slices"), NEMOTRON, [[1], [3]]),
]


def divided(case: Case, sizes: list[list[int]], shares: tuple[int, ...]) -> Case:
    return replace(case, plan=replace(case.plan, stages=with_context_parallel_sizes(case.plan.stages, sizes, shares)))


# Context-parallel ranks have parts of the tokens outside of these layers, and some of the heads within.
RECURRENT_SHARED = [
    as_hybrid(sliced("delta-cp-slices", cp=2, recompute="full"), DELTA, [[1], [3]]),
    as_hybrid(sliced("mamba-cp", cp=2, schedule="1f1b", tp=2), MAMBA, [[3], [1]]),  # two ranks with one group
    as_hybrid(divided(dense("mamba-cp-unequal", [[1], [1]]), [[3], [2]], (2, 1, 1)), MAMBA, [[1], [3]]),
    as_hybrid(sliced("delta-cp-exchange", cp=2, slices=8, chunks=2, exchange=_EXCHANGE), DELTA, [[4, 4], [4, 4]]),
    as_hybrid(divided(in_slices(dense("mamba-cp-mixed", [[2, 1], [1]])), [[1, 2], [3]], (2, 1)), MAMBA, [[1], [3]]),
]
# Up to the last token of a document: Megatron's recurrent layers do not know it, and go on into the next one.
RECURRENT_MASKED = [
    packed(as_hybrid(dense("mamba-masked", [[1], [1]]), MAMBA, [[1], [3]]), "by token", MAMBA),
    packed(as_hybrid(sliced("delta-masked-slices", cp=2), DELTA, [[3], [1]]), "by token, with positions", DELTA),
]
CASES += RECURRENT + RECURRENT_SLICES + RECURRENT_SHARED + RECURRENT_MASKED
BY_NAME = {case.name: case for case in CASES}
FULL = {case.name for case in RECURRENT + RECURRENT_SLICES + RECURRENT_SHARED + RECURRENT_MASKED} - {
    "delta-mixed",
    "mamba-slices-full",
    "mamba-cp-unequal",
} | {"latent-slices", "later-slices", "vocabulary", "interleaved", "selective"}


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, lab: Lab, finished: dict[str, Finished]) -> None:
    case = BY_NAME[name]
    found = compared(case, finished[name], lab)
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    if name == "experts":
        ours, stock = finished[name].log(), (lab.reference(case) / "rank-0.log").read_text(encoding="utf-8")
        logged = [list(map(float, _BALANCING.findall(log))) for log in (ours, stock)]
        assert len(logged[0]) == lab.steps
        logged = [values[:1] + values[2:] for values in logged]  # stock Megatron's second line counts the first one too
        assert logged[0] == pytest.approx(logged[1], rel=1e-4)


_PACKED = ("--dataloader-inter-document-masking", "--reset-position-ids")
# Plans of packed documents.  Stock Megatron in one process has none without its kernels; one process under a plan has.
RECURRENT_PACKED = [
    as_hybrid(in_slices(dense("mamba-packed", [[2], [1]])), MAMBA, [[1], [3]]),
    as_hybrid(
        sliced(
            "delta-packed-work",
            cp=2,
            slices=3,
            microbatches=6,
            parameters={"slice_lengths": "work", "cp_documents": "whole"},
        ),
        DELTA,
        [[1], [3]],
    ),
    as_hybrid(replace(with_schedule(dense("", [[1], [1]]), "zb-h1", 1, {}), name="delta-packed-zb"), DELTA, [[3], [1]]),
    as_hybrid(sliced("mamba-packed-full", recompute="full", chunks=2), MAMBA, [[1, 1], [1, 1]]),
]
PACKED = {case.name: replace(case, extra=_PACKED) for case in RECURRENT_PACKED}


@pytest.mark.parametrize("name", tiers(PACKED, set(PACKED) - {"delta-packed-work"}))
def test_recurrent_layers_begin_anew_with_documents(name: str, lab: Lab) -> None:
    case = PACKED[name]
    one = as_hybrid(dense(f"{name}-one", [[1]]), case.family, [[4]])
    one = replace(one, extra=_PACKED, plan=replace(one.plan, model=case.plan.model))
    runs = [done.check() for done in lab.runner.run_all([lab.job(one), lab.job(case)], at_once=2)]
    folders = {done.job.name: done.job.log_dir for done in runs}
    found = compare(folders[case.name], case.plan, folders[one.name])
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
    carried = packed(replace(case, extra=()), "by token, with positions", case.family)
    assert compare(folders[case.name], case.plan, lab.reference(carried)).gradient > 100 * BAR


# A hybrid model of four layers, from the checkpoint of a GPTModel of two.
TWINS = [
    as_hybrid(dense("twin-1f1b", [[1], [1, 1]], even_routing=False), "hybrid", [[3], [1]]),
    as_hybrid(in_slices(dense("twin-slices", [[1], [1]])), "hybrid", [[1], [3]]),
    as_hybrid(dense("twin-tp", [[2], [1]], sequence_parallel=True), "hybrid", [[1], [3]]),
    as_hybrid(dense("twin-mixed", [[2, 1], [1]]), "hybrid", [[2], [2]]),
    as_hybrid(in_chunks(dense("twin-interleaved", [[1], [1]]), "interleaved"), "hybrid", [[1, 1], [1, 1]]),
    as_hybrid(in_chunks(dense("twin-zb-v", [[1], [1]]), "zb-v"), "hybrid", [[1, 1], [1, 1]]),
    as_hybrid(
        in_chunks(dense("twin-window", [[1], [1]], distributed_optimizer=True), "ministage", window=True),
        "hybrid",
        [[1, 1], [1, 1]],
    ),
    as_hybrid(replace(with_schedule(dense("", [[1], [1]]), "zb-h1", 1, {}), name="twin-zb-h1"), "hybrid", [[3], [1]]),
    as_hybrid(sliced("twin-vocabulary", vocabulary=True), "hybrid", [[1], [3]]),
    as_hybrid(sliced("twin-exchange", exchange=_EXCHANGE), "hybrid", [[2], [2]]),
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
