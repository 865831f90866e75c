"""What a worker tells the controller, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic import worker as workers
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.sessions import Outcome
from megatron_het.elastic.worker import Setting, Worker
from megatron_het.store import StoreError
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_pool import plan


@pytest.mark.parametrize("is_away", [False, True])
def test_a_rank_says_that_it_leaves_before_its_session_is_taken_down(
    is_away: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Once, also where the controller is away at that moment."""
    board: Any = Notes()
    monkeypatch.setattr(Setting, "board", lambda _: board)
    worker = Worker(Setting("127.0.0.1", 1, "t", 4, "n1", "", str(tmp_path), 1, 1.0, "s"), [], lambda _: None)
    early: list[Any] = []

    def session(boundary: Any, *_unused: Any) -> Outcome:
        boundary.iteration = 7
        with monkeypatch.context() as patched:
            if is_away:
                patched.setattr(board, "post", _refuse)
            boundary.leaving()
        early.append(board.get("inbox/1"))
        return Outcome("left")

    monkeypatch.setattr(workers, "run_session", session)
    worker._take_part(Generation(3, plan([[1]]), (4,), (), ("n1",)))
    told = {"type": "ended", "process": 4, "generation": 3, "how": "left", "error": "", "unsaved": None, "iteration": 7}
    told["refused"] = False
    assert early == [None if is_away else told]
    assert worker._ended == told, "signs of life say it again"
    assert not board.has("inbox/2")


def _refuse(_document: Any, **_: Any) -> None:
    raise StoreError("away")
