"""Types of command-line options: numbers within bounds, with an error that says which."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from megatron_het.safe_io.errors import shown


def count(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` to ``most``."""

    def convert(text: str) -> int:
        try:
            value = int(text) if len(text) <= 20 else None
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text, 40)}: a whole number from {least} to {most} is needed")
        return value

    return convert


def amount(least: float, most: float) -> Callable[[str], float]:
    """The type of an option that is a finite number from ``least`` to ``most``."""

    def convert(text: str) -> float:
        try:
            value = float(text) if len(text) <= 40 else math.nan
        except ValueError:
            value = math.nan
        if not least <= value <= most:  # False for NaN too
            raise argparse.ArgumentTypeError(f"{shown(text, 40)}: a number from {least:g} to {most:g} is needed")
        return value

    return convert
