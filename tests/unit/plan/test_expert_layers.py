"""What a plan decides about experts by its replicas: EP sizes, and balancing over the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_het.features.experts.spec import Experts
from megatron_het.plan import Plan, PlanError, Replica, Stage
from megatron_het.plan.validate import check_plan
from tests.unit.plan.test_refusals import arguments, in_slices, more_stages, of_different_sizes


@pytest.mark.parametrize(
    ("tp", "ep", "changed", "reason"),
    [
        (2, 2, {"num_experts": 2}, None),
        (2, 2, {"num_experts": 3}, r"replicas\[0\].ep = 2.*divide the 3 experts"),
        (2, 2, {}, r"replicas\[0\].ep = 2.*model has no experts"),
        (2, 1, {}, None),
        (4, 2, {"num_experts": 2, "expert_tensor_parallel_size": 2}, None),
        (
            4,
            2,
            {"num_experts": 2, "expert_tensor_parallel_size": 4},
            "--expert-tensor-parallel-size = 4.*TP 4 with EP 2, so 2 ranks",
        ),
    ],
)
def test_sizes(tp: int, ep: int, changed: dict[str, Any], reason: str | None) -> None:
    plan, given = more_stages(2, tp=tp, ep=ep, sequence_parallel=True), arguments(**changed)
    if reason is None:
        Experts().check_any_arguments(plan, given)
    else:
        with pytest.raises(PlanError, match=reason):
            Experts().check_any_arguments(plan, given)


def two_replicas() -> Plan:
    stage = Stage((4,), (Replica((0,), (0, 1, 2, 3)), Replica((1,), (4, 5, 6, 7))))
    return replace(more_stages(1), stages=(stage,))


def spanning(*counts: int, ep: int, **more: Any) -> Plan:
    """One stage of replicas of one rank with these numbers of microbatches."""
    first = [sum(counts[:q]) for q in range(len(counts))]
    replicas = [Replica((q,), tuple(range(first[q], first[q] + n)), **{"ep": ep, **more}) for q, n in enumerate(counts)]
    plan = more_stages(1)
    training = replace(plan.training, global_batch_size=sum(counts), micro_batch_size=1)
    return replace(plan, training=training, stages=(Stage((4,), tuple(replicas)),))


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        (spanning(2, 2, ep=2), {}, None),
        (spanning(3, 3, 1, 1, ep=2), {}, None),
        (
            spanning(3, 1, 3, 1, ep=2),
            {},
            "replicas 1 and 0 share experts.*replica 1 has 1 microbatches.*next to each other",
        ),
        (spanning(2, 2, 2, ep=2), {}, r"replicas\[0\].ep = 2.*3 ranks that cut weights so"),
        (spanning(2, 2, ep=1, etp=-1), {}, r"etp = -1.*at least 0"),
        (spanning(2, 2, ep=4), {}, r"divides experts over 4 ranks, and the stage has 2"),
        (spanning(2, 2, ep=2), {"optimizer": "muon"}, "--optimizer = 'muon'.*not known to update"),
    ],
)
def test_experts_over_replicas(plan: Plan, changed: dict[str, Any], reason: str | None) -> None:
    given = arguments(**{"num_experts": 4, **changed})

    def check() -> None:
        check_plan(plan)
        Experts().check(plan)
        Experts().check_any_arguments(plan, given)

    if reason is None:
        check()
    else:
        with pytest.raises(PlanError, match=reason):
            check()


def test_replicas_of_another_cut_do_not_share_experts() -> None:
    plan = spanning(2, 2, 2, ep=2)
    mixed = (*plan.stages[0].replicas[:2], replace(plan.stages[0].replicas[2], ep=1))
    with pytest.raises(PlanError, match="replicas of stage 0 cut weights in other ways too"):
        check_plan(replace(plan, stages=(replace(plan.stages[0], replicas=mixed),)))


WHOLE_BATCH = {"num_experts": 2, "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}


@pytest.mark.parametrize(
    ("plan", "changed", "reason"),
    [
        (more_stages(2), {}, None),
        (more_stages(2, tp=2, sequence_parallel=True), {"recompute_granularity": "selective"}, None),
        (two_replicas(), {}, "global_aux_loss.*these may have different numbers of passes"),
        (more_stages(2, recompute="full"), {}, None),
        (in_slices(), {"moe_aux_loss_coeff": [0.0, 0.1]}, None),
        (of_different_sizes(), {"moe_aux_loss_coeff": [0.0, 0.1]}, "global_aux_loss.*product of two sums.*sequences"),
    ],
)
def test_balancing_over_the_batch(plan: Plan, changed: dict[str, Any], reason: str | None) -> None:
    """One order of passes only, that of one process."""
    given = arguments(**WHOLE_BATCH, **changed)
    if reason is None:
        Experts().check_any_arguments(plan, given)
    else:
        with pytest.raises(PlanError, match=reason):
            Experts().check_any_arguments(plan, given)
