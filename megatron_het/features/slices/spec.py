"""Slices of sequences, and what they cannot be combined with (SlimPipe, section 4.1)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_het.families import family_of
from megatron_het.features.base import ATTENTION_REFUSED, Feature, Option, check_reach, not_sliced, option
from megatron_het.features.registry import attention_units
from megatron_het.features.slices.passes import seq1f1b, slimpipe, terapipe
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.placement import least_tokens
from megatron_het.plan.schema import KINDS, SPARSE_ATTENTION
from megatron_het.schedule.cutting import Cutting
from megatron_het.schedule.generators import BY_PART, GENERATORS
from megatron_het.schedule.ir import SLICED_SCHEDULES

GENERATORS.update({"seq1f1b": seq1f1b, "slimpipe": slimpipe, "terapipe": terapipe})
BY_PART.update(("seq1f1b", "slimpipe"))

_SLICES = "slices"
_ROPE, _LINEAR = "megatron.core.models.common.embeddings.rope_utils", "megatron.core.tensor_parallel.layers"
EQUAL, WORK = "equal", "work"  # lengths of slices: all equal, or chosen for equal work


def _needs_number(plan: Plan) -> str:
    return f"schedule {plan.schedule.name} needs a number of slices per sequence, at least 1"


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Number and lengths of slices."""

    # slices per sequence; 1 where sequences are only divided over context-parallel ranks
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
    lengths: str = option(
        "slice_lengths",
        EQUAL,
        flag="--het-slice-lengths",
        choices=(EQUAL, WORK),
        help="equal: slices of equal length (default); work: slices of equal work, by the attention of every token "
        "and, with packed documents, by document boundaries",
    )
    keys_per_token: float = option(
        "slice_keys_per_token",
        0.0,
        flag="--het-slice-keys-per-token",
        metavar="KEYS",
        help="with --het-slice-lengths work: how many keys a query attends to in the time that the rest of its layer "
        "takes; default: from the FLOPs of both",
        accepts=lambda value, plan: value > 0 and plan.schedule.parameters.get("slice_lengths") == WORK,
        problem="must be above 0, and goes with slices of equal work only",
    )


class Slices(Feature):
    """Forward passes over parts of sequences: slices, or the part of one context-parallel rank."""

    name = "slices"
    title = "slices of sequences"
    options = SliceOptions
    schedules = SLICED_SCHEDULES
    upstream_names: ClassVar[Mapping[str, str]] = {
        "megatron.core.packed_seq_params.PackedSeqParams": "762e6be84f7661e3",
        "megatron.core.models.gpt.gpt_model.GPTModel._preprocess": "4675914da72daa91",
        "megatron.core.transformer.attention.Attention.forward": "c84fa46b7757cd01",
        # What attention and light linear layers compute in their place.
        f"{_ROPE}.apply_rotary_pos_emb": "15e756684316d7ee",
        f"{_ROPE}._apply_rotary_pos_emb_bshd": "24d6e448efc03d54",
        f"{_LINEAR}.ColumnParallelLinear.forward": "b3d148e587f2cecb",
        f"{_LINEAR}.RowParallelLinear.forward": "235bf36cfa11fcf9",
    }
    refused = ATTENTION_REFUSED

    def options_of(self, plan: Plan) -> SliceOptions | None:
        """The options; context parallelism cuts sequences too, into one slice."""
        if is_sliced(plan):
            return self.read(plan.schedule) or SliceOptions()
        return SliceOptions() if plan.most_cp > 1 else None

    def elsewhere(self, plan: Plan, given: Option) -> PlanError:
        """The error for slices with a schedule of whole sequences."""
        return not_sliced(plan, given)

    def check_plan(self, plan: Plan, options: SliceOptions) -> None:
        """Refuse numbers of slices that leave stages without work, and lengths that ranks cannot share."""
        if is_sliced(plan):
            _check_number(plan)
        _check_kinds(plan)
        length, unit = plan.model.seq_length, _cutting_of(plan).unit
        if length % unit or length // unit < options.slices:
            raise PlanError(
                "--het-slices",
                options.slices,
                "the ranks of a replica share every slice"
                f"{', in exchange units' if attention_units(plan) > 1 else ''}, so --seq-length = {length} must be a "
                f"multiple of {unit} tokens, and have {options.slices} of them at least",
            )

    def named(self, plan: Plan) -> str:
        """Returns whether slices or context parallelism cut sequences, as a phrase for messages."""
        return "slices" if is_sliced(plan) else "context parallelism, which cuts sequences as slices do"

    def check_arguments(self, plan: Plan, options: SliceOptions, args: Any) -> None:
        """Refuse the arguments of the table, and unsupported position embeddings and windows."""
        super().check_arguments(plan, options, args)
        check_reach(args)

    def apply(self, plan: Plan, options: SliceOptions, args: Any) -> None:
        """Switch off attention masks in the data: slices are causal, and a mask grows as s^2."""
        args.create_attention_mask_in_dataloader = False

    def cutting(self, plan: Plan, args: Any) -> Cutting | None:
        """The plan's slices; a single one where sequences are only divided over context-parallel ranks."""
        return _cutting_of(plan, args) if self.options_of(plan) is not None else None

    def shape(self, options: SliceOptions) -> dict[str, Any]:
        """Slices per sequence."""
        return {"slices": options.slices}


