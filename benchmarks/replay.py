"""Compares a replayed trace with a real job: ``python -m benchmarks.replay --json OUT``.

A job over gloo on this machine runs under a random trace: workers are killed, nodes leave on notice, nodes join.
``replay`` simulates the same trace.  Two further jobs, one before and one after, measure the simulation's inputs: the
seconds of an iteration with 4, 3 and 2 nodes, the pauses of a join, a death and a leave, and how long a new node
starts.  The mean of both is taken, because a shared machine changes its speed from minute to minute.

Devices are *paced* (``benchmarks.drift_stand_ins``): a layer takes a set time, as on an accelerator, whatever its
host is busy with.  So four nodes are faster than three, and three than two, on a machine with fewer cores than nodes:
every join is worth a change, and every loss costs time.

Keys, by trace in ``traces``: ``iterations``, those that count at the trace's end in the real job; ``simulated``, the
same of the replay; ``error``, relative; ``changes`` of plan in the real job, and ``changes_simulated``; ``unchanged``,
iterations of a replay without any change, for comparison; ``trace``, times and nodes.  ``worst_error`` is the
largest (at most 0.10).
"""

import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.elastic import Changed, ForkedJob, Lines, change_pool, plan_of
from benchmarks.faults import prepare
from benchmarks.machine import command_line, scratch, write_report
from megatron_het.plan import Plan
from tools.planner.replay.policies import Change, Costs, Trace, run_elastic

# An elastic job on paced devices: a layer takes a set time, as on an accelerator that does not use its host's cores.
#
# A pass computes, and then its process sleeps for the rest of the time (``benchmarks.drift_stand_ins.Pace``).


FORWARD_S, BACKWARD_S = 0.012, 0.024  # of one layer and microbatch


def install() -> None:
    """Make this process a paced device."""
    from benchmarks.drift_stand_ins import Pace

    Pace(FORWARD_S, BACKWARD_S).install()


def paced_job(folder: Path, iterations: int) -> ForkedJob:
    """Returns a job whose workers are paced and are forked from this process, which has imported Megatron."""
    return ForkedJob(folder, iterations, "1", paced_plan, install)


_FIRST, _MOST, _FEWEST = 3, 4, 2
_WHOLE, _BETWEEN = 70, 12
"""Iterations of the job that measures, and how many are timed with every pool; others run while a node starts."""
_LAYERS = 5
_FIRST_LAYERS = {1: 2, 2: 2, 3: 1}
"""Layers of the first stage, by replicas of the second one: with three of them the first stage would hold all up."""


def paced_plan(replicas: int) -> Plan:
    """Returns a plan of two stages, the second with so many replicas, with the distributed optimizer."""
    first = _FIRST_LAYERS[replicas]
    plan = plan_of(replicas, (first, _LAYERS - first))
    return replace(plan, model=replace(plan.model, hidden_size=64, ffn_hidden_size=96, seq_length=64))


def random_trace(seed: int, changes: int, apart_s: tuple[float, float]) -> Trace:
    """Draw a trace that starts with three nodes; two to four are there at any time.

    Args:
        seed: Of the random numbers.
        changes: How many there are.
        apart_s: Least and most seconds between two of them.
    """
    rng = random.Random(seed)
    found, now_s, nodes = [Change(0.0, (_FIRST,))], 0.0, _FIRST
    for _ in range(changes):
        now_s += rng.uniform(*apart_s)
        nodes += 1 if nodes == _FEWEST else -1 if nodes == _MOST else rng.choice((-1, 1))
        found.append(Change(now_s, (nodes,), notice=rng.random() < 0.5))
    return Trace(tuple(found), now_s + rng.uniform(*apart_s))


def iteration_times(found: Changed) -> dict[int, float]:
    """Returns the seconds of an iteration by number of nodes, from the measuring job with 3, 4, 3 and 2 nodes."""
    ends = [entry["planned"] for entry in found.history[1:]] + [float("inf")]
    gaps: dict[int, list[float]] = {}
    for nodes, first_s, last_s in zip((3, 4, 3, 2), [0.0, *ends], ends, strict=False):
        times = [when for when, _ in found.lines if first_s < when < last_s][1:]
        gaps.setdefault(nodes, []).extend(b - a for a, b in itertools.pairwise(times))
    return {nodes: statistics.mean(values) for nodes, values in gaps.items()}


