"""Context parallelism: the ranks of a replica share every sequence.  A plan's replicas say so, not a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_het.features.base import Feature, Refusal
from megatron_het.plan import Plan, PlanError


@dataclass(frozen=True, slots=True)
class ContextParallelOptions:
    """How many ranks share a sequence.

    Attributes:
        size: Ranks per sequence, above 1.
    """

    size: int


_FLAG = "--context-parallel-size"
_CAUSAL = "a rank attends for the others' queries to all earlier keys that it holds"


class ContextParallel(Feature):
    """Slices, of which every rank of a replica holds a part."""

    name = "context_parallel"
    runtime = "megatron_het.attention.context_parallel.feature"
    title = "context parallelism"
    options = ContextParallelOptions
    sets = (_FLAG,)
    refused_by_plans = (
        Refusal("hybrid_context_parallel", "sequences are shared by the plan's own context parallelism"),
        Refusal("hierarchical_context_parallel_sizes", "sequences are shared by the plan's own context parallelism"),
    )

    def options_of(self, plan: Plan) -> ContextParallelOptions | None:
        """The size of the plan's replicas."""
        return ContextParallelOptions(plan.context_parallel) if plan.context_parallel > 1 else None

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """The table, and another size than the plan's."""
        super().check_any_arguments(plan, args)
        if args.context_parallel_size not in (1, plan.context_parallel):
            problem = f"the plan says {[plan.context_parallel]}"
            raise PlanError(_FLAG, args.context_parallel_size, problem, "Leave the flag out")

    def check_arguments(self, plan: Plan, options: ContextParallelOptions, args: Any) -> None:
        """Refuse Megatron's own ways to share sequences."""
        super().check_arguments(plan, options, args)
        methods = getattr(args, "cp_comm_type", None) or ()
        if any(method != "p2p" for method in methods):
            raise PlanError(
                "--cp-comm-type",
                " ".join(methods),
                "keys and values do not travel: with a plan, queries and outputs do (commuted context parallelism)",
                "Leave the flag out",
            )

    def apply(self, plan: Plan, options: ContextParallelOptions, args: Any) -> None:
        """To Megatron, ranks that share sequences are like data-parallel ones; attention knows better."""
        args.context_parallel_size = 1

    def beyond_stock(self, plan: Plan, options: ContextParallelOptions) -> str:
        """What travels."""
        return f"context-parallel size {options.size}, which sends queries instead of keys and values"
