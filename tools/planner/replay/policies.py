"""Progress of a job under a trace: elastic, by restarts, or with the full pool only.

A job runs one iteration after the other.  A pause begins at an event; no iteration completes before its end.  Lost work
is repeated at the speed of the next plan.
"""

import csv
import io
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from megatron_het.safe_io import read_text

from ..errors import PlannerError, file_errors
from ..inputs.cluster import Cluster

# The trace: a CSV file with the number of nodes of each kind from a time on.
#
# Columns, in any order, named in the first line:
#
# - ``time_s``: seconds since the job's start; lines are in the order of time, the first ones have 0.
# - ``gpu``: kind of the nodes, as in the cluster file.
# - ``nodes``: number of these nodes from then on, at most the cluster file's ``count``.
# - ``notice`` (optional): ``yes`` if the loss of nodes is announced, so that the running iteration ends
#   first; ``no`` or empty if they fail.
#
# Kinds that no line of time 0 names have all of their nodes from the start.  The last time is the end of the trace.


Pool = tuple[int, ...]  # nodes of every group of the cluster file, in its order

_NEEDED = ("time_s", "gpu", "nodes")
_COLUMNS = (*_NEEDED, "notice")
_MOST_LINES = 100_000
_LONGEST_S = 1e10
_NOTICE = {"yes": True, "no": False, "": False}


@dataclass(frozen=True, slots=True)
class Change:
    """The available nodes from a time on."""

    time_s: float  # since the start
    pool: Pool
    notice: bool = False  # whether the loss of nodes was announced


@dataclass(frozen=True, slots=True)
class Trace:
    """An availability trace."""

    changes: tuple[Change, ...]  # in the order of time; the first one is at 0
    end_s: float

    def pools(self) -> tuple[Pool, ...]:
        """Every pool that occurs, once."""
        return tuple(dict.fromkeys(change.pool for change in self.changes))


def load_trace(path: Path, cluster: Cluster) -> Trace:
    """Read a trace.

    Raises:
        PlannerError: The file cannot be read, or a line is invalid; the first one is named.
    """
    with file_errors():
        reader = csv.reader(io.StringIO(read_text(path)))
    try:
        lines = [(reader.line_num, row) for row in reader]  # line_num: the last line of a row
    except csv.Error as error:
        problem, hint = f"is no CSV: {error}", "A quotation mark may lack its end"
        raise PlannerError(str(path), f"line {reader.line_num}", None, problem, hint) from None
    names = lines[0][1] if lines else []
    if not {*_NEEDED} <= set(names) <= {*_COLUMNS} or len(set(names)) < len(names):
        hint = f"They are {', '.join(_COLUMNS)}"
        raise PlannerError(str(path), "line 1", ",".join(names), "the first line names the columns", hint)
    if len(lines) > _MOST_LINES:
        raise PlannerError(str(path), f"line {_MOST_LINES}", None, f"more than {_MOST_LINES} lines")
    groups = {node.gpu: i for i, node in enumerate(cluster.nodes)}
    pool = [node.count for node in cluster.nodes]
    changes: list[Change] = []
    now_s = 0.0
    for number, line in lines[1:]:
        if not line:
            continue
        row = _Row(str(path), number, dict(zip(names, line)) if len(line) == len(names) else None, line)
        time_s = row.number("time_s", now_s, _LONGEST_S)
        if time_s > now_s and not changes:
            changes.append(Change(0.0, tuple(pool)))
        now_s = time_s
        group = groups.get(row.text("gpu"))
        if group is None or [node.gpu for node in cluster.nodes].count(row.text("gpu")) > 1:
            known = ", ".join(groups)
            what = "is no kind of GPU of the cluster file" if group is None else "is that of several groups of nodes"
            raise row.error("gpu", f"{what}, which has {known}")
        pool[group] = int(row.number("nodes", 0, cluster.nodes[group].count, whole=True))
        if row.text("notice") not in _NOTICE:
            raise row.error("notice", "is yes, no or empty")
        notice = _NOTICE[row.text("notice")]
        if changes and changes[-1].time_s == now_s:
            changes[-1] = Change(now_s, tuple(pool), notice and changes[-1].notice)
        else:
            changes.append(Change(now_s, tuple(pool), notice))
    if not now_s:
        hint = "Its last line says when it ends"
        raise PlannerError(str(path), "time_s", None, "the trace ends when it begins", hint)
    return Trace(tuple(changes), now_s)


