"""A plan changes in running processes: state moves by ranges, and the losses are those of an undisturbed run."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_het.plan import Plan, ScheduleSpec, save_plan
from testing.cases import Weights, common_flags, recompute_some
from testing.compare import reported_losses
from testing.lab import Lab
from testing.runner import Job
from tests.functional.selected import tiers
from tests.functional.test_checkpoint import KINDS, OFFLOADED, assert_agree, plan

STEPS = 6
DIVIDED = {"distributed_optimizer": True}


def run(
    lab: Lab,
    folder: Path,
    weights: Weights,
    changes: list[tuple[Plan, list[int], int | None]],
    steps: int = STEPS,
    lost: dict[int, list[int]] | None = None,
    more: tuple[str, ...] = (),
) -> Any:
    """Go through steps of (plan, processes, until); returns the losses by iteration of every step.

    ``lost`` says before which step which processes lose what they hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = []
    for i, (under, ranks, until) in enumerate(changes):
        save_plan(under, folder / f"plan-{i}.json")
        script.append(
            {"plan": str(folder / f"plan-{i}.json"), "ranks": ranks, "until": until, "lost": (lost or {}).get(i, [])}
        )
    (folder / "script.json").write_text(json.dumps(script))
    size = max(max(ranks) for _, ranks, _ in changes) + 1
    flags = (*common_flags(weights, steps=steps), *lab.start_flags(weights), "--het-report", str(folder), *more)
    script = {"HET_SCRIPT": str(folder / "script.json")}
    target = "benchmarks.elastic_script:run"
    lab.runner.run(Job("elastic", size, flags, folder, target, environment=script, timeout_s=200.0))
    return [reported_losses(folder / f"generation-{i}") for i in range(len(changes))]


SLICED = ScheduleSpec("seq1f1b", {"slices": 4})
TP: dict[str, Any] = {"sequence_parallel": True}
AGAIN = plan("g", [[2]], [(2, 3)], recompute="full", schedule=ScheduleSpec("interleaved"), **TP)
SHARING = plan("f", [[1, 1]], [(2, 3)], ep=[[2, 2]], schedule=OFFLOADED, even_routing=True, **DIVIDED)
# Each chain is one training; its plans follow each other in the same processes.
CHAINS = {
    # TP cut and put together, other shards of the optimizer, ministages with unequal shares under a window.
    "untied": [KINDS["ministages"].first, plan("b", [[2], [1, 1]], [1, 4], **DIVIDED), KINDS["ministages"].second],
    # Without and with the distributed optimizer, a vocabulary over all stages, chunks in a V.
    "tied": [KINDS["tied"].first, KINDS["split-vocabulary"].first, KINDS["chunks-in-a-v"].first],
    "bf16": [KINDS["bf16"].first, KINDS["bf16"].second],
    # Slices read no masks, and the last plan, with the same processes, does.  Its experts keep tensors of a last pass.
    # Between them two replicas share experts under a window.
    "experts": [plan("e", [[2]], [5], schedule=SLICED, **TP), SHARING, recompute_some(AGAIN)],
    # Between two iterations a rank has new values of its own part of the parameters only.
    "gathered late": [plan("c", [[1, 1], [1]], [3, 2], **DIVIDED), plan("d", [[1], [1, 1]], [2, 3], **DIVIDED)],
}
FLAGS = {"gathered late": ("--overlap-grad-reduce", "--overlap-param-gather")}


@pytest.mark.parametrize("name", tiers(CHAINS, ["bf16", "experts", "gathered late"]))
def test_a_change_of_plan_keeps_the_losses(lab: Lab, tmp_path: Path, name: str):
    plans = CHAINS[name]
    model = plans[0].model
    family = KINDS["experts"].family if name == "experts" else "llama"
    weights = Weights(plans[0].training.precision, model.tied_embeddings, model.num_layers, family)
    reference = plan("one", [[1], [1]], [2, 3], tied=weights.tied, precision=weights.precision, **DIVIDED)
    (whole,) = run(lab, tmp_path / "whole", weights, [(reference, [0, 1], None)])
    changes: list[tuple[Plan, list[int], int | None]] = []
    for i, under in enumerate(plans):
        first = i % 2  # process 0 comes and goes, and others change their rank
        last = i == len(plans) - 1
        changes.append((under, list(range(first, first + under.world_size)), None if last else 2 * (i + 1)))
    found = run(lab, tmp_path / "changed", weights, changes, more=FLAGS.get(name, ()))
    assert [sorted(losses) for losses in found[:-1]] == [[2 * i + 1, 2 * i + 2] for i in range(len(plans) - 1)]
    assert sorted(iteration for losses in found for iteration in losses) == list(range(1, STEPS + 1))
    bar = 2e-3 if weights.precision == "bf16" else 1e-5
    for losses in found:
        assert_agree(losses, whole, bar)


@pytest.mark.parametrize(
    ("under", "lost"),
    [
        # Every rank of a stage holds the only copy of its weights, so nothing is complete once one of them is lost.
        pytest.param(plan("two", [[1], [1]], [2, 3], **DIVIDED), 0, marks=pytest.mark.full),
        # Shards end between two layers: nobody that is left knows the lost layer's state, and all have its weights.
        (plan("three", [[1], [1, 1], [1]], [1, 2, 2], **DIVIDED), 1),
    ],
)
def test_an_incomplete_state_leaves_nothing_behind(lab: Lab, tmp_path: Path, under: Plan, lost: int):
    changes = [(under, list(range(under.world_size)), until) for until in (2, None)]
    before, after = run(lab, tmp_path, Weights(), changes, steps=3, lost={1: [lost]})
    assert sorted(after) == [1, 2, 3], "the training begins as its flags say"
    assert_agree(before, after, 1e-6)
