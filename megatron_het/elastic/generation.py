"""One generation: a plan, the processes that run it, and those whose state it begins with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_het.plan import Plan


@dataclass(frozen=True)
class Generation:
    """Holds what every process is told about a generation.  Processes are known by numbers that never change.

    Attributes:
        number: Ascending from 0.
        plan: The plan.
        ranks: Process of each rank of the plan.
        holders: Processes that may hold state of an earlier generation.
        nodes: Name of the node of each rank.
        loads: Whether the state comes from them; the first generation starts as the flags say.
        unsaved: Iterations whose checkpoint could not be written, and is not tried again.
        elsewhere: Iterations whose checkpoint could not be written into ``--save``, and is tried in ``fallback``.
        fallback: Folder for them; empty for none.
    """

    number: int
    plan: Plan
    ranks: tuple[int, ...]
    holders: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    loads: bool = False
    unsaved: tuple[int, ...] = ()
    elsewhere: tuple[int, ...] = ()
    fallback: str = ""

    @property
    def movers(self) -> tuple[int, ...]:
        """Processes that take part in moving the state: the ranks in their order, then the others."""
        return (*self.ranks, *sorted({*self.holders}.difference(self.ranks)))

    @property
    def lost_key(self) -> str:
        """In the job's store: there once one of its processes is lost or its session has failed."""
        return f"{self.number}/lost"

    def rank_of(self, process: int) -> int | None:
        """The process's rank; None if it has none."""
        return self.ranks.index(process) if process in self.ranks else None

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "number": self.number,
            "plan": self.plan.to_json(),
            "ranks": list(self.ranks),
            "holders": list(self.holders),
            "nodes": list(self.nodes),
            "loads": self.loads,
            "unsaved": list(self.unsaved),
            "elsewhere": list(self.elsewhere),
            "fallback": self.fallback,
        }

    @staticmethod
    def from_json(document: dict[str, Any]) -> Generation:
        """Returns what :meth:`to_json` described.

        Raises:
            PlanError: The plan is not one.
        """
        return Generation(
            number=int(document["number"]),
            plan=Plan.from_json(document["plan"]),
            ranks=tuple(int(process) for process in document["ranks"]),
            holders=tuple(int(process) for process in document["holders"]),
            nodes=tuple(str(node) for node in document["nodes"]),
            loads=bool(document["loads"]),
            unsaved=tuple(int(iteration) for iteration in document["unsaved"]),
            elsewhere=tuple(int(iteration) for iteration in document.get("elsewhere", [])),
            fallback=str(document.get("fallback", "")),
        )