class _Row:
    """A line with its place, for errors."""

    def __init__(self, file: str, number: int, cells: dict[str, str] | None, line: Sequence[str]) -> None:
        self._file, self._number = file, number
        if cells is None:
            raise PlannerError(file, f"line {number}", ",".join(line), "has another number of columns than the first")
        self._cells = {name: text.strip() for name, text in cells.items()}

    def text(self, column: str) -> str:
        return self._cells.get(column, "")

    def number(self, column: str, least: float, most: float, *, whole: bool = False) -> float:
        try:
            value = float(self.text(column)) if len(self.text(column)) < 40 else inf
        except ValueError:
            raise self.error(column, "is no number") from None
        if not (least <= value <= most and value < inf) or (whole and value != int(value)):
            what = "a whole number" if whole else "a time after that of the line before"
            limit = f", at most the cluster file's {most:g}" if whole else ""
            raise self.error(column, f"must be {what}, at least {least:g}{limit}")
        return value

    def error(self, column: str, problem: str) -> PlannerError:
        return PlannerError(self._file, f"line {self._number}, {column}", self.text(column), problem)


IterationTime = Callable[[Pool], float | None]
"""Seconds of an iteration under the best plan for a pool; None where no plan fits it."""

CHANGES = ("join", "leave", "death")


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of changes, in seconds.

    The defaults of joining, leaving, death and restart are what ``benchmarks.elastic`` measured on 2026-11-24 with four
    processes of a small model on two cores (``benchmarks/results/elastic.json``; for a join its phases after ranks
    have left, less an iteration, which is more than the difference of two logged iterations).  They show the ratios.
    On GPUs all are longer: measure them, and give the file to ``--pauses``.  The others are assumptions, and so is what
    is added for the state of a larger model (:func:`megatron_het.elastic.worth.grows_s`).
    """

    # join_s, leave_s: a change without a failure, with no iteration lost
    join_s: float = 0.40
    leave_s: float = 0.28
    death_s: float = 0.65  # from a failure to the end of the next plan's first iteration, less that iteration
    start_s: float = 10.0  # of a new node, before it can join; the others train meanwhile
    restart_s: float = 4.5  # all processes are started again and load the newest checkpoint
    save_every: int = 100  # iterations between two checkpoints
    save_s: float = 0.0  # pause of the training for a checkpoint


def pauses_by_state(sizes: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns, by kind of change, the seconds of a pause without state and the seconds more per byte of state.

    Args:
        sizes: From ``benchmarks.elastic --sizes``: largest state of a rank, and pauses.

    Raises:
        ValueError: There are fewer than two sizes.
    """
    found, state_bytes = {}, [float(size["state_bytes"]) for size in sizes]
    if len(set(state_bytes)) < 2:
        raise ValueError("pauses of two sizes at least are needed")
    for kind in CHANGES:
        pauses_s = [float(size["pause_s"][kind]["whole"]) for size in sizes]
        slope, fixed_s = linear_regression(state_bytes, pauses_s)
        if fixed_s < 0:
            slope, fixed_s = linear_regression(state_bytes, pauses_s, proportional=True)
        found[kind] = (fixed_s, slope) if slope > 0 else (fmean(pauses_s), 0.0)
    return found


@dataclass(slots=True)
class Course:
    """Progress and lost time of a job."""

    policy: str
    iterations: float = 0.0  # completed and kept until the end
    repeated: float = 0.0  # iterations whose result was lost, parts of iterations included
    # training_s, paused_s, idle_s: time in iterations (lost ones included), in changes, and without a plan
    training_s: float = 0.0
    paused_s: float = 0.0
    idle_s: float = 0.0
    changes: int = 0  # how often the plan changed
    # (time in s, completed iterations), in the order of time
    curve: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])


