"""What a running job measured, for the controller: a better plan is searched, and taken where the change pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_het.elastic.generation import Generation
from megatron_het.elastic.members import Member
from megatron_het.elastic.pool import Planner, Process
from megatron_het.elastic.worth import change_s


class Lessons:
    """Hears of drift, and says when there is a plan that is worth a change.

    Args:
        planner: Searches.
        say: Writes one line of progress.

    Attributes:
        corrected: What the planner was taught, as JSON values; None before that.
    """

    def __init__(self, planner: Planner, say: Callable[[str], None]) -> None:
        self._planner, self._say = planner, say
        self._generation, self._last = -1, 0
        self.corrected: dict[str, Any] | None = None

    def note(
        self,
        message: Mapping[str, Any],
        generation: Generation,
        pool: Sequence[Process],
        history: Sequence[dict[str, Any]],
    ) -> None:
        """The run is not as planned: begin to search a better plan, while it goes on.

        Args:
            message: Of the rank that compares: what was measured, and the last iteration of the training.
            generation: What runs.
            pool: The processes that there are.
            history: Of changes.
        """
        self._generation, self._last = generation.number, int(message["last"])
        self._planner.learn(pool, generation.plan, dict(message["measured"]), change_s(history))

    def reason(self, generation: Generation, members: Mapping[int, Member]) -> str:
        """Why to change now; empty if there is no reason.  The slow devices among the members get their own kinds.

        Args:
            generation: What runs.
            members: All workers.
        """
        learned = self._planner.learned()
        if learned is None or self._generation != generation.number:
            return ""
        left = self._last - max((member.iteration for member in members.values()), default=0)
        gain = f"a plan with iterations {100 * learned.gain:.1f} % shorter for what was measured"
        if learned.pays_after >= left:
            self._say(f"{gain} pays after {learned.pays_after} iterations; {left} are left, so nothing changes")
            return ""
        for process, kind in zip(generation.ranks, learned.kinds, strict=True):
            if process in members:
                members[process].process = replace(members[process].process, device=kind)
        self._planner.accept(learned, [member.process for member in members.values()])
        self.corrected = learned.to_json()
        return gain

    def recall(self, document: dict[str, Any] | None) -> None:
        """What :attr:`corrected` was before the controller was started again."""
        self.corrected = document
        if document is not None:
            self._planner.recall(document)
