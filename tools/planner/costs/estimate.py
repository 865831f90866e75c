"""The closed-form cost model: iteration time by cause, memory by category, price.  The search's inner loop.

``docs/cost_model.md`` derives the formulas and says where the schedule simulator differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from ..errors import PlannerError
from ..inputs.cluster import Cluster
from .candidate import Candidate
from .estimates import Estimate, GroupMemory, StageTimes, Unit, allocate
from .formulas import evaluate
from .operating import OperatingPoints
from .uncertainty import Uncertainty

INFEASIBLE = float("inf")

__all__ = ["INFEASIBLE", "Estimate", "Estimator", "GroupMemory", "StageTimes", "Unit", "allocate"]


class Estimator(OperatingPoints):
    """Evaluates candidates for one cluster and model.

    Attributes:
        evaluations: How many candidates have been evaluated.
        known_estimates, known_seconds: What was evaluated and simulated; parts of a cluster are searched again and
            again, and meet the same candidates.
        known_blocks: By candidate, what was made to simulate it in other orders too (``simulation.py``).
    """

    evaluations = 0

    @cached_property
    def known_estimates(self) -> dict[Candidate, Estimate | None]:
        """By candidate; None where there are no figures."""
        return {}

    @cached_property
    def known_blocks(self) -> dict[Candidate, Any]:
        """By candidate in one order."""
        return {}

    @cached_property
    def known_seconds(self) -> dict[tuple[Candidate, bool], float | PlannerError]:
        """By candidate, and whether the whole plan was simulated."""
        return {}

    def simulated_s(self, candidate: Candidate, whole: bool, simulate: Callable[[], float]) -> float:
        """Returns what ``simulate`` says of the candidate, asked once.

        Args:
            whole: Of the whole plan, not of one of its equal pipelines.

        Raises:
            PlannerError: What ``simulate`` raised.
        """
        key = candidate, whole
        if key not in self.known_seconds:
            try:
                self.known_seconds[key] = simulate()
            except PlannerError as error:
                self.known_seconds[key] = error
        found = self.known_seconds[key]
        if isinstance(found, PlannerError):
            raise found
        return found

    def only(self, pools: Sequence[int]) -> Estimator:
        """The same for these pools of the cluster, in this order."""
        nodes = tuple(self.cluster.nodes[p] for p in pools)
        cluster = Cluster(name=self.cluster.name, nodes=nodes, links=self.cluster.links, gpus=self.cluster.gpus)
        return Estimator(cluster, self.model, self.costs, self.runtime, self.memory_margin)

    def time_s(self, candidate: Candidate) -> float:
        """Iteration time, infinite when the candidate does not fit or cannot be run."""
        found = self.estimate(candidate)
        return INFEASIBLE if found is None or not self.fits(found) else found.iteration_s

    def fits(self, estimate: Estimate) -> bool:
        """Whether every rank stays below the margin of its memory, and every node within its main memory."""
        return estimate.fullest <= self.memory_margin and not self.short_of_host_memory(estimate)

    def host_memory(self, estimate: Estimate) -> list[tuple[int, float]]:
        """(pool, bytes) of main memory that a node of the pool holds for what a plan offloads.

        A node is taken to hold the ranks that offload most.
        """
        out: list[tuple[int, float]] = []
        for pool, node in enumerate(self.cluster.nodes):
            mine = [m for m in estimate.memory if m.group.pool == pool and m.host_bytes]
            left, held = node.gpus_per_node, 0.0
            for m in sorted(mine, key=lambda m: -m.host_bytes):
                ranks = min(left, m.ranks)
                held, left = held + ranks * m.host_bytes, left - ranks
            if held:
                out.append((pool, held))
        return out

    def short_of_host_memory(self, estimate: Estimate) -> list[tuple[int, float, float]]:
        """(pool, bytes that a node of it would hold, its limit) where a plan offloads more than nodes have."""
        if not self.limits_host_memory:
            return []
        limits = ((pool, held, self.cluster.nodes[pool].host_memory_bytes) for pool, held in self.host_memory(estimate))
        return [(pool, held, limit) for pool, held, limit in limits if limit is not None and held > limit]

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """The closed form; None when a replica has no figures, layers or microbatch, or the plan too many passes."""
        if candidate not in self.known_estimates:
            self.evaluations += 1
            self.known_estimates[candidate] = evaluate(self, candidate)
        return self.known_estimates[candidate]

    def uncertainty(self, candidate: Candidate) -> Uncertainty:
        """Expected relative error of a candidate's time, as published runs of such plans show."""
        return self.costs.uncertainty_of({self.cluster.nodes[g.pool].gpu for s in candidate.stages for g in s.groups})
