"""Features together: the table of what is refused is true, and plans that hold many pairs equal one process.

``benchmarks/combinations.py`` trains every pair.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.combinations import markdown, refusals
from testing.combination_cases import PARAMETERS, are_of_two_schedules, case_of, pair_row, pairs
from testing.compare import Differences
from tests.functional.selected import SECTIONS, tiers

BAR = 1e-5
TABLE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
_SECTION: dict[str, dict[str, Any]] = SECTIONS["combinations"]["cases"]
ROWS = {name: {key: value for key, value in row.items() if key != "full"} for name, row in _SECTION.items()}
BY_NAME = {name: case_of(pair_row(row.items()), name, 0) for name, row in ROWS.items()}
FULL = {name for name, row in _SECTION.items() if "full" in row}


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
