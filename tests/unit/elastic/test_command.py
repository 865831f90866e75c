"""``het-run``: what it refuses, and what it shows of a job."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.__main__ import main
from megatron_het.elastic.board import ServedBoard
from megatron_het.elastic.controller import Bounds, Controller
from megatron_het.elastic.pool import GivenPlans
from megatron_het.elastic.worth import standing
from megatron_het.plan import Plan, save_plan
from megatron_het.store import job as clients
from tests.unit.elastic.test_pool import plan

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, list[str]]:
    """A free port, and the words that go with it."""
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


def test_a_second_controller_is_refused(
    place: tuple[int, list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    port, words = place
    first = ServedBoard("127.0.0.1", port, TOKEN)
    assert main([*words, "--controller-only", "--plans", str(tmp_path / "plan.json")]) == 1
    said = one_error(capfd)
    assert f"127.0.0.1:{port} cannot be listened on" in said and "Does a controller run there?" in said
    first.close()


@pytest.mark.parametrize("flag", ["--het-plan", "--het-auto-batch", "--het-measured-cp-shares"])
def test_flags_of_the_training_that_the_controllers_plan_rules_out(
    flag: str, place: tuple[int, list[str]], capfd: pytest.CaptureFixture[str]
):
    assert main([*place[1], "--node", "n1", "--workers", "1", "--", "--mock-data", flag]) != 0
    assert f"{flag}: " in one_error(capfd)


def test_an_unreachable_controller(place: tuple[int, list[str]], capfd: pytest.CaptureFixture[str]):
    port, words = place
    assert main([*words, "--node", "n1", "--workers", "1", "--timeout-s", "0.2", "--", "--mock-data"]) == 1
    said = one_error(capfd)
    assert f"127.0.0.1:{port} does not answer" in said and "Start the controller first" in said


def _batch(one: Plan) -> Plan:
    return replace(one, training=replace(one.training, global_batch_size=2 * one.training.global_batch_size))


def _sequence(one: Plan) -> Plan:
    return replace(one, model=replace(one.model, seq_length=2 * one.model.seq_length))


@pytest.mark.parametrize(("change", "name"), [(_batch, "training.global_batch_size"), (_sequence, "model")])
def test_a_plan_that_alters_the_training_is_refused(
    change: Callable[[Plan], Plan],
    name: str,
    place: tuple[int, list[str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
):
    document = change(plan([[1]])).to_json()
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
    board: Any = ServedBoard("127.0.0.1", port, TOKEN)
    controller = Controller(board, GivenPlans([plan([[1]])]), tmp_path / "state.json", 1, Bounds(), print)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"x" * 64)
        while stranger.recv(4096):
            pass
    while not board.strangers.refused:
        pass
    controller._shown_s = 0.0
    controller._step()
    assert main(["status", *words]) == 0
    assert "1 connection without the token, the last from 127.0.0.1" in capsys.readouterr().out
    board.close()
