"""The ``--het-*`` flags of a training's command line.

They are read before Megatron, and before torch, is imported: a bad plan is reported in a fraction
of a second and before any process group exists.  The remaining words of the command line are passed to
Megatron's own parser.
"""

import argparse
import difflib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_het.features import FEATURES
from megatron_het.features.base import Feature, Option
from megatron_het.features.registry import check_plan_alone, runnable_schedules
from megatron_het.plan import Plan, ScheduleSpec, check_plan, load_plan
from megatron_het.plan.run_config import HetConfig, check_turns, errors_of, plan_from_flags
from megatron_het.safe_io import add_options, count

TRANSPORTS = ("auto", "nccl", "gloo", "staged")


# fmt: off
def add_het_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this extension to a parser."""
    add_options(parser.add_argument_group(
        "heterogeneous training",
        "Without --het-plan and --het-schedule Megatron runs exactly as it is. See docs/ for the plan file.",
    ), {
        "--het-plan": (
            None, "FILE", "plan.json: assigns layers and microbatches to ranks; give one plan for each global batch "
            "size of --step-batch-size-schedule", {"nargs": "+"}),
        "--het-schedule": (
            None, "", "pipeline schedule; overrides the plan's; without --het-plan an even plan is made from "
            "Megatron's own flags (pipeline, tensor and virtual pipeline sizes, batch sizes)",
            {"choices": runnable_schedules()}),
        "--het-transport": (
            "auto", "", "transport of activations between stages: nccl, gloo (host tensors), staged (device tensors "
            "copied through host memory; all other groups stay those of --distributed-backend); auto chooses",
            {"choices": TRANSPORTS}),
        "--het-report": (
            None, "DIR", "write rank-<rank>.json with times, losses and memory of this run's newest 10,000 iterations "
            "into DIR, every half minute and at the end"),
        "--het-trace": (
            None, "DIR", "write a Chrome trace of one iteration per rank into DIR (open it in Perfetto)"),
        "--het-trace-iteration": (
            3, "N", "the iteration of this run to trace, counted from 1 (default: 3)", {"type": count(1, 1 << 31)}),
        "--het-auto-batch": (
            None, "DIR", "no plan and no micro batch size: measure the largest pass and the times of all devices at "
            "the start, raise the ZeRO stage until one sequence fits (beginning at --het-zero, if given), allocate "
            "passes by speed (Poplar), and train; curves and plan are kept in DIR/auto_batch, and used by "
            "a later start with the same devices"),
        "--het-measured-cp-shares": (
            False, "", "time the devices at the start, and give each context-parallel rank a part of every sequence in "
            "proportion to its speed, in place of the plan's cp_shares"),
        "--het-trust-checkpoint": (
            False, "", "allow any class in the pickle .metadata of a checkpoint to load, not only those of torch's "
            "format; for checkpoints of other programs that you trust, because a pickle can run code"),
    })
    for feature in FEATURES:
        _add_feature(parser, feature)
    return parser
# fmt: on


def _add_feature(parser: argparse.ArgumentParser, feature: Feature) -> None:
    """Add the flags of one feature, in a group of their own."""
    flagged = [option for option in feature.parameters if option.flag]
    if not flagged:
        return
    where = "" if feature.schedules is None else f" (schedules: {', '.join(feature.schedules)})"
    group = parser.add_argument_group(feature.title + where)
    for option in flagged:
        if option.kind is bool:
            group.add_argument(option.flag, action="store_true", help=option.help)
        else:
            told = {"type": option.kind, "choices": option.choices or None}
            add_options(group, {option.flag: (None, option.metavar, option.help, told)})


def split_arguments(argv: Sequence[str]) -> tuple[HetConfig, list[str]]:
    """Separate this extension's flags from Megatron's.

    Args:
        argv: Words of the command line without the program's name.

    Returns:
        The checked configuration, and the words for Megatron's parser.

    Raises:
        PlanError: The plan is bad in itself.
        SystemExit: A ``--het-*`` flag is malformed or unknown (argparse prints why).
    """
    # No usage text, which would list all flags: errors take one line.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    given = [word.split("=", 1)[0] for word in argv if word.startswith("--het-")]
    if twice := next((flag for flag in given if given.count(flag) > 1), None):
        parser.error(f"{twice} is there twice: give it once")
    namespace, rest = add_het_arguments(parser).parse_known_args(list(argv))
    unknown = [word for word in rest if word.startswith("--het-")]
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser._option_string_actions, n=1)
        parser.error(f"{unknown[0]} is no flag{f', {near[0]} is' if near else ''}; --help lists all of them")
    if namespace.het_auto_batch is not None:
        return _auto_batch(namespace, parser), rest
    if namespace.het_plan is None and namespace.het_schedule is None:
        given = [f"--{k.replace('_', '-')}" for k, v in vars(namespace).items() if v != parser.get_default(k)]
        if given:
            parser.error(f"{given[0]} needs --het-plan, --het-schedule or --het-auto-batch")
        return HetConfig(), rest
    plans, rest = _plans(namespace, rest)
    files = tuple(namespace.het_plan or ("from the flags",))
    for plan, file in zip(plans, files, strict=True):
        with errors_of(file, files):
            check_plan_alone(plan)
    check_turns(plans, files)
    for feature in FEATURES:
        feature.check_flags(plans, namespace)
    config = HetConfig(
        plan=plans[0],
        plan_path=files[0],
        turns=plans if len(plans) > 1 else (),
        turn_files=files,
        measured_cp_shares=namespace.het_measured_cp_shares,
        **_of_every_run(namespace),
    )
    return config, rest


_OF_THE_RUN = "het_auto_batch het_transport het_report het_trace het_trace_iteration het_trust_checkpoint het_zero"


def _auto_batch(namespace: argparse.Namespace, parser: argparse.ArgumentParser) -> HetConfig:
    """The configuration of a run whose plan is made at the start (automatic batches)."""
    for name, value in vars(namespace).items():
        if name not in _OF_THE_RUN.split() and value != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} does not go with --het-auto-batch, which makes the plan")
    if namespace.het_zero not in (None, *range(4)):
        parser.error(f"--het-zero {namespace.het_zero}: with --het-auto-batch the first ZeRO stage to try, 0 to 3")
    return HetConfig(
        auto_batch=Path(namespace.het_auto_batch), least_zero=namespace.het_zero or 0, **_of_every_run(namespace)
    )


def _of_every_run(namespace: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of runs with and without a plan, as fields of the configuration."""
    return {
        "transport": namespace.het_transport,
        "report_dir": Path(namespace.het_report) if namespace.het_report else None,
        "trace_dir": Path(namespace.het_trace) if namespace.het_trace else None,
        "trace_iteration": namespace.het_trace_iteration,
        "trust_checkpoint": namespace.het_trust_checkpoint,
    }


