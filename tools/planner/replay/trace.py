"""The trace: a CSV file that says how many nodes of a kind there are from a time on.

Columns, in any order, named in the first line:

- ``time_s``: seconds since the job's start; lines are in the order of time, the first ones have 0.
- ``gpu``: kind of the nodes, as in the cluster file.
- ``nodes``: how many of them there are from then on, at most the cluster file's ``count``.
- ``notice`` (may be left out): ``yes`` where nodes that go are announced before, so that the running iteration ends
  first; ``no`` or empty where they fail.

Kinds that no line of time 0 names have all of their nodes from the start.  The last time is the end of the trace.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from megatron_het.safe_io import FileError, read_text

from ..errors import PlannerError, from_file_error
from ..inputs.cluster import Cluster

Pool = tuple[int, ...]
"""Nodes of every group of the cluster file, in its order."""

_NEEDED = ("time_s", "gpu", "nodes")
_COLUMNS = (*_NEEDED, "notice")
_MOST_LINES = 100_000
_LONGEST_S = 1e10
_NOTICE = {"yes": True, "no": False, "": False}


@dataclass(frozen=True, slots=True)
class Change:
    """Holds what there is from a time on.

    Attributes:
        time_s: Since the start.
        pool: The nodes.
        notice: Whether nodes that have gone were announced.
    """

    time_s: float
    pool: Pool
    notice: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """An availability trace.

    Attributes:
        changes: In the order of time; the first one is at 0.
        end_s: When it ends.
    """

    changes: tuple[Change, ...]
    end_s: float

    def pools(self) -> tuple[Pool, ...]:
        """Every pool that occurs, once."""
        return tuple(dict.fromkeys(change.pool for change in self.changes))


def _rows(path: str, text: str) -> tuple[list[int], list[list[str]]]:
    """The rows of a CSV file, and the line in which each of them ends.

    Raises:
        PlannerError: A row that cannot be read.
    """
    reader = csv.reader(io.StringIO(text))
    numbers: list[int] = []
    rows: list[list[str]] = []
    try:
        for row in reader:
            rows.append(row)
            numbers.append(reader.line_num)
    except csv.Error as error:
        raise PlannerError(
            path, f"line {reader.line_num}", None, f"is no CSV: {error}", "A quotation mark may lack its end"
        ) from None
    return numbers, rows


def load_trace(path: Path, cluster: Cluster) -> Trace:
    """Read a trace.

    Raises:
        PlannerError: The file cannot be read, or its first line that makes no sense.
    """
    try:
        text = read_text(path)
    except FileError as error:
        raise from_file_error(error) from None
    lines_of, lines = _rows(str(path), text)
    if not lines or not {*_NEEDED} <= set(lines[0]) <= {*_COLUMNS} or len(set(lines[0])) < len(lines[0]):
        found = ",".join(lines[0]) if lines else ""
        raise PlannerError(
            str(path), "line 1", found, "the first line names the columns", f"They are {', '.join(_COLUMNS)}"
        )
    if len(lines) > _MOST_LINES:
        raise PlannerError(str(path), f"line {_MOST_LINES}", None, f"more than {_MOST_LINES} lines")
    groups = {node.gpu: i for i, node in enumerate(cluster.nodes)}
    pool = [node.count for node in cluster.nodes]
    changes: list[Change] = []
    now_s = 0.0
    for number, line in zip(lines_of[1:], lines[1:], strict=True):
        if not line:
            continue
        row = _Row(str(path), number, dict(zip(lines[0], line)) if len(line) == len(lines[0]) else None, line)
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
        raise PlannerError(
            str(path), "time_s", None, "the trace ends when it begins", "Its last line says when it ends"
        )
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
            limit = "" if most == inf else f", at most the cluster file's {most:g}"
            raise self.error(column, f"must be {what}, at least {least:g}{limit}")
        return value

    def error(self, column: str, problem: str) -> PlannerError:
        return PlannerError(self._file, f"line {self._number}, {column}", self.text(column), problem)
