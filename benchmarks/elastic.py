"""Changes of the pool with and without a restart: ``python -m benchmarks.elastic --json OUT``.

Real training over gloo on this machine; a node is an agent with one worker.  In each round a job of three nodes is
joined by a fourth one, loses a worker to SIGKILL, and is left by a node on notice.  Then the same training is killed
and started again from its newest checkpoint under the next plan, in new processes.  A pause is the time from the event
(for a join or a leave: from the last iteration before it) to the end of the first iteration after it, less the time of
one iteration.

Keys: ``pause_ratio`` (restart over kill-free, by kind of change; at least 5 for death, 10 for join and leave),
``pause_s`` (by kind, whole and by phase), ``restart_s``, ``lost_iterations`` (iterations that were done twice in a
round with all three changes, copied after every iteration; at most 1), ``copy_overhead`` (of the copies in memory, as a
share of an iteration, with the chosen ``copy_every``; at most 0.03), ``copy_overhead_each`` (of an iteration that
begins with a copy), ``loss_difference`` (largest relative one to an undisturbed run; at most 1e-5).

With ``--sizes`` only join, death and leave are run, at each hidden size, and compared with the model of the controller
and of ``het-plan replay``: ``sizes`` has pauses, the state of the rank that holds most, the rates measured by its
copies in memory, and the growth of the pause over that of the first size: measured (``pause_grew_s``), by assumed
rates (``assumed_grew_s``), by measured rates (``model_grew_s``).  Of three or more sizes the last is predicted from the
others (``predicted_s``, ``prediction_error``): ``line`` by a line over the state, as in ``replay --pauses``;
``learned`` as the controller does, by the part of a change in which state moved; ``rates`` by pause and rates before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.fault_processes import children, descendants, end, het_run
from benchmarks.faults import prepare
from benchmarks.machine import command_line, scratch, write_report
from megatron_het.elastic.worth import HOST_BYTES_PER_S, LINK_BYTES_PER_S, grows_s
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape, save_plan
from megatron_het.store import free_port
from testing.cases import VOCABULARY, Weights, common_flags
from testing.forked import Forked
from testing.probe import write_dataset
from testing.runner import REPOSITORY, Device
from tools.planner.replay.policies import pauses_by_state

_HIDDEN, _SEQUENCE, _BATCH, SHORT = 128, 256, 12, 16
_LIMIT_S, _END_S, _DOCUMENTS = 600.0, 30.0, 3000
_TAIL_BYTES = 4096
_ITERATIONS, _MANY = 80, 10_000  # of a job, and of one that is ended before it has done them all
_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(\d+)/")
Lines = list[tuple[float, int]]
"""When each iteration was logged (seconds since the epoch), and its number; in the order of time."""


def plan_of(replicas: int, layers: tuple[int, int] = (2, 3), batch: int = _BATCH) -> Plan:
    """Returns a plan of two stages, the second with so many replicas, with the distributed optimizer."""
    routes = [tuple(range(q, batch, replicas)) for q in range(replicas)]
    second = tuple(Replica((1 + q,), route) for q, route in enumerate(routes))
    return Plan(
        ModelShape(sum(layers), _HIDDEN, 8, 4, _SEQUENCE, 3 * _HIDDEN // 2),
        TrainingShape(1, batch, distributed_optimizer=True),
        (Stage(layers[:1], (Replica((0,), tuple(range(batch))),)), Stage(layers[1:], second)),
    )


def flags(
    iterations: int, out: Path, plan: Plan | None = None, device: Device = "cpu", data: Sequence[str] = ("--mock-data",)
) -> list[str]:
    """Returns the flags of the training of :func:`plan_of`, without a plan."""
    plan = plan or plan_of(1)
    model = plan.model
    size = f"--hidden-size {model.hidden_size} --ffn-hidden-size {model.ffn_hidden_size}"
    size += f" --seq-length {model.seq_length} --max-position-embeddings {model.seq_length}"
    size += f" --global-batch-size {plan.training.global_batch_size}"
    size += f" --micro-batch-size {plan.training.micro_batch_size}"
    common = [*common_flags(Weights(layers=model.num_layers), steps=iterations, device=device), *size.split()]
    return [*common, *data, "--eval-interval", "1000", "--eval-iters", "0", "--het-report", str(out)]


def small_data(folder: Path) -> list[str]:
    """Write a small dataset, and return its flags; a newcomer takes seconds to index Megatron's mock data."""
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "documents": _DOCUMENTS, "seed": 1}
    prefix = folder / "documents"
    write = functools.partial(write_dataset, rank=0, prefix=str(prefix), **options)
    made = Forked(lambda: write() is not None, folder / "log.txt", environment())
    if made.wait(_LIMIT_S):
        raise RuntimeError(f"no data was written, see {folder}")
    return ["--data-path", str(prefix), "--data-cache-path", str(folder / "cache")]


