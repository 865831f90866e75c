"""The doctor's command line, and the checks that it asks for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_het.arguments.flags import TRANSPORTS
from megatron_het.doctor.check import Check, Expectations, load_expectations
from megatron_het.features.registry import check_plan_alone
from megatron_het.plan import Plan, PlanError, load_plan, plan_hash
from megatron_het.safe_io import amount, check_replaces, check_target, split_words

USUAL_LIMIT_S = 120.0
CHECKS = ("software", "flags", "disk", "devices", "links", "stress", "numerics")


def parser_of() -> argparse.ArgumentParser:
    """Returns the parser of the doctor's own options."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_het.doctor",
        description="Checks the allocated nodes before a long job. Start it once per rank, as the training: "
        "with torchrun or srun.",
        epilog="The training's flags follow after '--'; they hold --het-plan. Exit code: 0 fit, 1 not fit, "
        "2 bad input.",
    )
    parser.add_argument("--plan", metavar="FILE", help="plan.json; not needed where the training's flags name one")
    parser.add_argument("--expect", metavar="FILE", help="what cluster file and profile promise (emit --doctor)")
    parser.add_argument("--cluster", metavar="FILE", help="cluster file, in place of --expect; needs the planner")
    parser.add_argument("--profile", metavar="FILE", help="profile.json, with --cluster")
    parser.add_argument("--checkpoints", metavar="DIR", default="", help="folder of the checkpoints, to be written to")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there as well")
    parser.add_argument("--force", action="store_true", help="replace a file that was not written so before")
    parser.add_argument(
        "--log-dir", metavar="DIR", type=Path, help="logs of the tiny training (default: a temporary folder)"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="as --het-transport (default: auto)")
    parser.add_argument(
        "--limit-s", type=amount(10, 3600), default=USUAL_LIMIT_S, help="bound on everything (default: %(default)s)"
    )
    parser.add_argument(
        "--slow-ratio",
        type=amount(1.01, 100),
        default=1.25,
        help="a device is slow when it takes this many times as long as its kind (default: %(default)s)",
    )
    parser.add_argument(
        "--link-ratio",
        type=amount(1.01, 100),
        default=1.5,
        help="a link is slow when it has less than one over this of its bandwidth (default: %(default)s)",
    )
    parser.add_argument(
        "--skip", action="append", default=[], choices=CHECKS, help="leave a check out; may be repeated"
    )
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Options, with the training's flags (those after ``--``) as ``flags``; None when there are none."""
    own, flags = split_words(words)
    parser = parser_of()
    options = parser.parse_args(own)
    options.flags = None if flags is None else tuple(flags)
    if options.profile and not options.cluster:
        parser.error("--profile needs --cluster")
    if options.expect and options.cluster:
        parser.error("--expect and --cluster: give one of them")
    return options


@dataclass(frozen=True, slots=True)
class Inputs:
    """Holds what rank 0 has read."""

    plan: Plan
    expectations: Expectations
    transport: str


def read_inputs(options: argparse.Namespace, world_size: int) -> Inputs:
    """Plan and expectations.

    Raises:
        PlanError: A bad file, no plan, a plan for another world size, expectations of another plan.
        ValueError: A bad cluster file or profile, or a bad target of the report.
    """
    if options.json is not None:
        check_target(options.json)
        if not options.force:
            inputs = [p for p in (options.plan, options.expect, options.cluster, options.profile) if p]
            check_replaces(options.json, inputs, (b'"verdict"',))
    plan, transport = _plan(options)
    check_plan_alone(plan)
    if plan.world_size != world_size:
        raise PlanError("WORLD_SIZE", world_size, f"the plan has {plan.world_size} ranks", "Start one process per rank")
    expectations = _expectations(options, plan)
    if expectations.plan_hash != plan_hash(plan):
        raise PlanError("--expect", options.expect, "was written for another plan", "Run emit --doctor again")
    return Inputs(plan, expectations, transport)


def _plan(options: argparse.Namespace) -> tuple[Plan, str]:
    """The plan, and the transport that the training's flags ask for."""
    if options.plan:
        return load_plan(options.plan), options.transport
    words = list(options.flags or ())
    given = {name: _value(words, name) for name in ("--het-plan", "--het-schedule", "--het-transport")}
    if not (given["--het-plan"] or given["--het-schedule"]):
        raise PlanError("--plan", None, "no plan was given", "Name one, or give the training's flags after '--'")
    from megatron_het.arguments.flags import split_arguments

    config, _ = split_arguments(words)
    assert config.plan is not None
    return config.plan, config.transport if options.transport == "auto" else options.transport


def _value(words: list[str], flag: str) -> str | None:
    for i, word in enumerate(words):
        if word == flag and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return None


def _expectations(options: argparse.Namespace, plan: Plan) -> Expectations:
    if options.expect:
        return load_expectations(options.expect)
    if not options.cluster:
        return Expectations(plan_hash(plan))
    from megatron_het.planner_package import planner

    found: Expectations = planner("emit.command").expectations_of_files(plan, options.cluster, options.profile)
    return found


def checks_of(options: argparse.Namespace, plan: Plan, expectations: Expectations) -> list[Check]:
    """The checks in their order: what a rank can do alone comes first, so that most is known when one is lost."""
    from megatron_het.doctor.devices import Devices
    from megatron_het.doctor.flags import Flags
    from megatron_het.doctor.links import Links
    from megatron_het.doctor.numerics import Numerics
    from megatron_het.doctor.software import Disk, Software
    from megatron_het.doctor.stress import Stress

    checks: list[Check] = [
        Software(),
        Flags(),
        Disk(options.checkpoints, checkpoint_bytes(plan)),
        Devices(options.slow_ratio),
        Links(options.link_ratio, expectations),
        Stress(),
        Numerics(),
    ]
    for check in checks:
        check.limit_s *= patience(options.limit_s)
    return [check for check in checks if check.name not in options.skip]


def patience(limit_s: float) -> float:
    """How much longer than usual single checks may take when there is more time for all of them."""
    return max(1.0, limit_s / USUAL_LIMIT_S)


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of weights and optimizer state, from the plan's prediction; 0 without one.

    Replicas hold copies of each other's state, of which one is saved.
    """
    if plan.predicted is None:
        return 0
    saved = {rank for stage in plan.stages for rank in stage.replicas[0].ranks}
    sharded = plan.training.distributed_optimizer
    return sum(
        (p.parameter_bytes if p.rank in saved else 0) + (p.optimizer_bytes if sharded or p.rank in saved else 0)
        for p in plan.predicted.per_rank
    )
