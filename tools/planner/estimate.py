"""The closed-form cost model: iteration time by cause, memory by category, price.  The search's inner loop.

``docs/planner.md`` derives the formulas and says where the schedule simulator differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, floor
from typing import NamedTuple

from tools.planner.candidate import Candidate, Group
from tools.planner.cluster import Cluster
from tools.planner.errors import PlannerError
from tools.planner.layercost import LayerCosts
from tools.planner.model import Model
from tools.planner.network import Network
from tools.planner.runtime import MEGATRON_HET, Runtime

INFEASIBLE = float("inf")


@dataclass(frozen=True, slots=True)
class Unit:
    """Per-rank figures of one replica kind at one operating point (seconds per microbatch, bytes)."""

    layer_f: float
    layer_b: float
    embedding_f: float
    embedding_b: float
    head_f: float
    head_b: float
    layer_parameters: int
    embedding_parameters: int
    head_parameters: int
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    workspace_bytes: float
    head_workspace_bytes: float
    capacity_bytes: float
    reserved_bytes: float
    sliced_share: float = 1.0


class GroupMemory(NamedTuple):
    """Predicted bytes of one rank of a group, by category.

    ``state_share`` is the part of its stage's state that a replica keeps, None for equal parts.
    """

    stage: int
    group: Group
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    workspace_bytes: float
    reserved_bytes: float
    capacity_bytes: float
    state_share: float | None = None

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return (self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes
                + self.workspace_bytes + self.reserved_bytes)


class Estimate(NamedTuple):
    """What the closed form says about a candidate.

    Attributes:
        iteration_s: Predicted iteration time.
        busy_s: Compute of the stage that decides it.
        fill_s: Warm-up and drain around it (pipeline bubble).
        sync_s, update_s: Exposed gradient reduction and optimizer step.
        gather_s: Exposed parameter gathers (ministage).
        microbatches: Per stage and group, microbatches of each replica (some have one fewer).
        memory: Per stage and group.
        usd_per_iteration: GPU hours and egress.
        egress_bytes: Bytes per iteration over links with a price.
    """

    iteration_s: float
    busy_s: float
    fill_s: float
    sync_s: float
    update_s: float
    gather_s: float
    bottleneck: int
    microbatches: tuple[tuple[int, ...], ...]
    memory: tuple[GroupMemory, ...]
    usd_per_iteration: float
    gpu_usd_per_iteration: float
    egress_bytes: float
    stage_busy_s: tuple[float, ...] = ()

    @property
    def worst_memory(self) -> GroupMemory:
        """The rank nearest to (or furthest beyond) its capacity."""
        return max(self.memory, key=lambda m: m.total_bytes / m.capacity_bytes)


def allocate(times: list[float], counts: list[int], total: int) -> tuple[float, list[int]] | None:
    """Microbatches per replica so that the slowest replica is as early as possible (exact).

    Args:
        times: Seconds per microbatch of each kind of replica.
        counts: Replicas of each kind.
        total: Microbatches to give away.

    Returns:
        (time of the slowest, largest number per replica of each kind), or None when some replica
        would get nothing.
    """
    if len(times) == 1:
        share = -(-total // counts[0])
        return (share * times[0], [share]) if total >= counts[0] else None
    limit = total / sum(n / t for n, t in zip(counts, times))
    limit = max(limit, max(times))
    while True:
        shares = [floor(limit / t + 1e-9) for t in times]
        given = sum(n * k for n, k in zip(counts, shares))
        if given >= total:
            break
        limit = min((k + 1) * t for k, t in zip(shares, times))
    spare = given - total
    order = sorted(range(len(times)), key=lambda i: -shares[i] * times[i])
    largest = list(shares)
    for i in order:
        if spare <= 0:
            break
        whole = spare // counts[i]
        if whole and shares[i] > 1:
            take = min(whole, shares[i] - 1)
            largest[i] -= take
            spare -= take * counts[i]
    if spare > sum(n for n, k in zip(counts, largest) if k > 1):
        return None
    return max(k * t for k, t in zip(largest, times)), largest


class Estimator:
    """Evaluates candidates for one cluster and model.

    Args:
        memory_margin: Share of a GPU's memory that a plan may use.
    """

    def __init__(self, cluster: Cluster, model: Model, costs: LayerCosts, runtime: Runtime = MEGATRON_HET,
                 memory_margin: float = 0.95) -> None:
        self.cluster, self.model, self.costs, self.runtime = cluster, model, costs, runtime
        profile = getattr(costs, "profile", None)
        self.network = Network(cluster, runtime, profile.links if profile else ())
        self.memory_margin = memory_margin
        self.unit = cache(self._unit)
        self.price = [self._price(i) for i in range(len(cluster.nodes))]
        self.evaluations = 0
        from tools.planner.formulas import evaluate

        self._evaluate = evaluate
        mixed = model.element_bytes == 2
        self.optimizer_per_parameter = 12.0 if mixed else 8.0

    def _price(self, pool: int) -> float:
        node = self.cluster.nodes[pool]
        per_hour = node.usd_per_gpu_hour if node.usd_per_gpu_hour is not None else self.cluster.gpu(node.gpu).usd_per_hour
        return (per_hour or 0.0) / 3600.0

    def _unit(self, pool: int, tp: int, batch: int, recompute: str) -> Unit | None:
        """Figures of a replica kind, None where there are none."""
        node = self.cluster.nodes[pool]
        if tp > node.gpus_per_node or tp not in self.costs.tp_sizes(node.gpu) or batch > self.costs.max_batch(node.gpu, tp):
            return None
        gpu = self.cluster.gpu(node.gpu)
        try:
            layer, first, last = (self.costs.cost(node.gpu, k, batch, tp, recompute) for k in ("layer", "embedding", "head"))
        except PlannerError:
            return None
        reserved = self.runtime.reserved_bytes if self.runtime.reserved_bytes is not None else gpu.reserved_bytes
        return Unit(
            layer.forward_s, layer.backward_s, first.forward_s, first.backward_s, last.forward_s, last.backward_s,
            layer.parameters, first.parameters, last.parameters,
            layer.activation_bytes, first.activation_bytes, last.activation_bytes,
            layer.workspace_bytes, last.workspace_bytes, gpu.memory_bytes, reserved,
            self.costs.sliced_share(node.gpu, batch, tp, recompute),
        )  # fmt: skip

    @property
    def boundary_bytes_per_sequence(self) -> float:
        """Bytes of one sequence's activations between two layers."""
        return float(self.model.seq_length * self.model.hidden_size * self.model.element_bytes)

    def time_s(self, candidate: Candidate) -> float:
        """Iteration time, infinite when the candidate does not fit or cannot be run."""
        found = self.estimate(candidate)
        return INFEASIBLE if found is None or not self.fits(found) else found.iteration_s

    def fits(self, estimate: Estimate) -> bool:
        """Whether every rank stays below the margin of its memory."""
        return all(m.total_bytes <= self.memory_margin * m.capacity_bytes for m in estimate.memory)

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """The closed form; None when a replica has no figures, no layers or no microbatch."""
        self.evaluations += 1
        return self._evaluate(self, candidate)

    def transfer_times(self, candidate: Candidate) -> list[float]:
        """Seconds of one transfer over each boundary: the slowest pair of replicas."""
        size = self.boundary_bytes_per_sequence * candidate.micro_batch_size
        stages, out, taken = candidate.stages, [], {}
        transfer_s = self.network.transfer_s
        for i in range(len(stages) - 1):
            a, b = stages[i].groups, stages[i + 1].groups
            if len(a) == len(b) == 1:
                (pool, tp, count), (other, other_tp, more) = a[0], b[0]
                before = taken.get(pool, 0)
                # Nodes are filled in order: both stages inside one node?
                per_node = self.cluster.nodes[pool].gpus_per_node
                local = pool == other and before // per_node == (before + tp * count + other_tp * more - 1) // per_node
                out.append(transfer_s(pool, tp, other, other_tp, size, local))
            else:
                out.append(max(transfer_s(g.pool, g.tp, h.pool, h.tp, size, False) for g in a for h in b))
            for g in a:
                taken[g.pool] = taken.get(g.pool, 0) + g.tp * g.count
        return out

    def max_in_flight(self, later_replicas: int, mine: int, total: int, slack: float = 0.0) -> int:
        """Microbatches a 1F1B replica holds: its share of what the later stages keep busy, slack, and its own."""
        return min(mine, 1 + ceil((1 + slack) * mine / total * later_replicas - 1e-9))
