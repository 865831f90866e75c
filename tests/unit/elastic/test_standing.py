"""What ``het-run status`` shows."""

from __future__ import annotations

import ast
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_het.elastic
from megatron_het import store
from megatron_het.elastic import members as failures
from megatron_het.elastic import worth
from megatron_het.elastic.copies import SHARE, Cost, Pace
from megatron_het.elastic.job import Board, Generation, Moment, ServedBoard
from megatron_het.elastic.links import Links, Severing, sockets
from megatron_het.elastic.members import Bounds, Progress
from megatron_het.elastic.worth import describe, duration, ending, goodput, last_iteration, standing, summed_up
from tests.unit.elastic.notes import Job, about, plan, trained


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


@pytest.mark.parametrize(
    ("history", "done", "now_s", "share"),
    [
        ([], 0, 5.0, None),
        ([{**START, "opened": {}}], 0, 5.0, None),
        # 20 iterations in 20 s, of which two are done again; then 5 in 5 s; 40 s in all
        ([START], 20, 130.0, 20 / 30),
        ([START, DEATH], 23, 140.0, (18 + 5) / 40),
        ([START, {**DEATH, "opened": {}}], 20, 140.0, 20 / 40),  # a change is under way
        # an older checkpoint: 0 to 9 of the first 20 s, nothing of the second generation, 10 s of the third
        ([START, DEATH, generation(2, "1 rank was lost", 145.0, 28, 155.0, 9)], 19, 165.0, (9 + 10) / 65),
    ],
)
def test_time_that_counts(history: list[dict[str, Any]], done: int, now_s: float, share: float | None):
    assert goodput(history, done, now_s) == pytest.approx(share)


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
    job = trained(tmp_path, [[1]], nodes=1)
    for generation in range(2):
        job.step()
        job.opened(generation, **START["opened"]["4"])
        job.ended(1, generation=generation, error="", iteration=30 * generation)
        job.step()
    assert [list(entry.get("opened", {})) for entry in job.controller.history][:-1] == [["all"]] * 2


def test_a_history_has_a_bound_and_goodput_is_of_all(monkeypatch: pytest.MonkeyPatch):
    """Ten changes, one of which takes back what several before it did, and all but five of which are gone."""
    monkeypatch.setattr(worth, "_MOST", 5)
    whole, some = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(10):
        first = 9 * number - (15 if number == 4 else 0)
        entry = generation(number, "x", 20.0 * number, 9 * number + 2, 20.0 * number + 3, first)
        opened = entry.pop("opened")
        whole.append(dict(entry))
        some = worth.newest([*some, entry])
        whole[-1]["opened"] = some[-1]["opened"] = opened
    assert len(some) == 5 and [entry["generation"] for entry in some] == [0, 6, 7, 8, 9]
    assert goodput(some, 90, 197.0) == pytest.approx(goodput(whole, 90, 197.0))
    said = describe(status(history=some))
    assert "  5 changes before\n  change 6 at" in said and "change 5" not in said


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
    assert waiting.startswith("the training has not begun\n") and "waits for its nodes" in waiting
    assert "the job ended: no plan" in describe(status(over=True, error="no plan"))
    assert "the training has stopped at iteration 23 of 40" in describe(status(over=True, error=""))
    assert ending("", 10, 10) == ending("", 3, None) == "the training is over"


# An iteration that does not end, though everybody gives signs of life.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("megatron_het.elastic.controller.Moment", lambda: Moment(clock_s=now[0]))
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


def test_all_leave_a_stuck_iteration_and_who_does_not_is_ended(clock: list[float], tmp_path: Path) -> None:
    job = trained(tmp_path, [[1], [1]], [[1]], bounds=Bounds(stuck_s=0.1, leave_s=0.1))
    job.opened(last=9, times={"first_step": time.time()})
    job.step()
    assert not job.has("0/lost")
    clock[0] += 0.2
    job.step()
    assert job.has("0/lost") and not job.has("kill/1") and not job.has("kill/2")
    job.ended(1, error="closed", iteration=1)
    clock[0] += 0.2
    job.step()
    assert job.has("kill/2") and not job.has("kill/1")
    assert job.get("1/generation")["ranks"] == [1]
    assert job.controller.history[-1]["why"] == "1 rank was lost"
    assert "no iteration has ended for 0.1 s" in "\n".join(job.said)


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


