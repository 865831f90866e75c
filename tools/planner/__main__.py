"""Command line of the planner: ``python -m tools.planner COMMAND``, installed as ``het-plan``.

Only argparse is imported here; every command imports what it needs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

COMMANDS = {
    "profile": "measure layer times, memory and links on this node",
    "plan": "choose GPUs, stages, TP, layers, microbatches and schedule",
    "simulate": "iteration time by cause, memory per stage, price of a plan",
    "explain": "why this plan, what binds, the runners-up, what one more node would bring",
    "compare": "a plan against even splits, single GPU types and other schedules",
    "check": "is a plan valid, does it fit",
    "emit": "write args.sh, train.sbatch and torchrun scripts for a plan",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (0 fine, 1 a plan that does not hold, 2 bad input, 130 interrupted)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(next((w for w in words if w in COMMANDS), None))
    options = parser.parse_args(words)
    if not getattr(options, "run", None):
        parser.print_help()
        return 2
    from tools.planner.errors import PlannerError

    try:
        return options.run(options)
    except PlannerError as error:
        if getattr(options, "json", False):
            print(json.dumps({"error": {"file": error.file, "key": error.key, "value": repr(error.value),
                                        "problem": error.problem, "hint": error.hint}}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except OSError as error:  # a folder that cannot be written, a full disk
        what = f"{error.filename or 'file'}: {error.strerror or error}"
        print(json.dumps({"error": {"file": error.filename, "problem": error.strerror}}) if getattr(options, "json", False)
              else f"error: {what}", file=sys.stdout if getattr(options, "json", False) else sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; options of other commands than ``command`` are not built (their modules are not imported)."""
    parser = argparse.ArgumentParser(prog="het-plan", description="Plans LLM training on mixed GPU clusters.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == command:
            _OPTIONS[name](sub)
    return parser


def _common(parser: argparse.ArgumentParser, *, cluster: bool = True, model: bool = True) -> None:
    parser.add_argument("--cluster", required=cluster, metavar="FILE", help="cluster file (YAML)")
    parser.add_argument("--model", required=model, metavar="FILE", help="model file (YAML)")
    parser.add_argument("--profile", metavar="FILE", help="profile.json; without one, datasheet figures are used")
    parser.add_argument("--memory-margin", type=float, default=0.95, metavar="SHARE",
                        help="share of GPU memory that a plan may use (default 0.95)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _goal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--objective", choices=("throughput", "cost"), default="throughput",
                        help="shortest iteration (default) or cheapest iteration")
    parser.add_argument("--max-usd-per-iteration", type=float, metavar="USD", help="budget; needs prices in the cluster file")
    parser.add_argument("--min-iterations-per-s", type=float, metavar="RATE", help="refuse slower plans")
    parser.add_argument("--max-gpus", type=int, metavar="N", help="use at most this many GPUs")
    parser.add_argument("--schedules", default="1f1b,interleaved,ministage,slimpipe", metavar="A,B",
                        help="schedules to consider (default: 1f1b,interleaved,ministage,slimpipe)")
    parser.add_argument("--search", choices=("auto", "zorse", "sailor", "poplar"), default="auto",
                        help="method; auto (default) is never worse than the published ones")
    parser.add_argument("--limit-s", type=float, default=600.0, metavar="S",
                        help="CPU seconds the search may take (default 600); then, and on Ctrl-C, the best so far")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    _goal(parser)
    parser.add_argument("--out", default="plan.json", metavar="FILE", help="plan to write (default plan.json)")
    parser.set_defaults(run=_call("commands", "plan"))


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    _common(parser)
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (Perfetto)")
    parser.add_argument("--picture", metavar="FILE", help="write a picture (SVG, PNG or text by extension)")
    parser.set_defaults(run=_call("commands", "simulate"))


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    _common(parser)
    parser.set_defaults(run=_call("commands", "check"))


def _explain_options(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    _goal(parser)
    parser.set_defaults(run=_call("analysis", "explain"))


def _compare_options(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    _goal(parser)
    parser.set_defaults(run=_call("analysis", "compare"))


def _profile_options(parser: argparse.ArgumentParser) -> None:
    from tools.planner.profile import add_arguments

    parser.add_argument("--model", required=True, metavar="FILE", help="model file (YAML)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(parser)
    parser.set_defaults(run=_call("commands", "profile"))


def _emit_options(parser: argparse.ArgumentParser) -> None:
    from tools.planner.emit import add_arguments

    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster file (YAML)")
    parser.add_argument("--model", required=True, metavar="FILE", help="model file (YAML)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(parser)
    parser.set_defaults(run=_call("commands", "emit"))


def _call(module: str, name: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        import importlib

        return getattr(importlib.import_module(f"tools.planner.{module}"), name)(options)

    return run


_OPTIONS = {
    "profile": _profile_options, "plan": _plan_options, "simulate": _simulate_options, "explain": _explain_options,
    "compare": _compare_options, "check": _check_options, "emit": _emit_options,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
