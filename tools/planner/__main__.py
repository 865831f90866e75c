"""Command line of the planner: ``python -m tools.planner COMMAND`` in a checkout, ``het-plan`` where installed.

Only argparse is imported here; every command imports what it needs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_het.safe_io import MAX_DEVICES, amount, count, ends_with_its_reader, shown, split_words

from .errors import PlannerError, command

COMMANDS = {
    "quickstart": "from this machine or Slurm and a model to the command that starts a job: init, plan, check, emit",
    "init": "write a cluster file from what nvidia-smi or Slurm says",
    "profile": "measure layer times, memory and links on this node",
    "plan": "choose GPUs, stages, TP, layers, microbatches and schedule",
    "simulate": "iteration time by cause, memory per stage, price of a plan",
    "explain": "why this plan, what binds, the best plans of other kinds, what one more node would bring",
    "compare": "a plan against even splits, single GPU types and other schedules",
    "check": "is a plan valid, does it fit",
    "report": "one HTML page of a plan: cluster, memory, timeline, bubble, alternatives",
    "dry-run": "train one rank of each kind on fake tensors: memory by category, FLOPs, bytes sent",
    "replan": "a better plan from what a run measured, and when a change to it pays",
    "replay": "what a job gets done while nodes come and go by a trace: elastic, restarted, or with all nodes only",
    "rent": "what to rent first, what next, and where more stops paying, by the prices of a cluster file",
    "emit": "write args.sh, train.sbatch and torchrun scripts for a plan",
    "support": "pack versions, plan, arguments and logs for a report of a bug, without data",
    "completion": "print a script with which a shell completes het-plan, het-run and het-doctor",
}
_FILES, _FOLDERS = ("FILE", "PLAN", "PATH"), ("FOLDER", "DIR")
"""What an option's value is called where a file or folder is asked for."""


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (0 fine, 1 a plan that does not hold, 2 bad input, 130 interrupted)."""
    words, flags = split_words(_joined(sys.argv[1:] if arguments is None else arguments))
    parser = parser_of_all([w for w in words if w in COMMANDS][:1])
    options = parser.parse_args(words)
    if flags and getattr(options, "flags", None) is None:
        parser.error(f"unrecognized arguments: -- {' '.join(flags)}")
    options.flags = flags or []
    options.began_s = 0.0 if arguments is None else time.process_time()  # the process is the command's, or a caller's
    if not getattr(options, "run", None):
        parser.print_help()
        return 2
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        from .inputs.files import check_outputs

        check_outputs(options.command, options)
        return int(options.run(options))
    except PlannerError as error:
        _say_error(options, error)
        return 2
    except BrokenPipeError:  # is an OSError
        raise
    except OSError as error:  # a folder that cannot be written, a full disk
        _say_error(options, PlannerError(str(error.filename or "file"), "(file)", None, error.strerror or str(error)))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _joined(words: Sequence[str]) -> list[str]:
    """The command line with ``--extra`` joined to its value."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--extra" and word.startswith("--"):  # argparse takes --mock-data for an option
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _say_error(options: argparse.Namespace, error: PlannerError) -> None:
    """One error for people, or as JSON where that was asked for."""
    if not getattr(options, "json", False):
        sys.stderr.write(f"error: {error}\n")
        return
    body = {
        "file": error.file,
        "key": error.key,
        "value": shown(error.value),
        "problem": error.problem,
        "hint": error.hint,
    }
    sys.stdout.write(json.dumps({"error": body}) + "\n")