# Nothing that comes from others is unpickled.

SOURCES = sorted(s for package in (megatron_het.elastic, store) for s in Path(package.__path__[0]).glob("*.py"))
COLLECTIVES = {"all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list"}
UNPICKLES = {"pickle", "Unpickler", "torch.load", *COLLECTIVES}


def test_a_message_that_makes_no_sense_is_left_out(tmp_path: Path) -> None:
    """From somebody who knows the token; nobody else gets anything into it."""
    token = "0123456789abcdef"
    board = ServedBoard("127.0.0.1", 0, token)
    job = Job(tmp_path, [[1]], board=board)
    member = Board("127.0.0.1", board.port, token)
    member.ask("push", "inbox", "c__builtin__\nprint\n(S'a pickle'\ntR.")
    member.post({"type": "ready", **about(1)})
    job.step()
    assert sum("makes no sense" in line for line in job.said) == 1, job.said
    assert [found["node"] for found in job.controller.status()["members"]] == ["n1"]
    board.close()


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_no_module_unpickles(source: Path) -> None:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.Attribute):
            names |= {node.attr, ast.unparse(node)}
    assert not names & UNPICKLES
    assert all(hasattr(dist, name) for name in COLLECTIVES), "names of today's torch"


# How often copies are taken.


def run(pace: Pace, iteration_s: float, cost: Cost, count: int = 4) -> None:
    now_s = 0.0
    for _ in range(count):
        pace.left(now_s)
        now_s += iteration_s
        pace.arrived(now_s)
        pace.copied(cost)
        now_s += cost.held_s


@pytest.mark.parametrize(
    ("cost", "host_computes", "wanted"),
    [
        (Cost(0.02, 0.5, 0.02), False, 1),  # 2 % and arrives before the next one
        (Cost(0.02, 0.5, 0.02), True, 2),  # the sender takes 2 % more
        (Cost(0.10, 0.5, 0.0), False, 4),  # 10 % over 4 iterations
        (Cost(0.01, 2.5, 0.0), False, 3),  # the next one would wait for it
    ],
)
def test_the_fewest_iterations_that_fit(cost: Cost, host_computes: bool, wanted: int):
    pace = Pace(None)
    run(pace, 1.0, cost)
    found = pace.wanted(host_computes=host_computes)
    assert found == wanted
    assert pace.cost_s(host_computes=host_computes) / (found * pace.iteration_s()) <= SHARE


def test_one_slow_copy_and_one_slow_iteration_do_not_count():
    pace = Pace(None)
    run(pace, 1.0, Cost(0.02), 4)
    run(pace, 30.0, Cost(9.0), 1)
    run(pace, 1.0, Cost(0.02), 4)
    assert pace.wanted(host_computes=True) == 1


def test_a_session_measures_anew():
    pace = Pace(None)
    run(pace, 1.0, Cost(0.3))
    pace.every = pace.wanted(host_computes=False)
    assert pace.every == 10
    pace.begin()
    assert (pace.every, pace.wanted(host_computes=False)) == (1, 1)
    assert [i for i in range(1, 4) if pace.is_due(i)] == [1, 2, 3]


def test_what_the_user_sets_stays():
    pace = Pace(3)
    run(pace, 1.0, Cost(0.9))
    pace.begin()
    assert [i for i in range(1, 10) if pace.is_due(i)] == [3, 6, 9]
    assert not any(Pace(0).is_due(i) for i in range(1, 10))


# A wait for a host that has vanished ends when its own process cuts the connection; others stay.


LONG_S, SOON_S = 600.0, 100.0
"""A wait that nothing ends, and one that was ended; on a busy machine importing torch alone takes a minute."""
PEER = """
import sys, time
import torch.distributed as dist
from datetime import timedelta
from megatron_het.elastic.links import Links
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=600))
links = Links(dist.PrefixStore("here", store), 1, 2, 600.0)
links.gather(1)
print("met", flush=True)
time.sleep(600)
"""


