"""What to optimise, and what a plan must respect."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..costs.candidate import Candidate
from ..costs.estimate import Estimate, Estimator
from ..costs.schedules import SCHEDULES, Schedule


@dataclass(frozen=True, slots=True)
class Goal:
    """Objective and constraints.

    Attributes:
        objective: ``throughput`` (shortest iteration) or ``cost`` (cheapest iteration).
        max_usd_per_iteration, min_iterations_per_s, max_gpus: Constraints, None = none.
        schedules: Schedules that may be used.
        keep_data_parallel_in_region: Refuse stages that span regions (Sailor's H5); ``auto`` leaves
            it off and lets the cost decide.
    """

    objective: str = "throughput"
    max_usd_per_iteration: float | None = None
    min_iterations_per_s: float | None = None
    max_gpus: int | None = None
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    keep_data_parallel_in_region: bool = False

    @property
    def allowed(self) -> list[Schedule]:
        """The schedules, in the order in which they are tried."""
        return [schedule for name, schedule in SCHEDULES.items() if name in self.schedules]

    def violation(self, candidate: Candidate, estimate: Estimate) -> float:
        """How far the constraints are missed, relative; 0 when all hold."""
        miss = 0.0
        if self.max_usd_per_iteration is not None and estimate.usd_per_iteration > self.max_usd_per_iteration:
            miss += estimate.usd_per_iteration / max(self.max_usd_per_iteration, 1e-12) - 1
        if self.min_iterations_per_s is not None:
            miss += max(0.0, self.min_iterations_per_s * estimate.iteration_s - 1)
        if self.max_gpus is not None:
            miss += max(0.0, candidate.world_size / self.max_gpus - 1)
        return miss

    def value(self, estimate: Estimate) -> float:
        """Returns what is minimised."""
        return estimate.usd_per_iteration if self.objective == "cost" else estimate.iteration_s

    def score(self, estimator: Estimator, candidate: Candidate, estimate: Estimate | None) -> float:
        """Value with penalties for what does not fit or breaks a constraint; infinite when it cannot run."""
        if estimate is None:
            return inf
        value = self.value(estimate)
        miss = self.violation(candidate, estimate)
        over = estimate.fullest / estimator.memory_margin - 1
        if over > 0:
            miss += over
        return value * (1 + PENALTY * miss) + (PENALTY * value if miss > 0 else 0.0)


PENALTY = 100.0
