"""What the controller decides, and what an agent does with workers that end."""

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
from megatron_het.elastic.job import Board, Generation, ServedBoard
from megatron_het.elastic.members import Bounds, JobError
from megatron_het.elastic.sessions import Outcome
from megatron_het.elastic.worker import News, Setting, Worker
from megatron_het.elastic.worth import describe
from megatron_het.store import StoreError, TokenError
from tests.unit.elastic.notes import Job, plan, trained
from tests.unit.store.memory import MemoryStore

TOKEN = "0123456789abcdef"
PAIR, TRIPLE = [[1], [1]], [[1], [1, 1]]
PLANS = [plan(TRIPLE), plan(PAIR)]


def setting_of(port: int, folder: Path, **more: Any) -> Setting:
    return Setting("127.0.0.1", port, TOKEN, 0, "n1", "", str(folder), 1, 0.3, "s", **more)


def agent_of(folder: Path, say: Any = print, port: int = 1, **more: Any) -> Agent:
    return Agent(Node(setting_of(port, folder, **more), 1, folder, (), 3), say)


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What agents and workers take for the job's board."""
    notes = MemoryStore()
    monkeypatch.setattr(Setting, "board", lambda _: notes)
    return notes


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What agents start sleeps."""
    run = subprocess.Popen
    monkeypatch.setattr(agents.subprocess, "Popen", lambda _, **more: run(["sleep", "60"], stdout=more["stdout"]))


def halved(folder: Path, return_s: float) -> Job:
    """Two workers train; the first has left the session because the second one was lost."""
    job = trained(folder, PAIR, bounds=Bounds(return_s=return_s))
    job.board.post({"type": "exit", "process": 2, "node": "n2", "why": "was ended by signal 9"})
    job.ended(1, error="connection closed")
    return job


def test_a_worker_that_comes_back_is_waited_for(tmp_path: Path):
    job = halved(tmp_path, return_s=600.0)
    assert not job.step(5)
    assert job.has("0/lost")  # who waits for the dead process hears of it
    job.come(3, node="n2")
    job.step()
    assert job.get("latest") == 1
    assert job.get("1/generation")["ranks"] == [1, 3]
    assert job.get("1/generation")["holders"] == [1]
    assert [entry["why"] for entry in job.controller.history] == ["start", "1 rank was lost"]


def exits(job: Job, number: int, node: str, left: int, why: str = "ended with exit code 2: no such data") -> None:
    """An agent says that a worker has ended, and how many others it has or starts."""
    job.board.post({"type": "exit", "process": number, "node": node, "why": why, "left": left})


@pytest.mark.parametrize("begun", [False, True])
def test_when_all_workers_end_before_an_iteration_is_done_the_job_ends_with_their_reason(begun: bool, tmp_path: Path):
    """The controller waited for ten minutes, and then knew of nobody; or for one, and then knew that no plan fits."""
    job = trained(tmp_path, PAIR) if begun else Job(tmp_path, PAIR)
    exits(job, 1, "n1", 0)
    job.step(3)
    assert any("worker 1 on n1 ended with exit code 2: no such data" in line for line in job.said)
    exits(job, 2, "n2", 0, "ended with exit code 3")
    when = "there is no plan" if begun else "before the job has begun"
    with pytest.raises(JobError, match=f"{when}.*n1 .*no such data.*n2 .*exit code 3"):
        job.step(3)


def test_a_node_that_comes_again_before_the_job_begins_takes_part(tmp_path: Path):
    job = Job(tmp_path, PAIR)
    exits(job, 1, "n1", 0)
    job.come(2, node="n2"), job.come(3, node="n1")
    job.step()
    assert sorted(job.get("0/generation")["ranks"]) == [2, 3]


def test_nodes_that_do_not_come_are_told_with_those_that_have_no_worker_left(tmp_path: Path):
    job = Job(tmp_path, PAIR, bounds=Bounds(start_s=0.0))
    exits(job, 1, "n1", 0), job.come(2, node="n2")
    job.controller._listen()
    assert "waits for its nodes, and 1 of 2 came" in describe(job.controller.status())
    with pytest.raises(JobError, match=r"only 1 of 2 nodes came in 0 s \(n2\).*n1 .*no such data.*--start-s"):
        job.step()


def test_a_worker_that_ends_before_the_job_begins_is_counted_again(tmp_path: Path):
    """Its successor was taken for the one that had not come yet, and the job began without that one."""
    job = Job(tmp_path, PAIR, [[1]], nodes=1)
    job.come(1, node="n1", workers=2)
    exits(job, 1, "n1", 2, "was ended by signal 9")
    job.come(3, node="n1", workers=2)
    job.step()
    assert job.get("latest") is None
    job.come(2, node="n1", workers=2)
    job.step()
    assert job.get("0/generation")["ranks"] == [2, 3]


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_node_that_holds_nothing_leaves_at_once(has_begun: bool, is_ready: bool, tmp_path: Path):
    """A spare node, or one before the job has begun, waited for the next change; one that was not ready stayed."""
    job = trained(tmp_path, PAIR) if has_begun else Job(tmp_path, PAIR)
    if has_begun:
        job.opened(), job.opened(process=2)
    if is_ready:
        job.come(3), job.step()
    job.board.post({"type": "leave", "node": "n3", "processes": [3]})
    job.step()
    assert job.has("gone/3")
    if not is_ready:  # its message was on the way
        job.come(3), job.step()
    assert 3 not in job.controller._members
    assert not job.has("0/wanted")
    job.come(4, node="n3"), job.step()
    assert 4 in job.controller._members and not job.get("status")["leaving"], "it has come back"


def test_a_job_that_cannot_begin_says_so(tmp_path: Path):
    job = Job(tmp_path, TRIPLE, nodes=1)
    job.come(1)
    with pytest.raises(JobError, match=r"^the job cannot begin: no plan of the list fits 1 process"):
        job.step()


def test_a_checkpoint_that_cannot_be_written_is_not_tried_again(tmp_path: Path):
    job = trained(tmp_path, PAIR)
    job.ended(1, unsaved=4), job.ended(2, unsaved=None)
    job.step()
    assert job.get("1/generation")["unsaved"] == [4]
    assert sum("checkpoint of iteration 4" in line for line in job.said) == 1


def test_what_fails_again_and_again_at_one_place_ends_the_job(tmp_path: Path):
    # An iteration is done in between, so that a session has begun well each time.
    job = halved(tmp_path, return_s=600.0)
    job.come(3, node="n2")
    with pytest.raises(JobError, match="5 generations failed, and none has passed iteration 3"):
        for generation in range(1, 12):
            job.step()
            job.opened(generation, iteration=2)
            job.ended(1, 3, generation=generation)


def test_without_a_plan_the_job_ends_in_bounded_time(tmp_path: Path):
    job = halved(tmp_path, return_s=0.0)
    with pytest.raises(JobError, match="1 rank was lost, and there is no plan for what is left"):
        job.step()


@pytest.mark.parametrize(
    ("ends", "started"),
    [
        (["kill -9 $$", "kill -11 $$", "exit 3"], 3),  # a crash is repaired, an end of its own is not
        (["kill -9 $$"] * 9, 4),
    ],
)
def test_workers_that_crash_are_started_again(
    board: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ends: list[str], started: int
):
    scripts = iter(ends)
    run = subprocess.Popen

    def start(_: list[str], **options: Any) -> Any:
        return run(["sh", "-c", next(scripts)], stdin=options["stdin"], stdout=options["stdout"])

    monkeypatch.setattr(agents.subprocess, "Popen", start)
    assert agent_of(tmp_path).run() == 1
    posted = board.read(*board.keys("inbox/"))
    assert [document["process"] for document in posted] == list(range(1, started + 1))
    assert [document["left"] for document in posted] == [1] * (started - 1) + [0]


def test_what_a_worker_refuses_is_told_to_the_controller(board: Any, tmp_path: Path):
    """A batch that is not the plan's, for instance: one message of rank 0, in a log on one of many nodes."""
    agent = agent_of(tmp_path)
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


