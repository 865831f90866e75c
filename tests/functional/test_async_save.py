"""``--async-save`` under a plan: what was saved while training went on is what was trained."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_het.plan import save_plan
from testing.cases import common_flags
from testing.compare import reported_losses
from testing.lab import Lab
from testing.runner import Finished, Job, words
from tests.functional.selected import tiers
from tests.functional.test_checkpoint import KINDS

STEPS, SAVED_AT = 6, 3
ASYNC = words("--async-save --use-persistent-ckpt-worker --async-strategy mcore")


# Under a window parameters are freed when the next iteration begins; else they are trained on at once.
@pytest.mark.parametrize("kind", tiers(["ministages", "distributed-optimizer"], ["distributed-optimizer"]))
def test_a_run_goes_on_from_an_asynchronous_save(lab: Lab, tmp_path: Path, kind: str):
    plan, weights = KINDS[kind].first, KINDS[kind].weights
    save_plan(plan, tmp_path / "plan.json")
    common = (*common_flags(weights, steps=STEPS), "--het-plan", str(tmp_path / "plan.json"))
    saved = tmp_path / "saved"

    def run(name: str, *more: str) -> Finished:
        folder = tmp_path / name
        job = Job(name, plan.world_size, (*common, "--het-report", str(folder), *more), folder)
        return lab.runner.run(replace(job, timeout_s=240.0))

    run("saving", *lab.start_flags(weights), "--save", str(saved), "--save-interval", str(SAVED_AT), *ASYNC)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    run("resumed", *lab.data_flags(), "--load", str(saved), "--ckpt-step", str(SAVED_AT))
    whole, rest = (reported_losses(tmp_path / name) for name in ("saving", "resumed"))
    assert sorted(rest) == list(range(SAVED_AT + 1, STEPS + 1))
    assert rest == {iteration: whole[iteration] for iteration in rest}
