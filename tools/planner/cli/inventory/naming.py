"""From what drivers and Slurm call a GPU to the catalog's name."""

from __future__ import annotations

import re
from typing import NamedTuple

GIB = 2.0**30


class Named(NamedTuple):
    """A GPU of the catalog; ``doubt`` says what the name left open."""

    name: str
    doubt: str = ""


_RULES: tuple[tuple[str, str], ...] = (
    (r"gh200", "GH-96"),
    (r"gb300", "GB300"),
    (r"gb200", "GB200"),
    (r"b300", "B300"),
    (r"b200", "B200"),
    (r"h200", "H200"),
    (r"h100.*nvl", "H100-NVL"),
    (r"h100.*pcie", "H100-PCIe"),
    (r"h100", "H100-SXM"),
    (r"h800", "H800"),
    (r"h20\b", "H20"),
    (r"a800", "A800"),
    (r"mi250", "MI250X"),
    (r"mi300x", "MI300X"),
    (r"mi325x", "MI325X"),
    (r"mi350x", "MI350X"),
    (r"mi355x", "MI355X"),
    (r"l40s", "L40S"),
    (r"l40\b", "L40"),
    (r"l4\b", "L4"),
    (r"\ba40\b", "A40"),
    (r"p100", "P100-16"),
    (r"rtx pro 6000", "RTX-PRO-6000"),
    (r"(rtx 6000 ada|6000 ada)", "RTX-6000-Ada"),
    (r"rtx 8000", "RTX-8000"),
    (r"(rtx )?a5000", "A5000"),
    (r"a10g", "A10G"),
    (r"(\b|tesla)t4\b", "T4"),
    (r"(rtx )?a6000", "A6000"),
    (r"5090", "RTX-5090"),
    (r"4090", "RTX-4090"),
    (r"3090", "RTX-3090"),
    (r"2080", "RTX-2080"),
    (r"titan rtx", "Titan-RTX"),
)
"""First match wins; kinds with several sizes of memory are below."""
_BY_MEMORY = {"a100": (("A100-40", 40), ("A100-80", 80)), "v100": (("V100-16", 16), ("V100-32", 32))}


def catalog_name(text: str, memory_bytes: float | None = None) -> Named | None:
    """The catalog's GPU for a name as ``nvidia-smi`` or Slurm give it; None when it has none.

    Args:
        text: For example ``NVIDIA A100-SXM4-80GB``, ``a100`` or ``nvidia_h100_80gb_hbm3``.
        memory_bytes: Memory of the GPU, when known.
    """
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    for word, sizes in _BY_MEMORY.items():
        if word not in plain:
            continue
        said = re.search(r"(\d+) ?gb?\b", plain)
        gib = memory_bytes / GIB if memory_bytes else float(said.group(1)) if said else None
        if gib is None:
            names = " or ".join(name for name, _ in sizes)
            return Named(sizes[0][0], f"{names}: the name does not say how much memory it has")
        return Named(min(sizes, key=lambda entry: abs(entry[1] - gib))[0])
    return next((Named(name) for pattern, name in _RULES if re.search(pattern, plain)), None)
