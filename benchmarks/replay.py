"""A replay by simulation against a real one: ``python -m benchmarks.replay --json OUT``.

Real training over gloo on this machine; a node is an agent with one worker.  A first job tells how long an iteration
takes with 2, 3 and 4 nodes, how long a new node starts, and how long a join, a death and a leave hold the training up.
Then another job goes through another trace, in which nodes join, die and leave at other times and in another order.
``het-plan replay``'s simulation goes through the same trace with the figures of the first job.

Keys: ``measured`` and ``simulated`` (iterations in the trace's time, and as goodput: a share of those that 4 nodes do
in that time without a change), ``difference`` (simulated over measured, less 1; at most 0.1 either way), ``figures``
(of the first job), ``trace``, ``rounds`` (the same of every round; the rest is of that with the median difference).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic import ElasticJob, Lines, pause
from benchmarks.machine import machine
from tools.planner.replay.policies import Costs, run_elastic
from tools.planner.replay.trace import Change, Trace

_MOST_ITERATIONS = 100_000
_FIRST_NODES, _ALL_NODES = 3, 4
_WHY = {"join": "joins", "leave": "leaves", "death": "lost"}


@dataclass(frozen=True)
class Event:
    """Something that happens to a node.

    Attributes:
        time_s: Since the job's first iterations.
        kind: ``join``, ``death`` or ``leave``.
        node: Its name; the first ones are a, b and c.
    """

    time_s: float
    kind: str
    node: str


FIRST = ((Event(10, "join", "d"), Event(55, "death", "b"), Event(70, "leave", "c")), 85.0)
SECOND = ((Event(15, "leave", "b"), Event(25, "join", "d"), Event(70, "death", "a")), 95.0)
"""Events, and the end of the trace in seconds."""


@dataclass(frozen=True)
class Played:
    """A job that went through a trace.

    Attributes:
        start_s: When the trace began (seconds since the epoch), at the end of an iteration.
        events: With the times at which they happened.
        lines: What was logged.
        history: Of the controller.
    """

    start_s: float
    events: tuple[Event, ...]
    lines: Lines
    history: list[dict[str, Any]]


def play(folder: Path, events: tuple[Event, ...], end_s: float) -> Played:
    """Run a job through a trace, in real time."""
    with ElasticJob(folder, _MOST_ITERATIONS, 1) as job:
        job.until(functools.partial(job.has_logged, 4), "the first iterations")
        start_s = job.lines()[-1][0]
        happened = []
        for event in events:
            time.sleep(max(0.0, start_s + event.time_s - time.time()))
            if event.kind == "join":
                when_s = time.time()
                job.start(event.node)
            else:
                when_s = job.kill_worker(event.node) if event.kind == "death" else job.notify(event.node)
            happened.append(Event(when_s - start_s, event.kind, event.node))
        time.sleep(max(0.0, start_s + end_s - time.time()))
        return Played(start_s, tuple(happened), job.lines(), job.history())


def figures_of(played: Played) -> tuple[dict[int, float], Costs]:
    """Seconds of an iteration by number of nodes, and what the changes cost.

    Raises:
        RuntimeError: The job did not make the changes that its trace has.
    """
    changes = played.history[1:]
    whys = [change["why"] for change in changes]
    if len(whys) != len(played.events) or not all(
        _WHY[event.kind] in why for event, why in zip(played.events, whys, strict=True)
    ):
        raise RuntimeError(f"{[event.kind for event in played.events]} became {whys}; the machine may be too busy")
    bounds = [*(entry["planned"] for entry in played.history), float("inf")]
    times: dict[int, list[float]] = {}
    nodes = _FIRST_NODES
    for i, (begin_s, end_s) in enumerate(itertools.pairwise(bounds)):
        nodes += 0 if i == 0 else 1 if played.events[i - 1].kind == "join" else -1
        inside = [when_s for when_s, _ in played.lines if begin_s < when_s < end_s]
        times.setdefault(nodes, []).extend(b - a for a, b in itertools.pairwise(inside[1:]))
    found: dict[str, float] = {}
    for event, entry in zip(played.events, changes, strict=True):
        when_s = played.start_s + event.time_s
        found[f"{event.kind}_s"] = pause(played.lines, when_s, entry["planned"], from_line=event.kind != "death")
        if event.kind == "join":
            found["start_s"] = entry["seen"] - when_s
    return {count: statistics.fmean(gaps) for count, gaps in times.items()}, Costs(**found, save_every=_MOST_ITERATIONS)


def trace_of(played: Played, end_s: float) -> Trace:
    """The trace as the simulation reads it."""
    nodes = _FIRST_NODES
    changes = [Change(0.0, (nodes,))]
    for event in played.events:
        nodes += 1 if event.kind == "join" else -1
        changes.append(Change(event.time_s, (nodes,), event.kind == "leave"))
    return Trace(tuple(changes), end_s)


def round_of(folder: Path) -> dict[str, Any]:
    """Both jobs, and the simulation of the second."""
    step_s, costs = figures_of(play(folder / "first", *FIRST))
    events, end_s = SECOND
    played = play(folder / "second", events, end_s)
    course = run_elastic(trace_of(played, end_s), lambda pool: step_s.get(pool[0]), costs)
    seen = {number for when_s, number in played.lines if played.start_s < when_s <= played.start_s + end_s}
    ideal_s = step_s[_ALL_NODES]
    return {
        "difference": course.iterations / len(seen) - 1.0,
        "measured": {"iterations": len(seen), "goodput": len(seen) * ideal_s / end_s},
        "simulated": {"iterations": course.iterations, "goodput": course.iterations * ideal_s / end_s},
        "figures": {"iteration_s": step_s, "costs": asdict(costs)},
        "changes": [entry["why"] for entry in played.history],
        "trace": [asdict(event) for event in played.events],
        "end_s": end_s,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for everything that the runs write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = options.keep or Path(temporary)
        rounds = [round_of(folder / f"round-{turn}") for turn in range(options.rounds)]
    middle = sorted(rounds, key=lambda r: float(r["difference"]))[len(rounds) // 2]
    document = {"machine": machine(), "load_average": os.getloadavg()[0], **middle}
    document["rounds"] = [{key: r[key] for key in ("difference", "measured", "simulated")} for r in rounds]
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
