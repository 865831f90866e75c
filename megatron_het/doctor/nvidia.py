"""What nvidia-smi says about one GPU; nothing where it is not there or does not answer."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

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
        properties: What torch says of the device; its UUID names the GPU whatever ``CUDA_VISIBLE_DEVICES`` is.
        fields: Of ``nvidia-smi --query-gpu``.
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
    """Fields of one line of comma-separated values; what the GPU does not know is left out."""
    values = [value.strip() for value in text.strip().split("\n")[0].split(",")]
    if len(values) != len(fields):
        return {}
    return {name: value for name, value in zip(fields, values) if value and not value.startswith("[")}
