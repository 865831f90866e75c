"""What the controller decides, and what an agent does with workers that end."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.elastic import agent as agents
from megatron_het.elastic import controller as controllers
from megatron_het.elastic import members
from megatron_het.elastic.agent import Agent, Node
from megatron_het.elastic.controller import Bounds, Controller, JobError
from megatron_het.elastic.pool import GivenPlans
from megatron_het.elastic.worker import Setting
from tests.unit.elastic.notes import Notes
from tests.unit.elastic.test_pool import plan


def controller_of(board: Any, folder: Path, return_s: float) -> Controller:
    """Two workers train; the first has left the session because the second one was lost."""
    bounds = Bounds(return_s=return_s)
    controller = Controller(board, GivenPlans([plan([[1], [1]])]), folder / "state.json", 2, bounds, lambda _: None)
    for number in (1, 2):
        come(board, number, f"n{number}")
    controller._step()
    assert board.get("latest") == 0
    board.post({"type": "exit", "process": 2, "node": "n2", "why": "was ended by signal 9"})
    ended = {"process": 1, "generation": 0, "how": "failed", "error": "connection closed", "iteration": 3}
    board.post({"type": "ended", **ended})
    return controller


def come(board: Any, number: int, node: str) -> None:
    board.post({"type": "ready", "process": number, "node": node, "device": "", "signature": "s"})


def test_a_worker_that_comes_back_is_waited_for(tmp_path: Path):
    board: Any = Notes()
    controller = controller_of(board, tmp_path, return_s=600.0)
    for _ in range(5):
        assert not controller._step()
    come(board, 3, "n2")
    controller._step()
    assert board.get("latest") == 1
    assert board.get("1/generation")["ranks"] == [1, 3]
    assert board.get("1/generation")["holders"] == [1]
    assert [entry["why"] for entry in controller.history] == ["start", "1 rank was lost"]


def test_a_generation_waits_for_all_workers_of_its_nodes(tmp_path: Path):
    board: Any = Notes()
    controller = Controller(board, GivenPlans([plan([[1], [1]])]), tmp_path / "state.json", 1, Bounds(), print)
    ready = {"type": "ready", "node": "n1", "device": "", "signature": "s", "workers": 2}
    board.post({**ready, "process": 1})
    controller._step()
    assert board.get("latest") is None
    board.post({**ready, "process": 2})
    controller._step()
    assert board.get("0/generation")["ranks"] == [1, 2]


def test_who_waits_for_a_dead_process_hears_of_it(tmp_path: Path):
    board: Any = Notes()
    controller = controller_of(board, tmp_path, return_s=600.0)
    assert not board.has("0/lost")
    controller._step()
    assert board.has("0/lost")


def test_a_checkpoint_that_cannot_be_written_is_not_tried_again(tmp_path: Path):
    board: Any = Notes()
    said: list[str] = []
    controller = Controller(board, GivenPlans([plan([[1], [1]])]), tmp_path / "state.json", 2, Bounds(), said.append)
    for number in (1, 2):
        come(board, number, f"n{number}")
    controller._step()
    for number, unsaved in ((1, 4), (2, None)):
        ended = {"process": number, "generation": 0, "how": "failed", "error": "No space left", "iteration": 3}
        board.post({"type": "ended", **ended, "unsaved": unsaved})
    controller._step()
    assert board.get("1/generation")["unsaved"] == [4]
    assert sum("checkpoint of iteration 4" in line for line in said) == 1


def test_what_fails_again_and_again_at_one_place_ends_the_job(tmp_path: Path):
    # An iteration is done in between, so that a session has begun well each time.
    board: Any = Notes()
    controller = controller_of(board, tmp_path, return_s=600.0)
    come(board, 3, "n2")
    with pytest.raises(JobError, match="generations failed in a row, at iteration 3"):
        for generation in range(1, 12):
            controller._step()
            opened = {"type": "opened", "process": 1, "generation": generation, "padded_vocab_size": None}
            board.post({**opened, "iteration": 2, "times": {}, "sent_bytes": 0})
            for process in (1, 3):
                ended = {"process": process, "generation": generation, "how": "failed", "error": "e", "iteration": 3}
                board.post({"type": "ended", **ended})


def test_without_a_plan_the_job_ends_in_bounded_time(tmp_path: Path):
    board: Any = Notes()
    controller = controller_of(board, tmp_path, return_s=0.0)
    with pytest.raises(JobError, match="1 rank was lost, and there is no plan for what is left"):
        controller._step()


@pytest.mark.parametrize(
    ("ends", "started"),
    [
        (["kill -9 $$", "kill -11 $$", "exit 3"], 3),  # a crash is repaired, an end of its own is not
        (["kill -9 $$"] * 9, 4),
    ],
)
def test_workers_that_crash_are_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[str], started: int
):
    board: Any = Notes()
    scripts = iter(ends)
    run = subprocess.Popen

    def start(_: list[str], **options: Any) -> Any:
        return run(["sh", "-c", next(scripts)], stdin=options["stdin"], stdout=options["stdout"])

    monkeypatch.setattr(Setting, "board", lambda _: board)
    monkeypatch.setattr(agents.subprocess, "Popen", start)
    setting = Setting("127.0.0.1", 1, "t", 0, "n1", "", "", 1, 1.0, "s")
    agent = Agent(Node(setting, 1, tmp_path, (), 3), lambda _: None)
    assert agent.run() == 1
    posted = [document for key, document in board.documents.items() if key.startswith("inbox/")]
    assert [document["process"] for document in posted] == list(range(1, started + 1))


def test_what_a_worker_refuses_is_told_to_the_controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A batch that is not the plan's, for instance: one message of rank 0, in a log on one of many nodes."""
    board: Any = Notes()
    monkeypatch.setattr(Setting, "board", lambda _: board)
    agent = Agent(Node(Setting("127.0.0.1", 1, "t", 0, "n1", "", "", 1, 1.0, "s"), 1, tmp_path, (), 3), print)
    says = "echo x; echo megatron_het: global_batch_size: 8, the plan has 12. Give that; echo bye; exit 2"
    for number, script in ((1, says), (2, "exit 1")):
        log = agents.Log(agent._log(number))
        process = subprocess.Popen(["sh", "-c", script], stdout=log.pipe, start_new_session=True)
        log.started()
        process.wait()
        agent._workers = [agents._Worker(number, 0, process, log)]
        agent._look_after()
    agent._meet()
    assert agent._log(1).read_text().endswith("Give that\nbye\n")
    told = [board.get(f"inbox/{n}")["why"] for n in (1, 2)]
    assert told == [
        "ended with exit code 2: global_batch_size: 8, the plan has 12. Give that",
        "ended with exit code 1",
    ]


