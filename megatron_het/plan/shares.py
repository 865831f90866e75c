"""Who keeps how much of a stage's state: shares of replicas, and where a buffer is cut (Zorse, section 4.1).

Megatron cuts parameters, gradients and optimizer state into equal parts.  A plan may say otherwise
(``state_share`` of a replica), so that GPUs with more memory keep more.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_het.plan.placement import Placement
from megatron_het.plan.schema import Cut, Plan, Stage

ALIGNMENT = 128
"""Elements that cuts are a multiple of, so that every part starts aligned whatever its type."""


def state_shares(stage: Stage) -> tuple[float, ...] | None:
    """The part of a stage's state that each replica keeps; they add up to 1.  None if they are equal."""
    given = [replica.state_share for replica in stage.replicas]
    if len(set(given)) == 1:
        return None
    total = sum(given)
    return tuple(share / total for share in given)


def state_parts(stage: Stage) -> tuple[float, ...]:
    """Returns what each replica keeps of the state that replicas of its cut share; these add up to 1 per cut.

    Replicas that cut weights otherwise have a copy of their own.
    """
    totals: dict[Cut, float] = {}
    for replica in stage.replicas:
        totals[replica.cut] = totals.get(replica.cut, 0.0) + replica.state_share
    return tuple(r.state_share / totals[r.cut] if totals[r.cut] else 0.0 for r in stage.replicas)


def has_shares(plan: Plan) -> bool:
    """Whether any stage of the plan is divided unequally."""
    return any(state_shares(stage) is not None for stage in plan.stages)


def rank_shares(placement: Placement, rank: int) -> tuple[float, ...] | None:
    """Shares of the ranks in this rank's data-parallel group, in the group's order.

    Context-parallel ranks divide the share of their replica evenly.

    Returns:
        One share per rank, together 1; None if they are equal.
    """
    where = placement.locate(rank)
    stage = placement.plan.stages[where.stage]
    parts = state_parts(stage)
    cut = stage.replicas[where.replica].cut
    owners = [placement.locate(r).replica for r in placement.class_ranks(where.stage, cut, where.tp_rank)]
    if len({stage.replicas[q].state_share for q in owners}) == 1:
        return None
    return tuple(parts[q] / stage.replicas[q].cp for q in owners)


def cuts(numel: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Where a buffer is cut: part ``i`` is ``[cuts[i], cuts[i + 1])``.

    Args:
        numel: Elements of the buffer.
        shares: One per part, together 1; 0 gives an empty part.

    Returns:
        One position more than there are shares, from 0 to ``numel``; multiples of ``ALIGNMENT`` between.
    """
    last = max(i for i, share in enumerate(shares) if share > 0)
    edges, held = [0], 0.0
    for i, share in enumerate(shares):
        held += share
        edge = numel if i >= last else min(numel, round(held * numel / ALIGNMENT) * ALIGNMENT)
        edges.append(max(edge, edges[-1]))
    return tuple(edges)
