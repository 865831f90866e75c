"""Context parallelism: the ranks of a replica share every sequence.  A plan's replicas set it, not a parameter.

Replicas may have different sizes, and their ranks parts of different size: between two stages the
pieces that sender and receiver have in common are sent (``lowering/ranks.py``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_het.features.base import Feature, Option, Refusal, option
from megatron_het.features.registry import attention_units, packing_argument, packing_flags, part_grain, slice_tokens
from megatron_het.plan import Plan, PlanError, Replica
from megatron_het.plan.placement import CUT, DOCUMENTS, WHOLE, least_tokens
from megatron_het.plan.schema import RECURRENT


@dataclass(frozen=True, slots=True)
class ContextParallelOptions:
    """Numbers of ranks that share a sequence."""

    sizes: tuple[int, ...]  # CP sizes of the plan's replicas, ascending; the last one is above 1
    documents: str = option(
        DOCUMENTS,
        CUT,
        flag="--het-cp-documents",
        choices=(CUT, WHOLE),
        help="with packed documents and context parallelism: cut: a rank holds the same positions of every slice "
        "(default); whole: a document is on one rank if it fits there, and only long ones are spread over several",
    )


_FLAG = "--context-parallel-size"


class ContextParallel(Feature):
    """Context parallelism over slices, of which every rank of a replica holds a part."""

    name = "context_parallel"
    title = "context parallelism"
    options = ContextParallelOptions
    sets = (_FLAG,)
    refused_by_plans = (
        Refusal("hybrid_context_parallel", "use the plan's own context parallelism, with --het-cp-documents whole"),
        Refusal("hierarchical_context_parallel_sizes", "sequences are shared by the plan's own context parallelism"),
    )

    def options_of(self, plan: Plan) -> ContextParallelOptions | None:
        """Returns the CP sizes of the plan's replicas; None if all are 1."""
        sizes = tuple(sorted({r.cp for stage in plan.stages for r in stage.replicas}))
        documents = plan.schedule.parameters.get(DOCUMENTS, CUT)
        return ContextParallelOptions(sizes, documents) if sizes[-1] > 1 else None

    def check_plan(self, plan: Plan, options: ContextParallelOptions) -> None:
        """Refuse slices that do not divide over the ranks."""
        tokens = slice_tokens(plan)
        for s, stage in enumerate(plan.stages):
            for q, replica in enumerate(stage.replicas):
                grain = part_grain(plan, replica)
                least = least_tokens(replica.cp, grain)
                if replica.cp > 1 and (tokens % 2 or tokens % grain or tokens < least):
                    even = math.lcm(2, grain)
                    raise PlanError(
                        f"stages[{s}].replicas[{q}].cp",
                        replica.cp,
                        f"a rank holds a block from the start and one from the end of every slice, or of the sequence "
                        f"without slices, together a multiple of {grain}; so these need a multiple of {even} tokens, "
                        f"at least {least}, not {tokens}",
                    )
        if options.documents == WHOLE:
            self._check_whole(plan)

    def _check_whole(self, plan: Plan) -> None:
        """Refuse whole documents per rank with the exchange, several sequences, or recurrent layers on single ranks."""
        where = f"schedule.parameters.{DOCUMENTS}"
        most = max(map(plan.training.sequences, range(plan.training.num_microbatches)))
        if attention_units(plan):
            problem = "with the context exchange ranks attend for others by the places of tokens in a slice"
            raise PlanError(where, WHOLE, problem, "Leave one of the two out")
        if most > 1:
            problem = f"microbatches have up to {most} sequences, which are cut alike, and their documents differ"
            raise PlanError(where, WHOLE, problem, "Use a micro batch size of 1 and longer sequences")
        alone = any(replica.cp == 1 for stage in plan.stages for replica in stage.replicas)
        if alone and not set(RECURRENT).isdisjoint(plan.model.pattern):
            problem = "where a replica has cp 1, its recurrent layers would get tokens out of order"
            raise PlanError(where, WHOLE, problem, "Give every replica a cp above 1")

    def without_switch(self, plan: Plan, given: Option) -> PlanError:
        """The error for whole documents per rank in a plan without context parallelism."""
        problem = f"no replica of the plan has context parallelism ({_FLAG})"
        return PlanError(f"schedule.parameters.{given.parameter}", plan.schedule.parameters[given.parameter], problem)

    def check_flags(self, plans: Sequence[Plan], flags: Any) -> None:
        """Refuse to measure shares without context parallelism, or for several plans."""
        if not flags.het_measured_cp_shares:
            return
        flag = "--het-measured-cp-shares"
        if len(plans) > 1:
            raise PlanError(flag, "given", "does not go with several plans", "Write cp_shares into the plans")
        if self.options_of(plans[0]) is None:
            hint = f"Leave the flag out, or give replicas a cp above 1 ({_FLAG} without a plan)"
            raise PlanError(flag, "given", "no replica of the plan has context parallelism", hint)

    def check_any_arguments(self, plan: Plan, args: Any) -> None:
        """Refuse arguments by the table of refusals, and another CP size than the plan's."""
        super().check_any_arguments(plan, args)
        sizes = sorted({r.cp for stage in plan.stages for r in stage.replicas})
        if args.context_parallel_size != 1 and [args.context_parallel_size] != sizes:
            problem = f"the plan says {sizes}"
            raise PlanError(_FLAG, args.context_parallel_size, problem, "Leave the flag out")

    def check_arguments(self, plan: Plan, options: ContextParallelOptions, args: Any) -> None:
        """Refuse Megatron's own context parallelism, and whole documents per rank without packed documents."""
        super().check_arguments(plan, options, args)
        if options.documents == WHOLE and not packing_argument(args):
            flags = ", ".join(sorted(packing_flags()))
            raise PlanError("--het-cp-documents", WHOLE, "a sequence is one document", f"Give one of {flags}")
        methods = getattr(args, "cp_comm_type", None) or ()
        if any(method != "p2p" for method in methods):
            raise PlanError(
                "--cp-comm-type",
                " ".join(methods),
                "keys and values do not travel: with a plan, queries and outputs do (commuted context parallelism)",
                "Leave the flag out",
            )

    def apply(self, plan: Plan, options: ContextParallelOptions, args: Any) -> None:
        """Set Megatron's CP size to 1: outside of attention, ranks that share sequences are like data-parallel ones."""
        args.context_parallel_size = 1

    def beyond_stock(self, plan: Plan, options: ContextParallelOptions) -> str:
        """Returns why stock Megatron cannot run it: queries are sent instead of keys and values."""
        sizes = " and ".join(map(str, options.sizes))
        return f"context-parallel size {sizes}, which sends queries instead of keys and values"


def widest(plan: Plan) -> Replica:
    """The first replica with the largest context-parallel size, whose ranks read the starts of documents."""
    return max((replica for stage in plan.stages for replica in stage.replicas), key=lambda replica: replica.cp)
