"""Measures the speed of every device, and compares it with its kind and with the plan's profile.

All ranks measure at the same time, like the profile and the training, so that shared resources (a
core, a PCIe switch, power) are included.
"""

import itertools
import logging
import math
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_het import megatron_patches as upstream
from megatron_het import planner
from megatron_het.doctor import check

# Figures of one GPU from nvidia-smi; none if it is missing or does not answer.

_FIELDS = (
    "driver_version",
    "temperature.gpu",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
    "power.draw",
    "power.limit",
    "memory.used",
)
_TIMEOUT_S = 8.0

REASONS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the throttle reasons that slow a device down under load, besides its power limit."""
POWER_CAP = 0x4


def query(properties: Any, fields: tuple[str, ...] = _FIELDS) -> dict[str, str]:
    """Figures by field of nvidia-smi.

    Args:
        properties: torch's properties of the device; the UUID identifies the GPU for any ``CUDA_VISIBLE_DEVICES``.
        fields: Fields of ``nvidia-smi --query-gpu``.
    """
    program = shutil.which("nvidia-smi")
    uuid = str(getattr(properties, "uuid", ""))
    if program is None or not uuid:
        return {}
    command = [program, f"--id=GPU-{uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    return parse(done.stdout, fields)


def parse(text: str, fields: tuple[str, ...] = _FIELDS) -> dict[str, str]:
    """Fields of one line of comma-separated values, without those that the GPU does not support."""
    values = [value.strip() for value in text.strip().split("\n")[0].split(",")]
    if len(values) != len(fields):
        return {}
    return {name: value for name, value in zip(fields, values) if value and not value.startswith("[")}


# Throttling of a device during a measurement: heat, power limits, quotas.

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.stat")


class Throttling:
    """Detects throttling of a CUDA device, given by its index (None: a CPU), during a measurement."""

    def __init__(self, gpu: int | None) -> None:
        self._gpu = gpu
        self._before = self._read()
        self.state: dict[str, str] = {}

    def found(self) -> dict[str, list[str]]:
        """Returns the reasons as texts, ``faults`` and ``warnings``; call it before the device has cooled down."""
        after = self._read()
        self.state = {name: str(value) for name, value in after.items()}
        if self._gpu is not None:
            faults, errors = reasons_in(after), after.get("ecc.errors.uncorrected.volatile.total", "0")
            if errors.isdigit() and int(errors):
                faults.append(f"{errors} uncorrected memory errors")
            return {"faults": faults, "warnings": []}
        # A quota is set on purpose, so it is a warning; heat is a fault.
        return {
            "faults": ["heat: the processor throttles"] if self._has_grown("thermal", after) else [],
            "warnings": ["the CPU quota of its container"] if self._has_grown("quota", after) else [],
        }

    def _has_grown(self, name: str, after: dict[str, Any]) -> bool:
        return bool(after.get(name, 0) > self._before.get(name, math.inf))

    def _read(self) -> dict[str, Any]:
        if self._gpu is None:
            return {name: value for name, value in (("thermal", _thermal()), ("quota", _quota())) if value is not None}
        return dict(query(torch.cuda.get_device_properties(self._gpu)))


def reasons_in(facts: dict[str, str]) -> list[str]:
    """Throttle reasons of nvidia-smi's figures, with temperature and clock."""
    try:
        bits = int(facts.get("clocks_throttle_reasons.active", "0"), 16)
    except ValueError:
        return []
    state = (
        f"{facts.get('temperature.gpu', '?')} C, {facts.get('clocks.sm', '?')} of {facts.get('clocks.max.sm', '?')} MHz"
    )
    found = [f"{text} ({state})" for bit, text in REASONS.items() if bits & bit]
    if bits & POWER_CAP and _is_far_below(facts):
        found.append(f"power limit ({facts.get('power.limit', '?')} W, {state})")
    return found


def _is_far_below(facts: dict[str, str]) -> bool:
    """Whether the clock is below 60 %: a power limit slows every large GPU a little, but a low one this much."""
    try:
        return float(facts["clocks.sm"]) < 0.6 * float(facts["clocks.max.sm"])
    except (KeyError, ValueError):
        return False


def _thermal() -> int | None:
    try:
        paths = _CPUS.glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
        found = [int(path.read_text(encoding="ascii")) for path in paths]
    except (OSError, ValueError):
        return None
    return sum(found) if found else None