def test_a_refused_worker_is_named_once_and_not_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    board: Any = Notes()
    run, said = subprocess.Popen, []
    monkeypatch.setattr(Setting, "board", lambda _: board)
    monkeypatch.setattr(
        agents.subprocess, "Popen", lambda _, **more: run(["sleep", "60"], stdin=more["stdin"], stdout=more["stdout"])
    )
    board.put("refused/1", {"identity": "", "why": "other flags", "again": False})
    setting = Setting("127.0.0.1", 1, "t", 0, "n1", "", "", 1, 1.0, "s")
    agent = Agent(Node(setting, 1, tmp_path, (), 3), said.append)
    agent._meet()
    for worker in agent._workers:  # it takes a while to end
        monkeypatch.setattr(worker.process, "poll", iter([None, None, -9]).__next__)
    monkeypatch.setattr(agents, "_MEET_S", 0.0)
    while agent._workers:
        agent._meet()
        agent._look_after()
    assert [line for line in said if "was refused" in line] == ["worker 1 was refused: other flags"]
    assert sum("started" in line for line in said) == 1


def test_what_a_dead_controller_did_not_read_is_heard_again(tmp_path: Path):
    """Sessions tell once how they ended; signs of life say it again to a controller that was started again."""
    board: Any = Notes()
    plans = GivenPlans([plan([[1], [1]])])
    first = Controller(board, plans, tmp_path / "state.json", 2, Bounds(), print)
    for number in (1, 2):
        come(board, number, f"n{number}")
    first._step()
    again = Controller(board, plans, tmp_path / "state.json", 2, Bounds(), print)
    again._read = first._read
    for number in (1, 2):
        ended = {"process": number, "generation": 0, "how": "finished", "error": "", "iteration": 9}
        about = {"process": number, "node": f"n{number}", "device": "", "signature": "s"}
        board.put(f"beat/{number}", {"beats": 7, "iteration": 9, "ended": ended, **about})
    assert again._step() or again._step()


