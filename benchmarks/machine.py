"""Parts that all benchmarks share: command line, folder for the runs, report, and description of the machine."""

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

_STARTED_S = time.monotonic()


def machine() -> dict[str, object]:
    """Returns date, processor, cores of this process, and versions of Python and libraries."""
    model = "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "date": datetime.date.today().isoformat(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "megatron_core": _version("megatron-core"),
    }


def _version(package: str) -> str | None:
    """Returns a package's version; None if it is not installed (benchmarks of the planner do not need all)."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def command_line(module: str, text: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark, with ``--json OUT``."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", required=True, type=Path, metavar="OUT", help="where to write the figures")
    return parser


def add_begin_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--begin-s``, for runs in pieces."""
    text = "begin no plan later than so long after the first one; go on with --add"
    parser.add_argument("--begin-s", type=float, default=math.inf, metavar="SECONDS", help=text)


def add_part_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--part I/N``, for runs in pieces; its value is ``(I, N)``."""
    text = "run the I-th of N parts of the cases"
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help=text)


def part_of(text: str) -> tuple[int, int]:
    """Parse ``I/N`` into I and N."""
    index, _, parts = text.partition("/")
    if not (index.isdecimal() and parts.isdecimal() and 1 <= int(index) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: must be I/N with I from 1 to N, as in 2/4")
    return int(index), int(parts)


@contextlib.contextmanager
def scratch(prefix: str, keep: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder for the files of the runs."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def alternate(sides: Iterable[str], rounds: int, run: Callable[[str, int], float]) -> dict[str, list[float]]:
    """Measures all sides in rounds; each round begins with another side, so that slow phases of the machine hit all."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds):
        first = index % len(found)
        for side in (*list(found)[first:], *list(found)[:first]):
            found[side].append(run(side, index))
            print(f"round {index} {side}: {found[side][-1]:.4f} s", flush=True)
    return found


def save(path: Path, report: Any) -> None:
    """Write figures to a file, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def write_between_marks(file: Path, module: str, text: str) -> None:
    """Replace the text between a benchmark's marks in a Markdown file.

    Raises:
        SystemExit: The file has no such marks.
    """
    begin, end = f"<!-- made by {module} -->", f"<!-- end of what {module} makes -->"
    head, has_begin, rest = file.read_text(encoding="utf-8").partition(begin)
    _, has_end, tail = rest.partition(end)
    if not (has_begin and has_end):
        raise SystemExit(f"--markdown {file}: {begin!r} and {end!r} are not in it")
    file.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}", encoding="utf-8")


def write_report(path: Path | None, report: dict[str, Any], unprinted: Collection[str] = ("cases",)) -> None:
    """Write and print the figures, with the machine and the seconds since this module was imported.

    Args:
        path: The JSON file; None to print only.
        report: The figures.
        unprinted: Keys that are only in the file.
    """
    elapsed_s = round(time.monotonic() - _STARTED_S, 1)
    whole = report | {"machine": machine(), "load_average": os.getloadavg(), "elapsed_s": elapsed_s}
    if path is not None:
        save(path, whole)
    print(json.dumps({key: value for key, value in whole.items() if key not in unprinted}, indent=1))
