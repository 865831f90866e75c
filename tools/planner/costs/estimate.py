"""The closed-form cost model: iteration time by cause, memory by category, price.  The search's inner loop.

``docs/cost_model.md`` derives the formulas and says where the schedule simulator differs.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Literal

from megatron_het.plan.validate import most_chunks

from ..errors import PlannerError
from ..inputs.cluster import Cluster
from ..inputs.model import Model
from ..inputs.profile_schema import Profile
from .candidate import Candidate, Estimate, Group, Line, Pipeline, StageTimes, divided_alike, rank_parameters
from .layer import Runtime, Uncertainty, runtime_for
from .layercost import costs_of
from .operating import OperatingPoints
from .schedules import schedule_of
from .stages import remember_memory, stages_of

# The closed forms behind ``Estimator.estimate``: time and price.


# Bytes over links that have a price, and their cost.


def egress(estimator: OperatingPoints, candidate: Candidate, stages: list[StageTimes]) -> tuple[float, float]:
    """(bytes per iteration over links with a price, their price)."""
    moved = usd = 0.0
    if not estimator.network.has_egress:
        return moved, usd
    size = estimator.boundary_bytes_per_sequence * estimator.model.global_batch_size
    for s in range(len(stages)):
        groups = candidate.stages[s].groups
        if s + 1 < len(stages):
            nxt = candidate.stages[s + 1].groups
            shares = _pool_shares(candidate, stages[s], groups)
            for pool, share in shares.items():
                for other, weight in _pool_shares(candidate, stages[s + 1], nxt).items():
                    rate = estimator.network.usd_per_byte(pool, other) if pool != other else 0.0
                    if rate:
                        moved += 2 * size * share * weight * candidate.chunks
                        usd += 2 * size * share * weight * candidate.chunks * rate
        pools = sorted({g.pool for g in candidate.reducing(s)})
        for first, second in zip(pools, pools[1:]):
            rate = estimator.network.usd_per_byte(first, second)
            if rate:
                volume = 4 * estimator.gradient_per_parameter * groups[0].tp
                volume *= rank_parameters(candidate, stages[s].units[0], s)
                moved += volume
                usd += volume * rate
    return moved, usd


def _pool_shares(candidate: Candidate, stage: StageTimes, groups: tuple[Group, ...]) -> dict[int, float]:
    if "pools" in stage.memo:
        return stage.memo["pools"]
    whole = sum(g.count * k for g, k in zip(groups, stage.microbatches))
    out: dict[int, float] = {}
    for g, k in zip(groups, stage.microbatches):
        for part, portion in candidate.parts_of(g):
            out[part.pool] = out.get(part.pool, 0.0) + part.count * portion * k / whole
    stage.memo["pools"] = out
    return out


def evaluate(estimator: OperatingPoints, candidate: Candidate, most_s: float = inf) -> Estimate | Literal[False] | None:
    """See ``Estimator.estimate``; False where that is certainly more than ``most_s``."""
    model = estimator.model
    if not candidate.stages or (model.global_batch_size % candidate.micro_batch_size and not candidate.sizes):
        return None
    total = model.global_batch_size // candidate.micro_batch_size
    if candidate.sizes:
        total = sum(len(own) for replicas in candidate.sizes for own in replicas)
    most = most_chunks(total, candidate.slices)
    if estimator.writes_plans and len(candidate.stages) * candidate.chunks > most:
        return None  # the plan would be refused
    for stage in candidate.stages:  # of the whole plan: a block has the rounded-up share of the microbatches
        replicas = sum([g.count for g in stage.groups])
        if not 0 < replicas <= total or (candidate.even and total % replicas):
            return None
    blocks = candidate.blocks
    total = -(-total // blocks)
    transfers, cards_s = estimator.transfers_of(candidate)
    stages = stages_of(estimator, candidate, blocks, total, transfers)
    if stages is None:
        return None
    line = Line(stages, transfers, cards_s)
    pipeline = _pipeline(estimator, candidate, line, total)
    pipe_s, busy_s, bottleneck, gather_s, _ = pipeline
    if pipe_s + estimator.runtime.iteration_s > most_s:
        return False
    remember_memory(estimator, candidate, stages)
    ends = schedule_of(candidate).ends(estimator, candidate, line, pipeline)
    tail_s = max([end + stage.sync_s + stage.update_s for end, stage in zip(ends, stages)])
    sync_s = max([stage.sync_s for stage in stages])
    iteration_s = max(pipe_s, tail_s) + estimator.runtime.iteration_s
    gpu_usd = iteration_s * sum(estimator.price[p] * n for p, n in candidate.gpus().items())
    egress_bytes, egress_usd = egress(estimator, candidate, stages)
    exposed = max(0.0, iteration_s - pipe_s)
    return Estimate(
        iteration_s=iteration_s,
        busy_s=busy_s,
        fill_s=max(0.0, pipe_s - busy_s - gather_s),
        sync_s=min(sync_s, exposed),
        update_s=max(0.0, exposed - sync_s),
        gather_s=gather_s,
        bottleneck=bottleneck,
        microbatches=tuple([tuple(s.microbatches) for s in stages]),
        memory=tuple([m for stage in stages for m in stage.memory]),
        usd_per_iteration=gpu_usd + egress_usd,
        gpu_usd_per_iteration=gpu_usd,
        egress_bytes=egress_bytes,
        stage_busy_s=tuple([s.busy_s for s in stages]),
        fullest=max([stage.fullest for stage in stages]),
    )


def _pipeline(estimator: OperatingPoints, candidate: Candidate, line: Line, total: int) -> Pipeline:
    """The time of the pipeline."""
    schedule, stages = schedule_of(candidate), line.stages
    mixed = max([len(stage.units) for stage in stages]) > 1 and not schedule.shards_parameters
    apart = mixed and divided_alike(candidate, [stage.microbatches for stage in stages])
    # Replicas that divide the microbatches alike on all stages fall into pipelines that never wait for each other.
    kinds = range(len(stages[0].units)) if apart else ()
    lines = [Line([_only_kind(stage, i) for stage in stages], *estimator.transfers_of(candidate, i)) for i in kinds]
    found = max([schedule.pipeline(estimator, candidate, own, total) for own in lines or [line]])
    if not (candidate.even or apart):
        found = found._replace(end_s=found.end_s + found.busy_s * schedule.mismatch_loss(candidate))
    return found


def _only_kind(stage: StageTimes, i: int) -> StageTimes:
    """The stage restricted to one kind of its replicas; the others are in pipelines of their own."""
    f, b, k, held = stage.replica_f[i], stage.replica_b[i], stage.microbatches[i], stage.in_flight[i : i + 1]
    one = replace(stage, units=[stage.units[i]], replica_f=[f], replica_b=[b], microbatches=[k], busy_s=k * (f + b))
    return replace(one, counts=[stage.counts[i]], in_flight=held, forward_s=f, backward_s=b)


__all__ = ["Estimate", "Estimator"]


class Estimator(OperatingPoints):
    """Evaluates candidates for one cluster and model."""

    evaluations = 0  # number of candidates evaluated so far
    _with_other_layers: "Estimator | None" = None  # one is enough: ``runtime_for`` knows two runtimes

    def simulated_s(self, candidate: Candidate, whole: bool, simulate: Callable[[], float]) -> float:
        """Returns the result of ``simulate`` for the candidate, which is cached; raises PlannerError."""
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

    def only(self, pools: Sequence[int]) -> "Estimator":
        """Returns the estimator of these pools of the cluster, in this order."""
        nodes = tuple(self.cluster.nodes[p] for p in pools)
        return self.on(self.cluster.model_copy(update={"nodes": nodes}))

    def on(self, cluster: Cluster, pools: Iterable[int] | None = None) -> "Estimator":
        """Returns the estimator of the same model on another cluster, with the layers of a plan on these pools of it.

        Args:
            pools: None: all.
        """
        costs, runtime = self.costs, self._runtime_on(cluster, range(len(cluster.nodes)) if pools is None else pools)
        if runtime != self.runtime:
            costs = costs_of(self.model, cluster.gpu, runtime, costs.profile, costs.file)
        return Estimator(cluster, self.model, costs, runtime, self.memory_margin, self.follows_gpus)

    def running(self, pools: Collection[int]) -> "Estimator":
        """Returns the estimator with the layers of a plan on these pools; all its ranks have the same."""
        if self._runtime_on(self.cluster, pools) == self.runtime:
            return self
        if self._with_other_layers is None:
            self._with_other_layers = self.on(self.cluster, pools)
            self._with_other_layers._with_other_layers = self  # not a third one, without the figures known here
        return self._with_other_layers

    def _runtime_on(self, cluster: Cluster, pools: Iterable[int]) -> Runtime:
        gpus = (cluster.gpu(cluster.nodes[pool].gpu) for pool in pools)
        return runtime_for(gpus) if self.follows_gpus else self.runtime

    def may_hold(self, limits: Sequence[int]) -> bool:
        """Whether ``limits`` GPUs of each pool may hold one copy of parameters, gradients and optimizer state."""
        free = need = 0.0
        for pool, count in enumerate(limits):
            unit = self.unit(pool, 1, self.model.batch_sizes[0], self.model.recompute[-1]) if count else None
            if count and unit is None:
                return True  # nothing is known
            if unit is not None:
                free += count * (self.memory_margin * unit.capacity_bytes - unit.reserved_bytes)
                need = unit.layer_parameters * self.model.num_layers + unit.embedding_parameters + unit.head_parameters
                need -= unit.tied_parameters
        return need * self.state_per_parameter <= free

    def fits(self, estimate: Estimate) -> bool:
        """Whether every rank stays below the margin of its memory, and every node within its main memory."""
        return estimate.fullest <= self.memory_margin and not self.short_of_host_memory(estimate)

    def host_memory(self, estimate: Estimate) -> list[tuple[int, float]]:
        """(pool, bytes of main memory) that a plan offloads to a node of the pool.

        A node is assumed to hold the ranks that offload most.
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
        if not any(m.host_bytes for m in estimate.memory):
            return []
        limits = ((pool, held, self.host_limits[pool]) for pool, held in self.host_memory(estimate))
        return [(pool, held, limit) for pool, held, limit in limits if held > limit]

    def estimate(self, candidate: Candidate, most_s: float = inf) -> Estimate | None:
        """The closed form; None when a replica has no figures, layers or microbatch, or the plan too many passes.

        Args:
            most_s: None is also returned if an iteration certainly takes longer, which is found much faster.
        """
        if candidate not in self.known_estimates:
            found = evaluate(self, candidate, most_s)
            if found is False:
                return None
            self.evaluations += 1
            self.known_estimates[candidate] = found
        return self.known_estimates[candidate]

    def uncertainty(self, candidate: Candidate) -> Uncertainty:
        """Expected relative error of a candidate's time, from published runs of such plans."""
        return self.costs.uncertainty_of({self.cluster.nodes[p].gpu for p in candidate.gpus()}, candidate.slices > 1)


def estimator_of(
    cluster: Cluster,
    model: Model,
    profile: Profile | None = None,
    runtime: Runtime | None = None,
    memory_margin: float = 0.95,
    file: str = "profile",
) -> Estimator:
    """Returns the estimator of a command, with the prices of the catalog or of a profile.

    Args:
        runtime: Of all plans; None: the GPUs of a plan choose its layers.
        file: Name of the profile in errors.
    """
    cluster = cluster.as_profiled(profile)
    whole = runtime or runtime_for(cluster.gpu(node.gpu) for node in cluster.nodes)
    costs = costs_of(model, cluster.gpu, whole, profile, file)
    return Estimator(cluster, model, costs, whole, memory_margin, follows_gpus=runtime is None)
