"""Early reductions of gradients: replicas of a stage have to begin them in one order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_het.plan import PlanError
from megatron_het.schedule.gradient_sync import unequal_orders
from megatron_het.schedule.ir import Program


def check_reductions_meet(program: Callable[[], Program], args: Any, cause: str) -> None:
    """Refuse an early reduction of gradients that would not meet that of other replicas.

    Args:
        program: Makes the program of training.
        args: Megatron's arguments.
        cause: What may put the ends of gradients in different orders.

    Raises:
        PlanError: The replicas of a stage complete their gradients in different orders.
    """
    stage = unequal_orders(program()) if args.overlap_grad_reduce else None
    if stage is not None:
        raise PlanError(
            "--overlap-grad-reduce",
            True,
            f"with {cause} the replicas of stage {stage} complete "
            "their gradients in different orders, so that their reductions would not meet",
            "Give all replicas of a stage as many microbatches, or leave the flag out",
        )
