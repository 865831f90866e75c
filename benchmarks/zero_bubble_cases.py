"""Plans whose backward passes are split, for the comparison with one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import PARAMETERS, Case, Row, case_from_row, is_valid, random_case, with_schedule
from benchmarks.pairwise import pairwise

SCHEDULE = "zb-h1"
_FAMILIES = ("llama", "gpt", "qkv-bias", "squared-relu")
_RANDOM, _BF16 = 6, 3
_PARAMETERS: dict[str, Sequence[Any]] = {**PARAMETERS, "family": _FAMILIES}


def zero_bubble_cases(seed: int, quick: bool) -> list[Case]:
    """Plans chosen pairwise from features and families of models, some of them in bf16 too, and random ones."""
    rng = random.Random(seed)
    rows, _ = pairwise(_PARAMETERS, is_valid, rng)
    cases = [_case(row, f"pair-{i:02}", rng) for i, row in enumerate(rows)]
    bf16 = [_case(row, f"bf16-{i:02}", rng, "bf16") for i, row in enumerate(rows[:_BF16])]
    drawn = [random_case(f"random-{i:02}", rng) for i in range(_RANDOM)]
    if quick:
        cases, bf16, drawn = cases[:8], bf16[:1], drawn[:2]
    return [with_schedule(case, SCHEDULE, 1, {}) for case in cases + bf16 + drawn]


def _case(row: Row, name: str, rng: random.Random, precision: str = "fp32") -> Case:
    return replace(case_from_row(row, name, rng, precision), family=row["family"])
