"""Checks of the doctor: a measurement on every rank, and a judgement of all answers on rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_het.doctor.expectations import Expectations
from megatron_het.plan import Placement, Plan
from megatron_het.store import Documents

# Figures in words.


_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def amount(number: float, unit: str = "B") -> str:
    """``12.5 GB``."""
    for size, prefix in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def rate(bytes_per_s: float) -> str:
    """``12.5 GB/s``."""
    return amount(bytes_per_s) + "/s"


def duration(seconds: float) -> str:
    """``35 us``, ``2.1 ms``, ``3.4 s``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


Answers = Mapping[int, dict[str, Any]]
"""What a check measured, by rank; ranks that failed are not among them."""


class Status(StrEnum):
    """How a finding counts."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "FAULT"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        check: Name of the check.
        status: ``FAULT`` and ``not run`` make the verdict bad.
        where: Ranks, with their hosts.
        what: What was found, with figures.
        hint: What to do.
    """

    check: str
    status: Status
    where: str
    what: str
    hint: str = ""

    def to_json(self) -> dict[str, str]:
        """For the JSON report."""
        return {name: str(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Seat:
    """Holds what a check knows on a rank.

    Attributes:
        rank, local_rank: This rank, in the job and on its host.
        hosts: Host name of every rank.
        plan: What is going to run.
        flags: The training's flags, with ``--het-*``; None when they were not given.
        expectations: What cluster file and profile promise.
        store: Part of the job's, for this check alone.
        folder: A folder of this rank, for logs.
        transport: ``--het-transport``.
    """

    rank: int
    local_rank: int
    hosts: tuple[str, ...]
    plan: Plan
    flags: tuple[str, ...] | None
    expectations: Expectations
    store: Documents
    folder: Path
    transport: str = "auto"

    @property
    def kind(self) -> str:
        """The kind of device that the plan gives this rank."""
        return kind_of(Placement(self.plan), self.rank)


def kind_of(placement: Placement, rank: int) -> str:
    """The plan's name of a rank's device; empty when the plan names none."""
    where = placement.locate(rank)
    return placement.replica(where.stage, where.replica).device


@dataclass
class Check:
    """One check; the same object is made on every rank.

    Attributes:
        name: One word.
        limit_s: Bound of the measurement on a rank.
        needs_all: Whether ranks wait for each other, so that it cannot run without some of them.
    """

    name: str = field(default="", init=False)
    limit_s: float = field(default=20.0, init=False)
    needs_all: bool = field(default=False, init=False)

    def measure(self, seat: Seat) -> dict[str, Any]:
        """On every rank: figures that JSON can hold."""
        raise NotImplementedError

    def judge(self, answers: Answers, names: Names) -> list[Finding]:
        """On rank 0: what the answers mean.  Pure."""
        raise NotImplementedError

    def ok(self, where: str, what: str) -> Finding:
        """A finding that is fine."""
        return Finding(self.name, Status.OK, where, what)

    def warning(self, where: str, what: str, hint: str = "") -> Finding:
        """A finding that does not stop a job."""
        return Finding(self.name, Status.WARNING, where, what, hint)

    def fault(self, where: str, what: str, hint: str = "") -> Finding:
        """A finding with which a job should not start."""
        return Finding(self.name, Status.FAULT, where, what, hint)


@dataclass(frozen=True, slots=True)
class Names:
    """Ranks in words: ``ranks 0-3 (node1), rank 8 (node2)``."""

    hosts: tuple[str, ...]
    kinds: tuple[str, ...] = ()

    def of(self, ranks: Iterable[int]) -> str:
        """Some ranks with their hosts; all of them in two words."""
        found = sorted(set(ranks))
        if len(found) == len(self.hosts) and len(found) > 1:
            return "all ranks"
        by_host: dict[str, list[int]] = {}
        for rank in found:
            by_host.setdefault(self.host(rank), []).append(rank)
        parts = [f"{_ranks(members)} ({host})" for host, members in by_host.items()]
        more = f" and {len(parts) - 4} more hosts" if len(parts) > 4 else ""
        return ", ".join(parts[:4]) + more

    def host(self, rank: int) -> str:
        """The host of a rank."""
        return self.hosts[rank] if rank < len(self.hosts) and self.hosts[rank] else "unknown host"

    def kind(self, rank: int) -> str:
        """The device kind of a rank as the plan names it."""
        return self.kinds[rank] if rank < len(self.kinds) else ""


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-3``, ``ranks 0, 2``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def grouped(answers: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Ranks by equal value, the most frequent value first."""
    found: dict[Any, list[int]] = {}
    for rank, value in sorted(answers.items()):
        found.setdefault(value, []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
