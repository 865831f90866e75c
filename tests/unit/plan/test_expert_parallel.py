"""Which EP sizes a plan may give its replicas, by the arguments of a run."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_het.features.experts import Experts
from megatron_het.plan import PlanError
from tests.unit.plan.test_refusals import arguments, more_stages


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
