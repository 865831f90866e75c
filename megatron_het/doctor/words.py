"""Figures in words."""

from __future__ import annotations

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(number: float, unit: str = "B") -> str:
    """``12.5 GB``."""
    for size, prefix in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def rate(bytes_per_s: float) -> str:
    """``12.5 GB/s``."""
    return amount(bytes_per_s) + "/s"


def duration(seconds: float) -> str:
    """``35 us``, ``2.1 ms``, ``3.4 s``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
