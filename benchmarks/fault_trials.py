"""One trial: a job of ``het-run`` with a random pool and random faults, and its outcome."""

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import control_plane, fault_points
from benchmarks.combinations import problems_here
from benchmarks.fault_points import Fault
from benchmarks.fault_processes import descendants, end, het_run, reap
from megatron_het.elastic.__main__ import main as plain_het_run
from megatron_het.elastic.pool import Process, assign
from megatron_het.plan import Plan, PlanError, save_plan
from megatron_het.store import free_port
from testing.cases import MICROBATCHES, Case, Row, Weights, build_plan, common_flags
from testing.combination_cases import PARAMETERS, case_of, needs
from testing.forked import Forked

# Random pools with plans for them: any schedule, mixed stages and options, and smaller plans for what is left.


LAYERS, STEPS = 8, 16
_LARGEST, _OPTIONS, _ATTEMPTS = 4, 3, 400
# Left out: another precision is not exact to 1e-5, a clip per ministage and another recompute module are not the same
# training for all plans of a list, unequal microbatches change what Megatron reads at once.
_LEFT_OUT = {"precision", "microbatches"}
_VALUES = {
    name: [value for value in values if value not in ("per-ministage", "mlp")]
    for name, values in PARAMETERS.items()
    if name not in _LEFT_OUT
}
SCHEDULES: tuple[str, ...] = tuple(PARAMETERS["schedule"])


@dataclass(frozen=True)
class Pool:
    """A job's nodes and plans."""

    plans: tuple[Plan, ...]  # the best one first; the last one has one rank
    nodes: tuple[int, ...]  # workers of every node
    weights: Weights  # what the model is
    clip: float  # bound on the gradient norm
    own: tuple[str, ...]  # more flags under all plans
    rows: tuple[Row, ...]  # what the first two plans consist of, for the record

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple("abcdefgh"[: len(self.nodes)])

    def flags(self) -> tuple[str, ...]:
        """Returns the training's flags, without data and checkpoints."""
        # Updates that cannot be undone need the last flag; other updates are not affected.
        return (*common_flags(self.weights, self.clip, steps=STEPS), *self.own, "--rerun-mode", "disabled")


def draw(rng: random.Random, schedule: str) -> Pool:
    """Draw a pool whose first plan has the given schedule.

    Raises:
        RuntimeError: No drawn plan was valid; never seen.
    """
    for _ in range(_ATTEMPTS):
        first = _draw_case(rng, schedule, 3, _LARGEST, {})
        if first is None:
            continue
        nodes = _nodes(first.plan, rng)
        shared = {name: first.chosen["row"][name] for name in ("tied", "overlap", "distributed_optimizer")}
        if nodes is None:
            continue
        left = first.plan.world_size - max(nodes)
        second = next(filter(None, (_draw_case(rng, rng.choice(SCHEDULES), 2, left, shared) for _ in range(60))), None)
        cases = [case for case in (first, second) if case is not None]
        at_once = any(case.chosen["row"]["window"] == "at-once" for case in cases)
        return Pool(
            (*(case.plan for case in cases), *_smallest(shared)),
            nodes,
            replace(first.weights, layers=LAYERS),
            0.0 if at_once else 1.0,
            first.plan_flags(),
            tuple(_options(case) for case in cases),
        )
    raise RuntimeError(f"no plan of {_ATTEMPTS} with the schedule {schedule} is valid")


def _draw_case(rng: random.Random, schedule: str, least: int, largest: int, shared: Row) -> Case | None:
    """Draw a case of so many ranks; None if it is invalid."""
    row: Row = {name: values[0] for name, values in PARAMETERS.items()} | {"schedule": schedule}
    for name in rng.sample([name for name in _VALUES if name != "schedule"], _OPTIONS):
        value = rng.choice(_VALUES[name])
        if needs((name, value)).get("schedule", schedule) == schedule:
            row |= needs((name, value)) | {name: value}
    row |= shared
    try:
        case = case_of(row, "plan", rng.randrange(10**6))
    except (PlanError, ValueError):
        return None
    # All plans of a list train one model, of LAYERS layers.
    times = LAYERS // case.plan.model.num_layers
    stages = tuple(replace(s, layers=tuple(times * n for n in s.layers)) for s in case.plan.stages)
    plan = replace(
        case.plan, stages=stages, model=replace(case.plan.model, num_layers=times * case.plan.model.num_layers)
    )
    return replace(case, plan=plan) if least <= plan.world_size <= largest else None


