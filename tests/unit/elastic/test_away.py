"""The controller is away, hangs, comes back elsewhere, or comes back with an old state: training goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic import agent as agents
from megatron_het.elastic.agent import Agent, Node
from megatron_het.elastic.board import Board, ServedBoard
from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.generation import Generation
from megatron_het.elastic.pool import GivenPlans
from megatron_het.elastic.worker import News, Setting, Worker
from megatron_het.store import StoreError, TokenError
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_controller import come
from tests.unit.elastic.test_pool import plan

TOKEN = "0123456789abcdef"


class Refusing:
    """A board that nobody may ask."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def setting_of(port: int, folder: Path, **more: Any) -> Setting:
    return Setting("127.0.0.1", port, TOKEN, 0, "n1", "", str(folder), 1, 0.3, "s", **more)


def test_an_agent_goes_on_without_the_controller_and_finds_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, said = subprocess.Popen, list[str]()
    monkeypatch.setattr(agents.subprocess, "Popen", lambda _, **more: run(["sleep", "60"], stdout=more["stdout"]))
    monkeypatch.setattr(agents, "_GLANCE_S", 0.1)
    monkeypatch.setattr(agents, "_MEET_S", 0.0)
    first = ServedBoard("127.0.0.1", 0, TOKEN)
    first.start()
    setting = setting_of(first.port, tmp_path, address_file=str(tmp_path / "address"))
    agent = Agent(Node(setting, 1, tmp_path, (), 3), said.append)
    agent._meet()
    (worker,) = agent._workers
    first.close()
    for _ in range(3):
        assert agent._meet() is None
        agent._look_after()
    assert worker.process.poll() is None and sum("the workers go on" in line for line in said) == 1
    worker.process.kill()
    worker.process.wait()
    agent._look_after()
    second = ServedBoard("127.0.0.1", 0, TOKEN)
    second.start()
    (tmp_path / "address").write_text(f"127.0.0.1:{second.port}\n")
    agent._meet()
    assert said.count("the controller answers again") == 1
    assert second.get("inbox/1")["type"] == "exit", "what it has not heard is told then"
    for one in agent._workers:
        agents.end_all(one.process)
        one.process.wait()
    second.close()


def test_another_token_ends_an_agent_at_once(tmp_path: Path) -> None:
    board = ServedBoard("127.0.0.1", 0, "another token 123")
    board.start()
    agent = Agent(Node(setting_of(board.port, tmp_path), 1, tmp_path, (), 3), print)
    with pytest.raises(TokenError, match="refuses this token"):
        agent._meet()
    board.close()


@pytest.mark.parametrize("code", [2, None])
def test_a_controller_that_did_not_start_ends_its_agent(code: int | None, tmp_path: Path) -> None:
    class Helper:
        def poll(self) -> int | None:
            return code

    helper: Any = Helper()
    agent = Agent(Node(setting_of(1, tmp_path), 1, tmp_path, (), 3), print, helper)
    with pytest.raises(StoreError, match="ended with exit code 2 before the job" if code else "Start the controller"):
        agent.run()


def test_training_asks_nobody_while_nothing_is_wanted() -> None:
    """A controller that hangs would hold up every iteration."""
    board: Any = Refusing()
    news = News(board, Generation(0, plan([[1]]), (1,), (), ("n1",)), 1, print)
    assert not any(news.leaves_at(iteration) for iteration in range(5))


def test_all_ranks_leave_at_one_boundary(tmp_path: Path) -> None:
    served = ServedBoard("127.0.0.1", 0, TOKEN)
    served.start()
    generation = Generation(0, plan([[1], [1]]), (4, 7), (), ("n1", "n2"))
    first, second = (News(Board("127.0.0.1", served.port, TOKEN), generation, rank, print) for rank in (4, 7))
    served.put("0/wanted", "a node joins")
    first._hear()
    assert not first.leaves_at(5) and not first.leaves_at(6), "the other one does not know yet"
    second._hear()
    first._hear()
    assert not first.leaves_at(7) and not second.leaves_at(7)
    assert first.leaves_at(8) and second.leaves_at(8)
    served.put("0/lost", "somebody died")
    assert (first._hear(), second._hear()) == ("lost", "lost")
    served.close()


