"""Malformed inputs by mutation: every case is wrong in a known way, whatever the seed.

A case is a command line and the files it reads.  Mutations of numbers, names and structure come from a
good file and a random place in it; texts that would run in a shell or control a terminal, special files
and bad options are listed, and drawn from.
"""

import copy
import json
import os
import random
import re
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_GOOD: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("bad_input.yaml").read_text(encoding="utf-8"))
MODEL, CLUSTER, PROFILE, PLAN = (_GOOD[name] for name in ("model", "cluster", "profile", "plan"))


def sliced_plan() -> dict[str, Any]:
    """Returns the plan with the same stages, in slices."""
    return {**PLAN, "schedule": {"name": "slimpipe", "parameters": {"slices": 4}}}


def other_plans() -> dict[str, dict[str, Any]]:
    """Plans of further kinds for the same model and cluster, by name."""
    return {name: {**PLAN, **changes} for name, changes in _GOOD["other_plans"].items()}


def written_out(text: Any) -> Any:
    """Returns a text with its repeated parts, like ``<9 x 400>``, written out; other values as they are."""
    if not isinstance(text, str):
        return text
    return re.sub(r"<(.+?) x (\d+)>", lambda part: part[1] * int(part[2]), text, flags=re.DOTALL)


def place_of(text: str) -> tuple[str | int, ...]:
    """Returns the keys and indices of a place in a document, from ``stages.0.layers``."""
    return tuple(int(key) if key.isdecimal() else key for key in text.split("."))


def document_text(document: Any) -> str:
    """Returns a document as JSON, which YAML readers accept, too."""
    return json.dumps(document, indent=1)


MARK = "executed.mark"  # injected commands make a file of this name
COMMAND = f"touch $MARK_FOLDER/{MARK}"
INJECTIONS = (
    f"x$({COMMAND})",
    f"x`{COMMAND}`",
    f"x; {COMMAND};",
    f"x\n{COMMAND}\n",
    f'x"; {COMMAND}; "',
    f"x'; {COMMAND}; '",
    f"x}}; {COMMAND}; ${{y",
    f"x & {COMMAND} &",
)
_PLANNER = ("check", "simulate", "emit", "plan")


@dataclass(frozen=True)
class Case:
    """One run of one command."""

    kind: str  # the change of the input
    # ``planner``, ``schedule``, ``job``, ``doctor``, ``start`` (the beginning of training) or ``checkpoint`` (the
    # choice of one to load)
    tool: str
    words: tuple[str, ...]  # its command line
    # text or bytes of files, by name; a callable makes a special file at the path
    files: dict[str, Any] = field(default_factory=dict)
    wrong: bool = True  # whether the input must be refused; else it may be accepted, but must do no harm
    scripts: bool = False  # whether scripts that were written are to be run


def good_files() -> dict[str, Any]:
    """The files that every case starts from."""
    return {
        "plan.json": document_text(PLAN),
        "sliced.json": document_text(sliced_plan()),
        "cluster.yaml": document_text(CLUSTER),
        "model.yaml": document_text(MODEL),
        "profile.json": document_text(PROFILE),
    }


def command(name: str, *more: str) -> tuple[str, ...]:
    """A planner's command line on the good files."""
    words = [name, "--cluster", "cluster.yaml", "--model", "model.yaml"]
    if name != "plan":
        words.insert(1, "plan.json")
    if name == "plan":
        words += ["--limit-s", "1", "--out", "out.json"]
    if name == "emit":
        words += ["--out", "run"]
    return (*words, *more)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields every scalar of a document with its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, (*path, key))
    else:
        yield path, value


def _replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(document)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return out


class _Raw(str):
    """Text that is written into a document verbatim, without quotes."""


def _text(document: Any) -> str:
    """Returns JSON in which ``_Raw`` values are verbatim."""
    raw: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, _Raw):
            name = f"@raw{len(raw)}@"
            raw[f'"{name}"'] = str(value)
            return name
        if isinstance(value, dict):
            return {k: marked(v) for k, v in value.items()}
        return [marked(v) for v in value] if isinstance(value, list) else value

    text = document_text(marked(document))
    for name, piece in raw.items():
        text = text.replace(name, piece)
    return text


def _leaf_case(rng: random.Random, name: str, document: Any, targets: list[tuple[str, tuple[str, ...]]]) -> Case | None:
    path, value = rng.choice(list(_leaves(document)))
    of = "switch" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "text"
    kind, text = rng.choice(list(_GOOD["in_place_of_a"][of].items()))
    if of == "text" and path[-1] in ("notes", "source") and text.startswith('"'):  # any text may be there
        return None
    tool, words = rng.choice(targets)
    return Case(
        f"{kind}: {_where(path)}", tool, words, {name: _text(_replaced(document, path, _Raw(written_out(text))))}
    )


def _where(path: tuple[Any, ...]) -> str:
    return ".".join("*" if isinstance(k, int) else str(k) for k in path)