def test_a_wait_for_a_host_that_has_vanished_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    severing = Severing("127.0.0.1", store.port)
    command = [sys.executable, "-c", PEER, str(store.port)]
    errors: list[Exception] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE) as peer, severing.during("0/lost"):
        try:
            links = Links(dist.PrefixStore("here", store), 0, 2, LONG_S)
            links.gather(0)
            assert peer.stdout is not None and peer.stdout.readline() == b"met\n"
            os.kill(peer.pid, signal.SIGSTOP)  # closes nothing

            def wait() -> None:
                try:
                    links.swap([], [(1, torch.zeros(4))])
                except RuntimeError as error:
                    errors.append(error)

            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive()
            assert severing.cut("1/lost") == 0, "of other connections"
            start_s = time.monotonic()
            assert severing.cut("0/lost") > 0
            while waiting.is_alive() and time.monotonic() - start_s < SOON_S:
                severing.cut("0/lost")  # as a worker does, in case the wait has begun only now
                waiting.join(0.1)
            assert not waiting.is_alive() and errors and time.monotonic() - start_s < SOON_S
            store.set("still", "there")
        finally:
            peer.kill()
    assert severing.cut("0/lost") == 0, "the session is over"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_older_connections_pythons_own_and_the_controllers_stay():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as controller:
        port = controller.getsockname()[1]
        severing = Severing("localhost", port)
        older = foreign(server.getsockname()[1])
        with severing.during("0/lost"):
            mine = foreign(server.getsockname()[1])
            told = foreign(port)
            with socket.create_connection(server.getsockname()) as python:
                severing.cut("0/lost")
                assert [is_open(number) for number in (older, mine, told, python.fileno())] == [True, False, True, True]
        for number in (older, mine, told):
            os.close(number)
    with socket.socket() as fresh:  # it may listen a moment later, and gloo ends its process where that is shut down
        fresh.bind(("127.0.0.1", 0))
        assert os.fstat(fresh.fileno()).st_ino not in [os.fstat(one.fileno()).st_ino for one in sockets()]


def foreign(port: int) -> int:
    """A connection that is no object of Python's."""
    return socket.create_connection(("127.0.0.1", port)).detach()


def is_open(number: int) -> bool:
    try:
        return os.write(number, b"x") == 1
    except BrokenPipeError:
        return False


class OnTheDevice:
    """A group whose kernels are gone once all groups are told to end them."""

    def __init__(self, all_told: threading.Barrier, backend: str = "nccl") -> None:
        self._all_told, self._backend = all_told, backend
        self.aborts = 0

    def _get_backend(self, device: torch.device) -> OnTheDevice:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self._backend

    def abort(self) -> None:
        self.aborts += 1
        self._all_told.wait(SOON_S)


def test_communicators_are_aborted_together_and_once(monkeypatch: pytest.MonkeyPatch):
    """Of each other's kernels they wait for the end: one after the other they would wait for ever."""
    both = threading.Barrier(2)
    groups = [OnTheDevice(both), OnTheDevice(both), OnTheDevice(both, "gloo")]
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    severing = Severing("127.0.0.1", 1)
    with severing.during("0/lost"):
        assert not severing.has_aborted()
        severing.cut("1/lost")
        assert not severing.has_aborted() and [group.aborts for group in groups] == [0, 0, 0]
        for _ in range(2):
            severing.cut("0/lost")
            assert severing.has_aborted() and [group.aborts for group in groups] == [1, 1, 0]
    with severing.during("1/lost"):
        assert not severing.has_aborted(), "of the session before"
        del groups[:2]
        monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
        severing.cut("1/lost")
        assert not severing.has_aborted(), "what gloo has delivered is right"


def test_copies_tell_how_fast_state_moves():
    pace = Pace(1)
    run(pace, 1.0, Cost(0.1, 0.2, held_bytes=4000, sent_bytes=1000))
    assert pace.rates is None, "what takes as long as a message tells nothing of the link"
    for sent_s in (0.2, 0.4, 50.0):
        run(pace, 1.0, Cost(0.1, sent_s, held_bytes=10**9, sent_bytes=10**8), 1)
    assert pace.rates == (pytest.approx(10**10), pytest.approx(2.5 * 10**8))
    pace.begin()
    assert pace.rates is not None, "a change is judged right after the one before"
