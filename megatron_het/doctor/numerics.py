"""Three iterations of a tiny model under the plan's topology, compared with one process on every kind of device.

The run is the real entry of the training, with the real groups, schedule, transfers and features; only the model is
tiny.  Every kind of device trains the same model alone besides, so that what differs is told apart: a kind that
computes differently, or a topology that does.  Besides, every device trains a fixed model whose losses are stored.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_het.doctor import stored
from megatron_het.doctor.check import Answers, Check, Finding, Names, Seat
from megatron_het.doctor.meeting import hear, tell
from megatron_het.doctor.tiny import ITERATIONS, flags_of, one_process, tiny_plan
from megatron_het.plan import Plan, save_plan

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
"""Relative difference of a loss that is still taken for rounding, by precision."""
_POLL_S = 0.1


@dataclass
class Numerics(Check):
    """Losses of the tiny training."""

    name: str = field(default="numerics", init=False)
    limit_s: float = field(default=75.0, init=False)
    needs_all: bool = field(default=True, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """Losses that this rank saw, and those of one process where this rank is the first of its kind."""
        from megatron_het.device import activate

        platform = activate()
        machine = _common_flags(seat, [list(f.words) for f in platform.flags() if f.required])
        plan = tiny_plan(seat.plan)
        # Processes end in time to be named by what they wrote, not by this rank's silence.
        deadline_s = time.monotonic() + self.limit_s - 8.0
        runs = {"plan": _start("plan", plan, machine, seat, _port(seat), seat.rank, len(seat.hosts))}
        if _is_first_of_its_kind(seat):
            runs["alone"] = _start("alone", one_process(plan), machine, seat, _free_port(), 0, 1)
        codes = _wait(runs, deadline_s)
        if codes["plan"] != 0:
            raise RuntimeError(_failure("plan", codes["plan"], seat.folder))
        precision = plan.training.precision
        answer = {"losses": _losses(seat.folder / "plan", seat.rank), "precision": precision}
        answer["stored"] = _of_stored_model(platform, seat, precision)
        if "alone" in runs:
            problem = _failure("alone", codes["alone"], seat.folder) if codes["alone"] != 0 else ""
            answer |= {"alone": _losses(seat.folder / "alone", 0), "problem": problem}
        return answer

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """Kinds against each other, and the plan's run against them."""
        precision = next(iter(answers.values()))["precision"]
        bound = TOLERANCE[precision]
        alone = {rank: a["alone"] for rank, a in answers.items() if a.get("alone")}
        found = [
            self.fault(names.of([rank]), f"the tiny model alone: {a['problem']}")
            for rank, a in answers.items()
            if a.get("problem")
        ]
        farthest, wrong = self._judge_stored(answers, names, bound)
        found += wrong
        planned = {rank: a["losses"] for rank, a in answers.items() if a["losses"]}
        if not planned or not alone:
            return found or [self.fault("all ranks", "no rank has seen a loss")]
        reference_rank, reference = next(iter(alone.items()))
        text = f"{ITERATIONS} iterations of a tiny model, {precision}"
        worst = 0.0
        for what, losses in (("alone", alone), ("under the plan", planned)):
            for rank, values in losses.items():
                error = difference(values, reference)
                worst = max(worst, error)
                if not error <= bound:  # NaN as well
                    where = f"{names.of([rank])}"
                    detail = f"{text}: losses {what} {_in_words(values)}, alone on {names.of([reference_rank])} "
                    found.append(self.fault(where, f"{detail}{_in_words(reference)}: {error:.1e} apart"))
        if not found:
            kinds = f"{len(alone)} kind(s) of devices alone, and the plan's topology"
            agree = f"losses agree within {worst:.1e}, and each device's with stored ones within {farthest:.1e}"
            found.append(self.ok("all ranks", f"{text}: {kinds}: {agree} (bound {bound:.0e})"))
        return found

    def _judge_stored(self, answers: Answers, names: Names, bound: float) -> tuple[float, list[Finding]]:
        """The largest difference from the stored losses, and the ranks that are beyond the bound."""
        errors = {rank: difference(answer["stored"], stored.LOSSES) for rank, answer in answers.items()}
        found = []
        for rank, error in errors.items():
            if not error <= bound:  # NaN as well
                text = f"a fixed model's losses are {_in_words(answers[rank]['stored'])}, and should be "
                hint = "This device, its driver or its libraries compute wrongly"
                found.append(self.fault(names.of([rank]), f"{text}{_in_words(stored.LOSSES)}: {error:.1e} apart", hint))
        return max(errors.values()), found


