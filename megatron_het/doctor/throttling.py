"""What slows a device down while something else is measured: heat, power limits, quotas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_het.doctor.nvidia import POWER_CAP, REASONS, query

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.stat")


class Throttling:
    """Holds what slows a device down while something else is measured.

    Args:
        gpu: Index of the CUDA device, None on a CPU.
    """

    def __init__(self, gpu: int | None) -> None:
        self._gpu = gpu
        self._before = self._read()
        self.state: dict[str, str] = {}

    def found(self) -> dict[str, list[str]]:
        """Reasons in words, ``faults`` and ``warnings``; call it before the device is cool again."""
        after = self._read()
        self.state = {name: str(value) for name, value in after.items()}
        if self._gpu is not None:
            return {"faults": self._of_gpu(after), "warnings": []}
        # A quota is somebody's decision, heat is nobody's.
        return {
            "faults": ["heat: the processor throttles"] if self._has_grown("thermal", after) else [],
            "warnings": ["the CPU quota of its container"] if self._has_grown("quota", after) else [],
        }

    def _has_grown(self, name: str, after: dict[str, Any]) -> bool:
        return bool(after.get(name, 0) > self._before.get(name, math.inf))

    def _of_gpu(self, facts: dict[str, Any]) -> list[str]:
        found = reasons_in(facts)
        errors = facts.get("ecc.errors.uncorrected.volatile.total", "0")
        if errors.isdigit() and int(errors):
            found.append(f"{errors} uncorrected memory errors")
        return found

    def _read(self) -> dict[str, Any]:
        if self._gpu is None:
            return {name: value for name, value in (("thermal", _thermal()), ("quota", _quota())) if value is not None}
        import torch

        return dict(query(torch.cuda.get_device_properties(self._gpu % torch.cuda.device_count())))


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
    """A power limit holds every large GPU a little; below six tenths of the clock it is set too low."""
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
    """Periods in which the kernel stopped this container because its share was used up."""
    try:
        lines = _QUOTA.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled")), None)
    except (OSError, ValueError, IndexError):
        return None