def test_a_worker_that_has_finished_does_not_need_the_controller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    board: Any = Notes()

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError("away")

    monkeypatch.setattr(Setting, "board", lambda _: board)
    worker = Worker(setting_of(1, tmp_path), [], lambda _: None)
    monkeypatch.setattr(board, "read", refuse)
    with pytest.raises(StoreError):
        worker._next(-1)
    worker._ended = {"how": "finished"}
    assert worker._next(-1) is None


def controller_of(board: Any, state: Path, said: list[str]) -> Controller:
    plans = GivenPlans([plan([[1], [1, 1]]), plan([[1], [1]])])
    return Controller(board, plans, state, 2, Bounds(), said.append)


def beat(board: Any, number: int, iteration: int, identity: str = "") -> None:
    about = {"process": number, "node": f"n{number}", "device": "", "signature": "s", "identity": identity}
    board.put(f"beat/{number}", {"beats": iteration, "iteration": iteration, "ended": None, **about})


@pytest.mark.parametrize("keeps_file", [True, False])
def test_a_controller_with_an_old_state_goes_on_with_what_runs(keeps_file: bool, tmp_path: Path) -> None:
    """Its file knows of generation 0 and of two workers; generation 3 runs on two others."""
    board, said = Notes(), list[str]()
    state = tmp_path / "state.json"
    old = controller_of(board, state, said)
    come(board, 1, "n1"), come(board, 2, "n2")
    old._step()
    if not keeps_file:
        state.unlink()
    board = Notes()
    again = controller_of(board, state, said)
    running = Generation(3, plan([[1], [1]]), (4, 7), (), ("n4", "n7"), loads=True)
    board.post({"type": "newer", "generation": running.to_json()})
    beat(board, 4, 9), beat(board, 7, 9)
    for _ in range(3):
        again._step()
    assert again._generation == running and {4, 7} <= set(again._members)
    assert not [key for key in board.documents if key.endswith(("/lost", "/wanted")) or key.startswith("kill/")]
    assert board.count("processes") == 8, "no number is given twice"
    board.post({"type": "exit", "process": 7, "node": "n7", "why": "was ended by signal 9"})
    board.post({"type": "ended", "process": 4, "generation": 3, "how": "failed", "error": "e", "iteration": 9})
    come(board, 8, "n8")
    again._step()
    assert board.get("4/generation")["ranks"] == [4, 8]
    assert 4 in board.get("4/generation")["holders"]


def test_a_number_that_is_given_twice_is_refused_to_the_second_one(tmp_path: Path) -> None:
    board: Any = Notes()
    controller = controller_of(board, tmp_path / "state.json", [])
    ready = {"type": "ready", "process": 1, "node": "n1", "device": "", "signature": "s"}
    board.post({**ready, "identity": "first"})
    board.post({**ready, "identity": "second", "node": "n2"})
    controller._step()
    assert controller._members[1].identity == "first" and controller._members[1].process.node == "n1"
    assert board.get("refused/1")["identity"] == "second" and board.get("refused/1")["again"]
    beat(board, 1, 5, "second")
    controller._step()
    assert controller._members[1].iteration == 0, "another process's sign of life"


def test_a_controller_that_was_stopped_loses_nobody(tmp_path: Path) -> None:
    """What others said meanwhile is read only after it goes on."""
    board: Any = Notes()
    controller = controller_of(board, tmp_path / "state.json", [])
    come(board, 1, "n1"), come(board, 2, "n2")
    controller._step()
    assert board.get("latest") == 0
    controller._watched_s -= 1000.0
    for member in controller._members.values():
        member.seen_s -= 1000.0
    controller._step()
    assert set(controller._members) == {1, 2}
    for member in controller._members.values():
        member.seen_s -= 1000.0
    controller._step()
    assert not controller._members, "these are really silent"
