"""The commands of ``docs/tutorial.md`` run as they are written, and end with what the page shows."""

import re
from pathlib import Path

import pytest

from scripts.make_docs import LAST, TUTORIAL, Piece, pieces_of, run


def shape(output: str) -> str:
    """The last line of an output without its numbers, which change with the machine and the search."""
    lines = [line for line in output.strip().splitlines() if "HET_PLAN_VERIFY=0" not in line]  # set for the tests
    return re.sub(r"[0-9][0-9.E+-]*", "#", lines[-1])


def compare(shown: list[Piece], made: list[Piece]) -> None:
    outputs = [(a, b) for a, b in zip(shown, made, strict=True) if a.kind == "text"]
    assert outputs
    for old, new in outputs:
        if "iteration" not in old.body:  # of a training the last iteration is logged last
            assert shape(old.body).split(":")[0] == shape(new.body).split(":")[0]


def test_from_init_to_the_job(tmp_path: Path) -> None:
    pieces = pieces_of(TUTORIAL.read_text(encoding="utf-8"))
    end = next(i for i, piece in enumerate(pieces) if LAST in piece.text)
    compare(pieces[:end], run(pieces[:end], tmp_path))
    assert (tmp_path / "work" / "plan.html").stat().st_size > 10_000


@pytest.mark.full
def test_two_processes_train(tmp_path: Path) -> None:
    pieces = pieces_of(TUTORIAL.read_text(encoding="utf-8"))
    begin = next(i for i, piece in enumerate(pieces) if LAST in piece.text)
    made = run(pieces[begin:], tmp_path)
    losses = [piece.body for piece in made if "lm loss" in piece.body and piece.kind == "text"]
    assert len(losses) == 1 and losses[0].count("lm loss") == 4 and "iteration 4/ 4" in losses[0]
