"""Checkpoints moved between two plans of different layout: ``python -m benchmarks.gpu.checkpoint --json OUT``.

Two ranks train for half of the steps under one plan and save; two ranks go on under another one, which divides the
model differently.  Losses must be those of one uninterrupted process of stock Megatron, within
``testing.compare.BOUNDS``.  Layers are Megatron's own in fp32, with ``--te`` those of Transformer Engine in bf16.
"""

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, CaseError, Setting, run_part
from benchmarks.models import case_for
from megatron_het.plan import Plan, Replica, ScheduleSpec, save_plan
from testing.cases import Case as Training
from testing.cases import build_plan
from testing.combination_cases import pair_row
from testing.compare import BOUNDS, plan_losses, reference_losses, relative
from testing.lab import Lab
from testing.runner import Job, Runner

_STEPS, _CASE_S = 4, 75.0


@dataclass(frozen=True)
class Move:
    """Two plans: a checkpoint of the first one is loaded under the second one."""

    first: Plan
    second: Plan
    family: str = "llama"


def moves(precision: str) -> dict[str, Move]:
    """Returns the cases.

    Args:
        precision: Of the weights.
    """

    def plan(sizes: list[list[int]], layers: list[int], **more: Any) -> Plan:
        training = {"distributed_optimizer": True, "precision": precision, **more}
        return build_plan(sizes, layers, random.Random(0), **training)

    stages = plan([[1], [1]], [2, 3])
    sliced = replace(stages, schedule=ScheduleSpec("slimpipe", {"slices": 4, "vocabulary": True}))
    cut = tuple(replace(s, layers=layers) for s, layers in zip(stages.stages, ((2, 1), (1, 1)), strict=True))
    window = {"window": True, "offload": True, "offload_optimizer": True}
    windowed = replace(stages, stages=cut, schedule=ScheduleSpec("ministage", window))
    # Experts of a layer are on one rank of each stage, then divided between the two ranks of the only stage.
    experts = case_for("mixtral", pair_row([("schedule", "1f1b")]), "experts", 0).plan
    experts = replace(experts, training=replace(stages.training, sequence_parallel=False))
    every = tuple(range(experts.num_microbatches))
    together = replace(experts.stages[0], layers=(experts.model.num_layers,), replicas=(Replica((0, 1), every, ep=2),))
    divided = replace(experts, stages=(together,), training=replace(experts.training, sequence_parallel=True))
    return {
        "stages-to-tp": Move(stages, plan([[2]], [5], sequence_parallel=True)),
        "tp-to-replicas": Move(plan([[2]], [5]), plan([[1, 1]], [5])),
        "slices-to-window": Move(sliced, windowed),
        "experts": Move(experts, divided, "mixtral"),
    }


def move(setting: Setting, name: str, chosen: Move, *, has_te: bool) -> dict[str, Any]:
    """Train, save, load under the other plan, and go on; returns the differences of the losses."""
    half, precision, own = _STEPS // 2, chosen.first.training.precision, setting.folder / name
    of_weights = Training(name, chosen.first, family=chosen.family)
    found: dict[str, Any] = {"bound": BOUNDS[setting.device][precision]["loss"]}
    with Runner(setting.device, has_te=has_te) as runner:
        lab = Lab(runner, own, steps=_STEPS, shared=setting.folder / "shared")
        expected = reference_losses(lab.reference(of_weights))["losses"]
        saved = ("--save", str(own / "checkpoint"), "--save-interval", str(half), "--exit-interval", str(half))
        loaded = ("--load", str(own / "checkpoint"), *lab.data_flags())
        runs = (
            ("saved", chosen.first, (*lab.start_flags(of_weights.weights), *saved), expected[:half]),
            ("loaded", chosen.second, loaded, expected[half:]),
        )
        for what, plan, more, losses in runs:
            training = Training(name, plan, family=chosen.family)
            argv = (*lab.common_flags(training.weights), *more, *training.plan_flags(setting.device))
            _train(runner, f"{name} {what}", plan, argv, own / what, setting.left_s(_CASE_S))
            found[what] = relative(plan_losses(own / what, plan)["losses"], losses, f"losses, {what}")
    if not max(found["saved"], found["loaded"]) <= found["bound"]:
        raise CaseError(f"losses differ: {found}")
    return found


def _train(runner: Runner, name: str, plan: Plan, argv: Sequence[str], folder: Path, limit_s: float) -> None:
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    flags = (*argv, "--het-plan", str(folder / "plan.json"), "--het-report", str(folder))
    runner.run(Job(name, plan.world_size, flags, folder, timeout_s=limit_s))


def cases(setting: Setting, options: argparse.Namespace) -> Mapping[str, Case]:
    """Returns the cases."""
    chosen = moves("bf16" if options.te else "fp32")
    return {name: partial(move, setting, name, one, has_te=options.te) for name, one in chosen.items()}


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--te", action="store_true", help="layers of Transformer Engine, in bf16")

    return run_part("benchmarks.gpu.checkpoint", __doc__, cases, words, add, at_once=len(moves("fp32")))


if __name__ == "__main__":
    raise SystemExit(main())
