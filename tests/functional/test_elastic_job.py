"""A job whose pool changes: a node joins, a rank is killed, a node leaves; it ends as an undisturbed run does."""

import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_het.elastic.__main__ import main as het_run
from megatron_het.elastic.controller import Controller
from megatron_het.elastic.job import Board, ServedBoard
from megatron_het.elastic.members import Bounds, JobError
from megatron_het.elastic.pool import GivenPlans, Planner
from megatron_het.plan import Plan, save_plan
from testing.cases import Weights, build_plan, common_flags
from testing.compare import reported_losses
from testing.lab import Lab
from testing.runner import Finished, Job, words
from tests.functional.test_checkpoint import assert_agree, with_ministages

STEPS, TOKEN = 16, "0123456789abcdef"
LIMIT_S = 240.0
_BOUNDS = Bounds(lost_s=8.0, leave_s=30.0)
ASYNC = words("--async-save --use-persistent-ckpt-worker --async-strategy mcore")


def plan(sizes: list[list[int]], layers: list[int]) -> Plan:
    # The optimizer is divided, so that nobody but its owner has a rank's part of it.
    return build_plan(sizes, layers, random.Random(0), even_routing=False, distributed_optimizer=True)


PLANS = [plan([[1], [1, 1, 1]], [2, 3]), plan([[1], [1, 1]], [3, 2]), plan([[1], [1]], [2, 3])]
UNDER_A_WINDOW = with_ministages(PLANS[1], ((2, 1), (1, 1)), offload=True, offload_optimizer=True, update="undo")