def environment() -> dict[str, str]:
    """Returns the environment of every process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **threads, **own}


def lines_of(logs: list[Path]) -> Lines:
    """Returns the lines that Megatron logged in any of the files."""
    text = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
    return sorted((datetime.fromisoformat(when).timestamp(), int(number)) for when, number in _LINE.findall(text))


def losses_of(folder: Path) -> dict[int, list[float]]:
    """Returns all losses in the reports below a folder, by iteration."""
    found: dict[int, list[float]] = {}
    for file in sorted(folder.rglob("rank-*.json")):
        for iteration, loss in json.loads(file.read_text(encoding="utf-8"))["losses"]:
            found.setdefault(iteration, []).append(loss)
    return found


class ElasticJob:
    """A controller and agents as processes of this machine; a context manager.

    Args:
        folder: An empty folder.
        iterations: Of the training.
        copy_every: See ``het-run --help``.
        make: Plan by the replicas of its second stage.
        nodes: Workers of every node at the start.
        device: What workers compute on.
        variables: Environment of every process.
        data: Flags that name the data.
    """

    def __init__(
        self,
        folder: Path,
        iterations: int,
        copy_every: str,
        make: Callable[[int], Plan] = plan_of,
        *,
        nodes: Mapping[str, int] = {"a": 1, "b": 1, "c": 1},
        device: Device = "cpu",
        variables: Mapping[str, str] | None = None,
        data: Sequence[str] = ("--mock-data",),
    ) -> None:
        self.folder = folder
        self._environment = variables or environment()
        folder.mkdir(parents=True)
        plans = [folder / f"plan-{n}.json" for n in (3, 2, 1)]
        for file, replicas in zip(plans, (3, 2, 1), strict=True):
            save_plan(make(replicas), file)
        self._base = ["--controller", f"127.0.0.1:{free_port()}"]
        leave_s = "30" if device == "cuda" else "10"
        self._base += ["--folder", str(folder / "job"), "--copy-every", copy_every, "--leave-s", leave_s]
        self._flags = flags(iterations, folder / "report", make(1), device, data)
        self._processes: dict[str, Any] = {}
        self._open("controller", ["--controller-only", "--nodes", str(len(nodes)), "--plans", *map(str, plans)])
        _until((folder / "job" / "token").exists, "the controller's token")
        for node, workers in nodes.items():
            self.start(node, workers)

    def start(self, node: str, workers: int = 1) -> None:
        """Start a node; a worker that is killed stays away, so that a death is one change."""
        self._open(node, ["--node", node, "--workers", str(workers), "--restarts", "0", "--", *self._flags])

    def _open(self, name: str, words: list[str]) -> None:
        self._processes[name] = self._begin(name, [*self._base, *words])

    def _begin(self, name: str, words: list[str]) -> Any:
        """Start ``het-run`` with these arguments."""
        command = [sys.executable, "-m", "megatron_het.elastic", *words]
        with (self.folder / f"{name}.txt").open("wb") as log:
            return subprocess.Popen(command, cwd=REPOSITORY, env=self._environment, stdout=log, stderr=log)

    def kill_worker(self, node: str) -> float:
        """Send SIGKILL to a worker; returns the time."""
        os.kill(self.worker(node), signal.SIGKILL)
        return time.time()

    def process(self, name: str) -> int:
        """Returns the PID of the controller or of an agent."""
        return int(self._processes[name].pid)

    def workers(self, node: str) -> list[int]:
        """Returns the PIDs of a node's workers."""
        return children(self.process(node))

    def worker(self, node: str) -> int:
        """Returns the PID of a node's first worker."""
        return self.workers(node)[0]

    def exit_code(self) -> int | None:
        """The controller's exit code; None while the job runs."""
        code: int | None = self._processes["controller"].poll()
        return code

    def has_reached(self, iteration: int) -> bool:
        """Whether an iteration is in the newest part of the logs, which are rotated and large."""
        newest = 0
        for log in (self.folder / "job").glob("node-*/worker-*/log.txt"):
            with contextlib.suppress(OSError), log.open("rb") as text:  # it has just been rotated or dropped
                text.seek(max(0, log.stat().st_size - _TAIL_BYTES))
                found = _LINE.findall(text.read().decode(errors="replace"))
                newest = max([newest, *(int(number) for _, number in found)])
        return newest >= iteration

    def notify(self, node: str) -> float:
        """Send SIGTERM to the agent; returns the time."""
        self._processes[node].terminate()
        return time.time()

    def lines(self) -> Lines:
        """Returns the logged iterations."""
        return lines_of(sorted((self.folder / "job").glob("node-*/worker-*/log.txt")))

    def state(self) -> dict[str, Any]:
        """Returns the controller's state file; empty if there is none yet."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            return dict(json.loads((self.folder / "job" / "state.json").read_text(encoding="utf-8")))
        return {}

    def history(self) -> list[dict[str, Any]]:
        """Returns the history in the controller's state file."""
        return list(self.state().get("history", []))

    def has_logged(self, number: int) -> bool:
        """Whether this many iterations were logged."""
        return len(self.lines()) >= number

    def has_opened(self, generation: int) -> bool:
        """Whether a generation has done an iteration."""
        return any(entry["generation"] == generation and "opened" in entry for entry in self.history())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait in bounded time, as long as the controller runs."""
        controller = self._processes["controller"]
        _until(lambda: condition() or controller.poll() is not None, what)
        if not condition():
            raise RuntimeError(f"{what}: the job ended, see {self.folder}")

    def end(self) -> None:
        """Wait until the training is over, as long as it makes progress."""
        controller, before = self._processes["controller"], None
        while controller.poll() is None and before != (now := self.lines()[-1:]):
            before = now
            with contextlib.suppress(subprocess.TimeoutExpired):
                controller.wait(_LIMIT_S)
        code = controller.wait(0)
        if code:
            raise RuntimeError(f"the job failed, see {self.folder}")

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class _Node(Forked):
    """A controller or an agent, with the process interface that :class:`ElasticJob` uses."""

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout: float = _END_S) -> int:
        return super().wait(timeout)


class ForkedJob(ElasticJob):
    """A job whose processes are forked from this one, which has imported Megatron, so that imports cost no time.

    Otherwise they run the code of ``het-run``.
    """

    def __init__(
        self,
        folder: Path,
        iterations: int,
        copy_every: str,
        make: Callable[[int], Plan] = plan_of,
        setup: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        self._setup, self._others = setup, descendants(os.getpid())
        super().__init__(folder, iterations, copy_every, make, **options)

    def _begin(self, name: str, words: list[str]) -> Any:
        return _Node(lambda: het_run(words, self._setup), self.folder / f"{name}.txt", environment())

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        end([process for process in descendants(os.getpid()) if process not in self._others])


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{what} did not come within {_LIMIT_S:g} s")
        time.sleep(0.05)


def pause(lines: Lines, event_s: float, planned_s: float, *, from_line: bool) -> float:
    """Returns the pause of a change in seconds, as the module's docstring defines it.

    Args:
        lines: Of the job.
        event_s: When the change was asked for, or the worker killed.
        planned_s: When the next generation was written down, or the new processes were started.
        from_line: Whether the pause begins with the last iteration before the change, as nothing was lost.
    """
    before = [when for when, _ in lines if when < planned_s]
    after = next(when for when, _ in lines if when > planned_s)
    iteration_s = statistics.median(b - a for a, b in zip(before[-5:], before[-4:], strict=False))
    return after - (before[-1] if from_line else event_s) - iteration_s


@dataclass(frozen=True)
class Changed:
    """The results of a job of three nodes that a fourth joined, that lost a worker, and that a node left."""

    events: tuple[tuple[str, float], ...]
    lines: Lines
    history: list[dict[str, Any]]

    def pauses(self) -> dict[str, dict[str, float]]:
        """Returns the pauses by kind of change, in total and by phase."""
        found = {}
        for (kind, event_s), entry in zip(self.events, self.history[1:], strict=True):
            whole = pause(self.lines, event_s, entry["planned"], from_line=kind != "death")
            found[kind] = {"whole": whole} | phases(event_s if kind == "death" else entry["seen"], entry)
        return found


def change_pool(job: ElasticJob, between: int = 4, *, to_the_end: bool = True) -> Changed:
    """Run a join, a death and a leave in one job, with so many iterations between them.

    Args:
        job: Of three nodes.
        between: Iterations before each change.
        to_the_end: Whether the training goes on to its last iteration.
    """
    with job:
        job.until(functools.partial(job.has_logged, between), "the first iterations")
        events = [("join", time.time())]
        job.start("d")
        for kind, act in (("death", lambda: job.kill_worker("b")), ("leave", lambda: job.notify("c"))):
            done = len(events)
            job.until(functools.partial(job.has_opened, done), f"the {events[-1][0]}")
            seen = len(job.lines())
            job.until(functools.partial(job.has_logged, seen + between), "iterations after a change")
            events.append((kind, act()))
        job.until(functools.partial(job.has_opened, 3), "the leave")
        if to_the_end:
            job.end()
        else:
            job.until(functools.partial(job.has_logged, len(job.lines()) + 1), "an iteration after the leave")
        return Changed(tuple(events), job.lines(), job.history())


def phases(event_s: float, entry: dict[str, Any]) -> dict[str, float]:
    """Returns the seconds of a change by phase, of the slowest process."""
    times = [opened["times"] for opened in entry["opened"].values()]
    built, loaded, first = (max(t[name] for t in times) for name in ("built", "loaded", "first_step"))
    return {
        "detect": entry["seen"] - event_s,
        "leave": entry["left"] - entry["seen"],
        "plan": entry["planned"] - entry["left"],
        "groups_and_model": built - entry["planned"],
        "state": loaded - built,
        "first_step": first - loaded,
    }


@contextlib.contextmanager
def ranks(folder: Path, plan: Plan, words: list[str]) -> Iterator[Callable[[], Lines]]:
    """Run plain ranks of a plan, which are killed at the end; yields a function that returns their log."""
    folder.mkdir(parents=True)
    save_plan(plan, folder / "plan.json")
    port = str(free_port())
    logs = [folder / f"rank-{rank}.log" for rank in range(plan.world_size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(plan.world_size)}
            where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "megatron_het.pretrain_gpt", *words]
            with log.open("wb") as out:
                command += ["--het-plan", str(folder / "plan.json")]
                settings = environment() | where
                processes.append(subprocess.Popen(command, cwd=REPOSITORY, env=settings, stdout=out, stderr=out))
        yield lambda: lines_of(logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def restart_round(folder: Path, iterations: int) -> dict[str, float]:
    """Kill all processes and start again from the newest checkpoint; checkpoints are written every other iteration."""
    folder.mkdir(parents=True)
    saving = ["--save", str(folder / "saved"), "--save-interval", "2"]
    with ranks(folder / "before", plan_of(2), [*flags(iterations, folder / "report"), *saving]) as lines:
        _until(lambda: len(lines()) >= 7, "iterations before the restart")
        killed_s, before = time.time(), lines()
    again = [*flags(iterations, folder / "report"), *saving, "--load", str(folder / "saved")]
    with ranks(folder / "after", plan_of(1), again) as lines:
        _until(lambda: bool(lines()), "iterations after the restart")
        after = lines()
    whole = pause(before + after, killed_s, killed_s, from_line=False)
    return {"whole": whole, "lost_iterations": before[-1][1] - after[0][1] + 1}


def copy_overhead(folder: Path, iterations: int) -> tuple[dict[str, float], dict[int, list[float]]]:
    """Returns the overhead of copies, and the losses of a run without copies.

    In one job every other iteration begins with a copy, so that both kinds meet the same machine.
    """
    with ElasticJob(folder / "turns", 2 * iterations, "2") as job:
        job.end()
        lines = job.lines()[3:]
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for (before_s, number), (after_s, _) in itertools.pairwise(lines):
        gaps[number % 2 == 0].append(after_s - before_s)
    plain_s = statistics.median(gaps[False])
    each = statistics.median(gaps[True]) / plain_s - 1.0
    with ElasticJob(folder / "chosen", iterations, "auto") as job:
        job.end()
        logs = "\n".join(log.read_text(errors="replace") for log in (folder / "chosen" / "job").rglob("log.txt"))
    every = int(re.findall(r"in memory: after every (\d+) iterations", logs)[-1])
    with ElasticJob(folder / "none", iterations, "0") as job:
        job.end()
    found = {"copy_overhead": each / every, "copy_every": every, "copy_overhead_each": each, "iteration_s": plain_s}
    return found, losses_of(folder / "none" / "report")


def sized(hidden: int) -> Callable[[int], Plan]:
    """Returns plans like those of :func:`plan_of`, with another hidden size and shorter iterations than a change."""

    def make(replicas: int) -> Plan:
        plan = plan_of(replicas, batch=3)
        model = replace(plan.model, hidden_size=hidden, ffn_hidden_size=3 * hidden // 2, seq_length=SHORT)
        return replace(plan, model=model)

    return make


def pauses_by_size(folder: Path, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure the pauses at some hidden sizes, beside the model's predictions."""
    found: list[dict[str, Any]] = []
    data = small_data(folder / "data")
    for hidden in sizes:
        job = ForkedJob(folder / f"size-{hidden}", _MANY, "1", sized(hidden), data=data)
        pauses = change_pool(job, to_the_end=False).pauses()
        told = [member["rates"] for member in job.state()["members"] if member["rates"]]
        model = sized(hidden)(1).model
        # The rank with three layers: attention with half as many groups, a gated MLP; weights and two moments in fp32.
        state_bytes = 12 * 3 * (3 * hidden**2 + 3 * hidden * (model.ffn_hidden_size or 0))
        rates = dict(zip(("host_bytes_per_s", "link_bytes_per_s"), map(min, zip(*told, strict=True)), strict=True))
        found.append({"hidden_size": hidden, "state_bytes": state_bytes, "pause_s": pauses, "rates": rates})
    compare(found)
    return found


