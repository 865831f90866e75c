"""What ``plan`` does unless told ``--no-verify``: finalists train dry, one rank of each kind, before one is written.

A finalist whose ranks need more than their GPUs have is left, and the next one is tried.  When none is left, the plan
is searched again with a smaller share of the GPUs' memory, by as much as the closest finalist was off.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron_het.plan import Plan, save_plan

from ..costs.build import build_plan
from ..costs.estimate import Estimator
from ..costs.estimates import GroupMemory
from ..errors import PlannerError
from ..inputs.model import Model
from ..report.tables import GIB, table
from ..search.outcome import Found, Outcome
from .dry_run import RankKind, rank_flags, rank_kinds, run_ranks

FINALISTS = 3
"""Of one search that are run; those after them are the same plan with small changes."""
SEARCHES = 3
"""With the first one."""
RANK_S = 120.0
"""Bound on one rank."""
ASKED_S, UNASKED_S = 900.0, 120.0
"""Bounds on all dry runs, with ``--verify`` and without a word."""
MOST_GPUS = 512
"""Of a cluster, up to which plans are verified without being asked: programs of larger plans take minutes."""
LEAST_STEP = 0.01
"""The share of memory becomes smaller by this at least."""
Search = Callable[[Estimator], Outcome]
"""Searches with the memory margin of an estimator."""


@dataclass(frozen=True, slots=True)
class RankCheck:
    """A rank's dry run beside its GPU.

    Attributes:
        rank: The one that ran.
        stands_for: So many ranks are of its kind.
        stage: Of the rank.
        gpu: Its kind of GPU.
        needed_bytes: The peak of the dry run, and what allocator and libraries take; 0 where the dry run failed.
        predicted_bytes: The same by the planner's formulas.
        capacity_bytes: Of the GPU.
        error: Why there are no figures.
    """

    rank: int
    stands_for: int
    stage: int
    gpu: str
    needed_bytes: float
    predicted_bytes: float
    capacity_bytes: float
    error: str = ""

    @property
    def is_too_large(self) -> bool:
        """Whether the rank needs more than its GPU has."""
        return self.needed_bytes > self.capacity_bytes


@dataclass(slots=True)
class Verified:
    """Holds what dry runs say of a plan.

    Attributes:
        found: The finalist that was taken.
        plan: Its plan.
        ranks: One of each kind.
        left: Why finalists before it were left, in order; for people.
        searches: How often a plan was searched.
        memory_margin: Share of a GPU's memory in the last search.
        seconds: That dry runs took.
        limit_s: That they might take.
    """

    found: Found
    plan: Plan
    ranks: list[RankCheck]
    left: list[str] = field(default_factory=list)
    searches: int = 1
    memory_margin: float = 0.95
    seconds: float = 0.0
    limit_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every kind of rank has figures."""
        return not any(check.error for check in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """All of it but the plan."""
        names = ("left", "searches", "memory_margin", "seconds", "limit_s")
        body = {name: getattr(self, name) for name in names} | {"complete": self.is_complete}
        return body | {"ranks": [asdict(check) for check in self.ranks]}


def verifier_of(options: argparse.Namespace, estimator: Estimator) -> Verifier | None:
    """Who runs the finalists dry; None where ``--no-verify`` was given, or nothing was and no dry run is possible.

    Raises:
        PlannerError: ``--verify``, and a model that a dry run cannot train.
    """
    wanted = options.verify
    if wanted is None:
        has_torch = all(importlib.util.find_spec(name) for name in ("torch", "megatron"))
        is_gpu = not any(estimator.cluster.gpu(n.gpu).is_processor for n in estimator.cluster.nodes)
        small = estimator.cluster.total_gpus <= MOST_GPUS and os.environ.get("HET_PLAN_VERIFY", "1") != "0"
        wanted = has_torch and is_gpu and small and not estimator.model.not_run
    if not wanted:
        return None
    limit_s = options.verify_limit_s
    return Verifier(estimator.model, limit_s if limit_s is not None else ASKED_S if options.verify else UNASKED_S)


class Verifier:
    """Dry runs of finalists, within a bound of time.

    Args:
        model: Of the plans.
        limit_s: Seconds that all dry runs together may take.

    Raises:
        PlannerError: A model that a dry run cannot train.
    """

    def __init__(self, model: Model, limit_s: float) -> None:
        model.check_dry_run("Give --no-verify")
        self._model, self._limit_s = model, limit_s
        self._start_s = time.monotonic()
        self._spent_s = 0.0
        self._left: list[str] = []

    def verified(self, estimator: Estimator, outcome: Outcome, search: Search) -> Verified:
        """The first finalist of which no dry run needs more than a GPU has.

        Args:
            estimator: Of the search.
            outcome: Of the search; with a plan.
            search: Called for another search with a smaller margin.

        Raises:
            PlannerError: Every finalist needs more than its GPUs have.
        """
        for searches in range(1, SEARCHES + 1):
            closest = 0.0
            for found in [f for f in outcome.found if f.runnable][:FINALISTS]:
                plan = build_plan(estimator, found.candidate, found.estimate)
                checks = self._checked(plan, found.estimate.memory, "gpu" if estimator.runtime.fused else "local")
                worst = max(checks, key=lambda c: c.needed_bytes / c.capacity_bytes)
                if not worst.is_too_large:
                    return Verified(
                        found,
                        plan,
                        checks,
                        self._left,
                        searches,
                        estimator.memory_margin,
                        round(self._spent_s, 1),
                        self._limit_s,
                    )
                self._left.append(_why(found, worst))
                closest = max(closest, worst.predicted_bytes / worst.needed_bytes)
            if not closest or searches == SEARCHES:
                break
            # What the formulas miss, they miss of the next plan as well: fill so much that the rest covers it.
            margin = min(closest, estimator.memory_margin - LEAST_STEP)
            estimator = Estimator(estimator.cluster, estimator.model, estimator.costs, estimator.runtime, margin)
            outcome = search(estimator)
        raise PlannerError(
            "command line",
            "--verify",
            None,
            f"no finalist fits its GPUs: {self._left[-1] if self._left else 'no further plan was found'}",
            "Plan with a smaller --memory-margin; --no-verify writes the plan all the same",
        )

    def _checked(self, plan: Plan, memory: Sequence[GroupMemory], kernels: str) -> list[RankCheck]:
        """One rank of each kind beside its GPU, in the time that is left."""
        kinds = rank_kinds(plan)
        left_s = self._limit_s - self._spent_s
        start_s = time.monotonic()
        with TemporaryDirectory(prefix="het-verify-") as folder:
            path = Path(folder) / "plan.json"
            save_plan(plan, path)
            flags = rank_flags(plan, self._model, str(path), [])
            ranks = [kind.ranks[0] for kind in kinds]
            results = run_ranks(ranks, flags, RANK_S, kernels, bound_s=left_s) if left_s > 0 else {}
        self._spent_s += time.monotonic() - start_s
        late = {"error": f"not run: --verify-limit-s {self._limit_s:g} was spent"}
        return [_check(plan, kind, results.get(kind.ranks[0], late), memory) for kind in kinds]


def _check(plan: Plan, kind: RankKind, result: dict[str, Any], memory: Sequence[GroupMemory]) -> RankCheck:
    rank = kind.ranks[0]
    s, replica = next((s, r) for s, stage in enumerate(plan.stages) for r in stage.replicas if rank in r.ranks)
    mine = [m for m in memory if m.stage == s and m.group.tp == replica.tp] or [m for m in memory if m.stage == s]
    said = max(mine, key=lambda m: m.total_bytes / m.capacity_bytes)
    peak = result["memory"]["total_bytes"] + said.reserved_bytes if "error" not in result else 0.0
    return RankCheck(
        rank,
        len(kind.ranks),
        s,
        replica.device,
        peak,
        said.total_bytes,
        said.capacity_bytes,
        str(result.get("error", "")),
    )


def _why(found: Found, worst: RankCheck) -> str:
    return (
        f"{found.candidate.schedule}, {len(found.candidate.stages)} stages: rank {worst.rank} of stage {worst.stage} "
        f"needs {worst.needed_bytes / GIB:.2f} GiB of {worst.capacity_bytes / GIB:.2f} GiB on {worst.gpu}, "
        f"{worst.predicted_bytes / GIB:.2f} GiB were predicted"
    )


def lines(verified: Verified) -> list[Any]:
    """Returns what people read."""
    shown = table("Dry runs (GiB)", "rank", "ranks", "stage", "GPU", "needs", "predicted", "has")
    for check in verified.ranks:
        needs = f"{check.needed_bytes / GIB:.2f}" if not check.error else "unknown"
        figures = (f"{check.predicted_bytes / GIB:.2f}", f"{check.capacity_bytes / GIB:.2f}")
        shown.add_row(str(check.rank), str(check.stands_for), str(check.stage), check.gpu, needs, *figures)
    out: list[Any] = [shown]
    out += [f"left: {why}" for why in verified.left]
    if verified.searches > 1:
        out.append(f"searched {verified.searches} times; the last with --memory-margin {verified.memory_margin:.3f}")
    for error in dict.fromkeys(check.error for check in verified.ranks if check.error):
        ranks = [str(check.rank) for check in verified.ranks if check.error == error]
        out.append(f"not verified: rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {error}")
    out.append(f"dry runs took {verified.seconds:.0f} s of {verified.limit_s:g} s")
    return out