class Running:
    """A controller in this process, and workers of the rank server.

    Args:
        lab: Shared data.
        folder: An empty folder.
        workers: Node of every worker, and the file for which it waits before it comes.
        kill: Worker, iteration and forward step at which it kills itself.
        hold: Iteration before which workers wait, and the file for which they do.
        planner: Of the controller; by default the plans above.
        flags: Of the training; by default those of the lab's small model.
        setup: What workers do before they come, and its arguments.
        device: Kind of all devices.
        bounds: Of the controller's waits.
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        workers: list[tuple[str, str]],
        kill: tuple[int, int, int] | None = None,
        hold: tuple[int, str] | None = None,
        *,
        planner: Planner | None = None,
        flags: Sequence[str] | None = None,
        setup: tuple[str, dict[str, Any]] | None = None,
        device: str = "",
        bounds: Bounds = _BOUNDS,
    ) -> None:
        self._lab, self.folder = lab, folder
        board = ServedBoard("127.0.0.1", 0, TOKEN)
        self.port = board.port
        described = [
            {"process": i + 1, "node": node, "after": after, "device": device}
            for i, (node, after) in enumerate(workers)
        ]
        document = {"port": self.port, "token": TOKEN, "timeout_s": 40.0, "workers": described}
        (folder / "job.json").write_text(json.dumps(document))
        first = sum(not after for _, after in workers)
        self.lines: list[str] = []
        plans = planner or GivenPlans(PLANS)
        self.controller = Controller(board, plans, folder / "state.json", first, bounds, self.lines.append)
        self.error: JobError | None = None
        self.finished: Finished | None = None
        options = {"out": None, "kill": kill, "hold": hold}
        own = (*common_flags(Weights(), steps=STEPS), *lab.start_flags(Weights()))
        job = Job(
            "elastic job",
            len(workers),
            (*(flags or own), "--het-report", str(folder)),
            folder,
            "benchmarks.elastic_script:work",
            setup or ("testing.probe:observe", options),
            {"HET_JOB": str(folder / "job.json")},
            timeout_s=LIMIT_S,
            grace_s=LIMIT_S,
        )
        self._threads = [threading.Thread(target=self._control, daemon=True)]
        self._threads.append(threading.Thread(target=self._work, args=(job,), daemon=True))
        for thread in self._threads:
            thread.start()

    def _control(self) -> None:
        try:
            self.controller.run()
        except JobError as error:
            self.error = error

    def _work(self, job: Job) -> None:
        self.finished = self._lab.runner.run(job, check=False)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline_s and self._threads[0].is_alive(), f"{what}: {self.lines} {self.error}"
            time.sleep(0.05)

    def iteration(self) -> int:
        return max((member["iteration"] for member in self.controller.status()["members"]), default=0)

    def end(self) -> Finished:
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert self.finished is not None and self.error is None, (self.error, self.lines)
        return self.finished


@pytest.fixture(scope="module")
def undisturbed(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    from tests.functional.test_elastic_state import run

    folder = tmp_path_factory.mktemp("undisturbed")
    (losses,) = run(lab, folder, Weights(), [(PLANS[1], [0, 1, 2], None)], steps=STEPS)
    return losses


def asked(job: Running, capsys: pytest.CaptureFixture[str]) -> str:
    (job.folder / "token").write_text(TOKEN)
    where = ["--controller", f"127.0.0.1:{job.port}", "--token-file", str(job.folder / "token")]
    capsys.readouterr()
    assert het_run(["status", *where]) == 0
    return capsys.readouterr().out


def test_join_death_leave(lab: Lab, tmp_path: Path, undisturbed: dict[int, float], capsys: pytest.CaptureFixture[str]):
    nodes = [("a", ""), ("b", ""), ("c", ""), ("d", "come")]
    job = Running(lab, tmp_path, nodes, kill=(1, 8, 0), hold=(4, str(tmp_path / "go")))
    job.until(lambda: job.iteration() >= 2, "start")
    (tmp_path / "come").touch()
    # The newcomer checks the flags against the next plan first, for seconds in which all iterations would pass.
    job.until(lambda: any(line.startswith("a node joins: ") for line in job.lines), "join")
    (tmp_path / "go").touch()
    job.until(lambda: len(job.controller.history) >= 3, "join and death")
    start = job.iteration()
    job.until(lambda: job.iteration() > start, "after the death")
    told = ""

    def is_told() -> bool:
        nonlocal told
        told = asked(job, capsys)
        return told.count("s to the end of the first iteration") == 2

    job.until(is_told, "status")
    first = re.match(rf"iteration (\d+) of {STEPS}[;,].* goodput \d+\.\d % of \d+ s\n", told)
    assert first is not None and int(first[1]) >= start, told
    assert "generation 2 (1 rank was lost): plan " in told and "1f1b, 2 stages of 1 + 2 ranks\n" in told
    assert [node for node in "abcd" if f"  node {node}: 1 worker\n" in told] == ["a", "c", "d"], told
    assert re.search(r"  change 1 at iteration \d+: a node joins, \d+\.\d s to the end of the first iteration\n", told)
    Board("127.0.0.1", job.port, TOKEN).post({"type": "leave", "node": "a"})
    finished = job.end()
    assert [entry["why"] for entry in job.controller.history] == [
        "start",
        "a node joins",
        "1 rank was lost",
        "a node leaves",
    ], job.lines
    assert sorted(finished.returncodes) == [-9, 0, 0, 0]
    check_losses(tmp_path, undisturbed)


@pytest.mark.full
def test_a_death_in_the_first_generation(lab: Lab, tmp_path: Path, undisturbed: dict[int, float]):
    # The optimizer has no state yet when the first copy is taken; the shard of the rank that dies must be copied later.
    job = Running(lab, tmp_path, [("a", ""), ("b", ""), ("c", "")], kill=(1, 5, 0))
    job.until(lambda: len(job.controller.history) >= 2, "death")
    finished = job.end()
    assert [entry["why"] for entry in job.controller.history] == ["start", "1 rank was lost"], job.lines
    assert sorted(finished.returncodes) == [-9, 0, 0]
    check_losses(tmp_path, undisturbed)


@pytest.mark.full
def test_a_rank_that_hangs_is_left_behind(lab: Lab, tmp_path: Path, undisturbed: dict[int, float]):
    # Its process gives signs of life all the time, and its peers' waits would end after a minute.
    hangs = ("benchmarks.drift_stand_ins:hang", {"hung": 1, "iteration": 5, "seconds": 16.0})
    nodes, bounds = [("a", ""), ("b", ""), ("c", "")], Bounds(lost_s=60.0, leave_s=2.0, stuck_s=8.0)
    job = Running(lab, tmp_path, nodes, setup=hangs, bounds=bounds)
    finished = job.end()
    assert [entry["why"] for entry in job.controller.history] == ["start", "1 rank was lost"], job.lines
    assert "no iteration has ended for 8 s: all ranks leave their session" in job.lines
    assert set(finished.returncodes) == {0}, "no agent is here to end it"
    check_losses(tmp_path, undisturbed)


@pytest.mark.full
def test_asynchronous_saves_go_on_through_a_death(lab: Lab, tmp_path: Path, undisturbed: dict[int, float]):
    # A save is being written under a window while the rank dies, and others begin in the generation after it.
    saved, every = tmp_path / "saved", 4
    saves = ("--save", str(saved), "--save-interval", str(every), *ASYNC)
    own = (*common_flags(Weights(), steps=STEPS), *lab.start_flags(Weights()))
    nodes = [("a", ""), ("b", ""), ("c", "")]
    plans = GivenPlans([UNDER_A_WINDOW, PLANS[2]])
    job = Running(lab, tmp_path, nodes, kill=(1, every + 1, 0), flags=(*own, *saves), planner=plans)
    job.until(lambda: len(job.controller.history) >= 2, "death")
    finished = job.end()
    assert sorted(finished.returncodes) == [-9, 0, 0], finished.log
    check_losses(tmp_path, undisturbed)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
    # What was written after the death is what was trained.
    save_plan(PLANS[2], tmp_path / "plan.json")
    resumed = tmp_path / "resumed"
    begins = STEPS - every
    flags = (*common_flags(Weights(), steps=STEPS), "--het-plan", str(tmp_path / "plan.json"), *lab.data_flags())
    loads = ("--load", str(saved), "--ckpt-step", str(begins), "--het-report", str(resumed))
    lab.runner.run(Job("resumed", PLANS[2].world_size, (*flags, *loads), resumed, timeout_s=LIMIT_S))
    found = reported_losses(resumed)
    assert sorted(found) == list(range(begins + 1, STEPS + 1))
    assert_agree(found, undisturbed)


def check_losses(folder: Path, undisturbed: dict[int, float]) -> None:
    """All generations have the losses of the undisturbed run, and at most one iteration was done twice."""
    generations = [reported_losses(generation) for generation in folder.glob("generation-*")]
    for found in generations:
        assert_agree(found, undisturbed)
    assert sorted(set().union(*generations)) == list(range(1, STEPS + 1))
    assert sum(map(len, generations)) - STEPS <= 1, "more than one iteration was lost"
