"""``het-plan completion SHELL``: a script that completes commands, options and their values.

Everything is read from the parser, so the script is as new as the program that printed it.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping

SHELLS = ("bash", "zsh", "fish")
Parsers = Mapping[str, argparse.ArgumentParser]
"""By command."""

_BASH = """\
_{function}() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} chosen= options= word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in
            --) COMPREPLY=(); return ;;
            {commands}) chosen=${{chosen:-$word}} ;;
        esac
    done
    case $chosen in
{options}
        *) COMPREPLY=($(compgen -W {all_commands} -- "$cur")); return ;;
    esac
    case $chosen:$prev in
{values}
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "$cur"))
    else
        COMPREPLY=($(compgen -f -- "$cur"))
    fi
}}
complete -o filenames -F _{function} {program}
"""


def completion(shell: str, parsers: Parsers, texts: Mapping[str, str]) -> int:
    """The command: print the script of a shell.

    Args:
        shell: One of ``SHELLS``.
        parsers: By command.
        texts: What each command does.
    """
    sys.stdout.write(_SCRIPTS[shell]("het-plan", parsers, texts))
    return 0


def _bash(program: str, parsers: Parsers, texts: Mapping[str, str]) -> str:
    options, values = [], []
    for name, parser in parsers.items():
        words = " ".join(word for action in _actions(parser) for word in action.option_strings)
        options.append(f"        {name}) options={shlex.quote(words)} ;;")
        for action in _actions(parser):
            if action.choices:
                patterns = "|".join(f"{name}:{word}" for word in action.option_strings)
                choices = shlex.quote(" ".join(map(str, action.choices)))
                values.append(f'        {patterns}) COMPREPLY=($(compgen -W {choices} -- "$cur")); return ;;')
    positional = [(n, a) for n, p in parsers.items() for a in p._actions if not a.option_strings and a.choices]
    for name, action in positional:
        choices = shlex.quote(" ".join(map(str, action.choices or ())))
        values.append(f'        {name}:{name}) COMPREPLY=($(compgen -W {choices} -- "$cur")); return ;;')
    return _BASH.format(
        function=program.replace("-", "_"),
        program=program,
        commands="|".join(texts),
        all_commands=shlex.quote(" ".join(texts)),
        options="\n".join(options),
        values="\n".join(values),
    )


def _zsh(program: str, parsers: Parsers, texts: Mapping[str, str]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(program, parsers, texts)


def _fish(program: str, parsers: Parsers, texts: Mapping[str, str]) -> str:
    out = [
        f"complete -c {program} -n __fish_use_subcommand -f -a {name} -d {_quoted(text)}"
        for name, text in texts.items()
    ]
    for name, parser in parsers.items():
        seen = f"complete -c {program} -n '__fish_seen_subcommand_from {name}'"
        for action in _actions(parser):
            names = " ".join(f"-l {w[2:]}" if w.startswith("--") else f"-s {w[1:]}" for w in action.option_strings)
            takes = "" if action.nargs == 0 else " -r"
            if action.choices:
                takes = f" -x -a {_quoted(' '.join(map(str, action.choices)))}"
            out.append(f"{seen} {names}{takes} -d {_quoted((action.help or '').replace('%', ''))}")
    return "\n".join(out) + "\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The options of a command."""
    yield from (action for action in parser._actions if action.option_strings)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS: Mapping[str, Callable[[str, Parsers, Mapping[str, str]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
