"""Reading and writing of files under the limits of ``megatron_het.safe_io``, with PlannerErrors; names in files."""

import ipaddress
import os
import re
import shlex
from collections.abc import Callable
from math import inf
from typing import Any

from megatron_het import safe_io as untrusted

from ..errors import PlannerError, file_errors

# Names in generated scripts: as Slurm and DNS allow them, and quoting of the rest.


_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.+@=-]*"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_JOB = re.compile(_WORD)
_PARTITION = re.compile(rf"{_WORD}(?:,{_WORD})*")
_FEATURE = re.compile(_WORD)
_CONSTRAINT = re.compile(r"[A-Za-z0-9\[(][A-Za-z0-9_.+@=:&|,*()\[\]-]*")
_GRES = re.compile(rf"{_WORD}(?::(?![0-9]+$){_WORD})*")
_TIME = re.compile(
    r"[0-9]{1,8}|[0-9]{1,6}(?::[0-5]?[0-9]){1,2}|[0-9]{1,5}-[0-9]{1,2}(?::[0-5]?[0-9]){0,2}|UNLIMITED|INFINITE"
)
_MOST = 200
_MOST_HOSTS = 100_000
_HOSTS = re.compile(r"(?P<head>[^\[\]]*)\[(?P<ranges>[0-9,-]{1,1000})\](?P<tail>[^\[\]]*)")


def host_problem(name: str) -> str:
    """Returns why a text is no host name or address (RFC 1123; underscores are allowed); empty if it is one."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "" if len(name) <= 253 and _HOST.fullmatch(name) else "is no host name: letters, digits, '-' and '.'"
    return ""


def expanded_hosts(text: str) -> list[str]:
    """Names from ``n1,n2`` or ``n[01-16,20]``, as Slurm writes them; raises ValueError for anything else."""
    out: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        out += _expanded(part.strip())
    for name in out:
        if problem := host_problem(name):
            raise ValueError(f"{name[:80]!r} {problem}; names are given as n1,n2 or n[01-16]")
    return out


def _expanded(part: str) -> list[str]:
    match = _HOSTS.fullmatch(part)
    if match is None:
        return [part]
    out = []
    for one in match["ranges"].split(","):
        first, _, last = one.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(last or first) - int(first) >= _MOST_HOSTS:
            raise ValueError(f"{part[:80]!r} is not a range of numbers, like n[01-16]")
        out += [f"{match['head']}{n:0{len(first)}}{match['tail']}" for n in range(int(first), int(last or first) + 1)]
    return out


def _matches(pattern: re.Pattern[str], rule: str) -> Callable[[str], str]:
    def problem(text: str) -> str:
        return "" if len(text) <= _MOST and pattern.fullmatch(text) else rule

    return problem


job_problem = _matches(_JOB, "is no job name: letters, digits, and - _ . + @ =, at most 200")
partition_problem = _matches(_PARTITION, "is no partition (or several with commas)")
account_problem = _matches(_FEATURE, "is no account: letters, digits, and - _ . + @ =")
constraint_problem = _matches(_CONSTRAINT, "is no constraint: features joined with & | , and brackets")
gres_problem = _matches(_GRES, "is no generic resource without its number, like gpu or gpu:a100")
time_problem = _matches(
    _TIME, "is no time: minutes, [hours:]minutes:seconds, days-hours[:minutes[:seconds]] or UNLIMITED"
)


def slurm_seconds(text: str) -> float:
    """Seconds of a time limit as :data:`time_problem` takes it; infinite where there is none."""
    if text.isalpha():
        return inf
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(n * unit for n, unit in zip(parts, units))


module_problem = _matches(re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+@=/-]*"), "is no name of a module, like cuda/12.4")
mount_problem = _matches(
    re.compile(r"/[^:,\s]*(?::/[^:,\s]*(?::r[ow])?)?"), "is no mount: /FOLDER, /FOLDER:/INSIDE or /FOLDER:/INSIDE:ro"
)
image_problem = _matches(re.compile(r"[A-Za-z0-9/.][^\s,]*"), "is no image: a file, or a name like registry/name:tag")

SLURM_RULES: dict[str, Callable[[str], str]] = {
    "partition": partition_problem,
    "constraint": constraint_problem,
    "account": account_problem,
    "gres": gres_problem,
    "qos": _matches(_FEATURE, "is no quality of service: letters, digits, and - _ . + @ ="),
    "reservation": _matches(_PARTITION, "is no reservation (or several with commas)"),
    "licenses": _matches(
        re.compile(rf"{_WORD}(?::[0-9]+)?(?:,{_WORD}(?::[0-9]+)?)*"), "is no licence, like name or name:4"
    ),
    "mem": _matches(re.compile(r"[0-9]{1,12}[KMGT]?"), "is no amount of memory, like 64G, or 0 for all of a node's"),
}
"""Rules of the cluster file's ``slurm`` section, by key."""