def _shape_case(rng: random.Random, name: str, document: Any, targets: list[tuple[str, tuple[str, ...]]]) -> Case:
    """Make a case with wrong keys or structure of the whole file."""
    text = document_text(document)
    lines = text.splitlines()
    keyed = [i for i, line in enumerate(lines) if '": ' in line and line.rstrip().endswith(",")]
    i = rng.choice(keyed)
    cut = rng.randrange(1, len(text) - 2)
    deep = rng.choice((100, 2_000, 200_000))
    changes: dict[str, Callable[[], Any]] = {
        "a key twice": lambda: "\n".join([*lines[: i + 1], lines[i], *lines[i + 1 :]]),
        "an unknown key": lambda: text.replace("{", '{"colour": 1, ', 1),
        "truncated": lambda: text[:cut],
        "empty": lambda: "",
        "blank": lambda: "\n\n  \n",
        "a list": lambda: f"[{text}]",
        "a number": lambda: "17",
        "a text": lambda: '"plan"',
        "null": lambda: "null",
        "two documents": lambda: f"{text}\n---\n{text}" if name.endswith("yaml") else text + text,
        "garbage behind": lambda: text + "\n}]",
        "not UTF-8": lambda: text.encode().replace(b'"', b'"\xff\xfe', 1),
        "random bytes": lambda: rng.randbytes(2000),
        "deep lists": lambda: "[" * deep + "]" * deep,
        "deep mappings": lambda: '{"a":' * deep + "1" + "}" * deep,
        "deep value": lambda: text.replace("{", '{"deep": ' + "[" * deep + "]" * deep + ", ", 1),
        "half of a surrogate pair": lambda: text.replace('": "', '": "\\ud800', 1),
        "a tag": lambda: text.replace("{", '{"a": !!python/object/apply:os.system ["' + COMMAND + '"], ', 1),
        "an endless alias": lambda: "a: &a [*a]",
        "aliases that multiply": _bomb,
        "aliases that multiply in a field": lambda: _bomb() + "name: *h\nnum_layers: *h\nnodes: *h\n",
        "larger than what is read": lambda: " " * (33 << 20) + text,
    }
    kind = rng.choice(list(changes))
    tool, words = rng.choice(targets)
    return Case(f"{kind}: the file", tool, words, {name: changes[kind]()})


def _bomb() -> str:
    text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, name in zip("abcdefg", "bcdefgh"):
        text += f"{name}: &{name} [" + ", ".join([f"*{before}"] * 10) + "]\n"
    return text


def _removed_case(rng: random.Random, name: str, document: Any, targets: list[tuple[str, tuple[str, ...]]]) -> Case:
    """Make a case without a required key."""
    path = place_of(rng.choice(_GOOD["required"][name]))
    out = copy.deepcopy(document)
    inner = out
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    tool, words = rng.choice(targets)
    return Case(f"missing: {_where(path)}", tool, words, {name: _text(out)})


# Special files, created at the path where a regular file is expected.


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    """Create a device like /dev/full where that is allowed (root), else a pipe."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    except PermissionError:
        os.mkfifo(path)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


def _kernel(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": _fifo,
    "a device": _device,
    "/dev/zero": _zero,
    "a socket": _socket,
    "a link to itself": _loop,
    "a folder": _folder,
    "a file of the kernel": _kernel,
}


def _planner(*names: str) -> list[tuple[str, tuple[str, ...]]]:
    return [("planner", command(name)) for name in names]


def _start(plan: str = "plan.json") -> tuple[str, tuple[str, ...]]:
    return "start", ("--num-layers", "4", "--het-plan", plan)


def mutated(rng: random.Random, count: int) -> Iterator[Case]:
    """Returns ``count`` mutations of the four kinds of files."""
    profiled = [("planner", (*command(name), "--profile", "profile.json")) for name in ("plan", "simulate", "check")]
    sources: list[tuple[str, Any, list[tuple[str, tuple[str, ...]]]]] = [
        ("plan.json", PLAN, [*_planner("check", "simulate", "emit"), _start(), _start()]),
        ("plan.json", sliced_plan(), [*_planner("check", "simulate", "emit"), _start()]),
        *(("plan.json", plan, [*_planner("check", "simulate", "emit"), _start()]) for plan in other_plans().values()),
        *[("cluster.yaml", CLUSTER, _planner(*_PLANNER))] * 3,  # as often as half of the plans
        *[("model.yaml", MODEL, _planner(*_PLANNER))] * 3,
        ("profile.json", PROFILE, profiled),
    ]
    made = 0
    while made < count:
        name, document, targets = rng.choice(sources)
        makers = (_leaf_case, _leaf_case, _leaf_case, _shape_case, _removed_case)
        case = rng.choice(makers)(rng, name, document, targets)
        if case is not None:
            made += 1
            yield case


def random_numbers(rng: random.Random, count: int) -> Iterator[Case]:
    """Cases with random numbers, valid or not: any result is right, except a hang or a traceback."""
    # A valid plan would start a dry run first, which takes long and runs in processes of its own.
    planned = [("planner", command("plan", "--no-verify")), *_planner("simulate")]
    sources = (
        ("plan.json", PLAN, [*_planner("check", "simulate"), _start()]),
        ("plan.json", sliced_plan(), [*_planner("check", "simulate"), _start()]),
        *(("plan.json", plan, [*_planner("check", "simulate"), _start()]) for plan in other_plans().values()),
        ("cluster.yaml", CLUSTER, planned),
        ("model.yaml", MODEL, planned),
    )
    for _ in range(count):
        name, document, targets = rng.choice(sources)
        paths = [p for p, v in _leaves(document) if isinstance(v, int | float) and not isinstance(v, bool)]
        path = rng.choice(paths)
        value = rng.choice((0, 1, 2, 7, 1000, 10**5, 10**6, 10**7, 10**9, 10**18, 2**63 - 1, 1e-300, 1e300, 0.5))
        tool, words = rng.choice(targets)
        text = json.dumps(_replaced(document, path, value))
        yield Case(f"{value:g} for {_where(path)}", tool, words, {name: text}, wrong=False)
