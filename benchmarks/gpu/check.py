"""All checks that need a GPU, in one command: ``make gpu-check``, ``python -m benchmarks.gpu.check --json OUT``.

Each part is a process of its own with a limit of its own.  A part that fails, hangs or dies is a row in the result
and does not end the others.  Parts without timed figures run side by side first; then each timed part runs
alone.  The JSON names hardware and date, and is written after every part.  Without a CUDA device the command
prints one line and exits with 3, before anything starts.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.timings import BARS, CATALOG_BAR, PROFILE_BAR
from benchmarks.machine import machine
from megatron_het.safe_io import check_target, count, write_json
from testing.runner import run_in_session

LIMIT_S = 520.0
AT_ONCE = 4
NO_GPU = 3
_TAIL_LINES = 15
_LEAST_S = 10.0
_LAST_WORDS_S = 5.0  # a part that keeps to a limit itself has so much less, to say what hangs
_MARK = "HET_GPU_CHECK_PART"  # variable by which the processes of a part are known, whatever session they are in


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the check."""

    name: str  # key of the result
    command: tuple[str, ...]  # arguments of the Python interpreter; ``{json}`` and ``{limit_s}`` are replaced
    limit_s: float  # the part is ended after this time; sooner where parts before it have taken too long
    judge: Callable[[Any], tuple[bool, str]]  # from the figures that the part wrote to (passed, what counts)
    is_timed: bool = False  # times count, so that no other part runs meanwhile


def judged_by(key: str, least: float | None = None, most: float | None = None) -> Callable[[Any], tuple[bool, str]]:
    """Returns a judgement by one figure within bounds."""

    def judge(figures: Any) -> tuple[bool, str]:
        value = figures.get(key)
        if not isinstance(value, int | float):
            return False, f"{key}: no figure"
        good = (least is None or value >= least) and (most is None or value <= most)
        bound = f"at least {least:g}" if least is not None else f"at most {most:g}"
        return good, f"{key} {value:.4g} ({bound})"

    return judge


def all_of(*judges: Callable[[Any], tuple[bool, str]]) -> Callable[[Any], tuple[bool, str]]:
    """Returns a judgement by several figures."""

    def judge(figures: Any) -> tuple[bool, str]:
        found = [one(figures) for one in judges]
        return all(good for good, _ in found), "; ".join(text for _, text in found)

    return judge


def _all_passed(figures: Any) -> tuple[bool, str]:
    """Judges tests: some ran, none failed."""
    ran, failed = figures["tests"] - figures["skipped"], figures["failures"] + figures["errors"]
    return ran > 0 and not failed, f"{ran} tests ran, {failed} failed"


def _cases(module: str, *words: str) -> tuple[str, ...]:
    """Returns the command of a part that consists of cases and keeps its limit itself."""
    return ("-m", f"benchmarks.gpu.{module}", *words, "--json", "{json}", "--limit-s", "{limit_s}")


_NONE_FAILED = judged_by("failures", most=0)

PARTS = (
    # Those that train many plans at once are not neighbours: their ranks take turns on the device.
    Part("parity", _cases("trainings"), 200, _NONE_FAILED),
    Part("elastic", _cases("elastic"), 120, _NONE_FAILED),
    Part("parity-te", _cases("trainings", "--te"), 200, _NONE_FAILED),
    Part("doctor", _cases("doctor"), 120, _NONE_FAILED),
    Part("parity-fp8", _cases("trainings", "--fp8"), 150, _NONE_FAILED),
    Part("auto-batch", _cases("auto_batch"), 90, _NONE_FAILED),
    Part("checkpoint", _cases("checkpoint"), 80, _NONE_FAILED),
    Part("checkpoint-te", _cases("checkpoint", "--te"), 80, _NONE_FAILED),
    Part("cuda-graphs", _cases("trainings", "--cuda-graphs"), 90, _NONE_FAILED),
    Part(
        "memory",
        ("-m", "benchmarks.gpu.memory", "--json", "{json}"),
        90,
        all_of(judged_by("largest_error", most=0.10), judged_by("dry_run_error", most=0.05)),
    ),
    Part("tests", ("-m", "pytest", "-q", "-m", "gpu", "tests/unit/device", "--junitxml", "{json}"), 40, _all_passed),
    # Outputs are equal; gradients are added up in an order that changes, and a rounding of bf16 is 2^-8.
    Part(
        "graphs",
        ("-m", "benchmarks.gpu.graphs", "--json", "{json}"),
        60,
        all_of(judged_by("difference", most=1e-5), judged_by("gradient_difference", most=2**-7)),
    ),
    Part(
        "timings",
        _cases("timings", "--profile"),
        150,
        all_of(
            *(judged_by(name, most=bar) for name, bar in BARS.items()),
            judged_by("catalog_error", most=CATALOG_BAR),
            judged_by("profile_error", most=PROFILE_BAR),
        ),
        is_timed=True,
    ),
    Part(
        "slices",
        (
            *("-m", "benchmarks.gpu.slice_attention", "--json", "{json}"),
            *("--tokens", "32768", "65536", "--slices", "8", "16", "--repeats", "3"),
        ),
        40,
        judged_by("least_margin", least=0.0),
        is_timed=True,
    ),
    Part(
        "offload",
        _cases("offload", "--rounds", "1", "--iterations", "6"),
        95,
        judged_by("max_slowdown", most=0.03),
        is_timed=True,
    ),
    Part("longest", _cases("timings", "--longest"), 35, judged_by("longest_tokens", least=131072), is_timed=True),
)


