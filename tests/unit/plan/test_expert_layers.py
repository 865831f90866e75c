"""What a plan decides about experts by its replicas: EP sizes, and balancing over the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_het.features.experts.spec import Experts
from megatron_het.plan import Plan, PlanError, Replica, Stage
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
