"""``het-plan completion SHELL``: a script with which a shell completes het-plan, het-run and het-doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_het.doctor import __main__ as doctor
from megatron_het.elastic import __main__ as elastic

from ..errors import PlannerError

_FILES, _FOLDERS = ("FILE", "PLAN", "PATH"), ("FOLDER", "DIR")
"""What an option's value is called where a file or folder is asked for."""


def completion(options: argparse.Namespace) -> int:
    """Print the script of ``options.shell``, made from the parsers themselves.

    Args:
        options: The shell, and ``parser``, which makes the planner's own.

    Raises:
        PlannerError: The library that writes the script is not installed.
    """
    try:
        import shtab
    except ImportError:
        problem, hint = "needs the package shtab, which is not installed", "pip install 'megatron-het[planner]'"
        raise PlannerError("command line", "completion", options.shell, problem, hint) from None
    for name, parser in _parsers(options.parser()).items():
        parser.prog = name
        for action in _actions(parser):
            if str(action.metavar).endswith(_FILES) or action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            if str(action.metavar).endswith(_FOLDERS):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(parser, options.shell) + "\n")
    return 0


def _parsers(planner: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """By program."""
    run = elastic.parser_of()
    commands = run.add_subparsers()
    for name, text in elastic.COMMANDS.items():
        commands.add_parser(name, help=text, parents=[elastic.parser_of(name)], add_help=False)
    return {"het-plan": planner, "het-run": run, "het-doctor": doctor.parser_of()}


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options and arguments, those of a program's commands too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