class _Job:
    """A job and its clock."""

    def __init__(self, policy: str, costs: Costs, step_s: float | None, end_s: float) -> None:
        self.course, self._costs, self.step_s, self._end_s = Course(policy), costs, step_s, end_s
        self._now_s = self._part = 0.0
        self._saved = 0.0

    def train_until(self, time_s: float) -> None:
        """Train with the current plan until a time; a pause may end later."""
        time_s = min(time_s, self._end_s)
        course, span_s = self.course, time_s - self._now_s
        if span_s <= 0:
            return
        if self.step_s is None:
            course.idle_s += span_s
        else:
            course.training_s += span_s
            done = self._part + span_s / self._pace_s
            whole = int(done + 1e-9)
            course.iterations += whole
            self._part = max(0.0, done - whole)
        self._move(time_s)

    def finish_iteration(self, time_s: float) -> float:
        """Finish the iteration that runs at a time; returns its end, or the given time if none runs."""
        if self.step_s is None or self._part == 0:
            return time_s
        self.train_until(self._now_s + (1.0 - self._part) * self._pace_s)
        return self._now_s

    def save(self) -> None:
        """Save an additional checkpoint of the completed iterations."""
        self._saved = self.course.iterations

    def lose(self, *, to_checkpoint: bool) -> None:
        """Lose the running iteration, or all since the newest checkpoint."""
        course = self.course
        every = self._costs.save_every
        kept = max(self._saved, course.iterations // every * every) if to_checkpoint else None
        course.repeated += self._part + (0 if kept is None else course.iterations - kept)
        course.iterations = course.iterations if kept is None else kept
        self._part = 0.0
        self._move(self._now_s)

    def change(self, time_s: float, pause_s: float, step_s: float | None) -> None:
        """Pause, then continue under another plan.  A change during a pause restarts the pause."""
        end_s = max(self._now_s, time_s + pause_s)
        self.course.changes += step_s is not None
        self.course.paused_s += end_s - self._now_s
        self.step_s = step_s
        self._move(end_s)

    def end(self, time_s: float) -> Course:
        """Stop the job; a pause that would end later is cut."""
        self.train_until(time_s)
        self.course.paused_s -= max(0.0, self._now_s - time_s)
        return self.course

    @property
    def _pace_s(self) -> float:
        assert self.step_s is not None
        return self.step_s + self._costs.save_s / self._costs.save_every

    def _move(self, time_s: float) -> None:
        self._now_s = time_s
        self.course.curve.append((time_s, self.course.iterations))

    def meet(self, changes: Sequence[Change], time_of: IterationTime) -> Iterator[tuple[Change, float | None, bool]]:
        """Trains until each change of the time of an iteration; yields it, that time, and whether nodes leave."""
        for before, change in pairwise(changes):
            self.train_until(change.time_s)
            step_s = time_of(change.pool)
            if step_s != self.step_s:
                yield change, step_s, any(new < old for old, new in zip(before.pool, change.pool, strict=True))


def run_elastic(trace: Trace, time_of: IterationTime, costs: Costs) -> Course:
    """Replay with plan changes in running processes; new nodes are used when ready, if that makes training faster."""
    ready = with_start(trace, costs.start_s)
    job = _Job("elastic", costs, time_of(ready[0].pool), trace.end_s)
    for change, step_s, loses in job.meet(ready, time_of):
        if job.step_s is None:  # no process held the state in memory any more
            job.change(change.time_s, costs.restart_s, step_s)
        elif step_s is None:
            job.lose(to_checkpoint=True)
            job.change(change.time_s, 0.0, None)
        elif loses and not change.notice:
            job.lose(to_checkpoint=False)
            job.change(change.time_s, costs.death_s, step_s)
        elif loses or step_s < job.step_s:
            boundary_s = job.finish_iteration(change.time_s)
            job.change(boundary_s, costs.leave_s if loses else costs.join_s, step_s)
    return job.end(trace.end_s)


def run_restart(trace: Trace, time_of: IterationTime, costs: Costs) -> Course:
    """Replay with a restart of all processes at every change; for new nodes after a checkpoint."""
    job = _Job("restart", costs, time_of(trace.changes[0].pool), trace.end_s)
    for change, step_s, loses in job.meet(trace.changes, time_of):
        if job.step_s is not None and not loses and (step_s is None or step_s > job.step_s):
            continue
        stopped_s = _stop(job, change, failed=loses and not change.notice)
        job.change(stopped_s, costs.restart_s if step_s is not None else 0.0, step_s)
    return job.end(trace.end_s)


def run_full_pool(trace: Trace, time_of: IterationTime, costs: Costs, full: Pool) -> Course:
    """Replay a job that trains only while all nodes are available."""
    present = trace.changes[0].pool == full
    job = _Job("full pool", costs, time_of(full) if present else None, trace.end_s)
    for change in trace.changes[1:]:
        job.train_until(change.time_s)
        if (change.pool == full) == present:
            continue
        present = not present
        if present:
            job.change(change.time_s, costs.restart_s, time_of(full))
        else:
            job.change(_stop(job, change, failed=not change.notice), 0.0, None)
    return job.end(trace.end_s)


def _stop(job: _Job, change: Change, *, failed: bool) -> float:
    """Stop at a change; with notice after the running iteration and a save.  Returns the time of the stop."""
    if not failed:
        stopped_s = job.finish_iteration(change.time_s)
        job.save()
        return stopped_s
    job.lose(to_checkpoint=True)
    return change.time_s


def with_start(trace: Trace, start_s: float) -> tuple[Change, ...]:
    """Returns the changes of ready nodes: new nodes are ready after their start, if they are still available then."""
    starts = [change.time_s for change in trace.changes]
    found: list[Change] = []
    for time_s in sorted({*starts, *(start + start_s for start in starts[1:])}):
        if time_s > trace.end_s:
            break
        last = bisect_right(starts, time_s) - 1
        first = max(0, bisect_right(starts, time_s - start_s) - 1)
        lately = trace.changes[first : last + 1]
        pool = tuple(min(counts) for counts in zip(*(change.pool for change in lately), strict=True))
        if not found or pool != found[-1].pool:
            found.append(Change(time_s, pool, lately[-1].notice and lately[-1].time_s == time_s))
    return tuple(found)


def run_all(trace: Trace, time_of: IterationTime, costs: Costs, full: Pool) -> list[Course]:
    """Returns the courses under every policy: elastic, by restarts, and with the full pool only."""
    given = trace, time_of, costs
    return [run_elastic(*given), run_restart(*given), run_full_pool(*given, full)]
