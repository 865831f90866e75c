"""The ``--het-*`` flags.  The only place that touches argparse.

They are read before Megatron, and before torch, is imported: a bad plan is reported in a fraction
of a second and before any process group exists.  What is left of the command line goes to
Megatron's own parser.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_het.config import HetConfig
from megatron_het.plan import Plan, PlanError, ScheduleSpec
from megatron_het.runtime.window_options import SCHEDULE as MINISTAGE
from megatron_het.runtime.window_options import UPDATES

TRANSPORTS = ("auto", "nccl", "gloo", "staged")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "ministage", "seq1f1b", "slimpipe", "terapipe")


def add_het_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this extension to a parser."""
    group = parser.add_argument_group(
        "heterogeneous training",
        "Without --het-plan and --het-schedule Megatron runs exactly as it is. See docs/ for the plan "
        "file.",
    )
    group.add_argument(
        "--het-plan", metavar="FILE", help="plan.json: which rank runs which layers and microbatches"
    )
    group.add_argument(
        "--het-schedule",
        choices=SCHEDULES,
        help="the pipeline schedule, in place of the plan's; without --het-plan an even plan is made "
        "from Megatron's own flags (pipeline, tensor and virtual pipeline sizes, batch sizes)",
    )
    _add_slice_arguments(group)
    _add_window_arguments(group)
    group.add_argument(
        "--het-thrifty-layers",
        action="store_true",
        help="RMSNorm and SwiGLU keep only their input from forward to backward",
    )
    group.add_argument(
        "--het-transport",
        choices=TRANSPORTS,
        default="auto",
        help="how activations travel between stages: nccl, gloo (host tensors), staged (device "
        "tensors by way of host memory: several ranks per GPU, mixed vendors); auto chooses",
    )
    group.add_argument(
        "--het-report",
        metavar="DIR",
        help="write rank-<rank>.json with times, losses and memory of this run into DIR",
    )
    group.add_argument(
        "--het-trace",
        metavar="DIR",
        help="write a Chrome trace of one iteration per rank into DIR (open it in Perfetto)",
    )
    group.add_argument(
        "--het-trace-iteration",
        metavar="N",
        type=int,
        default=3,
        help="the iteration of this run to trace, counted from 1 (default: 3)",
    )
    return parser


def _add_slice_arguments(group: argparse._ArgumentGroup) -> None:
    """What schedules over slices can be asked for, and what goes with them."""
    group.add_argument(
        "--het-slices",
        metavar="N",
        type=int,
        help="slices per sequence, for slimpipe, seq1f1b and terapipe",
    )
    group.add_argument(
        "--het-vocabulary-parallel",
        action="store_true",
        help="split embedding, output layer and loss over all stages and TP ranks",
    )
    group.add_argument(
        "--het-offload-activations",
        metavar="RATIO",
        type=float,
        help="share (above 0, at most 1) of the activations of each forward that waits in host memory "
        "for its backward, where the schedule leaves time for it",
    )
    group.add_argument(
        "--het-context-exchange",
        action="store_true",
        help="devices with short prefixes attend for those with long ones, so that slices take equal "
        "time on all stages (SlimPipe, section 4.2)",
    )
    group.add_argument(
        "--het-exchange-units",
        metavar="Q",
        type=int,
        help="the context exchange moves attention in units of 1/Q of a slice (default: 2)",
    )
    group.add_argument(
        "--het-exchange-keep",
        action="store_true",
        help="keys and values stay where they were sent until their microbatch is done, and their gradients "
        "return once: less traffic, more memory",
    )
    group.add_argument(
        "--het-exchange-idle",
        action="store_true",
        help="stages that wait for work at the start and the end of an iteration attend for others too",
    )


