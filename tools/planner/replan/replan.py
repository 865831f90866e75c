"""The better plan: cluster and profile as the run has found them, the search, and whether a change pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from megatron_het.plan import Plan

from ..costs.build import candidate_of
from ..costs.estimate import Estimator
from ..costs.layercost import CatalogCosts, LayerCosts, MeasuredCosts
from ..costs.runtime import CPU_GLOO, Runtime, runtime_for
from ..errors import PlannerError
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile_schema import Profile
from ..report.analysis import complete
from ..search.methods import search
from ..search.outcome import Goal, Outcome, Progress
from ..simulate.simulation import simulate_candidate
from .corrections import Corrected, correct
from .measured import Watched

Search = Callable[[Estimator, Goal], Outcome]


@dataclass(frozen=True, slots=True)
class Replanned:
    """Holds what a better plan would be, and gain.

    Attributes:
        corrected: The planner's inputs as the run has found them.
        plan: The better plan; None where the run's own plan is the best that was found.
        measured_s: Iteration time of the run now.
        before_s, after_s: Predicted from the measured figures: of the run's own plan, and of the better one.
        outcome: Of the search.
        restart_s: What a change was taken to cost.
    """

    corrected: Corrected
    plan: Plan | None
    measured_s: float
    before_s: float
    after_s: float
    outcome: Outcome
    restart_s: float

    @property
    def gain(self) -> float:
        """Share of the iteration time that the better plan saves."""
        return 1 - self.after_s / self.before_s

    @property
    def expected_s(self) -> float:
        """Iteration time under the better plan: the gain applied to what is measured now."""
        return self.measured_s * (1 - self.gain)

    @property
    def pays_after(self) -> int | None:
        """Iterations after which the time that the change costs is won back; None if never."""
        saved_s = self.measured_s - self.expected_s
        return ceil(self.restart_s / saved_s) if self.plan is not None and saved_s > 0 else None

    def pays(self, iterations_left: int) -> bool:
        """Whether a change now ends the training earlier."""
        return self.pays_after is not None and self.pays_after < iterations_left


def replan(
    plan: Plan,
    cluster: Cluster,
    model: Model,
    watched: Watched,
    *,
    profile: Profile | None = None,
    goal: Goal | None = None,
    memory_margin: float = 0.95,
    restart_s: float = 60.0,
    find: Search | None = None,
) -> Replanned:
    """Search a better plan from what a run measured.  A controller of elastic runs calls this.

    Args:
        plan: What runs.
        cluster, model, profile: What it was planned from.
        watched: What was measured.
        goal: Objective, constraints and schedules to consider.
        memory_margin: Share of the memory of GPUs that may be used.
        restart_s: Seconds that a change of the plan costs: save, stop, start, load.
        find: The search; by default the one of ``plan``.

    Raises:
        PlannerError: The plan does not fit the cluster or is not priced; nothing fits.
    """
    corrected = correct(plan, cluster, profile, watched)
    estimator = estimator_of(corrected, model, _runtime(plan, cluster), memory_margin)
    before_s = predicted_s(estimator, corrected.plan)
    outcome = (find or _search)(estimator, goal or Goal())
    best = outcome.best
    better = None
    if best is not None and best.runnable and best.iteration_s < before_s:
        better = complete(estimator, best, "made by replan from measured figures")
    after_s = before_s if better is None or best is None else best.iteration_s
    return Replanned(corrected, better, watched.iteration_s, before_s, after_s, outcome, restart_s)


def predicted_s(estimator: Estimator, plan: Plan) -> float:
    """The simulated time of a plan's iteration.

    Raises:
        PlannerError: The plan does not fit the cluster, or there are no figures for one of its replicas.
    """
    candidate, seated = candidate_of(plan, estimator.cluster, "the run's plan")
    estimate = estimator.estimate(candidate)
    if estimate is None:
        raise PlannerError("the run's plan", "stages", len(plan.stages), "no figures for some replica of this plan")
    return simulate_candidate(estimator, candidate, estimate, replace(plan, predicted=None), seated).iteration_s


def _search(estimator: Estimator, goal: Goal) -> Outcome:
    return search("auto", estimator, goal, Progress())


def _runtime(plan: Plan, cluster: Cluster) -> Runtime:
    """As the plan's prediction was made: on the CPU the host computes and posts."""
    costs = plan.predicted.costs if plan.predicted is not None else None
    is_cpu = costs is not None and costs.host_blocks
    return CPU_GLOO if is_cpu else runtime_for(cluster.gpu(node.gpu) for node in cluster.nodes)


def estimator_of(corrected: Corrected, model: Model, runtime: Runtime, memory_margin: float = 0.95) -> Estimator:
    """The planner's model of the cluster as the run has found it."""
    cluster, profile = corrected.cluster, corrected.profile
    costs: LayerCosts = CatalogCosts(model, cluster.gpu, runtime)
    if profile is not None:
        costs = MeasuredCosts(model, profile, cluster.gpu, runtime)
    return Estimator(cluster, model, costs, runtime, memory_margin)