def is_sliced(plan: Plan) -> bool:
    """Whether the plan's schedule runs slices of sequences."""
    return plan.schedule.name in SLICED_SCHEDULES


def _token_unit(plan: Plan) -> int:
    """Returns the number of which the tokens of slices of different length are a multiple.

    The ranks that share a slice then hold parts in proportion to its length, in whole exchange units.
    """
    found, units = 1, max(attention_units(plan), 1)
    for replica in (replica for stage in plan.stages for replica in stage.replicas):
        grain = math.lcm(units, replica.tp if plan.training.sequence_parallel else 1)
        found = math.lcm(found, least_tokens(sum(replica.shares), grain) if replica.cp > 1 else grain)
    return found


def _can_be_even(plan: Plan, slices: int) -> bool:
    """Whether slices of equal length divide the sequence, and the ranks that share them divide each slice."""
    length, tokens = plan.model.seq_length, plan.model.seq_length // slices
    if length % slices:
        return False
    for replica in (replica for stage in plan.stages for replica in stage.replicas):
        grain = replica.tp if plan.training.sequence_parallel else 1
        if tokens % grain or (replica.cp > 1 and (tokens % 2 or tokens < least_tokens(replica.cp, grain))):
            return False
    return True


def _cutting_of(plan: Plan, args: Any = None) -> Cutting:
    """Where the plan cuts sequences.

    Args:
        args: Megatron's arguments, for slices of equal work and for windows; None for nominal lengths alone.
    """
    options = Slices().options_of(plan) or SliceOptions()
    length, slices = plan.model.seq_length, max(options.slices, 1)
    is_even = options.lengths == EQUAL and (not is_sliced(plan) or _can_be_even(plan, slices))
    unit = length // slices if is_even else _token_unit(plan)
    cutting = Cutting(length, slices, unit, by_work=options.lengths != EQUAL)
    if args is None:
        return cutting
    limits = getattr(args, "window_size", None)
    return replace(
        cutting,
        keys_per_token=0.0 if options.lengths == EQUAL else options.keys_per_token or keys_per_token(args),
        window_tokens=limits[0] if limits else None,
        window_share=_window_share(args) if limits else 0.0,
    )


def keys_per_token(args: Any) -> float:
    """Number of keys per query at which attention has as many multiplications as the rest of its layer.

    In a hybrid model, the layers between one attention layer and the next count as the rest of the layer.
    """
    hidden, width = args.hidden_size, args.kv_channels * args.num_attention_heads
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    rest = 2 * hidden * (width + args.kv_channels * groups)
    matrices = 3 if args.swiglu else 2
    per_attention = family_of(args).rest_per_attention(args)
    if per_attention.experts:
        chosen = args.moe_router_topk * (args.moe_ffn_hidden_size or args.ffn_hidden_size)
        experts = matrices * hidden * (chosen + (args.moe_shared_expert_intermediate_size or 0))
        rest += per_attention.experts * experts
    if per_attention.dense:
        rest += per_attention.dense * matrices * hidden * args.ffn_hidden_size
    return float(rest / (2 * width))


def _window_share(args: Any) -> float:
    """Share of the layers with attention that have a sliding window, as ``--window-attn-skip-freq`` says."""
    skip, numbers = args.window_attn_skip_freq, family_of(args).attention_numbers(args)
    if skip is None or not numbers:
        return 1.0
    if isinstance(skip, int):
        return sum(number % skip != 0 for number in numbers) / len(numbers)
    return sum(bool(skip[number - 1]) for number in numbers) / len(numbers)


def _check_kinds(plan: Plan) -> None:
    """Refuse sparse attention, which chooses among the keys of a whole sequence."""
    pattern = plan.model.pattern
    if SPARSE_ATTENTION in pattern:
        raise PlanError(
            "model.pattern",
            pattern,
            f"layers {SPARSE_ATTENTION} ({KINDS[SPARSE_ATTENTION]}) choose among the keys of a whole sequence, and "
            "passes run parts of it",
            "Use a schedule without slices, and no context parallelism",
        )


def _check_number(plan: Plan) -> None:
    slices, stages = plan.schedule.parameters.get(_SLICES), len(plan.stages)
    where = "--het-slices"
    if slices is None:
        raise PlanError(where, None, _needs_number(plan))
    if slices < stages:
        problem = f"fewer slices than the {stages} stages leave stages without work"
        raise PlanError(where, slices, problem, f"Use a multiple of {stages}")
    chunks = plan.most_chunks
    if chunks > 1 and slices % stages:
        raise PlanError(
            where,
            slices,
            f"with {chunks} chunks per stage the {stages} stages must divide it: "
            "groups of slices take turns between chunks",
            f"Use a multiple of {stages}",
        )