def _plans(namespace: argparse.Namespace, rest: list[str]) -> tuple[tuple[Plan, ...], list[str]]:
    """The plans of the files or else the plan of Megatron's flags, with the requested schedule."""
    parameters = _schedule_parameters(namespace)
    if namespace.het_plan is None:
        schedule = ScheduleSpec(namespace.het_schedule, parameters)
        plan, rest = plan_from_flags(rest, int(os.environ.get("WORLD_SIZE", "1")), schedule)
        check_plan(plan)
        return (plan,), rest
    plans = []
    for file in namespace.het_plan:
        with errors_of(file, namespace.het_plan):
            plan = load_plan(file)
        name = namespace.het_schedule or plan.schedule.name
        # The plan's parameters belong to its own schedule, not to the requested one.
        kept = plan.schedule.parameters if name == plan.schedule.name else {}
        plans.append(replace(plan, schedule=ScheduleSpec(name, {**kept, **parameters})))
    return tuple(plans), rest


def _schedule_parameters(namespace: argparse.Namespace) -> dict[str, Any]:
    """The schedule's parameters from the given flags."""
    found: dict[str, Any] = {}
    for feature in FEATURES:
        given = {o.parameter: value for o in feature.parameters if (value := _given(namespace, o)) is not None}
        if given and feature.implied and feature.switch is not None:
            found[feature.switch.parameter] = True
        found |= given
    return found


def _given(namespace: argparse.Namespace, option: Option) -> Any:
    """The value of an option's flag; None if it was not given."""
    if not option.flag:
        return None
    value = getattr(namespace, option.flag.removeprefix("--").replace("-", "_"))
    return None if value is False else value


def het_help() -> str:
    """Help text of this extension's flags, printed before Megatron's own."""
    parser = argparse.ArgumentParser(add_help=False, usage="... [--het-plan FILE] [Megatron flags]")
    return add_het_arguments(parser).format_help()