@pytest.mark.usefixtures("sleepers")
def test_a_refused_worker_is_named_once_and_not_restarted(board: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    said = list[str]()
    board.put("refused/1", {"identity": "", "why": "other flags", "again": False})
    agent = agent_of(tmp_path, said.append)
    agent._meet()
    for worker in agent._workers:  # it takes a while to end
        monkeypatch.setattr(worker.process, "poll", iter([None, None, -9, -9]).__next__)
    monkeypatch.setattr(agents, "_MEET_S", 0.0)
    while agent._workers:
        agent._meet()
        agent._look_after()
    assert [line for line in said if "was refused" in line] == ["worker 1 was refused: other flags"]
    assert sum("started" in line for line in said) == 1


def test_what_a_dead_controller_did_not_read_is_heard_again(tmp_path: Path):
    """Sessions tell once how they ended; signs of life say it again to a controller that was started again."""
    job = trained(tmp_path, PAIR)
    read = job.controller._read
    job.start()._read = read
    for number in (1, 2):
        ended = {"process": number, "generation": 0, "how": "finished", "error": "", "iteration": 9}
        job.beat(number, 9, ended=ended)
    assert job.step() or job.step()


def test_numbers_of_processes_are_not_given_again(tmp_path: Path):
    """Also those of workers that came after the last generation began."""
    job = Job(tmp_path, PAIR)
    job.come(1, 2, 3)
    job.step()
    fresh = job.board = MemoryStore()
    job.start()
    assert fresh.count("processes") == 4


def test_all_that_is_heard_at_once_is_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Nobody notices a death while the controller waits for a busy disk."""
    job = Job(tmp_path, PAIR, nodes=9)
    written: list[int] = []
    monkeypatch.setattr(
        controllers.members.StateFile, "write", lambda _, text: written.append(len(json.loads(text)["members"]))
    )
    job.come(1, 2, 3)
    job.step(3)
    assert written == [3]


def test_workers_are_told_to_stop_until_they_do(board: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A session that is being built or taken down does not notice a signal."""
    monkeypatch.setattr(agents, "_TELL_S", 0.0)
    agent = agent_of(tmp_path)
    told: list[int] = []
    process = SimpleNamespace(send_signal=told.append, poll=lambda: None)
    agent._workers = [agents._Worker(1, 0, process, None)]  # type: ignore[arg-type]
    agent._look_after()
    assert not told
    agent._ask_to_stop()
    for _ in range(3):
        agent._look_after()
    assert told == [signal.SIGUSR1] * 3


def joined(folder: Path) -> Job:
    """Two workers train under the second plan, and a third one comes, with whom the first plan would do."""
    job = trained(folder, *PLANS)
    job.opened()
    job.come(3)
    job.step()
    return job


def test_a_better_plan_that_the_flags_refuse_ends_no_session(tmp_path: Path):
    job = joined(tmp_path)
    asked = job.get("check/3")
    assert asked["plan"] == PLANS[0].to_json() and not job.has("0/wanted")
    problems = ["--tensor-model-parallel-size does not fit"]
    job.board.post({"type": "checked", "id": asked["id"], "problems": problems})
    job.step(3)
    assert not job.has("0/wanted"), job.said
    assert any("its plan is refused: --tensor-model-parallel-size" in line for line in job.said)


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_plan_that_does_not_open_leads_back_to_the_one_before(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Refused by the flags, or twice for another reason, such as a device that is too small for it."""
    monkeypatch.setattr(members, "_FIRST_PAUSE_S", 0.0)
    job = joined(tmp_path)
    job.board.post({"type": "checked", "id": job.get("check/3")["id"], "problems": []})
    job.step()
    assert job.get("0/wanted") == "a node joins"
    job.ended(1, 2, how="left", error="", iteration=5)
    job.step()
    for generation in (1,) if is_refused else (1, 2):
        assert job.get(f"{generation}/generation")["plan"] == PLANS[0].to_json()
        job.ended(1, 2, 3, generation=generation, error="no", iteration=5, refused=is_refused)
        job.step()
    assert job.get("latest") == (2 if is_refused else 3)
    assert job.get(f"{job.get('latest')}/generation")["plan"] == PLANS[1].to_json()
    assert sum("is given up: no" in line for line in job.said) == 1
    job.board.post({"type": "replan"})
    job.step(3)
    assert not job.has("2/wanted") or job.planner.plan(job.controller._pool())[0] == PLANS[1]


# The controller is away, hangs, comes back elsewhere, or comes back with an old state: training goes on.


@pytest.mark.usefixtures("sleepers")
def test_an_agent_goes_on_without_the_controller_and_finds_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = list[str]()
    monkeypatch.setattr(agents, "_MEET_S", 0.0)
    first = ServedBoard("127.0.0.1", 0, TOKEN)
    first.start()
    agent = agent_of(tmp_path, said.append, first.port, address_file=str(tmp_path / "address"))
    agent._meet()
    (worker,) = agent._workers
    first.close()
    monkeypatch.setattr(agents, "_GLANCE_S", 0.1)
    for _ in range(3):
        assert agent._meet() is None
        agent._look_after()
    assert worker.process.poll() is None and sum("the workers go on" in line for line in said) == 1
    worker.process.kill()
    worker.process.wait()
    agent._look_after()
    second = ServedBoard("127.0.0.1", 0, TOKEN)
    second.start()
    monkeypatch.setattr(agents, "_GLANCE_S", 60.0)
    (tmp_path / "address").write_text(f"127.0.0.1:{second.port}\n")
    agent._meet()
    assert said.count("the controller answers again") == 1
    assert second.get("inbox/1")["type"] == "exit", "what it has not heard is told then"
    for one in agent._workers:
        agents.end_all(one.process)
        one.process.wait()
    second.close()


@pytest.mark.usefixtures("sleepers")
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_node_that_is_to_leave_waits_for_no_controller(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SIGTERM while the controller was away was never obeyed, and before it was there after ``--timeout-s`` only."""
    board = ServedBoard("127.0.0.1", 0, TOKEN)
    said = list[str]()
    agent = agent_of(tmp_path, said.append, board.port)
    if has_begun:
        board.start()
        agent._meet()
    board.close()
    agent._ask_to_leave()
    numbers, agent._to_start = [worker.number for worker in agent._workers], [7]
    agent._look_after()
    assert not agent._to_start and agent._unsaid[0] == {"type": "leave", "node": "n1", "processes": numbers}
    for worker in agent._workers:  # it takes a while to end
        monkeypatch.setattr(worker.process, "poll", iter([None] * 5 + [-9] * 9).__next__)
    assert agent.run() == 0
    assert sum("this node leaves without it" in line for line in said) == has_begun


def test_another_token_ends_an_agent_at_once(tmp_path: Path) -> None:
    board = ServedBoard("127.0.0.1", 0, "another token 123")
    board.start()
    agent = agent_of(tmp_path, port=board.port)
    with pytest.raises(TokenError, match="refuses this token"):
        agent._meet()
    board.close()


@pytest.mark.parametrize("code", [2, None])
def test_a_controller_that_did_not_start_ends_its_agent(
    code: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agents, "_QUIET_S", 0.0)
    helper: Any = SimpleNamespace(poll=lambda: code)
    said = list[str]()
    agent = Agent(Node(setting_of(1, tmp_path), 1, tmp_path, (), 3), said.append, helper)
    with pytest.raises(StoreError, match="ended with exit code 2 before the job" if code else "Start the controller"):
        agent.run()
    assert said == ([] if code else ["waits up to 0.3 s for the controller at 127.0.0.1:1"])


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_node_without_workers_keeps_its_controller(board: Any, is_asked: bool, tmp_path: Path) -> None:
    """The others lost it 20 seconds after the last worker of its node had ended."""
    polls = iter([None, None, 0, 0])
    helper: Any = SimpleNamespace(poll=lambda: next(polls))
    agent = Agent(Node(setting_of(1, tmp_path), 0, tmp_path, (), 3), print, helper)
    agent._to_leave = agent._asked = is_asked
    assert agent.run() == 0
    assert len(list(polls)) == (4 if is_asked else 1), "it is waited for, unless the node has to go"


def test_training_asks_nobody_while_nothing_is_wanted() -> None:
    """A controller that hangs would hold up every iteration."""
    nobody: Any = None
    news = News(nobody, Generation(0, plan([[1]]), (1,), (), ("n1",)), 1, print)
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
    board: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise StoreError("away")

    worker = Worker(setting_of(1, tmp_path), [], lambda _: None)
    monkeypatch.setattr(board, "read", refuse)
    with pytest.raises(StoreError):
        worker._next(-1)
    worker._ended = {"how": "finished"}
    assert worker._next(-1) is None
    boundary: Any = SimpleNamespace(iteration=5, generation=SimpleNamespace(number=0))
    for how, done in (("finished", 6), ("left", 5)):
        worker._tell_ended(boundary, Outcome(how))
        assert worker._ended["iteration"] == done


@pytest.mark.parametrize("keeps_file", [True, False])
def test_a_controller_with_an_old_state_goes_on_with_what_runs(keeps_file: bool, tmp_path: Path) -> None:
    """Its file knows of generation 0 and of two workers; generation 3 runs on two others."""
    job = trained(tmp_path, *PLANS)
    if not keeps_file:
        job.state.unlink()
    board = job.board = MemoryStore()
    again = job.start()
    running = Generation(3, plan(PAIR), (4, 7), (), ("n4", "n7"), loads=True)
    board.post({"type": "newer", "generation": running.to_json()})
    job.beat(4, 9), job.beat(7, 9)
    job.step(3)
    assert again._generation == running and {4, 7} <= set(again._members)
    assert not [key for key in board.values if key.endswith(("/lost", "/wanted")) or key.startswith("kill/")]
    assert board.count("processes") == 8, "no number is given twice"
    board.post({"type": "exit", "process": 7, "node": "n7", "why": "was ended by signal 9"})
    job.ended(4, generation=3, iteration=9)
    job.come(8)
    job.step()
    assert job.get("4/generation")["ranks"] == [4, 8]
    assert 4 in job.get("4/generation")["holders"]


def test_a_number_that_is_given_twice_is_refused_to_the_second_one(tmp_path: Path) -> None:
    job = Job(tmp_path, *PLANS)
    job.come(1, identity="first")
    job.come(1, identity="second", node="n2")
    job.step()
    member = job.controller._members[1]
    assert member.identity == "first" and member.process.node == "n1"
    assert job.get("refused/1")["identity"] == "second" and job.get("refused/1")["again"]
    job.beat(1, 5, identity="second")
    job.step()
    assert member.iteration == 0, "another process's sign of life"


def test_a_controller_that_was_stopped_loses_nobody(tmp_path: Path) -> None:
    """What others said meanwhile is read only after it goes on."""
    job = trained(tmp_path, *PLANS)
    controller = job.controller
    controller._watched_s -= 1000.0
    for member in controller._members.values():
        member.seen_s -= 1000.0
    job.step()
    assert set(controller._members) == {1, 2}
    for member in controller._members.values():
        member.seen_s -= 1000.0
    job.step()
    assert not controller._members, "these are really silent"
