"""Training in NCCL's order, on the CPU; and orders that NCCL would not survive, which must be noticed.

``benchmarks/nccl_order.py`` runs more plans.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.models import case_for
from benchmarks.nccl_mistakes import MISTAKES, SOUND, mistake_job
from benchmarks.nccl_order import cases_of, caught_by_some_rank, in_nccl_order, transports
from benchmarks.parity import labs
from testing.cases import Case, build_plan, with_schedule
from testing.combination_cases import pair_row
from testing.compare import compare
from testing.feature_cases import packed
from testing.lab import Lab
from testing.runner import Job, Runner, words
from tests.functional.selected import tiers

FP32_BAR = 1e-5
STEPS_IN_ORDER = 3
"""Every step has the same order; what a step leaves to the next one comes twice, and an evaluation once."""
# Mixed TP in a stage with ties and overlapped reductions; a window with unequal shares; sizes by microbatch; chunks;
# exchange, split vocabulary, also under a window, updates of ties, activations offloaded, CP; chunks in a V, whose loss
# is told to another stage.
CHOSEN = {
    "1f1b": ("pair-04", "random-03"),
    "gpipe": ("gpipe-pair-01",),
    "zero-bubble": ("zb-h1-pair-04", "zb-v-pair-01"),
    "unequal-microbatches": ("sizes-1-2-1-1-1-p4-n16-v2", "sizes-4-2-interleaved-plain-20"),
    "ministage": ("fp32-03", "fp32-42", "fp32-48", "fp32-50", "fp32-52"),
    "slimpipe": ("exchange-p4-n8-vocabulary", "exchange-p2-n2-idle-vocabulary", "cp2-exchange"),
    "data-parallel": ("12-sizes-1-1-1-2-1-zero-2",),
    "depths": ("pair-00",),
}
FULL = words(
    """
    random-03 gpipe-pair-01 zb-h1-pair-04 sizes-1-2-1-1-1-p4-n16-v2 fp32-03 fp32-48 fp32-52
    exchange-p2-n2-idle-vocabulary 12-sizes-1-1-1-2-1-zero-2
    """
)
NAMED = {name: schedule for schedule, names in CHOSEN.items() for name in names}


def chosen(name: str) -> Case:
    schedule = NAMED[name]
    cases = cases_of(schedule, 0, schedule not in ("slimpipe", "ministage"))
    return next(case for case in cases if case.name == name)


def short(lab: Lab, case: Case) -> Job:
    """The beginning of the case's training: simulating the order of every operator takes time."""
    return in_nccl_order(lab.job(case, "--exit-interval", str(STEPS_IN_ORDER)))


@pytest.mark.parametrize("name", tiers(NAMED, FULL))
def test_training_in_nccls_order_equals_one_process(name: str, lab_of: Callable[[type[Lab]], Lab]):
    case = chosen(name)
    (kind,) = labs([case])
    check_in_nccls_order(case, lab_of(kind))


def check_in_nccls_order(case: Case, lab: Lab) -> None:
    reference = lab.reference(case)
    done = lab.runner.run(short(lab, case))
    assert transports(done.job.log_dir) == {"nccl"}
    found = compare(done.job.log_dir, case.plan, reference, gradients=False, steps=STEPS_IN_ORDER)
    assert max(found.loss, found.validation) <= FP32_BAR, found


def test_documents_are_told_in_nccls_order(lab: Lab):
    """In a collective of all ranks, before every iteration."""
    plan = build_plan([[1], [1, 1]], [3, 2], random.Random(0), even_routing=False)
    case = packed(Case("documents", plan), "by dataset", "llama")
    check_in_nccls_order(case, lab)


@pytest.mark.full
def test_later_tokens_are_told_in_nccls_order(lab: Lab):
    """Between the ranks of a TP group, before a forward of the last stage."""
    plan = build_plan([[1], [2]], [3, 2], random.Random(0), sequence_parallel=True)
    plan = replace(plan, model=replace(plan.model, mtp_num_layers=2))
    case = with_schedule(Case("later", plan, family="later-tokens"), "slimpipe", 1, {"slices": 4})
    check_in_nccls_order(case, lab)


@pytest.mark.full
def test_latent_attention_and_experts_in_nccls_order(lab: Lab):
    """Slices with a cache of compressed keys and values, part of whose attention is computed by another stage."""
    row = {"schedule": "slimpipe", "context_exchange": True, "tp": "by stage"}
    case = case_for("deepseek_v2", pair_row(row.items()), "latent", 0)
    reference = lab.reference(case)
    done = lab.runner.run(short(lab, case)).check()
    assert transports(done.job.log_dir) == {"nccl"}
    found = compare(done.job.log_dir, case.plan, reference, steps=STEPS_IN_ORDER)
    assert found.gradient <= FP32_BAR, found
    # Two scores of experts that are equal up to rounding may be ordered otherwise in a later step.
    assert found.loss <= 1e-3, found


@pytest.mark.parametrize("name", list(MISTAKES))
def test_wrong_orders_are_noticed(name: str, runner: Runner, tmp_path: Path):
    done = runner.run(mistake_job(name, tmp_path), check=False)
    assert caught_by_some_rank(done), [done.log(rank)[-500:] for rank in range(len(done.returncodes))]


@pytest.mark.parametrize("name", list(SOUND))
def test_what_nccl_runs_is_no_mistake(name: str, runner: Runner, tmp_path: Path):
    done = runner.run(mistake_job(name, tmp_path), check=False)
    assert set(done.returncodes) == {3}, [done.log(rank)[-500:] for rank in range(len(done.returncodes))]
