"""Kills a worker, which returns later, while the training goes on: ``python -m examples.llama.elastic_demo``.

Three nodes of one worker each train a small Llama in two stages.  With two cores or more, the first node has a core of
its own and the others share one, so that throughput falls while it is gone.  ``make demo-elastic`` runs this demo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from examples.llama import job as jobs
from examples.llama.data import prepare_apart
from examples.llama.devices import available_cores
from examples.llama.report import Screen
from megatron_het.plan import ModelShape, Plan, Replica, Stage, TrainingShape, save_plan
from megatron_het.safe_io import ends_with_its_reader
from megatron_het.store import free_port
from tools.planner.emit.flags import common_arguments, model_arguments
from tools.planner.profile.settings import default_environment

_LINE = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+)\] iteration +(\d+)/.*?lm loss: ([0-9.E+-]+)")
_MICROBATCHES = 12
_LIMIT_S = 900.0
NODES = (("one", "alone"), ("two", "shared"), ("three", "shared"))  # name of every node, and the kind of its device


@dataclass(frozen=True)
class Size:
    """Model and effort."""

    model: ModelShape  # shape of the Llama
    iterations: int  # of the training
    kill_at: int  # iteration after which the worker is killed


FULL = Size(ModelShape(6, 192, 6, 3, 192, ffn_hidden_size=512), 100, 25)
QUICK = Size(ModelShape(3, 32, 4, 2, 32, ffn_hidden_size=64), 300, 20)


def plans_of(model: ModelShape) -> tuple[Plan, Plan]:
    """Returns the plans: with three nodes most layers on the free core, with the two others halves."""
    every, training = tuple(range(_MICROBATCHES)), TrainingShape(1, _MICROBATCHES)
    most = model.num_layers - model.num_layers // 3
    second = (Replica((1,), every[::2], "shared"), Replica((2,), every[1::2], "shared"))
    half = model.num_layers // 2
    return (
        Plan(model, training, (
            Stage((most,), (Replica((0,), every, "alone"),)),
            Stage((model.num_layers - most,), second),
        )),
        Plan(model, training, (
            Stage((model.num_layers - half,), (Replica((0,), every, "shared"),)),
            Stage((half,), (Replica((1,), every, "shared"),)),
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A logged iteration."""

    time_s: float  # when it ended, since the first one
    iteration: int  # its number
    loss: float  # in nats per byte


