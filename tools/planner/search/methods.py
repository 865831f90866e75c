"""Searches by name."""

from __future__ import annotations

import time

from ..costs.estimate import Estimator
from ..search.bounds import Bounds
from ..search.choices import choose
from ..search.goal import Goal
from ..search.outcome import Outcome, Progress
from ..search.overlap import prefer_plain, prefer_steady
from ..search.pools import all_gpus

METHODS = ("auto", "zorse", "sailor", "poplar")


def search(
    method: str, estimator: Estimator, goal: Goal, progress: Progress | None = None, robust: bool = True
) -> Outcome:
    """Run one of ``METHODS``, and say what no plan can beat.

    Args:
        robust: Of plans that are about as fast, take the one that loses least where figures are off.
    """
    progress, started = progress or Progress(), time.process_time()
    # Before the search, so that its time counts: on clusters of many pools the bound takes seconds.
    bound = Bounds(estimator, goal).value(all_gpus(estimator))
    outcome = _search(method, estimator, goal, progress)
    if method == "auto":
        choose(estimator, goal, progress, outcome)
        prefer_plain(estimator, goal, outcome)
        if robust:
            prefer_steady(estimator, goal, outcome)
        outcome.cpu_s = time.process_time() - started
    outcome.bound = bound
    return outcome


def _search(method: str, estimator: Estimator, goal: Goal, progress: Progress) -> Outcome:
    """Modules are imported when needed."""
    if method == "zorse":
        from ..search.zorse import search_zorse

        return search_zorse(estimator, goal, progress)
    if method == "sailor":
        from ..search.sailor import search_sailor

        return search_sailor(estimator, goal, progress)
    if method == "poplar":
        from ..search.poplar import search_poplar

        return search_poplar(estimator, goal, progress)
    from ..search.auto import search_auto

    return search_auto(estimator, goal, progress)
