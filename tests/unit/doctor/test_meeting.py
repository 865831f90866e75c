"""Coordinator and participants over a real store, as threads: who fails, hangs or dies is named, and hides nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_het.doctor import participant as coordinating
from megatron_het.doctor.__main__ import _Rank
from megatron_het.doctor.check import Check, Names, Status
from megatron_het.doctor.participant import (
    Coordinator,
    Heart,
    Keys,
    MeetingError,
    Participant,
    exit_code,
    hear,
    table,
    verdict,
)
from megatron_het.store import StoreServer

WORLD = 3
NAMES = Names(("a", "a", "b"))


@dataclass
class Scripted(Check):
    """Every rank answers its number, unless the script says otherwise."""

    name: str = "scripted"
    script: dict[int, Any] = field(default_factory=dict)
    limit_s: float = 5.0
    needs_all: bool = False

    def measure(self, seat):
        return self.script.get(seat, lambda: {"rank": seat})()

    def judge(self, answers, names):
        assert all(answer == {"rank": rank} for rank, answer in answers.items())
        return [self.ok(names.of(answers), f"{len(answers)} answers")]


@pytest.fixture
def store():
    server = StoreServer("127.0.0.1", 0, "0123456789abcdef")
    server.start()
    yield server
    server.close()


class Run:
    """The coordinator here, participants on threads; ranks of ``absent`` never come."""

    def __init__(self, store, checks, absent=(), limit_s=60.0, dies=None):
        self.left: list[int] = []
        self.codes: dict[int, int] = {}
        threads, hearts = [], []
        for rank in range(WORLD):
            if rank in absent:
                continue
            own = store
            own.put(Keys.here(rank), {"host": NAMES.hosts[rank]})
            hearts.append(Heart(own, rank))
            if dies == rank:
                hearts.pop().stop()
                continue
            thread = threading.Thread(target=self.take_part, args=(own, checks, rank, limit_s), daemon=True)
            thread.start()
            threads.append(thread)
        leader = Coordinator(store, checks, WORLD, limit_s)
        self.here = leader.meet(1.0)
        self.findings = leader.run(NAMES)
        leader.close(exit_code(self.findings))
        self.lost = leader.lost
        for thread in threads:
            thread.join(timeout=20.0)
        for heart in hearts:
            heart.stop()

    def take_part(self, store, checks, rank, limit_s):
        one = Participant(store, lambda index: rank, checks, rank, leave=self.left.append)
        self.codes[rank] = one.run(limit_s)

    def rows(self, name):
        return [(f.status, f.where, f.what) for f in self.findings if f.check == name]


def test_all_well(store):
    run = Run(store, [Scripted("one"), Scripted("two", needs_all=True)])
    assert run.rows("one") == run.rows("two") == [(Status.OK, "all ranks", "3 answers")]
    assert run.codes == {0: 0, 1: 0, 2: 0} and not run.lost
    assert verdict(run.findings) == "fit"


def test_a_failing_check_hides_no_other(store):
    def fail():
        raise SystemExit("refused")

    run = Run(store, [Scripted("one", script={1: fail}), Scripted("two", needs_all=True)])
    assert run.rows("one") == [
        (Status.FAULT, "rank 1 (a)", "SystemExit: refused"),
        (Status.OK, "rank 0 (a), rank 2 (b)", "2 answers"),
    ]
    assert run.rows("two") == [(Status.OK, "all ranks", "3 answers")]
    assert run.codes == {0: 1, 1: 1, 2: 1}


def test_a_judgement_that_fails_hides_no_other(store):
    run = Run(store, [Scripted("one", script={1: lambda: {"rank": 7}}), Scripted("two")])
    assert run.rows("one")[0][0] is Status.FAULT and "cannot be judged" in run.rows("one")[0][2]
    assert run.rows("two") == [(Status.OK, "all ranks", "3 answers")]


def test_a_rank_that_hangs_is_named_with_the_place(store):
    own = store

    def hang():
        while not own.has(Keys.answer(0, 2)):  # until the watchdog has spoken
            time.sleep(0.01)
        return {"rank": 2}

    checks = [Scripted("one", script={2: hang}, limit_s=1.0), Scripted("two", needs_all=True), Scripted("three")]
    run = Run(store, checks)
    status, where, what = run.rows("one")[0]
    assert (
        (status, where) == (Status.FAULT, "rank 2 (b)")
        and what.startswith("slow or stuck")
        and "test_meeting.py" in what
    )
    assert run.rows("two") == [(Status.NOT_RUN, "all ranks", "it needs all ranks, and rank 2 (b) gave no answer")]
    assert run.rows("three") == [(Status.OK, "ranks 0-1 (a)", "2 answers")]
    assert run.codes[0] == run.codes[1] == 1


def test_a_rank_that_dies_is_named(store, monkeypatch):
    monkeypatch.setattr(coordinating, "_SILENT_S", 1.5)
    run = Run(store, [Scripted("one", limit_s=30.0), Scripted("two")], dies=1)
    assert run.rows("one")[0][:2] == (Status.FAULT, "rank 1 (a)") and "has died" in run.rows("one")[0][2]
    assert run.rows("two") == [(Status.OK, "rank 0 (a), rank 2 (b)", "2 answers")]


def test_a_rank_that_never_comes_is_named(store):
    run = Run(store, [Scripted("one"), Scripted("two", needs_all=True)], absent=[2])
    assert sorted(run.here) == [0, 1]
    assert run.rows("ranks") == [(Status.FAULT, "rank 2 (b)", "did not start within 1 s")]
    assert run.rows("one") == [(Status.OK, "ranks 0-1 (a)", "2 answers")]
    assert run.rows("two")[0][0] is Status.NOT_RUN


def test_without_time_checks_are_not_run_and_say_so(store):
    run = Run(store, [Scripted("one")], limit_s=1.0)
    assert run.rows("one") == [(Status.NOT_RUN, "all ranks", "no time is left (--limit-s)")]
    assert exit_code(run.findings) == 1


def test_the_launcher_ends_the_job(store):
    leader = Coordinator(store, [Scripted("one")], 1, 60.0, is_ending=lambda: True)
    assert leader.run(NAMES)[0].what == "the launcher has ended the job"


def test_silence_of_rank_0_is_bounded(store):
    with pytest.raises(MeetingError, match="rank 0"):
        hear(store, "nothing", 0.2)


def test_table_shows_faults_first_and_bounds_rows():
    check = Scripted("links")
    rows = [check.ok("all ranks", "fine"), *[check.fault(f"rank {i}", "bad", "Mend it") for i in range(20)]]
    text = table(rows, 7.0)
    lines = text.splitlines()
    assert "FAULT" in lines[2] and "9 more rows" in text
    assert lines[-1] == "verdict: NOT FIT: 20 fault(s) (7 s)"
    assert max(map(len, lines)) <= 80


class Closed:
    """A standard output whose reader has left."""

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


def test_the_verdict_reaches_all_when_nobody_reads_the_table(monkeypatch, tmp_path):
    codes: list[int] = []
    findings = [Scripted().fault("rank 0", "broken")]
    leader = SimpleNamespace(run=lambda names: findings, figures={}, close=codes.append)
    monkeypatch.setattr("sys.stdout", Closed())
    options = SimpleNamespace(limit_s=60.0, json=tmp_path / "doctor.json")
    _Rank(options, 0, WORLD)._coordinate(leader, NAMES)
    assert codes == [1] and (tmp_path / "doctor.json").is_file()
