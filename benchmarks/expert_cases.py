"""Mixture of experts under every schedule: the plans of the dense cases with layers of experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.cases import Case
from benchmarks.families import EXPERT_FAMILIES
from benchmarks.model_families import MODELS, has_experts
from megatron_het.plan import Plan

_WHOLE_SEQUENCES = ("capacity",)
"""Families whose passes need whole sequences."""
_BY_SEQUENCE = ("deepseek", "sequence-balance")
"""Families whose balancing does not depend on the sizes of microbatches."""

_ONE_REPLICA = ("global-balance",)
"""Families whose balancing needs one replica per stage."""


def is_routed(case: Case) -> bool:
    """Whether tokens are routed by the largest of scores.

    Scores that are equal up to rounding may be ordered differently.  A token in another expert does not show in losses,
    but in the moments that Adam keeps of the few tokens of an expert.
    """
    return case.family in EXPERT_FAMILIES or (case.family in MODELS and has_experts(case.family))


def divided(plan: Plan, sizes: Sequence[Sequence[int]]) -> Plan:
    """The plan with the EP sizes ``sizes[s][q]`` of replica q of stage s."""
    stages = tuple(
        replace(s, replicas=tuple(replace(r, ep=ep) for r, ep in zip(s.replicas, eps, strict=True)))
        for s, eps in zip(plan.stages, sizes, strict=True)
    )
    return replace(plan, stages=stages)


def _draw_ep(plan: Plan, rng: random.Random) -> Plan:
    """A plan with an EP size for every replica with TP."""
    sizes = [
        [rng.choice([ep for ep in (1, 2, 4) if replica.tp % ep == 0]) for replica in stage.replicas]
        for stage in plan.stages
    ]
    return divided(plan, sizes)


def _sizes(plan: Plan) -> list[int]:
    return [replica.tp for stage in plan.stages for replica in stage.replicas]


def families_for(plan: Plan) -> list[str]:
    """The families that a plan can train."""
    cuts_sequences = plan.schedule.parameters.get("slices", 1) != 1 or any(
        replica.cp > 1 for stage in plan.stages for replica in stage.replicas
    )
    if max(plan.training.micro_batch_sizes or (plan.training.micro_batch_size,)) > 1:
        return list(_BY_SEQUENCE)  # the reference has microbatches of one sequence
    drawn = [name for name in EXPERT_FAMILIES if not (cuts_sequences and name in _WHOLE_SEQUENCES)]
    if any(len(stage.replicas) > 1 for stage in plan.stages):
        drawn = [name for name in drawn if name not in _ONE_REPLICA]
    return [name for name in drawn if name != "capacity" or max(_sizes(plan)) == 1]


def with_experts(cases: Sequence[Case], seed: int) -> list[Case]:
    """The cases with a family of experts each, under sequence parallelism and EP where they have TP.

    Args:
        cases: Of a dense model; those in fp32 count.
        seed: Of the choice.
    """
    rng, parts, found = random.Random(seed), random.Random(f"parts of experts {seed}"), []
    for case in cases:
        plan = case.plan
        if plan.training.precision != "fp32":
            continue
        if max(_sizes(plan)) > 1:
            plan = replace(plan, training=replace(plan.training, sequence_parallel=True))
        family = rng.choice(families_for(plan))
        plan = _draw_ep(plan, parts)
        gathers = family != "capacity" and parts.random() < 1 / 3
        own = (*case.own, "--moe-token-dispatcher-type", "allgather") if gathers else case.own
        chosen = {
            **case.chosen,
            "family": family,
            "sequence_parallel": plan.training.sequence_parallel,
            "ep": [[replica.ep for replica in stage.replicas] for stage in plan.stages],
            "dispatcher": "allgather" if gathers else "alltoall",
        }
        found.append(replace(case, plan=plan, family=family, own=own, chosen=chosen))
    return found