def compare(sizes: Sequence[dict[str, Any]]) -> None:
    """Add the model's predictions to each size, and to the last size the predictions from the smaller ones."""
    first = sizes[0]
    for row in sizes:
        host, link = row["rates"]["host_bytes_per_s"], row["rates"]["link_bytes_per_s"]
        ways = {"assumed": (LINK_BYTES_PER_S, HOST_BYTES_PER_S), "model": (link, host)}
        for way, (to, at) in ways.items():
            # Whoever stays keeps its layers under the plans of this benchmark; only a newcomer gets them over a link.
            links = {kind: to if kind == "join" else float("inf") for kind in row["pause_s"]}
            row[f"{way}_grew_s"] = {
                kind: grows_s(row["state_bytes"], each, 8, at) - grows_s(first["state_bytes"], each, 8, at)
                for kind, each in links.items()
            }
        row["pause_grew_s"] = {k: p["whole"] - first["pause_s"][k]["whole"] for k, p in row["pause_s"].items()}
    if len(sizes) > 2:
        predict(sizes[:-1], sizes[-1])


def predict(smaller: Sequence[dict[str, Any]], last: dict[str, Any]) -> None:
    """Add to the last size the pauses that the smaller sizes predict, and the relative errors."""
    lines, more = pauses_by_state(smaller), last["state_bytes"] / smaller[-1]["state_bytes"] - 1.0
    ways = {
        "line": {kind: fixed_s + byte_s * last["state_bytes"] for kind, (fixed_s, byte_s) in lines.items()},
        "learned": {kind: p["whole"] + more * p["state"] for kind, p in smaller[-1]["pause_s"].items()},
    }
    if "model_grew_s" in last:
        grew_s = {kind: last["model_grew_s"][kind] - smaller[-1]["model_grew_s"][kind] for kind in last["pause_s"]}
        ways["rates"] = {kind: p["whole"] + grew_s[kind] for kind, p in smaller[-1]["pause_s"].items()}
    last["predicted_s"] = ways
    last["prediction_error"] = {
        way: {kind: value_s / last["pause_s"][kind]["whole"] - 1.0 for kind, value_s in predicted.items()}
        for way, predicted in ways.items()
    }


