"""Plans that train with Lion and Muon, and with LayerNorm-1p: drawn beside the others, whose seeds are on record."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.cases import OF_MATRICES, PARAMETERS, Case, case_from_row, is_valid
from benchmarks.pairwise import Row, pairwise

_NORM = "layernorm-1p"
_BF16 = 3
_PARAMETERS: dict[str, Sequence[Any]] = {
    **PARAMETERS,
    "family": ("llama", "gpt", "output-gate", _NORM),
    "flags": (*OF_MATRICES, "none"),
}


def optimizer_cases(seed: int) -> list[Case]:
    """Plans chosen pairwise from every feature, some of them in bf16 too."""
    rng = random.Random(f"optimizers {seed}")
    rows, _ = pairwise(_PARAMETERS, _is_new, rng)
    cases = [case_from_row(row, f"optimizer-{i:02}", rng) for i, row in enumerate(rows)]
    return cases + [case_from_row(row, f"optimizer-bf16-{i:02}", rng, "bf16") for i, row in enumerate(rows[:_BF16])]


def _is_new(row: Row) -> bool:
    """Whether a row has something that the other draws have not."""
    return is_valid(row) and (row["flags"] in OF_MATRICES or row["family"] == _NORM)