def parser_of_all(chosen: Collection[str]) -> argparse.ArgumentParser:
    """Returns the parser; options of other commands than ``chosen`` are not built (their modules are not imported)."""
    parser = argparse.ArgumentParser(prog=command(), description="Plans LLM training on mixed GPU clusters.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in chosen:
            _add_options(name, sub)
            sub.set_defaults(command=name)
    return parser


def parser_of(name: str) -> argparse.ArgumentParser:
    """A parser with the options of one command."""
    parser = argparse.ArgumentParser(prog=name)
    _add_options(name, parser)
    return parser


def _add_options(name: str, parser: argparse.ArgumentParser) -> None:
    from .inputs.files import WRITING

    _OPTIONS[name](parser)
    if name in WRITING:
        parser.add_argument(
            "--force", action="store_true", help="replace files that the command reads or did not write"
        )


def _model(parser: argparse.ArgumentParser, names: str = "") -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE",
        help=f"model file (YAML), Hugging Face config.json, or folder of a Megatron checkpoint{names}",
    )
    for option in ("--seq-length", "--global-batch-size"):
        parser.add_argument(option, type=count(1, 1 << 27), metavar="N", help="where FILE does not say it, or instead")
    parser.add_argument(
        "--precision",
        choices=("fp32", "tf32", "bf16", "fp16"),
        help="where FILE does not say it, or instead: V100, T4 and RTX-20 have no bf16",
    )
    parser.add_argument(
        "--document-lengths",
        metavar="MEAN|FILE",
        help="of documents packed into sequences that do not see each other: their mean in tokens, or a file with the "
        "lengths of some of them; where the model file does not say it, or instead",
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster file (YAML)")
    _model(parser)
    parser.add_argument("--profile", metavar="FILE", help="profile.json; without one, datasheet figures are used")
    parser.add_argument(
        "--memory-margin",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="share of GPU memory that a plan may use (default 0.95)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _goal(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--objective",
        choices=("throughput", "cost"),
        default="throughput",
        help="shortest iteration (default) or cheapest iteration",
    )
    parser.add_argument(
        "--max-usd-per-iteration",
        type=amount(0.0, 1e12),
        metavar="USD",
        help="budget; needs prices in the cluster file",
    )
    parser.add_argument("--min-iterations-per-s", type=amount(0.0, 1e12), metavar="RATE", help="refuse slower plans")
    parser.add_argument("--max-gpus", type=count(1, MAX_DEVICES), metavar="N", help="use at most this many GPUs")
    parser.add_argument(
        "--schedules",
        default="1f1b,interleaved,ministage,slimpipe",
        metavar="A,B",
        help="schedules to consider (default: 1f1b,interleaved,ministage,slimpipe)",
    )
    parser.add_argument(
        "--search",
        choices=("auto", "zorse", "sailor", "poplar"),
        default="auto",
        help="method; auto (default) also searches as the published ones do, and takes the best of all",
    )
    parser.add_argument(
        "--robust",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of plans that are about as fast, take the one that loses least where the network is 20 %% or one kind of "
        "GPU 10 %% slower or faster, and print what each of these costs (on by default, with --search auto)",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=600.0,
        metavar="S",
        help="CPU seconds from the start of the command, after which, and on Ctrl-C, its searches give the best so far "
        "(default %(default)g); a search has 1 of them at least, however long reading took",
    )


def _quickstart_options(parser: argparse.ArgumentParser) -> None:
    _model(parser, "; or a name like llama-3.1-8b (docs/planner.md)")
    parser.add_argument("--cluster", metavar="FILE", help="cluster file, instead of asking what there is")
    _whom_to_ask(parser)
    parser.add_argument("--out", type=Path, default=Path("run"), metavar="FOLDER", help="new folder (default run)")
    parser.add_argument("--extra", metavar="FLAGS", help="further Megatron flags in one string: data, tokenizer, ...")
    parser.add_argument(
        "--limit-s", type=amount(1.0, 1e6), default=120.0, metavar="S", help="CPU seconds to plan (default 120)"
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that is there")
    parser.set_defaults(json=False, main=main, run=_call("cli.inventory", "quickstart"))


def _init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="cluster.yaml", metavar="FILE", help="file to write (default cluster.yaml)")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    _whom_to_ask(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=_call("cli.inventory", "init"))


def _whom_to_ask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        choices=("auto", "slurm", "nvidia-smi"),
        default="auto",
        help="whom to ask; auto (default): Slurm's sinfo where it lists GPUs, else nvidia-smi",
    )
    parser.add_argument("--hosts", metavar="NAMES", help="nodes like this one, as n1,n2 or n[01-16]")
    parser.add_argument("--gpu", metavar="KIND", help="ask nobody: nodes with this GPU of the catalog")
    parser.add_argument("--gpus-per-node", type=count(1, 1024), default=8, metavar="N", help="with --gpu (default 8)")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    _goal(parser)
    parser.add_argument("--out", default="plan.json", metavar="FILE", help="plan to write (default plan.json)")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="train one rank of each kind dry before the plan is written; take the next finalist, or search again "
        "with a smaller memory margin, where one needs more than its GPU has (default: where torch and Megatron are "
        "installed, for at most two minutes)",
    )
    parser.add_argument(
        "--verify-limit-s",
        type=amount(0.0, 1e6),
        metavar="S",
        help="seconds that these dry runs may take together (default 900 with --verify, else 120)",
    )
    parser.set_defaults(run=_call("cli.commands", "plan"))


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    _common(parser)
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace (Perfetto)")
    parser.add_argument("--picture", metavar="FILE", help="write a picture (SVG, PNG or text by extension)")
    parser.set_defaults(run=_call("cli.commands", "simulate"))


