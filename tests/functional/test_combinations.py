"""Features together: the table of what is refused is true, and plans that hold many pairs equal one process.

``benchmarks/combinations.py`` trains every pair.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.combinations import markdown, refusals
from testing.cases import row_of
from testing.combination_cases import PARAMETERS, are_of_two_schedules, case_of, pair_row, pairs
from testing.compare import Differences
from tests.functional.selected import tiers

BAR = 1e-5
TABLE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
ROWS: dict[str, dict[str, Any]] = {
    "sliced": row_of(
        "schedule=slimpipe vocabulary context_exchange sequence_parallel layers=uneven microbatches=unequal "
        "distributed_optimizer recompute=mlp",
        tp="by stage",
        cp="unequal parts",
        overlap="gradients and parameters",
    ),
    "exchange": row_of("schedule=slimpipe vocabulary context_exchange cp=different tied recompute=selective"),
    "interleaved": row_of(
        "schedule=interleaved chunks=different cp=different vocabulary tied offload_activations=0.75 routing=uneven "
        "sequence_parallel recompute=selective",
        tp="within a stage",
    ),
    "window": row_of(
        "schedule=ministage window=exact distributed_optimizer tied routing=uneven sequence_parallel",
        tp="within a stage",
    ),
    "window-vocabulary": row_of(
        "schedule=ministage chunks=different window=exact distributed_optimizer vocabulary routing=uneven "
        "microbatches=unequal sequence_parallel recompute=full",
        tp="within a stage",
    ),
    "zero-3-vocabulary": row_of(
        "schedule=data-parallel window=ZeRO-3 distributed_optimizer vocabulary routing=uneven microbatches=unequal "
        "cp=different",
        tp="within a stage",
    ),
    "v": row_of(
        "schedule=zb-v overlap=gradients cp=different tied layers=uneven routing=uneven recompute=full", tp="by stage"
    ),
}
BY_NAME = {name: case_of(pair_row(row.items()), name, 0) for name, row in ROWS.items()}
FULL = {"exchange", "window", "zero-3-vocabulary", "v"}


def test_values_are_of_the_table() -> None:
    for row in ROWS.values():
        assert all(value in PARAMETERS[name][name != "schedule" :] for name, value in row.items())


def test_the_table_is_true(tmp_path: Path) -> None:
    """``python -m benchmarks.combinations --check --json OUT --markdown docs/combinations.md`` makes it again."""
    wanted = [pair for pair in pairs() if not are_of_two_schedules(pair)]
    assert markdown(refusals(wanted, 0, tmp_path)) == TABLE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tiers(BY_NAME, FULL))
def test_equals_one_process(name: str, found: Differences) -> None:
    assert max(found.loss, found.validation, found.gradient) <= BAR, found
