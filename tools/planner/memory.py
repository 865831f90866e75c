"""Predicted memory of every rank by category, for each family of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tools.planner.candidate import Candidate

if TYPE_CHECKING:
    from tools.planner.estimate import Estimator, GroupMemory, Unit
    from tools.planner.formulas import StageTimes


def rank_parameters(candidate: Candidate, unit: Unit, s: int) -> float:
    """Parameters of one rank of stage ``s``, embedding and head included."""
    count = float(candidate.stages[s].layers * unit.layer_parameters)
    if s == 0:
        count += unit.embedding_parameters
    if s == len(candidate.stages) - 1:
        count += unit.head_parameters
    return count


def in_flight(candidate: Candidate, stages: list[StageTimes], s: int, i: int) -> float:
    """Microbatches (whole-stage equivalents) whose activations a replica holds at its peak."""
    held, count, v = stages[s].in_flight[i], len(stages), candidate.chunks
    mine = stages[s].microbatches[i]
    if candidate.schedule == "interleaved":
        return min(float(mine), (2 * (count - 1 - s) + (v - 1) * count + 1) / v)
    if candidate.schedule == "slimpipe":
        n = candidate.slices
        return min(float(mine), (n * v + 2 * (count - 1 - s)) / (n * v))
    if candidate.schedule == "ministage":
        return float(mine)
    return float(held)


def group_memory(estimator: Estimator, candidate: Candidate, stages: list[StageTimes]) -> Iterator[GroupMemory]:
    """GroupMemory of every group."""
    from tools.planner.estimate import GroupMemory

    model, runtime = estimator.model, estimator.runtime
    element, last = model.element_bytes, len(stages) - 1
    boundary = estimator.boundary_bytes_per_sequence * candidate.micro_batch_size
    for s, stage in enumerate(stages):
        found: list[GroupMemory] = []
        layers, groups = candidate.stages[s]
        same_tp: dict[int, int] = {}
        for g in groups:
            same_tp[g.tp] = same_tp.get(g.tp, 0) + g.count
        for i, g in enumerate(groups):
            u = stage.units[i]
            count = rank_parameters(candidate, u, s)
            shards = same_tp[g.tp]
            parameters, gradients = count * element, count * 4.0
            optimizer = count * estimator.optimizer_per_parameter / (shards if candidate.zero_stage >= 1 else 1)
            gradients += count * 4.0 * runtime.extra_parameter_copies
            if candidate.zero_stage >= 2:  # shards, and whole gradients of the layer that is being reduced
                gradients = gradients / shards + 4.0 * u.layer_parameters
            if candidate.zero_stage >= 3:
                parameters = parameters / shards + 2 * u.layer_parameters * element
            held = in_flight(candidate, stages, s, i)
            layer_bytes = u.layer_bytes * (u.sliced_share if candidate.schedule == "slimpipe" else 1.0)
            kept = layers * layer_bytes + (u.embedding_bytes if s == 0 else 0.0)
            activations = held * kept
            if candidate.schedule == "ministage":
                parameters, gradients, optimizer = window_state(estimator, candidate, count, 1 / shards)
                if candidate.offload:
                    activations = 2 * kept
            if s == last and candidate.schedule == "ministage":
                activations += u.head_bytes if candidate.recompute == "full" else held * u.head_bytes
            elif s == last:
                activations += u.head_bytes / candidate.slices
            if last > 0:
                activations += 2 * boundary
                if runtime.keeps_sent and candidate.schedule != "slimpipe":
                    mine = stage.microbatches[i]  # until the last forward, which is when most is held
                    forward, backward = candidate.chunks - (s == last), candidate.chunks - (s == 0)
                    activations += boundary * (mine * forward + (mine - held) * backward)
            workspace = max(u.workspace_bytes, u.head_workspace_bytes if s == last else 0.0) / candidate.slices
            found.append(GroupMemory(s, g, parameters, gradients, optimizer, activations, workspace,
                                     u.reserved_bytes, u.capacity_bytes))
        if candidate.schedule == "ministage" and (len(found) > 1 or candidate.shares is not None):
            found = _divided(estimator, candidate, found, [rank_parameters(candidate, u, s) for u in stage.units])
        yield from found


def window_state(
    estimator: Estimator, candidate: Candidate, count: float, share: float
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state of a rank under a parameter window.

    Args:
        count: Parameters of the stage at this TP.
        share: The part of the stage's state that the rank keeps.
    """
    element, window = estimator.model.element_bytes, min(1.0, 2.0 / candidate.chunks)
    parameters = count * element * (window + (0.0 if candidate.offload else share))
    gradients = count * 4.0 * (1 / candidate.chunks + share)
    optimizer = count * estimator.optimizer_per_parameter * share * (window if candidate.offload else 1.0)
    return parameters, gradients, optimizer


def _divided(
    estimator: Estimator, candidate: Candidate, found: list[GroupMemory], counts: list[float]
) -> list[GroupMemory]:
    """The ranks of one stage with the shares of the candidate, or by free memory if equal ones do not fit."""
    shares: list[float] | None = None
    if candidate.shares is not None:
        shares = list(candidate.shares[found[0].stage])
        if len(set(shares)) == 1 and shares[0] * sum(m.group.count for m in found) < 1 + 1e-9:
            return found  # else kinds of replicas whose largest shares are equal
    elif any(m.total_bytes > estimator.memory_margin * m.capacity_bytes for m in found):
        shares = shares_by_memory(estimator, candidate, found, counts)
    if shares is None:
        return found
    out = []
    for m, count, share in zip(found, counts, shares):
        parameters, gradients, optimizer = window_state(estimator, candidate, count, share)
        out.append(m._replace(parameter_bytes=parameters, gradient_bytes=gradients, optimizer_bytes=optimizer,
                              state_share=share))
    return out


def shares_by_memory(
    estimator: Estimator, candidate: Candidate, found: list[GroupMemory], counts: list[float]
) -> list[float] | None:
    """The part of a stage's state for a replica of each group, in proportion to what else is free there.

    If any division fits, this one does.

    Returns:
        None where replicas differ in TP, so that they cannot share, or nothing is free.
    """
    if len({m.group.tp for m in found}) > 1:
        return None
    free = []
    for m, count in zip(found, counts):
        alone = sum(window_state(estimator, candidate, count, 0.0))
        rest = m.activation_bytes + m.workspace_bytes + m.reserved_bytes
        free.append(max(0.0, estimator.memory_margin * m.capacity_bytes - rest - alone))
    total = sum(f * m.group.count for f, m in zip(free, found))
    return [f / total for f in free] if total else None
