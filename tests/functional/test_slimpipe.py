"""SlimPipe in Megatron equals stock training in one process; ``benchmarks/parity.py`` has all cases."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testing.cases import LAYERS, Case, build_plan, common_flags, row_of, with_schedule
from testing.compare import compare
from testing.lab import Lab
from testing.runner import Job, words
from testing.slimpipe_cases import PLAIN, sliced_case
from tests.functional.selected import tiers

BAR = 1e-5
_ROW = {**PLAIN, "microbatches": 3, "layers": LAYERS}
_EXCHANGE = {"context_exchange": True}
ROWS: dict[str, dict[str, Any]] = {
    "slices-plain": {},
    "slices-interleaved": {"chunks": 2, "slices": 8, "recompute": "full"},
    "slices-tp": {"tp": 2, "distributed_optimizer": True, "recompute": "selective"},
    "slices-replicas-uneven": {"microbatches": 4, "uneven": True, "tied": True},
    "split-vocabulary": {"tp": 2, "vocabulary": True, "distributed_optimizer": True, "chunks": 2, "microbatches": 2},
    "split-tied-vocabulary-offload": row_of("tied vocabulary offload=0.75 slices=8", recompute="mlp"),
    "slices-of-equal-work": {"slices": 5, "tp": 2, "recompute": "selective", "parameters": {"slice_lengths": "work"}},
    "exchange": {"exchange": _EXCHANGE, "layers": 4, "stages": 4, "slices": 8, "recompute": "selective"},
    "exchange-interleaved-tp": row_of(
        "layers=4 tp=2 slices=8 chunks=2 microbatches=2 distributed_optimizer recompute=full",
        exchange={**_EXCHANGE, "exchange_keep": True, "exchange_idle": True},
    ),
    "exchange-uneven-layers": row_of("uneven layers=5 slices=8", exchange={**_EXCHANGE, "exchange_idle": True}),
    "exchange-unequal-devices": row_of(
        "uneven layers=5 slices=8 microbatches=4",
        exchange={
            **_EXCHANGE,
            "exchange_idle": True,
            "exchange_keep": True,
            "exchange_attention": [1, 1, 4, 3],
            "exchange_rest": [9, 9, 30, 25],
        },
    ),
    "exchange-slices-that-do-not-divide": row_of(
        "slices=5 tp=2 uneven", exchange={**_EXCHANGE, "exchange_keep": True, "exchange_idle": True}
    ),
    "exchange-equal-work": row_of(
        "slices=6 chunks=2 cp=2 recompute=selective",
        exchange={**_EXCHANGE, "exchange_idle": True, "exchange_attention": [1, 2], "exchange_rest": [9, 9, 30, 9]},
        parameters={"slice_lengths": "work"},
    ),
    "context-parallel": {"schedule": "1f1b", "slices": 1, "cp": 2, "uneven": True},
    "context-parallel-slices-exchange": row_of("layers=4 cp=2 microbatches=2 vocabulary", exchange=_EXCHANGE),
    "exchange-replicas-vocabulary": row_of(
        "layers=4 slices=8 microbatches=4 vocabulary overlap", exchange={**_EXCHANGE, "exchange_keep": True}
    ),
}
CASES = {name: sliced_case({**_ROW, **row}, name, random.Random(0)) for name, row in ROWS.items()}
FULL = words(
    """
    slices-plain split-vocabulary exchange exchange-interleaved-tp exchange-unequal-devices
    exchange-slices-that-do-not-divide exchange-equal-work exchange-replicas-vocabulary
    """
)


@pytest.mark.parametrize("name", tiers(CASES, FULL))
def test_equals_one_process(name: str, lab: Lab) -> None:
    found = lab.differences(CASES[name])
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


def test_one_call_per_slice(lab: Lab) -> None:
    """Transformer Engine's attention, stood in for: a slice and all before it are one call of the forward."""
    case = replace(CASES["slices-plain"], name="slices-in-one-call")
    done = lab.runner.run(lab.job(case, observe="testing.attention_stand_ins:observe"))
    assert all((done.job.log_dir / f"joined-{rank}").exists() for rank in range(case.plan.world_size))
    found = compare(done.job.log_dir, case.plan, lab.reference(case))
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


def test_thrifty_layers(lab: Lab) -> None:
    case = replace(CASES["slices-plain"], name="slices-thrifty")
    found = lab.differences(case, "--het-thrifty-layers")
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


def _even_case() -> Case:
    """Four layers, which flags can spread over two stages of two chunks."""
    even = Case("like-flags", build_plan([[1], [1]], [2, 2], random.Random(0)))
    return with_schedule(even, "slimpipe", 2, {"slices": 4})


def _from_flags(lab: Lab, folder: Path, *more: str) -> Job:
    layout = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    slices = ("--het-schedule", "slimpipe", "--het-slices", "4", "--het-report", str(folder))
    like = _even_case()
    flags = (*common_flags(*like.reference, steps=lab.steps), *lab.start_flags(like.weights), *layout.split())
    observe = ("testing.probe:observe", {"out": str(folder), "gradients": True})
    return Job(folder.name, 2, (*flags, *slices, *more), folder, setup=observe, timeout_s=240.0)


def test_from_flags(lab: Lab, tmp_path: Path) -> None:
    """Without a plan file the layout comes from Megatron's own flags."""
    case = _even_case()
    done = lab.runner.run(_from_flags(lab, tmp_path / "flags"))
    found = compare(done.job.log_dir, case.plan, lab.reference(case))
    assert max(found.loss, found.validation, found.gradient) <= BAR, found


@pytest.mark.full
def test_refused_before_training(lab: Lab, tmp_path: Path) -> None:
    job = _from_flags(lab, tmp_path / "refused", "--attention-dropout", "0.1")
    done = lab.runner.run(job, check=False)
    assert set(done.returncodes) == {2}
    assert "--attention-dropout = 0.1: cannot be used with slices" in done.log(0)


@pytest.mark.parametrize(("right", "wrong"), [("slices-plain", "positions"), ("exchange", "weights")])
def test_the_comparison_can_fail(right: str, wrong: str, lab: Lab) -> None:
    """Slices that all start at position 0, or helpers that answer with wrong weights, train something else."""
    case = replace(CASES[right], name=f"{right}-wrong-{wrong}")
    found = lab.differences(case, observe=f"tests.functional.break_slices:{wrong}")
    assert found.gradient > 100 * BAR, found
