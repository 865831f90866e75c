"""What the controller and the agents write: full disks, old files, and two controllers for one folder."""

import ast
import errno
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_het
from megatron_het.device import kill_with
from megatron_het.elastic import __main__ as commands
from megatron_het.elastic import agent as agents
from megatron_het.elastic import members, sessions
from megatron_het.elastic.__main__ import main
from megatron_het.elastic.agent import Agent, Log, Node
from megatron_het.elastic.job import Generation, ServedBoard
from megatron_het.elastic.members import Bounds, FolderLock, JobError, ReplacedError, Saves, StateFile
from megatron_het.elastic.worth import standing
from megatron_het.plan import save_plan
from megatron_het.safe_io import FileError
from megatron_het.store import job as clients
from tests.unit.elastic.notes import Job, plan, trained
from tests.unit.elastic.test_controller import setting_of


class Disk:
    """Writes as long as there is room, which the reserve takes until it is given up."""

    def __init__(self, state: Path) -> None:
        self._reserve = state.with_name(f".{state.name}.reserve")
        self.is_full = False

    def write(self, path: Path, text: str) -> None:
        if self.is_full and (self._reserve.exists() or "big" in text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_text(text)


def test_a_full_disk_is_told_survived_and_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    file = StateFile(tmp_path / "state.json", said.append)
    disk = Disk(tmp_path / "state.json")
    monkeypatch.setattr(members, "write_text", disk.write)
    assert file.write("1") and (tmp_path / ".state.json.reserve").stat().st_size > 2**20
    disk.is_full = True
    assert file.write("2"), "the space that was kept free is for that"
    assert not file.write("big") and not file.write("big")
    assert len(said) == 1 and "No space left" in said[0] and "The job goes on" in said[0]
    assert (tmp_path / "state.json").read_text() == "2" and "No space left" in file.failure
    disk.is_full = False
    assert file.write("3") and len(said) == 2 and not file.failure


def test_a_job_goes_on_while_its_state_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(members, "write_text", write)
    job = trained(tmp_path, [[1], [1]])
    assert any("Read-only" in said["unwritten"] for said in (job.get("status"), job.controller.status()))
    monkeypatch.undo()
    job.controller._tried_s = 0.0
    job.step()
    assert json.loads(job.state.read_text())["newest"] == 2


def test_a_log_is_bounded_and_a_full_disk_ends_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(agents, "MAX_LOG_BYTES", 4000)
    log = Log(tmp_path / "a" / "log.txt")
    for number in range(300):
        os.write(log.pipe, f"line {number:04} ".encode() * 10)
    log.started()
    assert log.ended().endswith(b"line 0299 ")
    kept = [file.stat().st_size for file in (tmp_path / "a").iterdir()]
    assert len(kept) <= 2 and sum(kept) < 4000 + 2 * 65536
    (tmp_path / "b").write_text("not a folder")
    log = Log(tmp_path / "b" / "log.txt")
    os.write(log.pipe, b"megatron_het: why\n")
    log.started()
    assert agents._last_words(log.ended()) == ": why"
    assert agents._last_words(b"usage: worker.py\nworker.py: error: --x\n") == ": worker.py: error: --x"


def test_a_worker_ends_whose_agent_was_killed_before_the_kernel_knew() -> None:
    begin = functools.partial(kill_with, 0)
    assert subprocess.run(["sleep", "60"], preexec_fn=begin, check=False).returncode == 1


def test_a_plan_is_kept_for_its_generation_and_elsewhere_where_the_disk_is_full(tmp_path: Path) -> None:
    (tmp_path / "plan-to-check.json").touch()
    for number in range(12):
        generation = Generation(number, plan([[1]]), (1,), (), ("n1",))
        sessions._written(generation, tmp_path)
    (elsewhere := sessions._written(generation, tmp_path / "plan-to-check.json")).unlink()
    assert elsewhere.parent == Path(sessions.tempfile.gettempdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan-11.json", "plan-to-check.json"]


def test_logs_of_workers_that_have_ended_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every join, and every death that a worker comes back from, brings a worker with a folder of its own."""
    run = subprocess.Popen
    monkeypatch.setattr(agents.subprocess, "Popen", lambda _, **more: run(["true"], stdout=more["stdout"]))
    agent = Agent(Node(setting_of(1, tmp_path), 2, tmp_path, (), 3), lambda _: None)
    agent._start(0, 1)  # runs on
    for number in range(2, 30):
        agent._start(1, number)
        agent._workers.pop().process.wait()
        (tmp_path / f"worker-{number}" / "log.txt").touch()
        os.utime(tmp_path / f"worker-{number}", (number, number))
    agent._workers.pop().process.wait()
    found = sorted(int(folder.name.removeprefix("worker-")) for folder in tmp_path.iterdir())
    assert found == [1, *range(21, 30)]


def test_a_worker_that_is_killed_says_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR2); print(flush=True); time.sleep(60)"
    run, command = subprocess.Popen, [sys.executable, "-c", code]
    monkeypatch.setattr(agents.subprocess, "Popen", lambda _, **more: run(command, stdout=-1, stderr=more["stdout"]))
    agent = Agent(Node(setting_of(1, tmp_path), 1, tmp_path, (), 3), print)
    agent._start(0, 1)
    process = agent._workers[0].process
    process.stdout.readline()
    agent._obey(agent._workers[0], None, {"identity": ""}, None)
    assert process.wait(10) == -signal.SIGKILL and b"line 1" in agent._workers[0].log.ended()


def test_a_folder_has_one_controller(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(FileError, match=rf"the controller of this folder is process {os.getpid()} on "):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()


def test_where_locks_do_not_work_the_lease_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As between machines of a network file system."""

    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(members.fcntl, "flock", no_locks)
    monkeypatch.setattr(members, "_LEASE_S", 0.3)
    monkeypatch.setattr(members, "_RENEW_S", 0.02)
    monkeypatch.setattr(members.socket, "gethostname", lambda: "one")
    first = FolderLock(tmp_path)
    monkeypatch.setattr(members.socket, "gethostname", lambda: "two")
    with pytest.raises(FileError, match="on one"):
        FolderLock(tmp_path)
    first._stopped.set()  # its machine has vanished
    first._thread.join()
    second = FolderLock(tmp_path)
    first._keep_once()
    assert first.is_lost and not second.is_lost
    second.release()


def test_a_controller_that_was_replaced_writes_nothing_any_more(tmp_path: Path) -> None:
    job = Job(tmp_path, [[1]], is_replaced=lambda: True)
    with pytest.raises(ReplacedError, match="another controller has taken over"):
        job.controller.run()
    assert not job.has("over") and not job.state.exists()


def test_failed_saves_are_counted_and_the_last_one_is_tried_again() -> None:
    saves = Saves("")
    assert "(1 failed save so far); it is left out" in saves.note(0, 4, 9)
    assert saves.note(0, 4, 9) == "", "another rank"
    assert "it is the last one and tried again" in saves.note(1, 9, 9)
    assert tuple(saves.for_generation().values()) == ((4,), (), "") and not saves.unsaved_end(9)
    assert "(3 failed saves so far); it is left out" in saves.note(2, 9, 9)
    assert "last state, of iteration 9, is not written" in saves.unsaved_end(9)
    saves = Saves("/other")
    assert "it is tried in /other" in saves.note(0, 9, 9)
    assert tuple(saves.for_generation().values()) == ((), (9,), "/other") and not saves.unsaved_end(9)
    assert "left out" in saves.note(1, 9, 9)
    assert tuple(saves.for_generation().values()) == ((9,), (), "/other") and saves.unsaved_end(9)


def test_a_training_without_its_last_checkpoint_does_not_end_well(tmp_path: Path) -> None:
    job = trained(tmp_path, [[1]], nodes=1)
    for generation in range(3):
        job.opened(generation, last=9)
        if generation < 2:
            job.ended(1, generation=generation, iteration=8, unsaved=9)
            job.step()
    job.ended(1, generation=2, how="finished", iteration=8)
    with pytest.raises(JobError, match="last state, of iteration 9, is not written"):
        job.controller.run()
    assert "is not written" in job.get("over")["error"]


STAMPS = {
    "elastic/job.py": 0,  # Moment, the one place of the controller: a default factory, no call
    "elastic/sessions.py": 3,  # when a change reached which phase, for people
    "elastic/worker.py": 1,
    "gpt_training.py": 2,  # Megatron's own
    "dry_run/run.py": 1,  # Megatron's own
}


def test_nobody_waits_by_the_wall_clock() -> None:
    """It may be set back.  What is left writes times down."""
    root = Path(megatron_het.__file__).parent
    found: dict[str, int] = {}
    for package in (root, root.parent / "tools"):
        for source in package.rglob("*.py"):
            text = source.read_text(encoding="utf-8")
            if "time.time" not in text and "datetime.now" not in text:
                continue
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            number = sum(ast.unparse(call.func) in ("time.time", "datetime.now", "time.time_ns") for call in calls)
            if number:
                found[str(source.relative_to(root if package == root else root.parent))] = number
    assert found == {name: number for name, number in STAMPS.items() if number}


def test_a_clock_that_is_set_back_changes_no_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = trained(tmp_path, [[1], [1]], [[1]], bounds=Bounds(leave_s=0.0))
    job.ended(1)
    monkeypatch.setattr(members.time, "time", lambda: 0.0)
    job.step()
    assert job.has("kill/2") and job.get("1/generation")["ranks"] == [1]


def test_a_broken_state_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    job = trained(tmp_path, [[1], [1]])
    first = job.controller
    first._save()
    os.truncate(job.state, job.state.stat().st_size // 2)
    assert job.start().history == first.history
    assert any("The state before it is taken" in line for line in job.said)
    for spoilt in (job.state, tmp_path / ".state.json.before"):
        spoilt.write_text("{")
    with pytest.raises(FileError):
        job.start()


TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    monkeypatch.setattr(clients, "_RETRY_S", 0.01)
    (tmp_path / "token").write_text(TOKEN)
    save_plan(plan([[1], [1]]), tmp_path / "plan.json")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["--controller", f"127.0.0.1:{port}", "--token-file", str(tmp_path / "token")]
    return port, [*words, "--folder", str(tmp_path / "job")]


def one_error(capfd: pytest.CaptureFixture[str]) -> str:
    """The only line that was said, but for what torch says of a connection."""
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("het-run: ")]
    assert len(said) == 1, said
    return said[0]


def test_without_a_token_the_folder_of_the_job_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert main(["status", "--folder", str(tmp_path)]) == 2
    assert one_error(capfd).endswith("token: no such file. Give --token-file or --folder of the job")


def test_two_controllers_are_refused(place: tuple[int, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    port, words = place
    words += ["--controller-only", "--plans", str(tmp_path / "plan.json")]
    assert main([*words, "--profile", "p.json"]) == 2 and "--model (and --profile) to search" in one_error(capfd)
    first = ServedBoard("127.0.0.1", port, TOKEN)
    assert main(words) == 1
    said = one_error(capfd)
    assert f"127.0.0.1:{port} cannot be listened on" in said and "Does a controller run there?" in said
    first.close()
    assert main([*words, "--controller", "no such host:1", "--folder", str(tmp_path / "other")]) != 0
    assert "'no such host' cannot be listened on" in one_error(capfd) and not (tmp_path / "other").exists()


def test_sigterm_before_the_node_begins_ends_its_controller(
    place: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It waited for nodes until --start-s, and the port and the folder were taken."""
    ended = list[str]()
    helper = SimpleNamespace(terminate=lambda: ended.append("controller"), wait=lambda timeout: 0)
    monkeypatch.setattr(commands.subprocess, "Popen", lambda _: helper)
    handlers = dict[int, Any]()
    monkeypatch.setattr(commands.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(commands, "_serve_node", lambda *_: handlers[signal.SIGTERM]())
    with pytest.raises(SystemExit):
        main([*place[1], "--plans", str(tmp_path / "plan.json"), "--start-controller", "--", "--mock-data"])
    assert ended == ["controller"]


@pytest.mark.parametrize(
    "flag", ("het-plan", "het-auto-batch", "het-measured-cp-shares", "use-precision-aware-optimizer")
)
def test_flags_of_the_training_that_the_controllers_plan_rules_out(
    flag: str, place: tuple[int, list[str]], capfd: pytest.CaptureFixture[str]
):
    assert main([*place[1], "--node", "n1", "--workers", "1", "--", "--mock-data", f"--{flag}"]) != 0
    assert f"--{flag}: " in one_error(capfd)


def test_an_unreachable_controller(place: tuple[int, list[str]], capfd: pytest.CaptureFixture[str]):
    port, words = place
    words += ["--node", "n1", "--workers", "1", "--timeout-s", "0.2"]
    assert main([*words, "--lost-s", "9", "--nodes=2", "--", "--mock-data"]) == 1
    idle, said = (line for line in capfd.readouterr().err.splitlines() if line.startswith("het-run: "))
    assert idle == "het-run: --nodes, --lost-s: without effect here, give them to the node with --start-controller"
    assert f"127.0.0.1:{port} does not answer" in said and "Start the controller first" in said


@pytest.mark.parametrize(
    ("part", "size", "name"),
    [("training", "global_batch_size", "training.global_batch_size"), ("model", "seq_length", "model")],
)
def test_a_plan_that_alters_the_training_is_refused(
    part: str, size: str, name: str, place: tuple[int, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    document = plan([[1]]).to_json()
    document[part][size] *= 2
    document["stages"][0]["replicas"][0]["microbatches"] = list(range(document["training"]["global_batch_size"]))
    (tmp_path / "other.json").write_text(json.dumps(document))
    plans = ["--plans", str(tmp_path / "plan.json"), str(tmp_path / "other.json")]
    assert main([*place[1], "--controller-only", *plans]) == 2
    said = one_error(capfd)
    assert f"{name} = " in said and "Give plans for one training" in said and len(said) < 1500


def test_status_and_leave(place: tuple[int, list[str]], capsys: pytest.CaptureFixture[str]):
    port, words = place
    board = ServedBoard("127.0.0.1", port, TOKEN)
    board.start()
    document: dict[str, Any] = {
        **standing([], 0, 1.0),
        "generation": None,
        "members": [{"process": 1, "node": "n1", "device": "", "iteration": 0}],
        "leaving": [],
        "history": [],
    }
    board.put("status", document)
    assert main(["status", *words]) == 0
    assert "node n1: 1 worker\n" in capsys.readouterr().out
    assert main(["status", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert main(["leave", *words, "n2"]) == 2
    assert "no node of the job is called 'n2'; its nodes are n1" in capsys.readouterr().err
    assert main(["leave", *words, "n1"]) == 0
    assert board.get("inbox/1") == {"type": "leave", "node": "n1"}
    board.close()


@pytest.mark.parametrize("command", [["status"], ["leave", "n1"], ["replan"]])
def test_another_token_is_told(command: list[str], place: tuple[int, list[str]], capfd: pytest.CaptureFixture[str]):
    port, words = place
    board = ServedBoard("127.0.0.1", port, "another token 123")
    board.start()
    assert main([command[0], *words, *command[1:]]) == 1
    assert "refuses this token" in one_error(capfd)
    board.close()


def test_strangers_are_counted(place: tuple[int, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    port, words = place
    board = ServedBoard("127.0.0.1", port, TOKEN)
    job = Job(tmp_path, [[1]], board=board)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 64)
        while stranger.recv(4096):
            pass
    while not board.strangers.refused:
        pass
    job.controller._shown_s = 0.0
    job.step()
    assert main(["status", *words]) == 0
    assert "1 connection without the token, the last from 127.0.0.1" in capsys.readouterr().out
    board.close()