def is_feature(text: str) -> bool:
    """Whether a constraint is one feature's name, so that nodes can be asked for it."""
    return _FEATURE.fullmatch(text) is not None


def text_problem(text: str, most: int = _MOST) -> str:
    """Returns why a text is no valid name (one short line of printable characters); empty if it is."""
    if len(text) > most:
        return f"longer than {most} characters"
    return "" if text.isprintable() else "holds control characters"


def folder_problem(path: str) -> str:
    """Returns why a folder cannot be that of a run; Slurm interprets ``%`` and ``\\`` in file names."""
    if not path.startswith("/"):
        return "must be an absolute path: nodes start elsewhere"
    if bad := next((c for c in "%\\" if c in path), ""):
        return f"holds {bad!r}, which has a meaning in Slurm's names of files"
    return text_problem(path, 4096)


def quote(text: str) -> str:
    """A word of a shell script.

    Raises:
        ValueError: Control characters: no quoting keeps a new line out of an ``#SBATCH`` line.
    """
    if not text.isprintable():
        raise ValueError(f"{text[:80]!r} holds control characters")
    return shlex.quote(text)


def default_of(variable: str, text: str) -> str:
    """``VARIABLE=${VARIABLE:-text}`` with ``text`` taken literally; not to be put into double quotes."""
    return f"{variable}=${{{variable}:-{quote(text)}}}"


def comment(text: str) -> str:
    """Text for a comment line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def read_yaml(path: str | os.PathLike[str], *, constants_as_text: bool = False, hint: str = "") -> Any:
    """Parsed YAML, or JSON where the name ends in ``.json``; see ``safe_io.read_yaml``. Raises PlannerError."""
    with file_errors(hint):
        return untrusted.read_yaml(path, constants_as_text=constants_as_text)


def read_json(path: str | os.PathLike[str], hint: str = "") -> Any:
    """Parsed JSON; raises PlannerError."""
    with file_errors(hint):
        return untrusted.read_json(path)


def check_target(path: str | os.PathLike[str], option: str, endings: tuple[str, ...] = ()) -> None:
    """Check before long work that a file can be written there; raises PlannerError."""
    with file_errors(option=option, path=path):
        untrusted.check_target(path, endings)


_PLAN, _PAGE, _PICTURE = (b'"megatron_het.plan"',), (b"<!doctype html",), (b"<svg", b"\x89PNG", b"%PDF")
_INPUTS = ("plan", "cluster", "model", "profile", "document_lengths", "pauses", "plans")
_OUTPUTS: dict[str, dict[str, tuple[bytes, ...]]] = {
    "plan": {"out": _PLAN},
    "simulate": {"trace": (b'"traceEvents"',), "picture": _PICTURE},
    "report": {"html": _PAGE},
    "explain": {"html": _PAGE},
    "compare": {"html": _PAGE},
    "replay": {"picture": _PICTURE, "html": _PAGE},
    "rent": {"out": (b'"nodes"',), "picture": _PICTURE},
    "replan": {"out": _PLAN},
    "dry-run": {"out": (b'"kernels"',)},
    "profile": {"out": (b'"megatron_het.profile"',)},
}
_EMITTED = {"plan.json": _PLAN, "args.sh": (b"Megatron arguments of plan",)}
WRITING = frozenset({*_OUTPUTS, "emit"})  # commands whose output files are options


def check_outputs(command: str, options: Any) -> None:
    """Check that no output file of a command replaces one of its input files, or a file of another kind.

    Raises:
        PlannerError: Such a file exists, and ``--force`` was not given.
    """
    if command not in WRITING or options.force:
        return
    given = [getattr(options, name, None) for name in _INPUTS]
    # The trace of ``replay`` is an input file.
    given += [options.trace] if command == "replay" else []
    inputs = [path for value in given for path in (value if isinstance(value, list) else [value]) if path]
    inputs += [os.path.join(options.model, "config.json")] if getattr(options, "model", None) else []
    targets = [(f"--{name}", getattr(options, name), marks) for name, marks in _OUTPUTS.get(command, {}).items()]
    if command == "emit":
        targets = [("--out", options.out / name, marks) for name, marks in _EMITTED.items()]
    for option, path, marks in targets:
        if path and str(path) not in ("", "-"):
            try:
                # A picture as text has no signature.
                is_text = option == "--picture" and str(path).endswith(".txt")
                untrusted.check_replaces(path, inputs, () if is_text else marks)
            except untrusted.FileError as error:
                raise PlannerError("command line", option, str(path), error.problem, error.hint) from None
            except (OSError, ValueError):
                pass  # check_target names what cannot be written


def write_text(path: str | os.PathLike[str], text: str, *, executable: bool = False) -> None:
    """Write a complete file or nothing; raises PlannerError."""
    with file_errors():
        untrusted.write_text(path, text, executable=executable)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write complete JSON or nothing; raises PlannerError."""
    with file_errors():
        untrusted.write_json(path, value)
