"""Hybrid models under plans equal stock Megatron in one process, and a GPTModel of the same layers.

``benchmarks/parity.py --model hybrid`` has more plans, of every schedule.
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cases import Case, Weights, build_plan, common_flags, with_schedule
from benchmarks.hybrid_cases import as_hybrid
from benchmarks.lab import Lab
from benchmarks.runner import Finished, Job
from benchmarks.slimpipe_cases import PLAIN, sliced_case
from megatron_het.plan import save_plan
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
    as_hybrid(sliced("vocabulary", vocabulary=True, tp=2), "hybrid-norms", [[5], [3]]),
    as_hybrid(
        in_chunks(dense("interleaved", [[2], [1, 1]], sequence_parallel=True, tied=True), "interleaved"),
        "hybrid-norms",
        [[1, 3], [2, 2]],
    ),
    as_hybrid(dense("selective", [[2], [1]], recompute="selective", sequence_parallel=True), "hybrid", [[3], [1]]),
]
DELTA, MAMBA = "hybrid-delta", "hybrid-mamba"
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
]
CASES += RECURRENT + RECURRENT_SLICES
BY_NAME = {case.name: case for case in CASES}
FULL = {case.name for case in RECURRENT + RECURRENT_SLICES} - {"delta-mixed", "mamba-slices-full"} | {
    "latent-slices",
    "later-slices",
    "vocabulary",
    "interleaved",
    "selective",
}


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


TWINS = {
    "one-process": None,
    "one-f-one-b": as_hybrid(dense("one-f-one-b", [[1], [1, 1]], even_routing=False), "hybrid", [[3], [1]]).plan,
    "slices": as_hybrid(in_slices(dense("slices", [[1], [1]])), "hybrid", [[3], [1]]).plan,
}


def test_a_gpt_model_and_its_hybrid_twin_train_alike(lab: Lab) -> None:
    folder = lab.folder / "twins"
    folder.mkdir()
    weights = str(folder / "weights.npz")
    lab.data_flags()

    def job(name: str, family: str, layers: int, setup: str, world_size: int = 1, *more: str) -> Job:
        flags = common_flags(Weights(layers=layers, family=family), steps=lab.steps)
        options = {"weights": weights, "out": str(folder / name)}
        observed = (f"tests.functional.twins:{setup}", options)
        return Job(name, world_size, (*flags, *lab.data_flags(), *more), folder / name, setup=observed)

    lab.runner.run(job("gpt", "llama", 2, "keep"))
    jobs = []
    for name, plan in TWINS.items():
        own: tuple[str, ...] = ()
        if plan is not None:
            save_plan(plan, folder / f"{name}.json")
            own = ("--het-plan", str(folder / f"{name}.json"))
        jobs.append(job(name, "hybrid", 4, "take", plan.world_size if plan else 1, *own))
    expected = json.loads((folder / "gpt" / "losses-0.json").read_text(encoding="utf-8"))["losses"]
    for done in lab.runner.run_all(jobs, at_once=2):
        done.check()
        last = done.job.log_dir / f"losses-{done.job.world_size - 1}.json"
        found = json.loads(last.read_text(encoding="utf-8"))["losses"]
        assert len(found) == lab.steps and found == pytest.approx(expected, rel=TWIN_BAR), done.job.name


@pytest.mark.full
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH is not set: no Megatron-LM checkout")
def test_a_checkouts_own_script_runs_under_a_plan(lab: Lab) -> None:
    case = replace(BY_NAME["experts"], name="own-script")
    job = lab.job(case)
    script = replace(job, entry="megatron_het.run:main", argv=(f"{CHECKOUT}/pretrain_hybrid.py", *job.argv))
    found = compared(case, lab.runner.run(script), lab)
    assert max(found.loss, found.validation, found.gradient, found.norm) <= BAR, found