def with_and_without_restart(folder: Path, rounds: int, iterations: int) -> dict[str, Any]:
    """Measure all figures of the module's docstring, except those of ``--sizes``."""
    changes, restarts, lost, losses = [], [], [], []
    for turn in range(rounds):
        place = folder / f"elastic-{turn}"
        found = change_pool(ElasticJob(place, iterations, "1"))
        changes.append(found.pauses())
        lost.append(len(found.lines) - len({number for _, number in found.lines}))  # that were done twice
        losses.append(losses_of(place / "report"))
        restarts.append(restart_round(folder / f"restart-{turn}", iterations))
    overhead, undisturbed = copy_overhead(folder / "copies", iterations)
    restart_s = statistics.median(r["whole"] for r in restarts)
    pauses = {
        kind: {phase: statistics.median(c[kind][phase] for c in changes) for phase in changes[0][kind]}
        for kind in changes[0]
    }
    return {
        "pause_ratio": {kind: restart_s / pauses[kind]["whole"] for kind in pauses},
        "pause_s": pauses,
        "restart_s": restart_s,
        "restart_lost_iterations": [r["lost_iterations"] for r in restarts],
        "lost_iterations": lost,
        **overhead,
        "loss_difference": max(
            abs(value - undisturbed[i][0]) / undisturbed[i][0] for seen in losses for i in seen for value in seen[i]
        ),
        "iterations_seen": [sorted(seen) == list(range(1, iterations + 1)) for seen in losses],
    }


def main() -> None:
    """Command line."""
    parser = command_line("benchmarks.elastic", __doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=_ITERATIONS, help=f"of each job (default {_ITERATIONS})")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="HIDDEN", help="only pauses, at these hidden sizes")
    parser.add_argument("--keep", type=Path, help="folder for everything that the runs write")
    options = parser.parse_args()
    with scratch("elastic-", options.keep) as folder:
        if options.sizes:
            prepare(folder)
            document = {"sizes": pauses_by_size(folder, options.sizes)}
        else:
            document = with_and_without_restart(folder, options.rounds, options.iterations)
    write_report(options.json, document)


if __name__ == "__main__":
    main()
