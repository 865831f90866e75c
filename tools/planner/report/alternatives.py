"""Plans that differ from the best one in kind: in schedule, number of stages, TP or GPUs used."""

from __future__ import annotations

from typing import Any

from ..costs.candidate import Candidate
from ..costs.estimate import Estimator
from ..costs.schedules import schedule_of
from ..search.outcome import Found, Outcome
from .tables import describe


def kind_of(c: Candidate) -> tuple[object, ...]:
    """Returns what makes two plans differ in kind; layers, batches and the order of stages do not."""
    sizes = {(g.pool, g.tp) for s in c.stages for g in s.groups}
    return c.schedule, len(c.stages), tuple(sorted(c.gpus().items())), tuple(sorted(sizes))


def alternatives(estimator: Estimator, outcome: Outcome, best: Found, count: int = 8) -> list[dict[str, Any]]:
    """The best plan of each other kind that the search has met, the best first.

    Plans that the runtime cannot run are left out.
    """
    seen = {kind_of(best.candidate)}
    rows = []
    for found in outcome.found:
        kind = kind_of(found.candidate)
        if kind in seen or not found.runnable:
            continue
        seen.add(kind)
        rows.append(row_of(estimator, differences(estimator, best.candidate, found.candidate), found, best))
    return rows[:count]


def row_of(estimator: Estimator, what: str, found: Found, best: Found) -> dict[str, Any]:
    """One plan beside the best one."""
    return {
        "what": what,
        "plan": describe(estimator, found.candidate),
        "iteration_s": found.iteration_s,
        "ratio": found.iteration_s / best.iteration_s,
        "usd_per_iteration": found.usd_per_iteration,
        "gpus": found.candidate.world_size,
    }


def differences(estimator: Estimator, best: Candidate, other: Candidate) -> str:
    """How a plan differs in kind, in words."""
    out = []
    if schedule_of(other).name != schedule_of(best).name:
        out.append(f"schedule {other.schedule}")
    if len(other.stages) != len(best.stages):
        out.append(f"{len(other.stages)} stage{'s' if len(other.stages) > 1 else ''}")
    mine, theirs = best.gpus(), other.gpus()
    for pool, node in enumerate(estimator.cluster.nodes):
        used = theirs.get(pool, 0)
        if used != mine.get(pool, 0):
            out.append(f"{used} of {node.quota} {node.gpu}" if used else f"no {node.gpu}")
        elif used and (sizes := _sizes(other, pool)) != _sizes(best, pool):
            out.append(f"TP {' and '.join(map(str, sizes))} on {node.gpu}")
    return ", ".join(out)


def _sizes(c: Candidate, pool: int) -> list[int]:
    return sorted({g.tp for s in c.stages for g in s.groups if g.pool == pool})