def test_numbers_of_processes_are_not_given_again(tmp_path: Path):
    """Also those of workers that came after the last generation began."""
    board: Any = Notes()
    plans = GivenPlans([plan([[1], [1]])])
    first = Controller(board, plans, tmp_path / "state.json", 2, Bounds(), print)
    for number in (1, 2, 3):
        come(board, number, f"n{number}")
    first._step()
    fresh: Any = Notes()
    Controller(fresh, plans, tmp_path / "state.json", 2, Bounds(), print)
    assert fresh.count("processes") == 4


def test_all_that_is_heard_at_once_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nobody notices a death while the controller waits for a busy disk."""
    board: Any = Notes()
    controller = Controller(board, GivenPlans([plan([[1], [1]])]), tmp_path / "state.json", 9, Bounds(), print)
    written: list[int] = []
    monkeypatch.setattr(
        controllers.StateFile, "write", lambda _, text: written.append(len(json.loads(text)["members"]))
    )
    for number in (1, 2, 3):
        come(board, number, f"n{number}")
    for _ in range(3):
        controller._step()
    assert written == [3]


def test_workers_are_told_to_stop_until_they_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A session that is being built or taken down does not notice a signal."""
    board: Any = Notes()
    monkeypatch.setattr(Setting, "board", lambda _: board)
    monkeypatch.setattr(agents, "_TELL_S", 0.0)
    setting = Setting("127.0.0.1", 1, "t", 0, "n1", "", "", 1, 1.0, "s")
    agent = Agent(Node(setting, 1, tmp_path, (), 3), print)
    told: list[int] = []
    process = SimpleNamespace(send_signal=told.append, poll=lambda: None)
    agent._workers = [agents._Worker(1, 0, process, None)]  # type: ignore[arg-type]
    agent._look_after()
    assert not told
    agent._ask_to_stop()
    for _ in range(3):
        agent._look_after()
    assert told == [signal.SIGUSR1] * 3


PLANS = [plan([[1], [1, 1]]), plan([[1], [1]])]


def trained(board: Any, folder: Path, said: list[str]) -> Controller:
    """Two workers train under the second plan, and a third one comes, with whom the first plan would do."""
    controller = Controller(board, GivenPlans(PLANS), folder / "state.json", 2, Bounds(), said.append)
    come(board, 1, "n1"), come(board, 2, "n2")
    controller._step()
    opened = {"type": "opened", "process": 1, "generation": 0, "iteration": 0, "times": {}, "padded_vocab_size": None}
    board.post(opened)
    come(board, 3, "n3")
    controller._step()
    return controller


def test_a_better_plan_that_the_flags_refuse_ends_no_session(tmp_path: Path):
    board: Any = Notes()
    said: list[str] = []
    controller = trained(board, tmp_path, said)
    asked = board.get("check/3")
    assert asked["plan"] == PLANS[0].to_json() and not board.has("0/wanted")
    board.post({"type": "checked", "id": asked["id"], "problems": ["--tensor-model-parallel-size does not fit"]})
    for _ in range(3):
        controller._step()
    assert not board.has("0/wanted"), said
    assert any("its plan is refused: --tensor-model-parallel-size" in line for line in said)


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_plan_that_does_not_open_leads_back_to_the_one_before(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Refused by the flags, or twice for another reason, such as a device that is too small for it."""
    monkeypatch.setattr(members, "_FIRST_PAUSE_S", 0.0)
    board: Any = Notes()
    said: list[str] = []
    controller = trained(board, tmp_path, said)
    board.post({"type": "checked", "id": board.get("check/3")["id"], "problems": []})
    controller._step()
    assert board.get("0/wanted") == "a node joins"
    for process in (1, 2):
        left = {"process": process, "generation": 0, "how": "left", "error": "", "iteration": 5}
        board.post({"type": "ended", **left})
    controller._step()
    for generation in (1,) if is_refused else (1, 2):
        assert board.get(f"{generation}/generation")["plan"] == PLANS[0].to_json()
        for process in (1, 2, 3):
            ended = {"process": process, "generation": generation, "how": "failed", "error": "no", "iteration": 5}
            board.post({"type": "ended", **ended, "refused": is_refused})
        controller._step()
    assert board.get("latest") == (2 if is_refused else 3)
    assert board.get(f"{board.get('latest')}/generation")["plan"] == PLANS[1].to_json()
    assert sum("is given up: no" in line for line in said) == 1
    board.post({"type": "replan"})
    for _ in range(3):
        controller._step()
    assert not board.has("2/wanted") or controller._planner.plan(controller._pool())[0] == PLANS[1]