def _add_window_arguments(group: argparse._ArgumentGroup) -> None:
    """The parameter window of ministages; the plan can say more (docs/zorse.md)."""
    group.add_argument(
        "--het-window",
        action="store_true",
        help="with --het-schedule ministage: shard a stage's parameters over its replicas and keep only "
        "two ministages whole (Zorse, section 4.1); the next three flags imply it; shards are equal unless the "
        "plan's replicas have a state_share",
    )
    group.add_argument(
        "--het-update",
        choices=UPDATES,
        help="when a ministage is updated: exact (after the global gradient norm, the default), at-once, "
        "undo (at once, taken back when the norm asks for it), per-ministage (clipped by its own norm); at-once "
        "and per-ministage need --rerun-mode disabled",
    )
    group.add_argument(
        "--het-offload-parameters",
        action="store_true",
        help="parameter shards live in host memory while their ministage is closed",
    )
    group.add_argument(
        "--het-offload-optimizer",
        action="store_true",
        help="the optimizer's state lives in host memory while its ministage is not updated",
    )


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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    namespace, rest = add_het_arguments(parser).parse_known_args(list(argv))
    unknown = [word for word in rest if word.startswith("--het-")]
    if unknown:
        known = [o for a in parser._actions for o in a.option_strings]
        parser.error(f"unknown flag {unknown[0]}; known: {', '.join(known)}")
    if namespace.het_plan is None and namespace.het_schedule is None:
        given = [f"--{k.replace('_', '-')}" for k, v in vars(namespace).items() if v != parser.get_default(k)]
        if given:
            parser.error(f"{given[0]} needs --het-plan or --het-schedule")
        return HetConfig(), rest
    plan, rest = _plan(namespace, rest)
    config = HetConfig(
        plan=plan,
        plan_path=namespace.het_plan or "from the flags",
        transport=namespace.het_transport,
        thrifty_layers=namespace.het_thrifty_layers,
        report_dir=Path(namespace.het_report) if namespace.het_report else None,
        trace_dir=Path(namespace.het_trace) if namespace.het_trace else None,
        trace_iteration=namespace.het_trace_iteration,
    )
    return config, rest


def _plan(namespace: argparse.Namespace, rest: list[str]) -> tuple[Plan, list[str]]:
    """The plan of the file or, without one, of Megatron's flags; with the schedule asked for."""
    from megatron_het.plan import load_plan
    from megatron_het.plan.from_flags import plan_from_flags
    from megatron_het.plan.validate import check_plan

    parameters = _schedule_parameters(namespace)
    if namespace.het_plan is None:
        schedule = ScheduleSpec(namespace.het_schedule, parameters)
        _check_window_flags(schedule)
        plan, rest = plan_from_flags(rest, int(os.environ.get("WORLD_SIZE", "1")), schedule)
        check_plan(plan)
        return plan, rest
    plan = load_plan(namespace.het_plan)
    name = namespace.het_schedule or plan.schedule.name
    # Another schedule's parameters mean nothing to this one.
    kept = plan.schedule.parameters if name == plan.schedule.name else {}
    schedule = ScheduleSpec(name, {**kept, **parameters})
    _check_window_flags(schedule)
    return replace(plan, schedule=schedule), rest


def _check_window_flags(schedule: ScheduleSpec) -> None:
    if schedule.parameters.get("window") and schedule.name != MINISTAGE:
        raise PlanError(
            "--het-window", True, f"schedule {schedule.name} has no parameter window",
            f"Use --het-schedule {MINISTAGE}",
        )  # fmt: skip


def _schedule_parameters(namespace: argparse.Namespace) -> dict[str, Any]:
    """The schedule's parameters among the flags that were given."""
    from megatron_het.plan.slices import OFFLOAD, VOCABULARY

    window = {
        "update": namespace.het_update,
        "offload": namespace.het_offload_parameters or None,
        "offload_optimizer": namespace.het_offload_optimizer or None,
    }
    found = {
        "window": namespace.het_window or any(window.values()) or None,
        **window,
        "slices": namespace.het_slices,
        VOCABULARY: namespace.het_vocabulary_parallel or None,
        OFFLOAD: namespace.het_offload_activations,
        "context_exchange": namespace.het_context_exchange or None,
        "exchange_units": namespace.het_exchange_units,
        "exchange_keep": namespace.het_exchange_keep or None,
        "exchange_idle": namespace.het_exchange_idle or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def het_help() -> str:
    """Help text of this extension's flags, printed before Megatron's own."""
    parser = argparse.ArgumentParser(add_help=False, usage="... [--het-plan FILE] [Megatron flags]")
    return add_het_arguments(parser).format_help()
