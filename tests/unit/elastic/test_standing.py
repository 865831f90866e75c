"""What ``het-run status`` shows."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.pool import GivenPlans
from megatron_het.elastic.worth import describe, duration, goodput, last_iteration, standing, summed_up
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_controller import come
from tests.unit.elastic.test_pool import plan


def generation(
    number: int, why: str, stopped_s: float, reached: int, loaded_s: float, first: int, **more: Any
) -> dict[str, Any]:
    """An entry of the history; the one before has stopped then, having reached an iteration."""
    times = {"built": loaded_s - 0.5, "loaded": loaded_s, "first_step": loaded_s + 1.0, "told": loaded_s + 1.0}
    opened = {"4": {"iteration": first, "last": 40, "times": times, "sent_bytes": 0}}
    entry = {"generation": number, "why": why, "seen": stopped_s, "left": stopped_s, "planned": stopped_s}
    return {**entry, "stopped": stopped_s, "reached": reached, "opened": opened, **more}


START = generation(0, "start", 100.0, 0, 110.0, 0)
DEATH = generation(1, "1 rank was lost", 130.0, 20, 135.0, 18)


def test_time_that_counts():
    # 20 iterations in 20 s, of which two are done again; then 5 in 5 s; 40 s in all
    assert goodput([START], 20, 130.0) == pytest.approx(20 / 30)
    assert goodput([START, DEATH], 23, 140.0) == pytest.approx((18 + 5) / 40)


def test_a_generation_that_is_over_takes_one_line_whatever_its_ranks(tmp_path: Path):
    """The controller shows the whole history every second."""
    ranks = {str(i): told | {"times": {**told["times"], "loaded": 110.0 - i}, "sent_bytes": 2}
             for told in START["opened"].values() for i in range(50)}  # fmt: skip
    whole = START | {"opened": ranks}
    one = summed_up(whole)
    assert len(json.dumps(one)) < 400
    assert one["opened"]["all"]["sent_bytes"] == 100
    for entries in ([whole, DEATH], [one, DEATH]):
        assert goodput(entries, 23, 140.0) == pytest.approx((18 + 5) / 40)
        assert last_iteration(entries[:1]) == 40
    assert summed_up({"why": "start"}) == {"why": "start"}
    board: Any = Notes()
    controller = Controller(board, GivenPlans([plan([[1]])]), tmp_path / "state.json", 1, Bounds(), lambda _: None)
    come(board, 1, "n1")
    for generation in range(2):
        controller._step()
        opened = {"type": "opened", "process": 1, **START["opened"]["4"], "padded_vocab_size": None}
        board.post({**opened, "generation": generation})
        board.post({"type": "ended", "process": 1, "how": "failed", "error": "", "iteration": 30 * generation,
                    "unsaved": None, "generation": generation})  # fmt: skip
        controller._step()
    assert [list(entry.get("opened", {})) for entry in controller.history][:-1] == [["all"]] * 2


def test_before_the_first_iteration_there_is_none():
    assert goodput([], 0, 5.0) is None
    assert goodput([{**START, "opened": {}}], 0, 5.0) is None


def test_a_change_that_is_under_way_counts_as_lost_time():
    opening = {**DEATH, "opened": {}}
    assert goodput([START, opening], 20, 140.0) == pytest.approx(20 / 40)


def test_an_older_checkpoint_takes_back_what_several_generations_did():
    fallen = generation(2, "1 rank was lost", 145.0, 28, 155.0, 9)
    # 0 to 9 of the first 20 s, nothing of the second generation, 10 s of the third
    assert goodput([START, DEATH, fallen], 19, 165.0) == pytest.approx((9 + 10) / 65)


def test_goodput_is_a_share():
    rng = random.Random(3)
    for _ in range(200):
        history, now_s, done = [], 0.0, 0
        for number in range(rng.randrange(1, 6)):
            first = rng.randrange(done + 1)
            entry = generation(number, "x", now_s, done, now_s + rng.random(), first)
            history.append(entry)
            now_s, done = now_s + 2.0 + rng.random(), first + rng.randrange(9)
        share = goodput(history, done, now_s)
        assert share is not None and 0.0 <= share <= 1.0


def status(**more: Any) -> Mapping[str, Any]:
    ranks = Generation(1, plan([[1], [1]]), (1, 3), (), ("n1", "n2"), loads=True)
    members = [{"process": n, "node": f"n{n}", "device": "T4", "iteration": 23} for n in (1, 3, 5)]
    history = [START, DEATH]
    return {"generation": ranks.to_json(), "members": members, "leaving": ["n3"], "history": history,
            **standing(history, 23, 140.0), **more}  # fmt: skip


def test_everything_that_a_user_asks_for_is_there():
    text = describe(status())
    # The first iteration since the change ended after 136 s, and four more until now.
    assert text.startswith("iteration 23 of 40, 1 s each, 17 s left; goodput 57.5 % of 40 s\n")
    assert "generation 1 (1 rank was lost): plan " in text and "2 stages of 1 + 1 ranks" in text
    assert "node n1: 1 worker (T4)\n" in text
    assert "node n3: 1 worker (T4), is to leave\n" in text
    assert "node n5: 1 worker (T4), 1 without a rank\n" in text
    assert "change 1 at iteration 20: 1 rank was lost, 6.0 s to the end of the first iteration\n" in text
    assert "begins" not in text
    leaving = describe(status(under_way="a node leaves"))
    assert leaving.endswith("  a change begins: a node leaves; all ranks leave their session\n")
    assert last_iteration([]) is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.4, "0 s"), (149.0, "149 s"), (151.0, "3 min"), (7000.0, "117 min"), (12000.0, "3 h 20 min")],
)
def test_times_for_a_reader(seconds: float, said: str):
    assert duration(seconds) == said


def test_a_job_that_has_not_begun_or_is_over():
    assert "just started" in describe(None)
    waiting = describe(status(generation=None, history=[], **standing([], 0, 1.0)))
    assert waiting.startswith("iteration 0\n") and "waits for its nodes" in waiting
    assert "the job ended: no plan" in describe(status(over=True, error="no plan"))
    assert "the training is over" in describe(status(over=True, error=""))