class Cluster:
    """A controller and three agents as processes of this machine; a context manager.

    Args:
        out: An empty folder.
        flags: Of the training.
        plans: Files, the best one first.
    """

    def __init__(self, out: Path, flags: Sequence[str], plans: Sequence[Path]) -> None:
        self._out, self._processes = out, dict[str, subprocess.Popen[bytes]]()
        base = [sys.executable, "-m", "megatron_het.elastic", "--controller", f"127.0.0.1:{free_port()}"]
        base += ["--folder", str(out / "elastic")]
        cores, gpus = sorted(available_cores()), jobs.gpus_here()
        for i, (name, device) in enumerate(NODES):
            words = ["--node", name, "--device", device, "--workers", "1"]
            if i == 0:
                words += ["--start-controller", "--nodes", "3", "--plans", *map(str, plans)]
            with (out / f"node-{name}.txt").open("wb") as log:
                own = {**default_environment(), **jobs.gpu_environment(i, len(NODES), gpus)}
                process = subprocess.Popen([*base, *words, "--", *flags], env=own, stdout=log, stderr=log)
            if len(cores) > 1:
                os.sched_setaffinity(process.pid, {cores[0] if device == "alone" else cores[1]})
            self._processes[name] = process
            if i == 0:
                self.until((out / "elastic" / "token").exists, "the controller's token")

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            process.kill()
            process.wait()

    def steps(self) -> list[Step]:
        """Returns the logged iterations, in the order of time."""
        found = []
        for log in (self._out / "elastic").glob("node-*/worker-*/log.txt"):
            for when, number, loss in _LINE.findall(log.read_text(errors="replace")):
                found.append((datetime.fromisoformat(when).timestamp(), int(number), float(loss)))
        return [Step(when, number, loss) for when, number, loss in sorted(found)]

    def history(self) -> list[dict[str, Any]]:
        """Returns the history that the controller has written."""
        with contextlib.suppress(OSError, ValueError):
            return list(json.loads((self._out / "elastic" / "state.json").read_text())["history"])
        return []

    def kill_worker(self, node: str) -> float:
        """Send SIGKILL to the node's worker; returns the time."""
        agent = self._processes[node].pid
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"megatron_het.elastic.worker" in words:
                os.kill(int(child), signal.SIGKILL)
        return time.time()

    def is_over(self) -> bool:
        """Whether every agent has ended.

        Raises:
            JobError: One has failed.
        """
        codes = {name: process.poll() for name, process in self._processes.items()}
        if bad := next((name for name, code in codes.items() if code), None):
            raise jobs.JobError(f"node {bad} failed; from its log:\n{jobs.excerpt(self._out / f'node-{bad}.txt')}")
        return all(code == 0 for code in codes.values())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, in bounded time, while no node fails."""
        deadline_s = time.monotonic() + _LIMIT_S
        while not condition() and not self.is_over():
            if time.monotonic() > deadline_s:
                raise jobs.JobError(f"{what} did not come within {_LIMIT_S:g} s; see {self._out}")
            time.sleep(0.1)


def run(out: Path, size: Size, source: Path | None, screen: Screen) -> dict[str, Any]:
    """Run the demo; returns the contents of ``report.json``."""
    screen.title("Data: the Python standard library, one token per byte")
    data = prepare_apart(out, source)
    plans = plans_of(size.model)
    files = [out / f"plan-{plan.world_size}.json" for plan in plans]
    for plan, file in zip(plans, files, strict=True):
        save_plan(plan, file)
    flags = [
        *model_arguments(plans[0], jobs.model_of(plans[0])),
        *common_arguments(plans[0]),
        *[*data.arguments, "--data-cache-path", str(out / "data" / "cache")],
        *jobs.training_arguments(size.iterations, size.iterations),
        *jobs.machine_arguments(jobs.gpus_here() > 0),
    ]
    screen.title(f"Training: {size.iterations} iterations on three nodes")
    with Cluster(out, flags, files) as cluster, screen.training("training", size.iterations) as show:
        shown = changes = 0

        def reached(iteration: int) -> bool:
            nonlocal shown, changes
            steps = cluster.steps()
            if steps and steps[-1].iteration != shown:
                shown = steps[-1].iteration
                show(shown, size.iterations, steps[-1].loss)
                for entry in cluster.history()[1 + changes :]:
                    changes += 1
                    screen.line(f"change after iteration {entry['reached']}: {entry['why']}")
            return shown >= iteration

        cluster.until(lambda: reached(size.kill_at), f"iteration {size.kill_at}")
        killed_s = cluster.kill_worker(NODES[0][0])
        screen.line(f"the worker of node {NODES[0][0]} is killed; its agent starts another one")
        cluster.until(lambda: reached(size.iterations), "the last iteration")
        cluster.until(cluster.is_over, "the end")
        return report_of(cluster.steps(), cluster.history(), killed_s, size)


def report_of(steps: Sequence[Step], history: Sequence[dict[str, Any]], killed_s: float, size: Size) -> dict[str, Any]:
    """Returns losses, throughput and events over time, in seconds since the first iteration.

    Raises:
        JobError: The training did not go on, or the worker did not come back before its end.
    """
    changes = [entry["why"] for entry in history]
    if changes != ["start", "1 rank was lost", "a node joins"]:
        raise jobs.JobError(f"the worker should die once and come back once before the end; it went: {changes}")
    start_s, tokens = steps[0].time_s, _MICROBATCHES * size.model.seq_length
    lost, back = (min(s.time_s for s in steps if s.time_s > entry["planned"]) for entry in history[1:])
    return {
        "iterations": [[s.time_s - start_s, s.iteration, s.loss] for s in steps],
        "tokens_per_iteration": tokens,
        "killed_s": killed_s - start_s,
        "goes_on_s": lost - start_s,
        "back_s": back - start_s,
        "repeated_iterations": len(steps) - len({s.iteration for s in steps}),
        "tokens_per_s": [tokens * _rate(steps, *span) for span in ((0.0, killed_s), (lost, back), (back, math.inf))],
    }


def _rate(steps: Sequence[Step], first_s: float, last_s: float) -> float:
    """Returns iterations per second between the first and the last one that ended in a period; 0 for fewer than two."""
    times = [step.time_s for step in steps if first_s <= step.time_s <= last_s]
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def draw(report: dict[str, Any], file: Path) -> None:
    """Draw loss and throughput over time.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    times = [time_s for time_s, _, _ in report["iterations"]]
    figure = Figure(figsize=(9.0, 5.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.plot(times, [loss for _, _, loss in report["iterations"]], color="#2171b5")
    upper.set(ylabel="loss, nats per byte", ylim=(0, None))
    rates = [report["tokens_per_iteration"] / (b - a) for a, b in zip(times, times[1:], strict=False) if b > a]
    lower.step(times, [*rates, rates[-1]], where="post", color="#2171b5")
    spans = (0.0, report["killed_s"]), (report["goes_on_s"], report["back_s"]), (report["back_s"], times[-1])
    for rate, span in zip(report["tokens_per_s"], spans, strict=True):
        lower.hlines(rate, *span, color="#a63603", ls="--", lw=1.2, label="mean" if span is spans[0] else None)
    lower.legend(loc="upper right", frameon=False)
    lower.set(xlabel="seconds since the first iteration", ylabel="tokens per second", ylim=(0, None))
    for axes in (upper, lower):
        axes.axvspan(report["killed_s"], report["goes_on_s"], color="#d98c3f", alpha=0.5, lw=0, label="until two go on")
        axes.axvspan(report["goes_on_s"], report["back_s"], color="#bdbdbd", alpha=0.35, lw=0, label="two nodes")
        axes.spines[["top", "right"]].set_visible(False)
    top = {"xycoords": ("data", "axes fraction"), "fontsize": 9, "va": "bottom"}
    upper.annotate("worker killed", (report["killed_s"], 1.01), ha="right", **top)
    upper.annotate("it is back", (report["back_s"], 1.01), ha="left", **top)
    upper.legend(loc="upper right", frameon=False)
    figure.savefig(file, dpi=120)


@ends_with_its_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit code is 0 when the worker came back and the training ended."""
    parser = argparse.ArgumentParser(prog="python -m examples.llama.elastic_demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-elastic"), help="folder (default %(default)s)")
    parser.add_argument("--source", type=Path, help="folder of .py files to train on (default: the standard library)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few iterations, to see that it works")
    options = parser.parse_args(argv)
    out, screen = options.out.resolve(), Screen()
    try:
        shutil.rmtree(out / "elastic", ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        report = run(out, QUICK if options.quick else FULL, options.source, screen)
    except (jobs.JobError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    alone_s, back_s = (report[key] - report["killed_s"] for key in ("goes_on_s", "back_s"))
    screen.line(
        f"killed after {report['killed_s']:.1f} s; the others went on {alone_s:.1f} s later, and the worker was back "
        f"{back_s:.1f} s after its death; iterations that were done twice: {report['repeated_iterations']}"
    )
    three, two, again = report["tokens_per_s"]
    screen.line(f"tokens per second: {three:.0f} on three nodes, {two:.0f} on two, {again:.0f} on three again")
    with contextlib.suppress(ImportError):
        draw(report, out / "elastic.png")
        screen.line(f"written: {out / 'report.json'}, {out / 'elastic.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
