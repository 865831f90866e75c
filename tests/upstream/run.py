"""Megatron-core's own unit tests under our platform and patches: ``make test-upstream``.

The tests come from a Megatron-LM checkout of tag core_v0.19.0, which MEGATRON_LM_PATH names.  They are those that
need no GPU.  Each line of ``files.txt`` runs in processes of its own, for a bounded time: one process where the tests
need no others, else the eight, over gloo, that they want.  Tests that fail for a known reason are in
``expected_failures.json`` with the reason.  Any other failure ends with exit code 1 and the test's name, and so does a
test that was expected to fail and passes.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
EXPECTED = HERE / "expected_failures.json"
FILES = HERE / "files.txt"
COLLECTIVE_S = 90  # bound on every collective, so that a rank whose peer has failed goes on
_SHARED = (
    *("pytest", "megatron.training", "megatron.core.dist_checkpointing", "megatron.core.models.gpt"),
    *("tests.unit_tests.test_utilities", "tests.unit_tests.dist_checkpointing"),
)
"""What most tests import, imported before the ranks are forked."""
_ORDER = ("failed", "unfinished", "passed", "skipped")  # a test has the first of these that any rank gave it


class Recorder:
    """A pytest plugin: the outcome of every test, written as soon as it is known."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.found: dict[str, dict[str, str]] = {}

    def _put(self, name: str, outcome: str, text: str = "") -> None:
        known = self.found.get(name, {"outcome": "unfinished"})["outcome"]
        if known == "unfinished" or _ORDER.index(outcome) < _ORDER.index(known):
            self.found[name] = {"outcome": outcome, "text": text[-1500:]}
        part = self._out.with_suffix(".part")
        part.write_text(json.dumps(self.found), encoding="utf-8")
        os.replace(part, self._out)  # the process may be ended at any moment

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._put(nodeid, "unfinished")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.pop(report.nodeid, None)
            self._put(report.nodeid, "failed", str(report.longrepr))
        elif report.skipped:
            self._put(report.nodeid, "skipped", str(report.longrepr))
        elif report.when == "call":
            self._put(report.nodeid, "passed")

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._put(f"{report.nodeid} (import)", "failed" if report.failed else "skipped", str(report.longrepr))


def prepare(checkout: Path) -> None:
    """Everything that the rank processes share: paths, our platform and patches, gloo, the imports."""
    sys.path[:0] = [str(checkout), str(REPOSITORY)]
    os.chdir(checkout)
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    from megatron_het.launch.start import install

    install(["pytest"])
    download = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    download.download_and_extract_asset = lambda **_: None  # type: ignore[attr-defined]
    sys.modules[download.__name__] = download
    _force_gloo()
    for module in _SHARED:
        importlib.import_module(module)


def _force_gloo() -> None:
    """Megatron's tests ask for NCCL by name."""
    import torch.distributed as dist

    def over_gloo(original: Any) -> Any:
        def call(*positional: Any, **keywords: Any) -> Any:
            if "nccl" in str(keywords.get("backend", "")):
                keywords["backend"] = "gloo"
            keywords["timeout"] = timedelta(seconds=COLLECTIVE_S)
            positional = tuple("gloo" if word == "nccl" else word for word in positional)
            return original(*positional, **keywords)

        return call

    for name in ("init_process_group", "new_group"):
        replacement = over_gloo(getattr(dist, name))
        setattr(dist, name, replacement)
        setattr(dist.distributed_c10d, name, replacement)


def run_files(files: Sequence[str], world: int, folder: Path, limit_s: float) -> dict[str, dict[str, str]]:
    """The outcomes of the tests of some files, over all ranks."""
    from testing.forked import Forked  # of this repository, which is on the path by now

    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randrange(20000, 32000))}
    where |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    processes = []
    for rank in range(world):
        environment = {**os.environ, **where, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))}
        run = functools.partial(_run_rank, rank, world, files, folder)
        processes.append(Forked(run, folder / f"{rank}.log", environment))
    deadline_s = time.monotonic() + limit_s
    for process in processes:
        if not process.finish(max(0.0, deadline_s - time.monotonic())):
            with contextlib.suppress(ProcessLookupError):  # what the tests have started
                os.killpg(process.pid, signal.SIGKILL)
    merged: dict[str, dict[str, str]] = {}
    for rank in range(world):
        out = folder / f"{rank}.json"
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        if not found:
            log = folder / f"{rank}.log"
            text = log.read_text(errors="replace")[-1500:] if log.exists() else "no output"
            found = {f"{' '.join(files)} (start)": {"outcome": "failed", "text": text}}
        for name, result in found.items():
            if name not in merged or _ORDER.index(result["outcome"]) < _ORDER.index(merged[name]["outcome"]):
                merged[name] = {**result, "text": f"rank {rank}: {result['text']}"}
    return merged


def _run_rank(rank: int, world: int, files: Sequence[str], folder: Path) -> int:
    import pytest
    from tests.unit_tests.test_utilities import Utils  # reads the environment when it is imported

    Utils.rank, Utils.world_size = rank, world
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=short", "-o", "addopts=", "-W", "ignore"]
    words = [*files, *options, f"--basetemp={folder / 'tmp'}-{rank}"]
    return int(pytest.main(words, plugins=[Recorder(folder / f"{rank}.json")]))


def judge(outcomes: dict[str, dict[str, str]], expected: dict[str, str], whole: bool) -> list[str]:
    wrong = []
    for name, result in outcomes.items():
        bad = result["outcome"] in ("failed", "unfinished")
        if bad and name not in expected:
            wrong.append(f"unexpected failure: {name} ({result['outcome']}): {result['text']}")
        if name in expected and not bad:
            wrong.append(f"unexpected {result['outcome']}: {name} was expected to fail because {expected[name]}")
    if whole:
        wrong += [f"expected to fail, but not there: {name}" for name in expected if name not in outcomes]
    return wrong


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="only these of tests/upstream/files.txt")
    parser.add_argument("--limit-s", type=float, default=300.0, help="per line of files.txt (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all outcomes to this file")
    options = parser.parse_args(words)
    checkout = Path(os.environ.get("MEGATRON_LM_PATH", ""))
    if not os.environ.get("MEGATRON_LM_PATH") or not (checkout / "tests" / "unit_tests").is_dir():
        print(
            f"MEGATRON_LM_PATH = {os.environ.get('MEGATRON_LM_PATH', '')!r}: there is no Megatron-LM checkout with "
            "tests/unit_tests. Clone tag core_v0.19.0 of Megatron-LM and name its folder"
        )
        return 2
    listed = [line.split("#")[0].strip() for line in FILES.read_text(encoding="utf-8").splitlines()]
    batches = [line.split() for line in listed if line]
    if options.files:
        batches = [[size, file] for size, *files in batches for file in files if file in options.files]
    out = options.json and options.json.resolve()
    prepare(checkout.resolve())
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (size, *files) in enumerate(batches):
            place = Path(folder) / str(number)
            place.mkdir()
            began = time.monotonic()
            found = run_files(files, int(size), place, options.limit_s)
            outcomes |= found
            counts = collections.Counter(result["outcome"] for result in found.values())
            print(
                f"{' '.join(files)} in {size} processes: {dict(counts)}, {time.monotonic() - began:.0f} s", flush=True
            )
            if out:
                out.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    wrong = judge(outcomes, expected, whole=not options.files)
    counts = collections.Counter(result["outcome"] for result in outcomes.values())
    print(f"{len(outcomes)} tests: {dict(counts)}; {sum(n in expected for n in outcomes)} expected to fail")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
