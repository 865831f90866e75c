"""Cases of a part of the GPU check: each may fail alone, and the file is written after each."""

import argparse
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import command_line, machine, scratch
from megatron_het.safe_io import amount, check_target, count, write_json
from testing.runner import Device, has_gpu, run_in_session, server_environment

_LIMIT_S, _TAIL_LINES = 300.0, 25


class CaseError(AssertionError):
    """A case ended with a wrong result."""


@dataclass(frozen=True)
class Setting:
    """The environment in which the cases of a part run."""

    out: Path  # file with the figures
    device: Device  # what is tried; sizes are small on a CPU
    folder: Path  # of everything that the cases write
    deadline_s: float  # of ``time.monotonic()``

    def left_s(self, most_s: float) -> float:
        """Returns a bound on a wait: the given one, or the time to the deadline; on a CPU always the latter.

        Raises:
            CaseError: It has passed.
        """
        left_s = self.deadline_s - time.monotonic()
        if left_s < 1.0:
            raise CaseError("no time was left")
        return min(most_s, left_s) if self.device == "cuda" else left_s

    def environment(self) -> dict[str, str]:
        """Returns the variables of a command that computes on the device."""
        outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        found = server_environment(self.device, outer)
        # It is for processes that fork others; ``HET_SAME_DEVICES`` is for the command itself to set.
        for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", "HET_SAME_DEVICES"):
            found.pop(name, None)
        return found | {"PYTHONUNBUFFERED": "1"}


Case = Callable[[], Mapping[str, Any]]  # returns figures; raises :class:`CaseError` or any other exception


def run_part(
    module: str,
    text: str | None,
    cases: Callable[[Setting, argparse.Namespace], Mapping[str, Case]],
    words: Sequence[str] | None = None,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    at_once: int = 1,
) -> int:
    """Run a part's command line; returns 0 if no case failed.

    Args:
        module: Name of the part's module.
        text: What it does.
        cases: Makes them, by name.
        words: Command line.
        more: Adds arguments of the part.
        at_once: Cases side by side on a GPU.
    """
    parser = command_line(module, text)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cpu: to see that it works (default: %(default)s)"
    )
    parser.add_argument("--only", action="append", metavar="CASE", help="this case only; may be repeated")
    parser.add_argument("--at-once", type=count(1, 16), help=f"cases side by side (default: {at_once}, on a CPU 1)")
    parser.add_argument("--limit-s", type=amount(1, 3600), default=_LIMIT_S, help="of all (default: %(default)g)")
    parser.add_argument("--keep", type=Path, help="folder for everything that the cases write")
    more(parser)
    options = parser.parse_args(words)
    if options.device == "cuda" and not has_gpu():
        parser.exit(3, f"{module}: there is no NVIDIA GPU here; --device cpu shows whether it works\n")
    check_target(options.json)
    with scratch("gpu-part-", options.keep) as folder:
        setting = Setting(options.json, options.device, folder.resolve(), time.monotonic() + options.limit_s)
        made = cases(setting, options)
        chosen = {name: case for name, case in made.items() if options.only is None or name in options.only}
        return run_cases(setting, chosen, options.at_once or (at_once if options.device == "cuda" else 1))


def run_cases(setting: Setting, cases: Mapping[str, Case], at_once: int = 1) -> int:
    """Run cases and write the results after each of them; returns 1 if one failed."""
    found: dict[str, Any] = {}
    lock = threading.Lock()

    def run(name: str) -> None:
        start_s = time.monotonic()
        try:
            entry: dict[str, Any] = {"passed": True, **cases[name]()}
        except Exception as error:  # any exception is a failure of this case only
            told = [] if isinstance(error, AssertionError) else traceback.format_exception(error)[-4:]
            entry = {"passed": False, "error": str(error) or type(error).__name__, "traceback": told}
        entry["elapsed_s"] = round(time.monotonic() - start_s, 1)
        with lock:
            found[name] = entry
            _write(setting, cases, found)
            print(f"{name:24} {entry['elapsed_s']:5.1f} s {entry.get('error', 'ok')}", flush=True)

    _write(setting, cases, found)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, cases))
    return int(_write(setting, cases, found)["failures"] > 0)


def _write(setting: Setting, chosen: Mapping[str, Case], found: Mapping[str, Any]) -> dict[str, Any]:
    failed = [name for name, entry in found.items() if not entry["passed"]]
    missing = [name for name in chosen if name not in found]
    report = {
        "failures": len(failed) + len(missing),
        "failed": failed,
        "not_run": missing,
        "device": setting.device,
        "machine": machine(),
        "cases": found,
    }
    write_json(setting.out, report)
    return report


def command(
    words: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str], *, expected: Sequence[int] = (0,)
) -> str:
    """Run a command in a session of its own; returns its output.

    Args:
        words: The command.
        log: File for its output.
        limit_s: It is ended then.
        environment: Of it.
        expected: Exit codes that are right.

    Raises:
        CaseError: It ended otherwise; with the end of its log.
    """
    code = run_in_session(words, log, limit_s, environment)
    text = log.read_text(errors="replace")
    if code not in expected:
        what = f"did not end within {limit_s:.0f} s" if code is None else f"ended with exit code {code}"
        raise CaseError("\n".join([f"{log.stem} {what}", *text.splitlines()[-_TAIL_LINES:]]))
    return text
