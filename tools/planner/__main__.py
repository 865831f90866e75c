"""Command line of the planner: ``python -m tools.planner COMMAND`` in a checkout, ``het-plan`` where installed.

Only argparse is imported here; every command imports what it needs, so that ``--help`` answers at once.
"""

import argparse
import importlib
import io
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_het import INSTALL, safe_io

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
"""Metavars of options that take a file or folder."""


@safe_io.ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (0 success, 1 the plan cannot run, 2 bad input, 130 interrupted)."""
    words, flags = safe_io.split_words(_joined(sys.argv[1:] if arguments is None else arguments))
    options = argparse.Namespace()
    try:
        parser = parser_of_all([w for w in words if w in COMMANDS][:1])
        parser.parse_args(words, options)
        pairs = [word.split("=", 1) for word in words if word.startswith("--") and "=" in word]
        for option, value in (*zip(words, words[1:]), *pairs):
            if not value and option != "--extra":  # for example from an unset shell variable
                parser.error(f"nothing is given after {option}")
        if flags and getattr(options, "flags", None) is None:
            parser.error(f"unrecognized arguments: -- {' '.join(flags)}")
        options.flags = flags or []
        options.began_s = 0.0 if arguments is None else time.process_time()  # of the command's process, or a caller's
        if not getattr(options, "run", None):
            parser.print_help()
            return 2
        for stream in (sys.stdout, sys.stderr):  # file names need not be valid Unicode
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        from .inputs.files import check_outputs

        check_outputs(options.command, options)
        return int(options.run(options))
    except PlannerError as error:
        _say_error(options, error)
        return 2
    except BrokenPipeError:  # is an OSError
        raise
    except OSError as error:  # a folder that cannot be written, a full disk
        _say_error(options, PlannerError(str(error.filename or "output"), "(file)", None, error.strerror or str(error)))
        return 2
    except ModuleNotFoundError as error:  # the extra ``planner`` is not installed
        problem = f"needs the package {error.name}, which is not installed"
        _say_error(options, PlannerError(command(), "(packages)", None, problem, INSTALL))
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


def _joined(words: Sequence[str]) -> list[str]:
    """Returns the command line with ``--extra`` joined to its value by "="."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == "--extra" and word.startswith("--"):  # argparse takes --mock-data for an option
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _say_error(options: argparse.Namespace, error: PlannerError) -> None:
    """Print an error as text, or as JSON with ``--json``."""
    if not getattr(options, "json", False):
        sys.stderr.write(f"error: {error}\n")
        return
    names = ("file", "key", "value", "problem", "hint")
    body = {name: getattr(error, name) for name in names} | {"value": safe_io.shown(error.value)}
    sys.stdout.write(json.dumps({"error": body}) + "\n")


def parser_of_all(chosen: Collection[str]) -> argparse.ArgumentParser:
    """Returns the parser; options of other commands than ``chosen`` are not built (their modules are not imported)."""
    parser = safe_io.LineParser(prog=command(), description="Plans LLM training on mixed GPU clusters.")
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

    run, parts, defaults = _OPTIONS[name]
    for part in parts:
        if isinstance(part, str):
            importlib.import_module(f".{part}", __package__).add_arguments(parser)
        else:
            safe_io.add_options(parser, part)
    if name in WRITING:
        safe_io.add_options(parser, {"--force": (False, "", "replace files that the command reads or did not write")})
    parser.set_defaults(run=run if callable(run) else _call(run), **defaults)


def completion(options: argparse.Namespace) -> int:
    """Print the script of ``options.shell``, made from the parsers themselves."""
    import shtab

    from megatron_het.doctor import __main__ as doctor
    from megatron_het.elastic import __main__ as elastic

    run = elastic.parser_of()
    commands = run.add_subparsers()
    for name, text in elastic.COMMANDS.items():
        commands.add_parser(name, help=text, parents=[elastic.parser_of(name)], add_help=False)
    parsers = {"het-plan": parser_of_all(COMMANDS), "het-run": run, "het-doctor": doctor.parser_of()}
    for name, parser in parsers.items():
        parser.prog = name
        for action in _actions(parser):
            if str(action.metavar).endswith(_FILES) or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if str(action.metavar).endswith(_FOLDERS):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, options.shell) + "\n")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments of a parser, including those of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        else:
            yield action


