"""An iteration that does not end, though everybody gives signs of life."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic import members as failures
from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.members import Progress
from megatron_het.elastic.pool import GivenPlans
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_controller import come
from tests.unit.elastic.test_pool import plan


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    return now


def test_time_counts_between_iterations(clock: list[float]) -> None:
    progress = Progress(10.0)
    clock[0] += 1000.0
    assert not progress.is_stuck(0, None), "a start has other bounds"
    progress.opened()
    for reached in range(1, 5):
        clock[0] += 9.0
        assert not progress.is_stuck(reached, 9)
        progress.opened()  # other ranks say so later
    clock[0] += 9.0
    assert not progress.is_stuck(4, 9)
    clock[0] += 2.0
    assert progress.is_stuck(4, 9)
    assert not progress.is_stuck(4, 4), "the run saves and evaluates at its end"
    progress.begin()
    assert not progress.is_stuck(4, 9)


def test_all_leave_a_stuck_iteration_and_who_does_not_is_ended(tmp_path: Path) -> None:
    board: Any = Notes()
    said: list[str] = []
    bounds = Bounds(stuck_s=0.1, leave_s=0.1)
    plans = GivenPlans([plan([[1], [1]]), plan([[1]])])
    controller = Controller(board, plans, tmp_path / "state.json", 2, bounds, said.append)
    come(board, 1, "n1"), come(board, 2, "n2")
    controller._step()
    opened = {"type": "opened", "generation": 0, "iteration": 0, "last": 9, "padded_vocab_size": None}
    board.post({**opened, "process": 1, "times": {"first_step": time.time()}})
    controller._step()
    assert not board.has("0/lost")
    time.sleep(0.2)
    controller._step()
    assert board.has("0/lost") and not board.has("kill/1") and not board.has("kill/2")
    board.post({"type": "ended", "process": 1, "generation": 0, "how": "failed", "error": "closed", "iteration": 1})
    time.sleep(0.2)
    controller._step()
    assert board.has("kill/2") and not board.has("kill/1")
    assert board.get("1/generation")["ranks"] == [1]
    assert controller.history[-1]["why"] == "1 rank was lost"
    assert "no iteration has ended for 0.1 s" in "\n".join(said)


def test_failures_in_a_row_are_tried_again_later_and_later() -> None:
    found = failures.Failures()
    pauses = [found.pause_s]
    for _ in range(3):
        found.note(1, 0, ["no memory"])
        pauses.append(found.pause_s)
    assert pauses == [0.0, 1.0, 2.0, 4.0]
    with pytest.raises(failures.JobError, match="4 generations failed in a row, at iteration 1: no memory"):
        found.note(1, 0, ["no memory"])
    found.over()
    assert found.pause_s == 0.0
