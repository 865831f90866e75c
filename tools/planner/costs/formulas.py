"""The closed forms behind ``Estimator.estimate``: time and price."""

from __future__ import annotations

from dataclasses import replace

from megatron_het.plan.validate import most_chunks

from .candidate import Candidate
from .egress import egress
from .estimates import Estimate, Pipeline, StageTimes, divided_alike
from .operating import OperatingPoints
from .schedules import schedule_of
from .stages import stages_of


def evaluate(estimator: OperatingPoints, candidate: Candidate) -> Estimate | None:
    """See ``Estimator.estimate``."""
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
    transfers = estimator.transfer_times(candidate)
    stages = stages_of(estimator, candidate, blocks, total, transfers)
    if stages is None:
        return None
    pipeline, ends = _pipeline(estimator, candidate, stages, transfers, total)
    pipe_s, busy_s, bottleneck, gather_s, _ = pipeline
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


def _pipeline(
    estimator: OperatingPoints, candidate: Candidate, stages: list[StageTimes], transfers: list[float], total: int
) -> tuple[Pipeline, list[float]]:
    """The time of the pipeline, and the end of the last backward of each stage."""
    schedule = schedule_of(candidate)
    mixed = any(len(stage.units) > 1 for stage in stages) and not schedule.shards_parameters
    apart = mixed and divided_alike(candidate, [stage.microbatches for stage in stages])
    # Replicas that divide the microbatches alike on all stages fall into pipelines that never wait for each other.
    lines = [[_of_kind(s, i) for s in stages] for i in range(len(stages[0].units))] if apart else [stages]
    found = max([schedule.pipeline(estimator, candidate, line, transfers, total) for line in lines])
    if candidate.rows:
        s = found.bottleneck
        layers, unit = candidate.stages[s].layers, stages[s].units[0]
        whole_s = unit.both_s(layers, *candidate.ends_of(s))
        loss_s = schedule.vocabulary_loss_s(candidate, unit, len(stages), layers)
        found = found._replace(end_s=found.end_s + found.busy_s * loss_s / whole_s)
    if not (candidate.even or apart):
        found = found._replace(end_s=found.end_s + found.busy_s * schedule.mismatch_loss(candidate))
    return found, schedule.ends(estimator, candidate, stages, transfers, found)


def _of_kind(stage: StageTimes, i: int) -> StageTimes:
    """A stage as one kind of its replicas is: the others are in pipelines of their own."""
    f, b, k = stage.replica_f[i], stage.replica_b[i], stage.microbatches[i]
    return replace(
        stage,
        replica_f=[f],
        replica_b=[b],
        microbatches=[k],
        in_flight=stage.in_flight[i : i + 1],
        busy_s=k * (f + b),
        forward_s=f,
        backward_s=b,
    )
