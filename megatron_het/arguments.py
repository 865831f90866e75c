"""The ``--het-*`` flags.  The only place that touches argparse.

They are read before Megatron, and before torch, is imported: a bad plan is reported in a fraction
of a second and before any process group exists.  What is left of the command line goes to
Megatron's own parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_het.config import HetConfig

TRANSPORTS = ("auto", "nccl", "gloo", "staged")


def add_het_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this extension to a parser."""
    group = parser.add_argument_group(
        "heterogeneous training",
        "Without --het-plan Megatron runs exactly as it is. See docs/ for the plan file.",
    )
    group.add_argument(
        "--het-plan", metavar="FILE", help="plan.json: which rank runs which layers and microbatches"
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
    if namespace.het_plan is None:
        given = [f"--{k.replace('_', '-')}" for k, v in vars(namespace).items() if v != parser.get_default(k)]
        if given:
            parser.error(f"{given[0]} needs --het-plan")
        return HetConfig(), rest
    from megatron_het.plan import load_plan

    config = HetConfig(
        plan=load_plan(namespace.het_plan),
        plan_path=namespace.het_plan,
        transport=namespace.het_transport,
        report_dir=Path(namespace.het_report) if namespace.het_report else None,
        trace_dir=Path(namespace.het_trace) if namespace.het_trace else None,
        trace_iteration=namespace.het_trace_iteration,
    )
    return config, rest


def het_help() -> str:
    """Help text of this extension's flags, printed before Megatron's own."""
    parser = argparse.ArgumentParser(add_help=False, usage="... [--het-plan FILE] [Megatron flags]")
    return add_het_arguments(parser).format_help()