def _check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    _common(parser)
    parser.set_defaults(run=_call("cli.commands", "check"))


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="plan.json")
    _common(parser)
    _goal(parser)
    parser.add_argument("--html", default="report.html", metavar="FILE", help="page to write (default report.html)")
    parser.add_argument(
        "--no-search",
        action="store_true",
        help="leave out what needs further searches: alternatives, and what one more node brings",
    )
    parser.set_defaults(limit_s=120.0, run=_call("cli.commands", "report"))


def _page_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write one HTML page of the plan and of what is printed")


def _explain_options(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    _goal(parser)
    _page_option(parser)
    parser.set_defaults(run=_call("cli.commands", "explain"))


def _compare_options(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    _goal(parser)
    _page_option(parser)
    parser.set_defaults(run=_call("cli.commands", "compare"))


def _profile_options(parser: argparse.ArgumentParser) -> None:
    from .profile.settings import add_arguments

    _model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(parser)
    parser.set_defaults(run=_call("cli.commands", "profile"))


def _emit_options(parser: argparse.ArgumentParser) -> None:
    from .emit.options import add_arguments

    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster file (YAML)")
    _model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(parser)
    parser.set_defaults(run=_call("cli.commands", "emit"))


def _dry_run_options(parser: argparse.ArgumentParser) -> None:
    from .cli.dry_run import add_arguments

    parser.usage = "%(prog)s PLAN --model FILE [options] [-- MEGATRON FLAGS]"
    _model(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_arguments(parser)
    parser.set_defaults(run=_call("cli.dry_run", "dry_run"), flags=[])


def _replan_options(parser: argparse.ArgumentParser) -> None:
    from .replay.replan import add_arguments

    add_arguments(parser)
    _goal(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(limit_s=120.0, run=_call("replay.replan", "run"))


def _replay_options(parser: argparse.ArgumentParser) -> None:
    from .replay.command import add_arguments

    add_arguments(parser)
    _common(parser)
    _goal(parser)
    parser.set_defaults(run=_call("replay.command", "replay"))


def _rent_options(parser: argparse.ArgumentParser) -> None:
    from .replay.rent import add_arguments

    _common(parser)
    add_arguments(parser)
    _goal(parser)
    parser.set_defaults(run=_call("replay.rent", "rent"))


def _support_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders and files of the job")
    parser.add_argument("--out", type=Path, default=Path("support.zip"), help="the archive (default %(default)s)")
    parser.set_defaults(run=_call("cli.commands", "support"))


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="whose script")
    parser.set_defaults(run=completion)


def completion(options: argparse.Namespace) -> int:
    """Print the script of ``options.shell``, made from the parsers themselves.

    Args:
        options: The shell.

    Raises:
        PlannerError: The library that writes the script is not installed.
    """
    try:
        import shtab
    except ImportError:
        problem, hint = "needs the package shtab, which is not installed", "pip install 'megatron-het[planner]'"
        raise PlannerError("command line", "completion", options.shell, problem, hint) from None
    for name, parser in _parsers().items():
        parser.prog = name
        for action in _actions(parser):
            if str(action.metavar).endswith(_FILES) or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if str(action.metavar).endswith(_FOLDERS):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, options.shell) + "\n")
    return 0


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """By program."""
    from megatron_het.doctor import __main__ as doctor
    from megatron_het.elastic import __main__ as elastic

    run = elastic.parser_of()
    commands = run.add_subparsers()
    for name, text in elastic.COMMANDS.items():
        commands.add_parser(name, help=text, parents=[elastic.parser_of(name)], add_help=False)
    return {"het-plan": parser_of_all(COMMANDS), "het-run": run, "het-doctor": doctor.parser_of()}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments, those of a program's commands too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        else:
            yield action


def _call(module: str, name: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        import importlib

        return getattr(importlib.import_module(f".{module}", __package__), name)(options)

    return run


_OPTIONS = {
    "quickstart": _quickstart_options,
    "init": _init_options,
    "profile": _profile_options,
    "plan": _plan_options,
    "simulate": _simulate_options,
    "explain": _explain_options,
    "compare": _compare_options,
    "check": _check_options,
    "report": _report_options,
    "replan": _replan_options,
    "replay": _replay_options,
    "rent": _rent_options,
    "emit": _emit_options,
    "dry-run": _dry_run_options,
    "support": _support_options,
    "completion": _completion_options,
}

if __name__ == "__main__":
    sys.exit(main())
