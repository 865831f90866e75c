"""Predicted memory of every rank by category."""

from __future__ import annotations

from collections.abc import Iterable

from .candidate import Candidate
from .estimates import GroupMemory, StageTimes
from .extras import moved_bytes
from .operating import OperatingPoints
from .schedules import schedule_of


def stage_memory(estimator: OperatingPoints, candidate: Candidate, stage: StageTimes, s: int) -> Iterable[GroupMemory]:
    """GroupMemory of every group of stage ``s``."""
    groups = candidate.stages[s].groups
    same_tp: dict[int, int] = {}
    for g in groups:
        same_tp[g.tp] = same_tp.get(g.tp, 0) + g.count * candidate.cp
    found = [_of_group(estimator, candidate, stage, s, i, same_tp[g.tp]) for i, g in enumerate(groups)]
    return schedule_of(candidate).divide(estimator, candidate.as_of(s), found, list(stage.parameters))


def _of_group(
    estimator: OperatingPoints, candidate: Candidate, stage: StageTimes, s: int, i: int, shards: int
) -> GroupMemory:
    """A rank of group ``i`` of stage ``s``, whose optimizer state ``shards`` replicas share equally."""
    runtime, schedule = estimator.runtime, schedule_of(candidate)
    has_head = s == candidate.head_stage
    layers, groups = candidate.stages[s]
    boundary = estimator.boundary_bytes_per_sequence * candidate.micro_batch_size / candidate.slices / candidate.cp
    if estimator.model.sequence_parallel:
        boundary /= groups[i].tp
    u, mine = stage.units[i], stage.microbatches[i]
    parameters, gradients, optimizer, host = schedule.state(
        estimator, candidate.as_of(s), u, stage.parameters[i], shards
    )
    held = schedule.in_flight(candidate, stage, s, i)
    kept = layers * (u.layer_bytes * schedule.layer_share(u)) + (u.embedding_bytes if s == 0 else 0.0)
    activations, waiting = schedule.activations(candidate, held, kept)
    if candidate.host_activations or candidate.exchange:
        more, offloaded = moved_bytes(estimator, candidate, groups[i], u, s, held)
        activations, waiting = activations + more, waiting + offloaded
    logits = max(candidate.rows[s]) if candidate.rows else float(has_head)
    if logits:
        activations += schedule.logits(candidate, held, u.head_bytes) * logits
    if len(candidate.stages) > 1:
        activations += 2 * boundary
        if runtime.keeps_sent and not schedule.cuts_sequences:
            # until the last forward, which is when most is held
            forward, backward = candidate.sends(s)
            activations += boundary * (mine * forward + (mine - held) * backward)
    workspace = u.workspace_bytes
    if has_head:
        workspace = schedule.head_workspace(candidate, u)
    workspace /= candidate.slices
    return GroupMemory(
        s,
        groups[i],
        parameters,
        gradients,
        optimizer,
        activations,
        workspace,
        u.reserved_bytes,
        u.capacity_bytes,
        host_bytes=host + waiting,
        cp=candidate.cp,
    )