def _call(name: str) -> Any:
    def run(options: argparse.Namespace) -> int:
        module, _, function = name.rpartition(".")
        return getattr(importlib.import_module(f".{module}", __package__), function)(options)

    return run


# Options that several commands share; see ``add_options``.
# fmt: off
_INSTEAD = "sets or overrides the value in FILE"
_SIZE = {"type": safe_io.count(1, 1 << 27)}
_MODEL: dict[str, tuple[Any, ...]] = {
    "--model": (
        None, "FILE", "model file (YAML), Hugging Face config.json, folder of a Megatron checkpoint, or a name like "
        "llama-3.1-8b (docs/planner.md)", {"required": True}),
    "--seq-length": (None, "N", _INSTEAD, _SIZE),
    "--global-batch-size": (None, "N", _INSTEAD, _SIZE),
    "--precision": (None, "", f"{_INSTEAD}: V100, T4 and RTX-20 have no bf16",
                    {"choices": ("fp32", "tf32", "bf16", "fp16")}),
    "--document-lengths": (
        None, "MEAN|FILE", "packed documents with attention inside each document only: their mean length in tokens, "
        "or a file with sample lengths; sets or overrides the value of the model file"),
}
_PLAN = {"plan": (None, "PLAN", "plan.json")}
_JSON = {"--json": (False, "", "print JSON instead of tables")}
_PAGE = {"--html": (None, "FILE", "write one HTML page of the plan and of what is printed")}
_CLUSTER = {"--cluster": (None, "FILE", "cluster file (YAML)", {"required": True})}
_COMMON = {
    **_CLUSTER,
    **_MODEL,
    "--profile": (None, "FILE", "profile.json; without one, datasheet figures are used"),
    "--memory-margin": (0.95, "SHARE", "share of GPU memory that a plan may use (default 0.95)"),
    **_JSON,
}
_GOAL = {
    "--objective": ("throughput", "", "shortest iteration (default) or cheapest iteration",
                    {"choices": ("throughput", "cost")}),
    "--max-usd-per-iteration": (None, "USD", "budget; needs prices in the cluster file",
                                {"type": safe_io.amount(0.0, 1e12)}),
    "--min-iterations-per-s": (None, "RATE", "refuse slower plans", {"type": safe_io.amount(0.0, 1e12)}),
    "--max-gpus": (None, "N", "use at most this many GPUs", {"type": safe_io.count(1, safe_io.MAX_DEVICES)}),
    "--schedules": ("1f1b,interleaved,ministage,slimpipe", "A,B",
                    "schedules to consider (default: 1f1b,interleaved,ministage,slimpipe)"),
    "--mix-vendors": (False, "", "price plans over GPUs of several vendors too, which cannot run (docs/scale.md)"),
    "--limit-s": (
        600.0, "S", "CPU seconds from the start of the command, after which, or on Ctrl-C, its searches return the "
        "best result so far (default %(default)g); a search gets at least 1 second"),
}
_SEARCH = {
    **_GOAL,
    "--search": ("auto", "", "method; auto (default) includes the published methods, and takes the best result",
                 {"choices": ("auto", "zorse", "sailor", "poplar")}),
}
_ROBUST = {
    **_SEARCH,
    "--robust": (
        None, "", "of about equally fast plans, take the one that loses least if the network is 20 %% or one kind of "
        "GPU 10 %% slower or faster, and print the loss in each of these cases (on by default, with --search auto)",
        {"action": argparse.BooleanOptionalAction}),
}
_WHOM_TO_ASK = {
    "--from": ("auto", "", "source of the nodes; auto (default): Slurm's sinfo if it lists GPUs, else nvidia-smi",
               {"dest": "source", "choices": ("auto", "slurm", "nvidia-smi")}),
    "--hosts": (None, "NAMES", "names of nodes of this kind, as n1,n2 or n[01-16]"),
    "--gpu": (None, "KIND", "nodes with this GPU of the catalog; ask no program"),
    "--gpus-per-node": (None, "N", "with --gpu (default 8)", {"type": safe_io.count(1, 1024)}),
}
_OPTIONS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "quickstart": ("cli.inventory.quickstart", (
        _MODEL,
        {"--cluster": (None, "FILE", "cluster file to use instead of running init")},
        _WHOM_TO_ASK,
        {"--out": (Path("run"), "FOLDER", "new folder (default run)"),
         "--extra": (None, "FLAGS", "further Megatron flags in one string: data, tokenizer, ..."),
         "--limit-s": (120.0, "S", "CPU seconds to plan (default 120)", {"type": safe_io.amount(1.0, 1e6)}),
         "--force": (False, "", "write into an existing folder")},
    ), {"json": False, "main": main}),
    "init": ("cli.inventory.init", (
        {"--out": ("cluster.yaml", "FILE", "file to write (default cluster.yaml)"),
         "--force": (False, "", "overwrite an existing file")},
        _WHOM_TO_ASK,
        {"--json": (False, "", "print JSON instead of text")},
    ), {}),
    "profile": ("cli.commands.profile", (_MODEL, _JSON, "profile.settings"), {}),
    "plan": ("cli.commands.plan", (_COMMON, _ROBUST, {
        "--out": ("plan.json", "FILE", "plan to write (default plan.json)"),
        "--verify": (
            None, "", "train one rank of each kind dry before the plan is written; take the next finalist, or search "
            "again with a smaller memory margin, where one needs more than its GPU has (default: where torch and "
            "Megatron are installed, for at most two minutes)", {"action": argparse.BooleanOptionalAction}),
        "--verify-limit-s": (
            None, "S", "seconds that these dry runs may take together (default 900 with --verify, else 120)",
            {"type": safe_io.amount(0.0, 1e6)}),
    }), {}),
    "simulate": ("cli.commands.simulate", (_PLAN, _COMMON, {
        "--trace": (None, "FILE", "write a Chrome trace (Perfetto)"),
        "--picture": (None, "FILE", "write a picture (SVG, PNG or text by extension)"),
    }), {}),
    "explain": ("cli.commands.explain", (_COMMON, _ROBUST, _PAGE), {}),
    "compare": ("cli.commands.compare", (_COMMON, _ROBUST, _PAGE), {}),
    "check": ("cli.commands.check", (_PLAN, _COMMON), {}),
    "report": ("cli.commands.report", (_PLAN, _COMMON, _GOAL, {
        "--html": ("report.html", "FILE", "page to write (default report.html)"),
        "--no-search": (
            False, "", "skip further searches: no alternatives, no gain of one more node"),
    }), {"limit_s": 120.0}),
    "replan": ("replay.replan.run", ("replay.replan", _SEARCH, _JSON), {"limit_s": 120.0}),
    "replay": ("replay.command.replay", ("replay.command", _COMMON, _SEARCH), {}),
    "rent": ("replay.rent.rent", (_COMMON, "replay.rent", _SEARCH), {}),
    "emit": ("cli.commands.emit", (_CLUSTER, _MODEL, _JSON, "emit.options"), {}),
    "dry-run": ("cli.dry_run.dry_run", (_MODEL, _JSON, "cli.dry_run"), {"flags": []}),
    "support": ("cli.commands.support", ({
        "paths": (None, "PATH", "folders and files of the job", {"nargs": "+", "type": Path}),
        "--out": (Path("support.zip"), "", "the archive (default %(default)s)"),
    },), {}),
    "completion": (completion, ({"shell": (None, "", "your shell", {"choices": ("bash", "zsh", "fish")})},), {}),
}
# fmt: on

if __name__ == "__main__":
    sys.exit(main())
