"""``het-doctor`` on a GPU that two ranks share: ``python -m benchmarks.gpu.doctor --json OUT``.

Ranks are started by torchrun, as for a training, and configure the shared device by themselves.  Every check of the
doctor has to run and to find no fault.  Its bounds on times are too wide to fail, because other parts run at the
same time.
"""

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu.cases import Case, CaseError, Setting, command, run_part
from megatron_het.doctor.__main__ import CHECKS
from megatron_het.plan import ScheduleSpec, save_plan
from megatron_het.safe_io import read_json
from megatron_het.store import free_port
from testing.cases import build_plan

_RANKS, _WIDE = 2, "100"
_LIMIT_S, _END_S = 150.0, 6.0


def examine(setting: Setting, schedule: ScheduleSpec, precision: str) -> dict[str, Any]:
    """Returns the findings of the doctor on a plan of two stages."""
    folder = setting.folder / schedule.name
    folder.mkdir()
    plan = build_plan([[1]] * _RANKS, [2, 3], random.Random(0), precision=precision)
    save_plan(replace(plan, schedule=schedule), folder / "plan.json")
    limit_s = setting.left_s(_LIMIT_S)
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS), "--master-addr", "127.0.0.1"]
    words += ["--master-port", str(free_port()), "--no-python", sys.executable, "-m", "megatron_het.doctor"]
    words += ["--plan", str(folder / "plan.json"), "--json", str(folder / "doctor.json")]
    words += ["--checkpoints", str(folder), "--log-dir", str(folder / "logs"), "--limit-s", f"{limit_s - _END_S:.0f}"]
    words += ["--slow-ratio", _WIDE, "--link-ratio", _WIDE]
    log = folder / "doctor.log"
    text = command([sys.executable, *words], log, limit_s, setting.environment(), expected=(0, 1))
    report = read_json(folder / "doctor.json")
    bad = [f for f in report["findings"] if f["status"] in ("FAULT", "not run")]
    if bad or report["exit_code"]:
        told = [f"{f['check']} {f['status']}: {f['where']}: {f['what']}" for f in bad]
        raise CaseError("\n".join([report["verdict"], *told, *text.splitlines()[-10:]]))
    missing = set(CHECKS) - {finding["check"] for finding in report["findings"]}
    if missing:
        raise CaseError(f"the doctor says nothing of {sorted(missing)}")
    shares = [line for line in text.splitlines() if "ranks share" in line]
    if setting.device == "cuda" and not shares:
        raise CaseError("nobody says that ranks share a device, so this machine has several")
    return {"verdict": report["verdict"], "shares": shares, "findings": report["findings"]}


def cases(setting: Setting, _options: argparse.Namespace) -> Mapping[str, Case]:
    """Returns the cases; a plan of slices has the transfers of many units in both directions."""
    precision = "bf16" if setting.device == "cuda" else "fp32"
    return {"slimpipe": partial(examine, setting, ScheduleSpec("slimpipe", {"slices": 4}), precision)}


if __name__ == "__main__":
    raise SystemExit(run_part("benchmarks.gpu.doctor", __doc__, cases))
