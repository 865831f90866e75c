"""Kills one worker of an elastic job whose workers share a GPU: ``python -m benchmarks.gpu.elastic --json OUT``.

A node of three workers trains; the last one is killed while an iteration runs.  The communicators of the others wait
for it on the device and must be aborted.  The two remaining workers must go on in their processes under the next plan,
with the state from before that iteration.  Losses must be those of an undisturbed job, which runs beside
it.
"""

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.elastic import ElasticJob, losses_of
from benchmarks.gpu.cases import Case, CaseError, Setting, run_part
from testing.compare import BOUNDS

_ITERATIONS, _BEFORE, _WORKERS = 30, 6, 3
_POLL_S, _TAIL_LINES = 0.1, 40


def death(setting: Setting) -> dict[str, Any]:
    """Returns the controller's history, and the difference of the losses from those without a death."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(_job, setting, name, kills=name == "killed") for name in ("killed", "undisturbed")]
    history, killed_s = runs[0].result()
    runs[1].result()
    expected, found = (losses_of(setting.folder / name / "report") for name in ("undisturbed", "killed"))
    every = list(range(1, _ITERATIONS + 1))
    if [entry["why"] for entry in history] != ["start", "1 rank was lost"]:
        raise CaseError(f"other changes than one death: {history}\n{_told(setting.folder / 'killed')}")
    if sorted(found) != every or sorted(expected) != every:
        raise CaseError(f"iterations of the two jobs: {sorted(found)}, {sorted(expected)}")
    bound = BOUNDS[setting.device]["fp32"]["loss"]
    apart = max(abs(loss - expected[i][0]) / abs(expected[i][0]) for i in every for loss in found[i])
    result = {
        "loss_difference": apart,
        "bound": bound,
        "repeated": sum(map(len, found.values())) - _ITERATIONS,
        "pause_s": {name: history[1][name] - killed_s for name in ("seen", "left", "planned")},
        "history": history,
    }
    if not apart <= bound:
        raise CaseError(f"losses are {apart:.1e} from those of an undisturbed job: {result}")
    return result


def _job(setting: Setting, name: str, *, kills: bool) -> tuple[list[dict[str, Any]], float]:
    """Run a job to its end; returns the controller's history, and the time at which a worker was killed."""
    folder, killed_s = setting.folder / name, 0.0
    copy_every = "1" if kills else "0"  # only who loses a rank needs its state
    options: dict[str, Any] = {"device": setting.device, "variables": setting.environment()}
    with ElasticJob(folder, _ITERATIONS, copy_every, nodes={"a": _WORKERS}, **options) as job:
        while job.exit_code() is None:
            if kills and not killed_s and job.has_reached(_BEFORE):
                os.kill(job.workers("a")[-1], signal.SIGKILL)
                killed_s = time.time()
            if setting.deadline_s < time.monotonic() + 3.0:
                for worker in job.workers("a"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGABRT)  # its threads write their stacks
                time.sleep(1.0)
                raise CaseError(f"{name}: the job did not end in time\n{_told(folder)}")
            time.sleep(_POLL_S)
        code, history = job.exit_code(), job.history()
    if code or (kills and not killed_s):
        raise CaseError(f"{name}: the job ended with exit code {code}\n{_told(folder)}")
    return history, killed_s


def _told(folder: Path) -> str:
    """Returns the end of every log."""
    lines = []
    for log in sorted(folder.rglob("*.txt")):
        lines += [f"--- {log.relative_to(folder)}", *log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]]
    return "\n".join(lines)


def cases(setting: Setting, _options: argparse.Namespace) -> Mapping[str, Case]:
    """Returns the one case."""
    return {"death": partial(death, setting)}


if __name__ == "__main__":
    raise SystemExit(run_part("benchmarks.gpu.elastic", __doc__, cases))
