"""Makes ``docs/flags.md`` from the options of the programs, and the outputs in ``docs/tutorial.md``: ``make docs``.

``--check`` writes nothing; the exit code is 1 where the flags are out of date.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "flags.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
LAST = "## 7."
"""The part of the tutorial that trains."""
LIMIT_S = 600.0

_BLOCK = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PLANNER = "import sys; sys.argv[0] = 'het-plan'; from tools.planner.__main__ import main; sys.exit(main())"
STAND_INS = {
    "het-plan": f'exec "{sys.executable}" -c "{_PLANNER}" "$@"',
    "sinfo": """cat <<'END'
big-1|gpu*|gpu:a100:8|a100|1031000|idle|128
big-2|gpu*|gpu:a100:8|a100|1031000|allocated|128
small-1|gpu*|gpu:a10g:4|a10g|380000|idle|32
small-2|gpu*|gpu:a10g:4|a10g|380000|idle|32
small-3|gpu*|gpu:a10g:4|a10g|380000|mixed|32
small-4|gpu*|gpu:a10g:4|a10g|380000|down|32
END""",
    "sbatch": 'bash -n "$1" && echo "Submitted batch job 1"',
}
"""Programs that the tutorial's reader has on PATH, and this machine may not have."""

_HEAD = """\
# All flags

For whoever looks for an option, of a training or of a command.
`make docs` makes this page from the options themselves. `--help` of each command says the same.

| program | what it is for |
|---|---|
| [training](#training) | flags beside Megatron's own, for `megatron_het.pretrain_gpt` and `megatron_het.run` |
| [het-plan](#het-plan) | plan, check and emit; in a checkout `python -m tools.planner` |
| [het-run](#het-run) | elastic training; `python -m megatron_het.elastic` |
| [het-doctor](#het-doctor) | check the nodes; `python -m megatron_het.doctor` |
| [schedules](#schedules) | look at, check, simulate and compare schedules |
"""


def main() -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the page is up to date")
    parser.add_argument("--flags", action="store_true", help="renew the flags only")
    options = parser.parse_args()
    text = flags_page()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        if not options.flags:
            with tempfile.TemporaryDirectory() as folder:
                pieces = run(pieces_of(TUTORIAL.read_text(encoding="utf-8")), Path(folder))
            TUTORIAL.write_text("".join(piece.text for piece in pieces), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    sys.stderr.write(f"{PAGE.relative_to(ROOT)} is out of date: run 'make docs'\n")
    return 1


@dataclass(frozen=True)
class Piece:
    """A part of a page: prose, commands (``bash``) or the output of the commands before (``text``)."""

    text: str  # as it is in the page, fences included
    kind: str = ""  # ``bash``, ``text`` or nothing
    body: str = ""  # without the fences


def pieces_of(page: str) -> list[Piece]:
    """Cut a page into prose, commands and outputs."""
    pieces, end = [], 0
    for found in _BLOCK.finditer(page):
        pieces += [Piece(page[end : found.start()]), Piece(found[0], found[1], found[2])]
        end = found.end()
    return [*pieces, Piece(page[end:])]


def run(pieces: Sequence[Piece], folder: Path) -> list[Piece]:
    """Run a page's commands one after the other; returns the page with their outputs in place of its own.

    Args:
        pieces: Of the page.
        folder: An empty one, in which the commands run.

    Raises:
        RuntimeError: A command failed.
    """
    programs, work = folder / "bin", folder / "work"
    programs.mkdir()
    work.mkdir()
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    path, own = f"{programs}:{os.environ['PATH']}", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": own, "PYTHON": sys.executable, "COLUMNS": "80"}
    made, output = [], ""
    for piece in pieces:
        if piece.kind == "bash":
            command = ["bash", "-euo", "pipefail", "-c", piece.body]
            done = subprocess.run(
                command, cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            if done.returncode:
                raise RuntimeError(f"exit code {done.returncode} of:\n{piece.body}\n{done.stdout}\n{done.stderr}")
            lines = done.stdout.replace(str(work), "/shared").splitlines()
            output = "".join(line.rstrip() + "\n" for line in lines)
        made.append(Piece(f"```text\n{output}```", "text", output) if piece.kind == "text" else piece)
    return made


def flags_page() -> str:
    """Returns the page of all options."""
    from megatron_het.arguments.flags import add_het_arguments
    from megatron_het.doctor.__main__ import parser_of as doctor_parser
    from megatron_het.elastic import __main__ as elastic
    from megatron_het.schedule.view.cli import _parser as schedule_parser
    from tools.planner import __main__ as planner

    training = add_het_arguments(argparse.ArgumentParser(add_help=False))
    parts = [_HEAD, "\n## Training\n", *_groups(training, "###"), "\n## het-plan\n"]
    for name, text in planner.COMMANDS.items():
        parts += [f"\n### het-plan {name}\n", f"\n{_sentence(text)}\n", *_groups(planner.parser_of(name), "")]
    parts += ["\n## het-run\n", *_groups(elastic.parser_of(), "")]
    for name, text in elastic.COMMANDS.items():
        parts += [f"\n### het-run {name}\n", f"\n{_sentence(text)}\n", *_groups(elastic.parser_of(name), "")]
    parts += ["\n## het-doctor\n", *_groups(doctor_parser(), ""), "\n## Schedules\n"]
    for action in schedule_parser()._actions:
        for name, command in action.choices.items() if isinstance(action, argparse._SubParsersAction) else ():
            parts += [f"\n### python -m megatron_het.schedule {name}\n", *_groups(command, "")]
    return "".join(parts)


def _groups(parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    """A table for each group of options; without ``heading`` one for all of them."""
    hidden = {a for a in parser._actions if a.help is argparse.SUPPRESS or "--help" in a.option_strings}
    found = [(g.title or "", [a for a in g._group_actions if a not in hidden]) for g in parser._action_groups]
    if not heading:
        found = [("", [action for _, actions in found for action in actions])]
    for title, actions in found:
        if actions:
            if heading:
                yield f"\n{heading} {_sentence(title).rstrip('.')}\n"
            yield "\n| option | meaning |\n|---|---|\n"
            yield from (_row(action) for action in actions)


def _row(action: argparse.Action) -> str:
    """One option, as a row of a table."""
    formatter = argparse.HelpFormatter("")
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = ""
    if action.option_strings and action.nargs != 0:
        metavar = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        value = " " + formatter._format_args(action, metavar)
    text = formatter._expand_help(action) if action.help else ""
    return f"| `{_cell(names + value)}` | {_cell(text).replace('<', '&lt;')} |\n"


def _cell(text: str) -> str:
    """Text that breaks no table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


if __name__ == "__main__":
    sys.exit(main())
