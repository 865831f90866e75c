"""Searches by name."""

from __future__ import annotations

from tools.planner.estimate import Estimator
from tools.planner.search.goal import Goal
from tools.planner.search.outcome import Outcome, Progress

METHODS = ("auto", "zorse", "sailor", "poplar")


def search(method: str, estimator: Estimator, goal: Goal, progress: Progress | None = None) -> Outcome:
    """Run one of ``METHODS``; modules are imported when needed."""
    if method == "zorse":
        from tools.planner.search.zorse import search_zorse as run
    elif method == "sailor":
        from tools.planner.search.sailor import search_sailor as run
    elif method == "poplar":
        from tools.planner.search.poplar import search_poplar as run
    else:
        from tools.planner.search.auto import search_auto as run
    return run(estimator, goal, progress)