def costs_of(found: Changed, times: Mapping[int, float]) -> Costs:
    """Returns the pauses of the measuring job as ``Costs``: without one iteration under the following plan.

    Args:
        found: The job.
        times: Seconds of its iterations, by nodes.
    """
    pauses: dict[str, float] = {}
    for (kind, event_s), entry, nodes in zip(found.events, found.history[1:], (4, 3, 2), strict=True):
        last_s = max(when for when, _ in found.lines if when < entry["planned"])
        after_s = min(when for when, _ in found.lines if when > entry["planned"])
        pauses[kind] = max(0.0, after_s - (event_s if kind == "death" else last_s) - times[nodes])
    start_s = found.history[1]["seen"] - found.events[0][1]
    return Costs(join_s=pauses["join"], death_s=pauses["death"], leave_s=pauses["leave"], start_s=start_s)


def mean_costs(every: Sequence[Costs]) -> Costs:
    """Returns the mean of each cost."""
    fields = zip(*(asdict(costs).items() for costs in every), strict=True)
    return Costs(**{pairs[0][0]: statistics.mean(value for _, value in pairs) for pairs in fields})


def run_trace(folder: Path, trace: Trace) -> tuple[Lines, float, int]:
    """Run a real job under a trace, and kill it at the trace's end.

    Returns:
        What it logged, when its first iteration began, and how often its plan changed.
    """
    names = [f"n{i}" for i in range(100)]
    with paced_job(folder, 100_000) as job:
        job.until(lambda: job.has_logged(3), "the first iterations")
        (first_s, _), (second_s, _) = job.lines()[1:3]
        start_s = first_s - (second_s - first_s)  # the first iteration warms up, and does not count
        live, nodes = ["a", "b", "c"], _FIRST
        for change in trace.changes[1:]:
            time.sleep(max(0.0, start_s + change.time_s - time.time()))
            if change.pool[0] > nodes:
                live.append(names.pop(0))
                job.start(live[-1])
            else:
                name = live.pop(1)
                job.notify(name) if change.notice else job.kill_worker(name)
            nodes = change.pool[0]
        time.sleep(max(0.0, start_s + trace.end_s - time.time()))
        changes = sum("opened" in entry for entry in job.history()[1:])
        return job.lines(), start_s, changes


def compare(folder: Path, seed: int, options: Any) -> dict[str, Any]:
    """Run one trace for real and simulated."""
    trace = random_trace(seed, options.changes, (options.apart_s, 2 * options.apart_s))
    measured = [change_pool(paced_job(folder / "before", _WHOLE), _BETWEEN)]
    lines, start_s, changes = run_trace(folder / "real", trace)
    measured.append(change_pool(paced_job(folder / "after", _WHOLE), _BETWEEN))
    every = [iteration_times(found) for found in measured]
    times = {nodes: statistics.mean(found[nodes] for found in every) for nodes in every[0]}
    costs = mean_costs([costs_of(found, own) for found, own in zip(measured, every, strict=True)])
    counted = [number for when, number in lines if start_s < when <= start_s + trace.end_s]
    real = counted[-1] - counted[0] + 1  # lost iterations are repeated
    course = run_elastic(trace, lambda pool: times[pool[0]], costs)
    return {
        "iterations": real,
        "simulated": course.iterations,
        "error": course.iterations / real - 1.0,
        "iteration_s": times,
        "iteration_s_each": every,
        "costs": asdict(costs),
        "trace": [[change.time_s, change.pool[0], change.notice] for change in trace.changes],
        "end_s": trace.end_s,
        "changes": changes,
        "changes_simulated": course.changes,
        "unchanged": trace.end_s / times[_FIRST],
    }


def main() -> None:
    """Command line."""
    parser = command_line("benchmarks.replay", __doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[4, 5], help="of the traces (default 4 5: with five "
                        "changes each, joins, leaves and deaths among them)")  # fmt: skip
    parser.add_argument("--changes", type=int, default=5, help="in a trace (default 5)")
    parser.add_argument(
        "--apart-s", type=float, default=15.0, help="least time between two (default 15), twice at most"
    )
    parser.add_argument("--keep", type=Path, help="folder for everything that the runs write")
    parser.add_argument("--add", type=Path, metavar="FILE", help="a result to go on with: its traces are in OUT too")
    options = parser.parse_args()
    traces = {} if options.add is None else json.loads(options.add.read_text(encoding="utf-8"))["traces"]
    with scratch("replay-", options.keep) as given:
        folder = given.resolve()
        prepare(folder)
        traces |= {str(seed): compare(folder / str(seed), seed, options) for seed in options.seed}
    document = {"worst_error": max(abs(trace["error"]) for trace in traces.values()), "traces": traces}
    write_report(options.json, document)


if __name__ == "__main__":
    main()
