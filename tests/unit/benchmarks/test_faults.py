"""What the benchmark of faults draws, and what it calls a survival."""

import json
import math
import os
import random
import signal
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import fault_points, fault_processes, fault_trials, long_run
from benchmarks.fault_trials import STEPS, Outcome, Pool, Trial, can_mount, draw, loss_difference, wrong_samples
from benchmarks.faults import KINDS, make, verdict
from megatron_het.elastic.pool import Process, assign
from testing.cases import MICROBATCHES
from testing.forked import Forked


@pytest.fixture(scope="module")
def pool() -> Pool:
    return draw(random.Random("pool"), "1f1b")


def good() -> Outcome:
    """Two stages; every iteration once, in the right order."""
    numbers = {i: list(range((i - 1) * MICROBATCHES, i * MICROBATCHES)) for i in range(1, STEPS + 1)}
    return Outcome(
        ended=True,
        code=0,
        history=["start"],
        losses={i: {0: [2.0]} for i in numbers},
        samples={i: {0: list(found), 1: list(found)} for i, found in numbers.items()},
    )


REFERENCE = dict.fromkeys(range(1, STEPS + 1), 2.0)


def test_pools_have_a_plan_whatever_node_is_lost(pool: Pool):
    assert len({plan.model for plan in pool.plans}) == 1
    assert sum(pool.nodes) == pool.plans[0].world_size and pool.plans[-1].world_size == 1
    workers = [Process(i, node) for i, node in enumerate(n for n, k in zip(pool.names, pool.nodes) for _ in range(k))]
    assert assign(pool.plans[0], workers) is not None
    for lost in pool.names:
        assert any(assign(plan, [p for p in workers if p.node != lost]) for plan in pool.plans)


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_a_kind_are_drawn_again_from_the_same_seed(pool: Pool, kind: str):
    first, again = (make(kind, random.Random("a"), pool) for _ in range(2))
    assert first == again and first.kind == kind
    for fault in first.faults:
        assert fault["slot"] < pool.nodes[pool.names.index(fault["node"])]


def test_kinds_that_need_a_mount_are_all_drawn_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """It is asked for each of them: the second answer was no, as the folder of the first one was there."""
    monkeypatch.setattr(fault_trials.subprocess, "run", lambda *_, **__: None)
    assert can_mount(tmp_path) and can_mount(tmp_path) and not list(tmp_path.iterdir())


def test_a_folder_in_which_files_are_open_becomes_read_only(tmp_path: Path):
    """The kernel refused: a mount has writers as long as a worker's log is open."""
    if not can_mount(tmp_path):
        pytest.skip("small disks need the right to mount")
    folder = tmp_path / "job"
    with fault_trials._disk(folder, 1 << 20):
        with (folder / "log").open("w") as log:
            fault_trials.make_read_only(folder)
            with pytest.raises(OSError, match="Read-only"):
                (folder / "state").write_text("x")
            log.write("a line")
        assert (folder / "log").read_text() == "a line"
    assert not any(folder.iterdir())


def test_a_forked_worker_holds_no_connection_of_its_agent(tmp_path: Path):
    """The controller kept a connection that its agent had given up for as long as the worker lived."""
    ours, theirs = socket.socketpair()

    def run() -> int:
        fault_processes.let_go_of_connections()
        signal.pause()
        return 0

    forked = Forked(run, tmp_path / "log.txt", {})
    theirs.close()
    ours.settimeout(10.0)
    try:
        assert ours.recv(1) == b""
    finally:
        forked.kill()


def test_a_shortage_of_memory_ends(monkeypatch: pytest.MonkeyPatch):
    """There was no memory for the thread that ends it, so that it lasted for ever and the job was lost."""
    done: list[str] = []
    timer = SimpleNamespace(start=lambda: done.append("timer"))
    monkeypatch.setattr(fault_points.threading, "Timer", lambda *_: timer)
    monkeypatch.setattr(fault_points.resource, "setrlimit", lambda *_: done.append("limit"))
    fault_points._be_short_of_memory()
    assert done == ["timer", "limit"]


def test_losses_that_a_report_has_dropped_are_remembered(tmp_path: Path):
    """A report keeps its newest ones; those after an iteration that was not ended are done again."""
    run, losses = tmp_path / "run", long_run.Losses(tmp_path / "run")
    for time_s, kept in enumerate(([[1, 1.0], [2, 9.0]], [[2, 2.0], [3, 3.0]])):
        (run / "generation-0").mkdir(parents=True, exist_ok=True)
        (run / "generation-0" / "rank-0.json").write_text(json.dumps({"losses": kept}))
        os.utime(run / "generation-0" / "rank-0.json", (time_s, time_s))
        losses.read()
    assert losses.read() == {1: [1.0], 2: [2.0], 3: [3.0]}
    (run / "rank-0.json").write_text("{")
    assert long_run.compared(losses, losses) == {
        "iterations_seen": 3,
        "losses_compared": 3,
        "last_compared": 3,
        "loss_difference": 0.0,
    }


def test_samples_are_counted():
    outcome = good()
    assert wrong_samples(outcome) == 0
    outcome.samples[2][1].remove(MICROBATCHES)  # skipped
    outcome.samples[3][0].append(2 * MICROBATCHES)  # twice
    outcome.samples[4][0][0] = 10**6  # another one
    assert wrong_samples(outcome) == 4
    del outcome.samples[5]
    assert wrong_samples(outcome) == 4 + MICROBATCHES


def test_losses_of_all_generations_are_compared():
    outcome = good()
    assert loss_difference(outcome, REFERENCE) == 0.0
    outcome.losses[3][1] = [2.0, 2.2]
    assert loss_difference(outcome, REFERENCE) == pytest.approx(0.1)
    del outcome.losses[4]
    assert math.isinf(loss_difference(outcome, REFERENCE))


def test_what_a_survival_is(pool: Pool):
    trial, outcome = Trial("kill", pool, ()), good()
    assert verdict(trial, outcome, 0.0, 0) == ""
    assert "differ" in verdict(trial, outcome, 1e-3, 0)
    assert "samples" in verdict(trial, outcome, 0.0, 3)
    assert verdict(trial, replace(outcome, ended=False), 0.0, 0) == "hung"
    assert "exit code 1" in verdict(trial, replace(outcome, code=1), 0.0, 0)
    changed = replace(outcome, history=["start", "1 rank was lost"])
    assert "there was a change" in verdict(replace(trial, unchanged=True), changed, 0.0, 0)
    fault = {"name": "kill-1"}
    assert "did not happen" in verdict(replace(trial, faults=(fault,)), outcome, 0.0, 0)
    hopeless, line = replace(trial, hopeless=True), "controller: 1 rank was lost, and there is no plan for what is left"
    assert verdict(hopeless, replace(outcome, code=1, error=[line]), 0.0, 0) == ""
    assert "2 clear errors" in verdict(hopeless, replace(outcome, code=1, error=[line, line]), 0.0, 0)
