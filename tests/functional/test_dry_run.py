"""A rank's dry run holds, computes and sends, to the byte, what the rank of a real run over gloo does."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases import Case
from benchmarks.dry_run import compare
from benchmarks.dry_run_cases import dry_run_cases
from benchmarks.runner import Runner

_CHOSEN = (
    "1f1b, distributed optimizer, bf16",
    "interleaved",
    "zero-bubble",
    "zero-bubble in a V",
    "ministage with a window",
    "slimpipe",
)


@pytest.mark.parametrize("case", [c for c in dry_run_cases() if c.name in _CHOSEN], ids=lambda case: case.name)
def test_equals_a_real_run(case: Case, runner: Runner, tmp_path: Path) -> None:
    ranks = [0]
    entry = compare(runner, case, tmp_path / "runs", ranks)
    assert "error" not in entry, entry["error"]
    assert entry["differences"] == {rank: {} for rank in ranks}
