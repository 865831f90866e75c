"""Slices of sequences, and what they cannot be combined with (SlimPipe, section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_het.features.attention_kinds import ATTENTION_REFUSED, check_reach
from megatron_het.features.base import Feature, Option, Refusal, option
from megatron_het.plan import Plan, PlanError

SLICED_SCHEDULES = ("seq1f1b", "slimpipe", "terapipe")
"""Schedules that cut sequences; their plans have the schedule parameter ``slices``."""
_SLICES = "slices"


def _needs_number(plan: Plan) -> str:
    return f"schedule {plan.schedule.name} needs a number of slices per sequence, at least 1"


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """How sequences are cut.

    Attributes:
        slices: Slices per sequence; 1 where only context-parallel ranks share sequences.
    """

    slices: int = option(
        _SLICES,
        1,
        flag="--het-slices",
        metavar="N",
        help="slices per sequence, for slimpipe, seq1f1b and terapipe",
        accepts=lambda value, plan: value >= 1,
        problem=_needs_number,
        where="--het-slices",
    )


class Slices(Feature):
    """Forward passes over parts of sequences: slices, or what one context-parallel rank holds."""

    name = "slices"
    runtime = "megatron_het.slices.feature"
    title = "slices of sequences"
    options = SliceOptions
    schedules = SLICED_SCHEDULES
    upstream_names: ClassVar[Mapping[str, str]] = {
        "megatron.core.packed_seq_params.PackedSeqParams": (
            "762e6be84f7661e30f4ab4c280f74d5fb7264e7bf36ebe1ac07dd1aec3810419"
        ),
        "megatron.core.models.gpt.gpt_model.GPTModel._preprocess": (
            "4675914da72daa913490268baa5b570a2f1b29834fa64a55d6dacf313be69111"
        ),
        "megatron.core.transformer.attention.Attention.forward": (
            "c84fa46b7757cd01bbbb910cdd8312050d20d53247cba482804ce4155261d089"
        ),
    }
    refused = (*ATTENTION_REFUSED, Refusal("logits_load_dir", "saved logits are read by whole sequences"))

    def options_of(self, plan: Plan) -> SliceOptions | None:
        """The options; context parallelism cuts sequences too, into one slice."""
        return SliceOptions(slices_of(plan)) if cuts_sequences(plan) else None

    def elsewhere(self, plan: Plan, given: Option) -> PlanError:
        """Slices with a schedule of whole sequences."""
        return not_sliced(plan, given)

    def check_plan(self, plan: Plan, options: SliceOptions) -> None:
        """Refuse numbers of slices that leave a remainder or stages without work."""
        if plan.model.mtp_num_layers:
            cut = "slice" if is_sliced(plan) else "context-parallel rank"
            raise PlanError(
                "model.mtp_num_layers",
                plan.model.mtp_num_layers,
                f"the tokens that a {cut} is to predict are in the next one",
                "Use a schedule of whole sequences, without context parallelism",
            )
        if is_sliced(plan):
            _check_number(plan)
        tokens = slice_tokens(plan)
        sizes = sorted({r.tp for stage in plan.stages for r in stage.replicas})
        if plan.training.sequence_parallel and any(tokens % size for size in sizes):
            raise PlanError(
                "--het-slices",
                options.slices,
                f"with sequence parallel, slices of {tokens} tokens must divide over TP size {sizes[-1]}",
            )

    def named(self, plan: Plan) -> str:
        """What cuts the sequences."""
        return "slices" if is_sliced(plan) else "context parallelism, which cuts sequences as slices do"

    def check_arguments(self, plan: Plan, options: SliceOptions, args: Any) -> None:
        """The table, embeddings of positions, and windows."""
        super().check_arguments(plan, options, args)
        check_reach(args)

    def apply(self, plan: Plan, options: SliceOptions, args: Any) -> None:
        """Slices are causal; a mask grows as s^2."""
        args.create_attention_mask_in_dataloader = False

    def shape(self, options: SliceOptions) -> dict[str, Any]:
        """Slices per sequence."""
        return {"slices": options.slices}


def is_sliced(plan: Plan) -> bool:
    """Whether the plan's schedule runs slices of sequences."""
    return plan.schedule.name in SLICED_SCHEDULES


def cuts_sequences(plan: Plan) -> bool:
    """Whether forward passes run parts of sequences: slices, or what one context-parallel rank holds."""
    return is_sliced(plan) or plan.context_parallel > 1


def slices_of(plan: Plan) -> int:
    """Slices per sequence; 1 for schedules that do not cut sequences."""
    return plan.schedule.parameters.get(_SLICES, 1) if is_sliced(plan) else 1


def slice_tokens(plan: Plan) -> int:
    """Tokens of a slice; of the sequence without slices."""
    return plan.model.seq_length // slices_of(plan)


def not_sliced(plan: Plan, given: Option) -> PlanError:
    """The refusal of a parameter that is about slices, with a schedule of whole sequences."""
    return PlanError(
        f"schedule.parameters.{given.parameter}",
        plan.schedule.parameters[given.parameter],
        f"schedule {plan.schedule.name} does not cut sequences",
        f"Schedules that do: {', '.join(SLICED_SCHEDULES)}",
    )


def _check_number(plan: Plan) -> None:
    slices, stages, length = plan.schedule.parameters.get(_SLICES), len(plan.stages), plan.model.seq_length
    where = "--het-slices"
    if slices is None:
        raise PlanError(where, None, _needs_number(plan))
    if length % slices:
        raise PlanError(where, slices, f"slices are equal, but do not divide --seq-length = {length}")
    if slices < stages:
        raise PlanError(
            where,
            slices,
            f"fewer slices than the {stages} stages leave stages without work",
            f"Use a multiple of {stages}",
        )
    chunks = max(len(stage.layers) for stage in plan.stages)
    if chunks > 1 and slices % stages:
        raise PlanError(
            where,
            slices,
            f"with {chunks} chunks per stage the {stages} stages must divide it: "
            "groups of slices take turns between chunks",
            f"Use a multiple of {stages}",
        )