def _of_stored_model(platform: Any, seat: Seat, precision: str) -> list[float]:
    """Losses of the fixed model on this rank's device, in the precision of the training."""
    import torch

    if platform.is_cuda:
        torch.cuda.set_device(seat.local_rank % torch.cuda.device_count())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    return stored.losses(platform.device, dtype)


def difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; infinite when one is shorter."""
    if len(values) != len(reference):
        return float("inf")
    errors = [abs(a - b) / abs(b) for a, b in zip(values, reference)]
    return float("nan") if any(e != e for e in errors) else max(errors, default=float("inf"))


def _in_words(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in values)


def _common_flags(seat: Seat, mine: list[list[str]]) -> list[str]:
    """The flags that any rank's machine asks for: what one node lacks, no node can use in a common run."""
    tell(seat.store, f"flags/{seat.rank}", mine)
    if seat.rank == 0:
        found: dict[str, list[str]] = {}
        for rank in range(len(seat.hosts)):
            found.update({words[0]: words for words in hear(seat.store, f"flags/{rank}", 30.0)})
        tell(seat.store, "flags", [word for words in found.values() for word in words])
    return list(hear(seat.store, "flags", 40.0))


def _port(seat: Seat) -> int:
    """A port on the host of rank 0, where the tiny training meets."""
    if seat.rank == 0:
        tell(seat.store, "port", _free_port())
    return int(hear(seat.store, "port", 20.0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _is_first_of_its_kind(seat: Seat) -> bool:
    """One rank per kind of device trains alone."""
    ranks = [r for s in seat.plan.stages for q in s.replicas if q.device == seat.kind for r in q.ranks]
    return seat.rank == min(ranks)


def _start(
    name: str, plan: Plan, machine: Sequence[str], seat: Seat, port: int, rank: int, world_size: int
) -> subprocess.Popen[bytes]:
    """A process of its own, because a run leaves much behind in Megatron, and must be ended when it hangs."""
    folder = seat.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / f"plan-{rank}.json")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1") if world_size > 1 else "127.0.0.1"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")},
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(seat.local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    words = [*flags_of(plan, machine), "--het-plan", str(folder / f"plan-{rank}.json"), "--het-report", str(folder)]
    if world_size > 1 and seat.transport != "auto":
        words += ["--het-transport", seat.transport]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_het.pretrain_gpt", *words]
    with _log(seat.folder, name).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _log(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def _wait(runs: Mapping[str, subprocess.Popen[bytes]], deadline_s: float) -> dict[str, int | None]:
    """Exit codes; None for a process that had to be ended."""
    while time.monotonic() < deadline_s and any(run.poll() is None for run in runs.values()):
        time.sleep(_POLL_S)
    codes = {name: run.poll() for name, run in runs.items()}
    for run in runs.values():
        if run.poll() is None:
            run.kill()
            run.wait()
    return codes


def _failure(name: str, code: int | None, folder: Path) -> str:
    """Returns what ended a run, with the end of its log."""
    lines = [line.strip() for line in _log(folder, name).read_text(errors="replace").splitlines() if line.strip()]
    words = "is slow or stuck, not done in time" if code is None else f"ended with exit code {code}"
    told = [line for line in lines if line.startswith(("megatron_het:", "het:")) or "Error" in line]
    return f"the tiny training {words}: {(told or lines or ['it wrote nothing'])[-1]}"


def _losses(folder: Path, rank: int) -> list[float]:
    """Losses of a rank's report; empty where it saw none."""
    path = folder / f"rank-{rank}.json"
    if not path.is_file():
        return []
    return [float(loss) for _, loss in json.loads(path.read_text(encoding="utf-8"))["losses"]]
