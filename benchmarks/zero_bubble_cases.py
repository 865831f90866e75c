"""Plans whose backward passes are split, for the comparison with one process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cases import PARAMETERS, Case, Row, case_from_row, is_valid, random_case, with_schedule
from benchmarks.pairwise import pairwise
from megatron_het.lowering.programs import program_of
from megatron_het.schedule.gradient_sync import unequal_orders

SCHEDULE, V_SCHEDULES = "zb-h1", ("zb-v", "v-half")
_FAMILIES = ("llama", "gpt", "qkv-bias", "squared-relu")
_RANDOM, _BF16 = 6, 3
_PARAMETERS: dict[str, Sequence[Any]] = {**PARAMETERS, "family": _FAMILIES}
_V_PARAMETERS: dict[str, Sequence[Any]] = {**_PARAMETERS, "schedule": V_SCHEDULES}


def zero_bubble_cases(seed: int, quick: bool) -> list[Case]:
    """Plans chosen pairwise from features and families of models, some of them in bf16 too, and random ones."""
    rng = random.Random(seed)
    rows, _ = pairwise(_PARAMETERS, is_valid, rng)
    cases = [_case(row, f"pair-{i:02}", rng) for i, row in enumerate(rows)]
    bf16 = [_case(row, f"bf16-{i:02}", rng, "bf16") for i, row in enumerate(rows[:_BF16])]
    drawn = [random_case(f"random-{i:02}", rng) for i in range(_RANDOM)]
    if quick:
        cases, bf16, drawn = cases[:8], bf16[:1], drawn[:2]
    return [_allowed(with_schedule(case, SCHEDULE, 1, {})) for case in cases + bf16 + drawn] + _v_cases(seed, quick)


def _allowed(case: Case) -> Case:
    """Without early reductions where replicas would begin them in different orders: tied embeddings are one alone."""
    if case.overlap and case.plan.model.tied_embeddings and unequal_orders(program_of(case.plan)) is not None:
        return replace(case, overlap=False, chosen={**case.chosen, "overlap": False})
    return case


def _v_cases(seed: int, quick: bool) -> list[Case]:
    """The same for two chunks per stage in a V: the schedule is one of the features."""
    rng = random.Random(f"v {seed}")
    rows, _ = pairwise(_V_PARAMETERS, _is_valid_v, rng)
    found = [(row["schedule"], _case(row, f"pair-{i:02}", rng)) for i, row in enumerate(rows)]
    found += [(row["schedule"], _case(row, f"bf16-{i:02}", rng, "bf16")) for i, row in enumerate(rows[:_BF16])]
    for i in range(_RANDOM):
        case = random_case(f"random-{i:02}", rng)
        while not _can_be_tied(case.chosen):
            case = random_case(f"random-{i:02}", rng)
        found.append((V_SCHEDULES[i % len(V_SCHEDULES)], case))
    return [_allowed(with_schedule(case, schedule, 2, {})) for schedule, case in (found[:8] if quick else found)]


def _is_valid_v(row: Row) -> bool:
    return is_valid(row) and _can_be_tied(row)


def _can_be_tied(row: Row) -> bool:
    """The two ends of a single stage are in two chunks."""
    return not (row["tied"] and row["stages"] == 1)


def _case(row: Row, name: str, rng: random.Random, precision: str = "fp32") -> Case:
    return replace(case_from_row(row, name, rng, precision), family=row["family"])
