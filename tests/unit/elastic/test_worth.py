"""A better plan is taken where it pays in what is left of the run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.pool import GivenPlans
from megatron_het.elastic.worth import (
    CHANGE_S,
    DEATH,
    GROUP_S,
    JOIN,
    LEAVE,
    Rates,
    against,
    change_s,
    grows_for_s,
    measured_s,
    state_bytes,
)
from megatron_het.plan import Plan, Prediction, RankPrediction
from megatron_het.plan.schema import LinkCosts, PlannedCosts
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_controller import come
from tests.unit.elastic.test_pool import plan


def predicted(sizes: list[list[int]], iteration_s: float) -> Plan:
    return replace(plan(sizes), predicted=Prediction(iteration_s, 0.0))


FAST, SLOW = predicted([[1], [1], [1]], 1.5), predicted([[1], [1]], 2.0)


def entry(generation: int, seen: float, steps: tuple[float, ...], began: int = 0) -> dict[str, Any]:
    opened = {str(i): {"iteration": began, "last": 100, "times": {"first_step": step}} for i, step in enumerate(steps)}
    return {"generation": generation, "seen": seen, "opened": opened}


def test_what_a_change_takes() -> None:
    assert change_s([entry(0, 0.0, (9.0,))]) == CHANGE_S
    assert change_s([entry(0, 0.0, (9.0,)), entry(1, 10.0, (12.5, 13.0))], SLOW) == 3.0


def test_what_a_change_takes_grows_with_state_links_and_groups() -> None:
    def of(held_bytes: int, link_bytes_per_s: float, sizes: list[list[int]], rates: Rates | None = None) -> float:
        ranks = tuple(RankPrediction(r, 1.0, held_bytes // 2, 0, held_bytes // 2, 0) for r in range(len(sizes)))
        costs = PlannedCosts((), (LinkCosts(((0, 1),), 1e-5, link_bytes_per_s),))
        made = replace(plan(sizes), predicted=Prediction(1.0, 0.0, ranks, costs))
        if rates is not None:
            assert change_s([], made, JOIN, rates) == CHANGE_S + grows_for_s(made, rates)
        return grows_for_s(made, rates or Rates())

    small, large = of(10**9, 1e9, [[1], [1]]), of(10**10, 1e9, [[1], [1]])
    assert large - small == pytest.approx(9 * 1.5), "once out, once over the link, once in"
    assert of(10**9, 1e8, [[1], [1]]) - small == pytest.approx(9.0)
    assert of(10**9, 1e9, [[1], [1, 1]]) - small == pytest.approx(2 * GROUP_S)
    assert grows_for_s(SLOW, Rates()) == 0.0 and change_s([], SLOW) == CHANGE_S
    measured = of(10**9, 1e9, [[1], [1]], Rates(4e9, 1e8))
    assert measured - small == pytest.approx(9.0), "copies have told that the link is slower"
    assert of(10**9, 1e8, [[1], [1]], Rates(4e9, 1e9)) == measured, "of the planned and the seen link the slower one"
    assert of(10**9, 1e9, [[1], [1]], Rates(4e8, None)) - small == pytest.approx(4.5)


def test_what_a_change_takes_is_learned_from_the_changes_of_the_job() -> None:
    def seen(number: int, took_s: float, moved_s: float) -> dict[str, Any]:
        told = {"iteration": 5, "times": {"built": 3.0, "loaded": 3.0 + moved_s, "first_step": 10.0 + took_s}}
        return {"generation": number, "seen": 10.0, "took_s": took_s, "state_bytes": 4e9, "opened": {"0": told}}

    ranks = (RankPrediction(0, 1.0, 10**10, 0, 10**10, 0),)
    large = replace(FAST, predicted=Prediction(1.0, 0.0, ranks))
    start, ratio = entry(0, 0.0, (9.0,)), 5.0
    assert change_s([start, seen(1, 7.0, 4.0)], large) == pytest.approx(3.0 + 4.0 * ratio)
    assert change_s([start, seen(1, 7.0, 9.0)], large) == pytest.approx(7.0 * ratio), "never more than the whole"
    changes = [seen(1, 1.0, 0.0), seen(2, 7.0, 0.0), seen(3, 90.0, 0.0), seen(4, 8.0, 0.0)]
    assert change_s([start, *changes], large) == 8.0, "one slow change does not count, nor does an old one"
    assert change_s([start, *changes]) == 8.0


def test_a_join_is_not_judged_by_deaths() -> None:
    """Who stays holds most of its state; a newcomer gets all of it."""
    history = [entry(0, 0.0, (9.0,))]
    history += [entry(i, 10.0, (10.0 + took_s,)) | {"kind": kind} for i, kind, took_s in
                ((1, JOIN, 9.0), (2, DEATH, 0.4), (3, DEATH, 0.5), (4, LEAVE, 1.0), (5, DEATH, 0.3))]  # fmt: skip
    assert change_s(history, kind=JOIN) == 9.0
    assert change_s(history, kind=DEATH) == pytest.approx(0.4)
    assert change_s([*history[:-1], history[-1] | {"kind": "other"}], kind="") == 0.5
    assert change_s(history[:1] + history[2:4], kind=JOIN) == pytest.approx(0.45), "the others, where there is none"


def test_the_controller_knows_how_fast_copies_went(tmp_path: Path) -> None:
    board: Any = Notes()
    made = replace(plan([[1], [1]]), predicted=Prediction(1.0, 0.0))
    controller = Controller(board, GivenPlans([made]), tmp_path / "state.json", 2, Bounds(), lambda _: None)
    come(board, 1, "n1"), come(board, 2, "n2")
    controller._step()
    assert controller._rates() == Rates()
    for number, rates in ((1, [2e9, 3e8]), (2, [1e9, 5e8])):
        about = {"process": number, "node": f"n{number}", "device": "", "signature": "s"}
        board.put(f"beat/{number}", {"beats": 1, "iteration": 4, "rates": rates, **about})
    controller._step()
    assert controller._rates() == Rates(1e9, 3e8), "the slowest"
    board.put("beat/1", {"beats": 2, "iteration": 4, "rates": [0.0, -1.0], **about, "process": 1})
    controller._step()
    assert controller._rates() == Rates(1e9, 5e8), "nonsense tells nothing"


def test_the_controller_notes_what_is_learned(tmp_path: Path) -> None:
    board: Any = Notes()
    made = replace(plan([[1]]), predicted=Prediction(1.0, 0.0, (RankPrediction(0, 1.0, 10**9, 0, 10**9, 0),)))
    controller = Controller(board, GivenPlans([made]), tmp_path / "state.json", 1, Bounds(), lambda _: None)
    come(board, 1, "n1")
    controller._step()
    ended = {"process": 1, "how": "failed", "error": "", "iteration": 1, "unsaved": None}
    for generation in range(2):
        times = {"built": 1.0, "loaded": 2.0, "first_step": 3.0}
        opened = {"type": "opened", "process": 1, "iteration": 0, "last": 9, "times": times, "padded_vocab_size": None}
        board.post({**opened, "generation": generation})
        controller._step()
        if not generation:
            board.post({"type": "ended", **ended, "generation": 0})
            controller._step()
    noted = controller.history[-1]
    assert noted["generation"] == 1 and noted["state_bytes"] == state_bytes(made) == 2e9 and noted["kind"] == DEATH
    assert 0.0 <= noted["took_s"] < 60.0


def test_what_an_iteration_takes() -> None:
    assert measured_s({}, 5, 10.0) is None
    assert measured_s(entry(0, 0.0, (9.0, 10.0), began=10), 13, 20.0) is None, "too few"
    assert measured_s(entry(0, 0.0, (9.0, 10.0), began=10), 15, 22.0) == 3.0


@pytest.mark.parametrize(
    ("reached", "now_s", "said"),
    [
        (50, 108.0, ""),  # 50 iterations of 2 s, a quarter of it saved: 25 s
        (90, 188.0, "25.0 % shorter, which saves 5.0 s in the 10 that are left; a change takes 10.0 s"),
        (90, 899.0, ""),  # iterations take 10 s in truth
    ],
)
def test_savings_and_costs(reached: int, now_s: float, said: str) -> None:
    assert said in against(FAST, SLOW, [entry(0, 0.0, (10.0,))], reached, now_s) or not said
    assert bool(said) == bool(against(FAST, SLOW, [entry(0, 0.0, (10.0,))], reached, now_s))


def test_where_nobody_can_say_the_users_order_counts() -> None:
    history = [entry(0, 0.0, (10.0,))]
    assert not against(plan([[1], [1], [1]]), SLOW, history, 99, 300.0)
    assert not against(FAST, SLOW, [{**history[0], "opened": {}}], 0, 5.0), "nobody knows how long the run is"
    assert not against(SLOW, FAST, history, 99, 300.0), "preferred for a reason of the user's own"


@pytest.mark.parametrize("reached", [10, 99])
def test_a_node_joins_where_it_pays(reached: int, tmp_path: Path) -> None:
    board: Any = Notes()
    said: list[str] = []
    controller = Controller(board, GivenPlans([FAST, SLOW]), tmp_path / "state.json", 2, Bounds(), said.append)
    come(board, 1, "n1"), come(board, 2, "n2")
    controller._step()
    times = {"loaded": time.time() - 22.0, "first_step": time.time() - 20.0}
    opened = {"generation": 0, "iteration": 0, "last": 100, "times": times, "padded_vocab_size": None}
    board.post({"type": "opened", "process": 1, **opened})
    about = {"process": 1, "node": "n1", "device": "", "signature": "s"}
    board.put("beat/1", {"beats": 1, "iteration": reached, **about})
    controller._step()
    come(board, 3, "n3")
    controller._step()
    if reached == 10:
        board.post({"type": "checked", "id": board.get("check/3")["id"], "problems": []})
    for _ in range(3):
        controller._step()
    refused = [line for line in said if "a node joins, and nothing changes: iterations would be" in line]
    assert (board.has("0/wanted"), len(refused)) == ((True, 0) if reached == 10 else (False, 1))