def _smallest(shared: Row) -> list[Plan]:
    """Returns plans for two ranks and for one."""
    common: dict[str, Any] = {name: shared[name] for name in ("tied", "distributed_optimizer")}
    two = build_plan([[1], [1]], [LAYERS // 2, LAYERS // 2], random.Random(0), **common)
    return [two, build_plan([[1]], [LAYERS], random.Random(0), **common)]


def _nodes(plan: Plan, rng: random.Random) -> tuple[int, ...] | None:
    """Draw a division of the plan's ranks over at least two nodes that keeps TP groups inside of nodes."""
    for _ in range(20):
        left, found = plan.world_size, list[int]()
        while left:
            found.append(min(left, rng.choice((1, 1, 2, 2, 3))))
            left -= found[-1]
        pool = [Process(i, str(n)) for i, n in enumerate(n for n, size in enumerate(found) for _ in range(size))]
        if len(found) > 1 and assign(plan, pool) is not None:
            return tuple(found)
    return None


def _options(case: Case) -> Row:
    """Returns the options of a case that differ from the defaults, as JSON values."""
    row = case.chosen["row"]
    return {name: row[name] for name, values in PARAMETERS.items() if name == "schedule" or row[name] != values[0]}


def problems(pool: Pool, files: Sequence[str]) -> list[str]:
    """Returns the problems for which the start would refuse any of the plans; runs in a process of its own."""
    starts = [
        (plan.world_size, (*pool.flags(), "--mock-data", "--het-plan", file))
        for plan, file in zip(pool.plans, files, strict=True)
    ]
    return list(itertools.chain.from_iterable(problems_here(starts)))


_POLL_S, _ENDS_S, _AWAY_S, _MOMENT_S, _GONE_S = 0.05, 40.0, 1.0, 3.0, 16.0
_OUTSIDE_S, _JUNK, _REFUSED = 6.0, 100, 2
BAR = 1e-5


@dataclass(frozen=True)
class Trial:
    """The pool, the faults and the expected end of a trial."""

    kind: str  # key of ``faults.KINDS``
    pool: Pool  # nodes and plans
    faults: tuple[Fault, ...]  # see :mod:`benchmarks.fault_points`
    options: tuple[str, ...] = ()  # more words for every node's ``het-run``
    saves_every: int = 0  # iterations between checkpoints, 0 for none
    unchanged: bool = False  # whether the first generation must do all iterations
    hopeless: bool = False  # whether there is no plan for the remaining nodes
    disk_bytes: int = 0  # size of the disk for checkpoints, 0 for any
    # whether a node whose agent has died is started again, and one that has vanished is there again
    node_returns: bool = False
    controller_moves: bool = False  # whether a controller that has died is started again at another port
    folder_bytes: int = 0  # size of the disk of the job's folder, 0 for any
    # what a controller that has died finds of its file: ``stale`` or ``broken``; empty for the file itself
    state: str = ""


@dataclass
class Outcome:
    """The outcome of a trial."""

    ended: bool = False  # whether the job ended within its bound
    code: int | None = None  # exit code of the controller
    left: int = 0  # processes that the job left behind
    history: list[str] = field(default_factory=list)  # the reason of each generation
    # by iteration and by generation that did it, as its ranks know them
    losses: dict[int, dict[int, list[float]]] = field(default_factory=dict)
    # by iteration and stage, as read in the last generation that did it
    samples: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    error: list[str] = field(default_factory=list)  # the controller's and the nodes' errors
    happened: list[str] = field(default_factory=list)  # faults that were injected


class Processes:
    """The controller and the agents of a trial."""

    def __init__(self, trial: Trial, folder: Path, flags: tuple[str, ...]) -> None:
        self._trial, self._folder, self._flags = trial, folder, flags
        self._where = self._somewhere()
        bounds = "--lost-s 8 --leave-s 10 --timeout-s 25 --return-s 20"
        self._base = ["--folder", str(folder / "job"), *bounds.split(), *trial.options]
        self._environment: Mapping[str, str] = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        self._known: list[Forked] = []
        self.controller = self._start_controller()
        token = folder / "job" / "token"
        deadline_s = time.monotonic() + _ENDS_S
        while not (token.exists() and token.stat().st_size) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        self.agents = {name: self._start_agent(name) for name in trial.pool.names}
        self._dies_s = 0.0
        self._continued: set[str] = set()
        self._begun: set[str] = set()
        self._vanished: set[str] = set()

    @staticmethod
    def _somewhere() -> list[str]:
        return ["--controller", f"127.0.0.1:{free_port()}"]

    def _fork(self, name: str, run: Callable[[], int]) -> Forked:
        def jumping() -> int:
            fault_points.have_jumping_clock(self._folder)
            return run()

        process = Forked(jumping, self._folder / f"{name}.txt", self._environment)
        self._known.append(process)
        return process

    def _start_controller(self, name: str = "controller") -> Forked:
        files = [str(self._folder / f"plan-{n}.json") for n in range(len(self._trial.pool.plans))]
        count = str(len(self._trial.pool.nodes))
        words = [*self._where, *self._base, "--controller-only", "--nodes", count, "--plans", *files]
        process = self._fork(name, lambda: plain_het_run(words))
        if name == "controller":
            (self._folder / "controller.pid").write_text(f"{process.pid}\n", encoding="utf-8")
        return process

    def _start_agent(self, name: str) -> Forked:
        workers = self._trial.pool.nodes[self._trial.pool.names.index(name)]
        words = [*self._where, *self._base, "--node", name, "--workers", str(workers), "--", *self._flags]
        setup = functools.partial(fault_points.install, self._folder)
        return self._fork(name, lambda: het_run(words, setup))

    def look_after(self) -> bool:
        """Do one round of monitoring; returns whether the job is over."""
        reap(self._known)
        self._end_moments()
        self._note_vanished()
        self._act_outside()
        code = self.controller.poll()
        if code is not None and code < 0:  # killed: started again with the same command after a while
            self._dies_s = self._dies_s or time.monotonic()
            if time.monotonic() - self._dies_s > _AWAY_S:
                if self._trial.controller_moves:
                    self._where = self._somewhere()
                self._spoil_state()
                self.controller, self._dies_s = self._start_controller(), 0.0
            return False
        if self._trial.node_returns:
            for name, agent in self.agents.items():
                if (agent.poll() or 0) < 0 and code is None:
                    self.agents[name] = self._start_agent(name)
        if code is not None:
            for name in self._vanished:
                end([*descendants(self.agents[name].pid), self.agents[name].pid])
        return code is not None and all(
            agent.poll() is not None or name in self._vanished for name, agent in self.agents.items()
        )

    def _act_outside(self) -> None:
        """Begin, and later end, the faults outside of the processes."""
        state, stale = self._folder / "job" / "state.json", self._folder / "stale.json"
        if self._trial.state == "stale" and not stale.exists():
            with contextlib.suppress(OSError):
                text = state.read_text(encoding="utf-8")
                if json.loads(text)["history"]:
                    stale.write_text(text, encoding="utf-8")
        for fault, since_s in self._happened(*fault_points.OUTSIDE):
            begins = fault["name"] not in self._begun
            if begins or since_s > _OUTSIDE_S:
                (self._begun if begins else self._continued).add(fault["name"])
                self._outside(fault["act"], begins)

    def _happened(self, *acts: str) -> Iterator[tuple[Fault, float]]:
        """Returns the faults that have happened and are not over, and their age in seconds."""
        for fault in self._trial.faults:
            mark = self._folder / f"happened-{fault['name']}"
            if fault["act"] in acts and fault["name"] not in self._continued and mark.exists():
                yield fault, time.time() - mark.stat().st_mtime

    def _outside(self, act: str, begins: bool) -> None:
        job = self._folder / "job"
        if act == "full folder" and begins:
            with contextlib.suppress(OSError), (job / "filling").open("wb", buffering=0) as out:
                while True:
                    out.write(bytes(4096))
        elif act == "full folder":
            (job / "filling").unlink(missing_ok=True)
        elif act == "read-only folder":
            make_read_only(job) if begins else _unmount(job, 1)
        elif act == "junk" and begins:
            port = int(self._where[1].rpartition(":")[2])
            stranger = control_plane.Stranger(port, random.Random(port))
            threading.Thread(target=stranger.junk, args=(_JUNK,), daemon=True).start()
        elif act == "second controller" and begins:
            self._second = self._start_controller("second")
        elif act == "second controller" and self._second.poll() != _REFUSED:
            (self._folder / "second.txt").write_text("Traceback: it was not refused", encoding="utf-8")

    def _spoil_state(self) -> None:
        state = self._folder / "job" / "state.json"
        if self._trial.state == "stale":
            shutil.copy(self._folder / "stale.json", state)
        elif self._trial.state == "broken":
            os.truncate(state, state.stat().st_size // 2)

    def _note_vanished(self) -> None:
        for fault, since_s in self._happened("vanish"):
            self._vanished.add(fault["node"])
            if self._trial.node_returns and since_s > _GONE_S:
                self._continued.add(fault["name"])
                self._vanished.discard(fault["node"])
                agent = self.agents[fault["node"]].pid
                _go_on(*descendants(agent), agent)

    def _end_moments(self) -> None:
        for fault, since_s in self._happened("moment"):
            text = (self._folder / f"happened-{fault['name']}").read_text(encoding="utf-8")
            if since_s > _MOMENT_S and text:
                self._continued.add(fault["name"])
                _go_on(int(text))

    def reap(self) -> None:
        """Reap processes that have ended."""
        for process in self._known:
            process.poll()
        reap(self._known)


def _go_on(*processes: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def run(trial: Trial, folder: Path, start_flags: tuple[str, ...], limit_s: float) -> Outcome:
    """Run a trial, and remove all its processes and mounts."""
    (folder / "records").mkdir(parents=True)
    for number, plan in enumerate(trial.pool.plans):
        save_plan(plan, folder / f"plan-{number}.json")
    (folder / "faults.json").write_text(json.dumps(trial.faults), encoding="utf-8")
    before = descendants(os.getpid())
    flags = [*trial.pool.flags(), *start_flags]
    outcome = Outcome()
    with _disk(folder / "saved", trial.disk_bytes), _disk(folder / "job", trial.folder_bytes):
        if trial.saves_every:
            flags += ["--save", str(folder / "saved"), "--save-interval", str(trial.saves_every)]
        processes = Processes(trial, folder, tuple(flags))
        deadline_s, over_s = time.monotonic() + limit_s, 0.0
        while not outcome.ended and time.monotonic() < deadline_s:
            outcome.ended = processes.look_after()
            if (code := processes.controller.poll()) is not None and code >= 0:  # it has ended by itself
                over_s = over_s or time.monotonic()
                if time.monotonic() - over_s > _ENDS_S:
                    break
            time.sleep(_POLL_S)
        time.sleep(0.2)
        processes.reap()
        left = descendants(os.getpid(), before)
        outcome.left = len(left) if outcome.ended else 0  # a job that hangs has processes left
        end(left)
        outcome.code = processes.controller.returncode
        _read(folder, outcome)
    return outcome


@contextlib.contextmanager
def _disk(folder: Path, size_bytes: int) -> Any:
    """Mount a small disk on a folder."""
    folder.mkdir()
    if size_bytes:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        if size_bytes:
            _unmount(folder)


def make_read_only(folder: Path) -> None:
    """Mount a folder on itself, read-only; files that are open stay writable, as a mount with writers must."""
    for words in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *words, str(folder)], check=True)


def _unmount(folder: Path, most: int = 2) -> None:
    """Unmount a folder, even if files of it are still open."""
    for _ in range(most):
        if os.path.ismount(folder):
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount(folder: Path) -> bool:
    """Whether this process may mount small disks."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as own, _disk(Path(own) / "disk", 1 << 20):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def _read(folder: Path, outcome: Outcome) -> None:
    records = []
    for file in sorted((folder / "records").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a killed worker's last line
                records.append(json.loads(line))
    last: dict[int, int] = {}
    for record in records:
        iteration = record["iteration"]
        last[iteration] = max(last.get(iteration, 0), record["generation"])
        if "loss" in record:
            losses = outcome.losses.setdefault(iteration, {})
            losses.setdefault(record["generation"], []).append(record["loss"])
    for record in records:
        if "samples" in record and record["generation"] == last[record["iteration"]]:
            stages = outcome.samples.setdefault(record["iteration"], {})
            stages.setdefault(record["stage"], []).extend(_once(record["samples"], record["times"]))
    with contextlib.suppress(OSError, ValueError):
        document = json.loads((folder / "job" / "state.json").read_text(encoding="utf-8"))
        outcome.history = [entry["why"] for entry in document["history"]]
    for file in sorted(folder.glob("*.txt")):
        text = file.read_text(encoding="utf-8", errors="replace")
        marks = ["Traceback", "the job ended:"] + ["no plan for what"] * (file.stem == "controller")
        outcome.error += [f"{file.stem}: {line}" for line in text.splitlines() if any(mark in line for mark in marks)]
    outcome.happened = sorted(file.name.removeprefix("happened-") for file in folder.glob("happened-*"))


def _once(samples: list[int], times: int) -> list[int]:
    """Merges equal records of several readers of one rank; records that differ are kept."""
    once = sorted(samples)[::times]
    return once if sorted(once * times) == sorted(samples) else samples


def wrong_samples(outcome: Outcome) -> int:
    """Counts samples that were skipped or used twice, over the iterations that count."""
    found = 0
    for iteration in range(1, STEPS + 1):
        expected = set(range((iteration - 1) * MICROBATCHES, iteration * MICROBATCHES))
        stages = outcome.samples.get(iteration, {})
        for stage in stages.values() or [[]]:
            found += len(expected.symmetric_difference(stage)) + len(stage) - len(set(stage))
    return found


def loss_difference(outcome: Outcome, reference: Mapping[int, float]) -> float:
    """Returns the largest relative difference, repeated iterations included; infinite if a loss is missing."""
    if sorted(outcome.losses) != list(range(1, STEPS + 1)):
        return float("inf")
    return max(
        abs(loss - reference[i]) / abs(reference[i])
        for i, by_generation in outcome.losses.items()
        for losses in by_generation.values()
        for loss in losses
    )