def run_part(part: Part, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one part to its end or its limit; never raises because of the part."""
    target = folder / f"{part.name}.json"
    values = {"{json}": str(target), "{limit_s}": f"{max(1.0, limit_s - _LAST_WORDS_S):g}"}
    words = [values.get(word, word) for word in part.command]
    start_s, mark = time.monotonic(), secrets.token_hex(8)
    log = folder / f"{part.name}.log"
    try:
        code = run_in_session([sys.executable, *words], log, limit_s, {**os.environ, _MARK: mark})
    finally:
        _end(mark)
    result: dict[str, Any] = {"exit_code": code, "elapsed_s": round(time.monotonic() - start_s, 1)}
    try:
        figures = read_figures(target)
        passed, text = part.judge(figures)
        result |= {"passed": passed and code is not None, "what": text, "figures": figures}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ElementTree.ParseError) as error:
        result |= {"passed": False, "what": f"no figures: {type(error).__name__}: {error}"}
    if code is None:
        result["what"] = f"ended after {limit_s:.0f} s; {result['what']}"
    if not result["passed"]:
        result["log"] = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return result


def _end(mark: str) -> None:
    """End the ranks that a part has started, which would keep the GPU's memory from the next part; wait for it."""
    until_s = time.monotonic() + _LAST_WORDS_S
    while _kill(f"{_MARK}={mark}".encode()) and time.monotonic() < until_s:
        time.sleep(0.05)


def _kill(own: bytes) -> int:
    """Kill the processes with this variable; returns their number (an ended process shows no variables)."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if own in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                found += 1
    return found


def read_figures(path: Path) -> Any:
    """Returns the figures of a part; from pytest's file the four counts."""
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("<"):
        return json.loads(text)
    suites = list(ElementTree.fromstring(text).iter("testsuite"))
    return {key: sum(int(s.get(key, "0")) for s in suites) for key in ("tests", "skipped", "failures", "errors")}


def planned_s(parts: Sequence[Part], at_once: int = AT_ONCE) -> float:
    """Returns the seconds of all parts if each needs its limit: side by side, then the timed ones."""
    lanes = [0.0] * at_once
    for part in parts:
        if not part.is_timed:
            lanes[lanes.index(min(lanes))] += part.limit_s
    return max(lanes) + sum(part.limit_s for part in parts if part.is_timed)


def share_s(parts: Sequence[Part], left_s: float, at_once: int = AT_ONCE) -> float:
    """Returns the seconds of the first part: its limit, or less, so that the others keep the same share of theirs.

    A part that hangs must not take the time of those after it.

    Args:
        parts: Those that have not begun, in their order.
        left_s: Until the end of the check.
        at_once: How many run side by side.
    """
    return parts[0].limit_s * min(1.0, left_s / planned_s(parts, at_once))


def run_all(
    parts: Sequence[Part], out: Path, hardware: dict[str, Any], limit_s: float = LIMIT_S, at_once: int = AT_ONCE
) -> dict[str, Any]:
    """Run all parts, the timed ones one after the other at the end; the report is complete after each of them."""
    deadline_s = time.monotonic() + limit_s
    report: dict[str, Any] = {"passed": False, **hardware, "parts": {}}
    results: dict[str, dict[str, Any]] = {}
    waiting = sorted(parts, key=lambda part: part.is_timed)
    lock = threading.Lock()

    def run_next(folder: Path) -> None:
        """Run the first waiting part, with its share of the time."""
        with lock:
            left_s = deadline_s - time.monotonic()
            bound_s = share_s(waiting, left_s, at_once)
            part = waiting.pop(0)
        if left_s < _LEAST_S:
            result: dict[str, Any] = {"passed": False, "what": "not run: no time was left"}
        else:
            result = run_part(part, folder, bound_s)
        with lock:
            results[part.name] = result
            report["parts"] = {one.name: results[one.name] for one in parts if one.name in results}
            report["passed"] = len(report["parts"]) == len(parts) and all(p["passed"] for p in report["parts"].values())
            write_json(out, report)
            print(f"{part.name:13} {'ok  ' if result['passed'] else 'FAIL'} {result['what']}", flush=True)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, ThreadPoolExecutor(at_once) as pool:
        numbers = range(sum(not part.is_timed for part in parts))
        for run in as_completed([pool.submit(run_next, Path(folder)) for _ in numbers]):
            run.result()
        while waiting:
            run_next(Path(folder))
    return report


def hardware() -> dict[str, Any] | None:
    """Returns the hardware that results must name; None without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return {
        **machine(),
        "device": torch.cuda.get_device_name(),
        "devices": torch.cuda.device_count(),
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()),
        "memory_bytes": total,
        "free_bytes": free,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Command line; 0 when all parts have passed, 3 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("runs/gpu-check.json"), help="default: %(default)s")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", choices=names, help="this part only; may be repeated")
    parser.add_argument("--list", action="store_true", help="show the parts with their command lines, and run nothing")
    parser.add_argument(
        "--limit-s", type=count(10, 7200), default=int(LIMIT_S), help="of all parts (default: %(default)s)"
    )
    parser.add_argument(
        "--at-once", type=count(1, 16), default=AT_ONCE, help="parts side by side (default: %(default)s)"
    )
    options = parser.parse_args(words)
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    if options.list:
        for part in parts:
            print(f"{part.name:13} {part.limit_s:4.0f} s  python {' '.join(part.command)}")
        return 0
    check_target(options.json)
    found = hardware()
    if found is None:
        sys.stderr.write("gpu-check: there is no CUDA device here; nothing was run\n")
        return NO_GPU
    return int(not run_all(parts, options.json, found, options.limit_s, options.at_once)["passed"])


if __name__ == "__main__":
    raise SystemExit(main())