def _quota() -> int | None:
    """Number of periods in which the kernel throttled this container because its CPU quota was used up."""
    try:
        lines = _QUOTA.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled")), None)
    except (OSError, ValueError, IndexError):
        return None


_WINDOW_S, _WINDOWS = 0.3, 3
_MOST_TOKENS = 8192
_MOST_PASS_S = 1.5
_BARRIER_S = 5.0
_GEMM = 1024
_LIBRARY = re.compile(r"\.so\b|load.*librar|librar.*load", re.IGNORECASE)
_LONGEST = 300


@dataclass
class Devices(check.Check):
    """Times of one transformer layer and of a matrix product on every device."""

    # a device that takes this many times as long as its kind, or as the profile, is a fault
    slow_ratio: float = 1.25
    name: str = field(default="devices", init=False)
    limit_s: float = field(default=45.0, init=False)

    def measure(self, seat: check.Seat) -> dict[str, Any]:
        """Measures seconds of a layer and of a GEMM, and throttling meanwhile."""
        platform, dtype = seat.platform(), check.dtype_of(seat.plan)
        throttling = Throttling(platform.device.index)
        turns = itertools.count()

        def barrier() -> None:
            """Wait for all ranks in bounded time; without some of them the measurement is still made."""
            check.meet(seat, f"barrier/{next(turns)}", True, _BARRIER_S)

        gemm_s = gemm_seconds(dtype, platform, barrier)
        answer: dict[str, Any] = {"gemm_s": gemm_s, "point": None, "layer_s": None, "note": "", "unloaded": ""}
        expected = seat.expectations.layer(seat.kind)
        model, point = operating_point(seat, expected)
        if 3 * point["flops"] / (2 * _GEMM**3 / gemm_s) > _MOST_PASS_S:
            answer["note"] = "a layer of the model takes too long here to be timed"
        else:
            try:
                answer |= {"point": point, **_layer(model, point, barrier)}
            except (ImportError, OSError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and not _LIBRARY.search(str(error)):
                    raise
                answer |= {"note": "no layer was timed", "unloaded": " ".join(str(error).split())[:_LONGEST]}
        again_s = gemm_seconds(dtype, platform, barrier)
        answer |= {"spread": max(again_s, gemm_s) / min(again_s, gemm_s), "load": os.getloadavg()[0]}
        answer["cores"] = os.cpu_count() or 1
        if expected is not None and point["measured_as"] == "the profile":
            answer["expected_s"] = expected.forward_s + expected.backward_s
        return answer | {"throttling": throttling.found(), "state": throttling.state}

    def judge(self, answers: check.Answers, names: check.Names) -> list[check.Finding]:
        """Finds slow devices by kind, and reports throttling."""
        found = []
        for judged, kind in ((self.fault, "faults"), (self.warning, "warnings")):
            said = {rank: answer["throttling"][kind] for rank, answer in answers.items()}
            for reason, ranks in check.ranks_by(said).items():
                found.append(
                    judged(names.of(ranks), f"slowed down by {reason}", "Times measured meanwhile are too long")
                )
        lacking = {rank: [answer["unloaded"]] for rank, answer in answers.items() if answer["unloaded"]}
        for error, ranks in check.ranks_by(lacking).items():
            text = f"a library that a layer needs cannot be loaded: {error}"
            found.append(self.fault(names.of(ranks), text, "Install it there, or correct LD_LIBRARY_PATH"))
        kinds: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, answer in answers.items():
            kinds.setdefault(names.kind(rank) or "device", {})[rank] = answer
        for kind, members in kinds.items():
            found += self._judge_kind(kind, members, names)
        return found

    def _judge_kind(self, kind: str, members: dict[int, dict[str, Any]], names: check.Names) -> list[check.Finding]:
        what = "layer_s" if all(a["layer_s"] for a in members.values()) else "gemm_s"
        task = "a layer" if what == "layer_s" else f"a GEMM of {_GEMM}"
        times = {rank: a[what] for rank, a in members.items()}
        # Of two devices the faster one is the measure: hence the lower median.
        usual = sorted(times.values())[(len(times) - 1) // 2]
        found = []
        worst = max(members.values(), key=lambda answer: answer["spread"])
        spread = worst["spread"]
        doubt = (  # figures of a busy machine say little
            f"The figure is not to be trusted: repeats differ by a factor of {spread:.1f}, at a load of "
            f"{worst['load']:.1f} on {worst['cores']} cores. Repeat it on an idle machine"
        )
        for rank, seconds in times.items():
            if seconds > self.slow_ratio * usual:
                times_usual = f"{seconds / usual:.2f} times the {check.duration(usual)} of its kind"
                text = f"{task} takes {check.duration(seconds)}, {times_usual}"
                if seconds > self.slow_ratio * spread * usual:
                    found.append(self.fault(names.of([rank]), f"{kind}: {text}", "A slow device slows all others down"))
                else:
                    found.append(self.warning(names.of([rank]), f"{kind}: {text}", doubt))
        text = f"{kind}: {task} takes {check.duration(usual)}"
        expected = next((a["expected_s"] for a in members.values() if "expected_s" in a), None)
        if what == "gemm_s" or expected is None:
            note = next((a["note"] for a in members.values() if a["note"]), "")
            more = f" ({note})" if note else ""
            rate = 2 * _GEMM**3 / statistics.median(a["gemm_s"] for a in members.values())
            return [*found, self.ok(names.of(times), f"{text}{more}, {check.amount(rate, 'FLOP/s')} in a GEMM")]
        text += f", {usual / expected:.2f} times the {check.duration(expected)} of the profile"
        if self.slow_ratio * expected < usual <= self.slow_ratio * spread * expected:
            found.append(self.warning(names.of(times), text, doubt))
        elif usual > self.slow_ratio * expected:
            found.append(self.fault(names.of(times), text, "The plan counts on faster devices; profile and plan again"))
        elif usual * self.slow_ratio < expected:
            found.append(self.warning(names.of(times), text, "The profile is of slower devices; profile again"))
        else:
            found.append(self.ok(names.of(times), text))
        return found


def operating_point(
    seat: check.Seat, expected: check.LayerExpectation | None
) -> tuple[check.LayerModel, dict[str, Any]]:
    """Returns the layer and sizes to time: the profile's, or the plan's layer without tensor parallelism."""
    model, plan = seat.expectations.model, seat.plan
    if expected is None or model is None:
        shape = plan.model
        ffn = shape.ffn_hidden_size or 4 * shape.hidden_size
        tokens = min(shape.seq_length, _MOST_TOKENS)
        model = check.LayerModel(
            hidden_size=shape.hidden_size,
            ffn_hidden_size=ffn,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_query_groups,
            vocab_size=128,
            seq_length=tokens,
            precision=plan.training.precision,
        )
        point: dict[str, Any] = {
            "batch": plan.training.micro_batch_size,
            "tokens": tokens,
            "recompute": "none",
            "measured_as": "plan",
        }
    else:
        point = {
            "batch": expected.micro_batch_size,
            "tokens": expected.tokens,
            "recompute": expected.recompute,
            "measured_as": "the profile",
        }
    s, h, groups = point["tokens"], model.hidden_size, model.num_query_groups / model.num_attention_heads
    point["flops"] = 2 * s * point["batch"] * h * (2 * h * (1 + groups) + 3 * model.ffn_hidden_size + s)
    return model, point


def _layer(model: check.LayerModel, point: dict[str, Any], barrier: Callable[[], None]) -> dict[str, Any]:
    """Seconds of forward and backward of one layer, with the planner's own measurement."""
    upstream.install("stock")
    layers, settings, schema = planner("profile.layers"), planner("profile.settings"), planner("inputs.profile_schema")
    torch.set_float32_matmul_precision("high" if model.precision == "tf32" else "highest")
    run = settings.ProfileSettings(
        model=schema.ProfiledModel(**asdict(model)), out="", kinds=("",), window_s=_WINDOW_S, windows=_WINDOWS
    )
    where = settings.Point("layer", point["batch"], 1, point["tokens"], point["recompute"])
    # A world of this rank alone: a layer without tensor parallelism does not communicate.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    logging.disable(logging.WARNING)  # Megatron logs every parameter
    try:
        with layers.tensor_parallel_state(1):
            timing = layers.measure(run, where, barrier)
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()
    return {"layer_s": timing.forward_s + timing.backward_s, "forward_s": timing.forward_s}


def gemm_seconds(dtype: Any, platform: Any, barrier: Callable[[], None]) -> float:
    """Median seconds of a square matrix product in the plan's precision."""
    if not platform.is_cuda:
        dtype = torch.float32  # a CPU is not judged by half precision
    a, b = (torch.randn(_GEMM, _GEMM, device=platform.device).to(dtype) for _ in range(2))
    barrier()
    times = []
    for _ in range(11):
        platform.synchronize()
        start_s = time.perf_counter()
        a @ b
        platform.synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[2:])
