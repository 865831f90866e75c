"""What schedules over slices cannot be combined with, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_het.config_exchange import check_exchange
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.slices import (
    EXCHANGE_PARAMETERS,
    OFFLOAD,
    SLICED_SCHEDULES,
    VOCABULARY,
    cuts_sequences,
    is_sliced,
    slices_of,
)


def _truthy(value: Any) -> bool:
    return bool(value)


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("attention_dropout", _truthy, "dropout inside attention would have to be the same in the slice's "
     "backward, call by call; use --attention-dropout 0"),
    ("reset_attention_mask", _truthy, "slices attend to everything before them; packed documents are "
     "not told apart"),
    ("dataloader_inter_document_masking", _truthy, "slices attend to everything before them; packed "
     "documents are not told apart"),
    ("window_size", _truthy, "the key-value cache keeps whole prefixes; sliding windows are not supported"),
    ("softmax_type", lambda v: v not in (None, "vanilla"), "the softmax offset is not merged over slices"),
    ("multi_latent_attention", _truthy, "its compressed keys and values are not cached by slices"),
    ("experimental_attention_variant", _truthy, "only ordinary softmax attention is cut into slices"),
    ("qk_clip", _truthy, "the largest attention logit is not known to the slice kernels"),
    ("log_max_attention_logit", _truthy, "the largest attention logit is not known to the slice kernels"),
    ("use_kitchen_attention", _truthy, "its kernels do not give what slices are merged from"),
    ("fused_single_qkv_rope", _truthy, "it refuses the argument that tells a layer its slice"),
    ("fine_grained_activation_offloading", _truthy, "it counts one forward per microbatch"),
    ("heterogeneous_layers_config_path", _truthy, "layers without attention are not supported with slices"),
    ("logits_load_dir", _truthy, "saved logits are read by whole sequences"),
)  # fmt: skip
_PARAMETERS = ("slices", VOCABULARY, OFFLOAD, *EXCHANGE_PARAMETERS)
_POSITIONS = ("rope", "yarn", "learned_absolute", "none")


def check_slices_plan(plan: Plan) -> None:
    """Refuse a plan whose sequences cannot be cut as it says, whatever the training's arguments.

    Raises:
        PlanError: The first thing that does not fit.
    """
    if is_sliced(plan):
        _check_numbers(plan)
    else:
        given = next((n for n in ("slices", *EXCHANGE_PARAMETERS) if n in plan.schedule.parameters), None)
        if given is not None:
            raise PlanError(
                f"schedule.parameters.{given}", plan.schedule.parameters[given],
                f"schedule {plan.schedule.name} does not cut sequences",
                f"Schedules that do: {', '.join(SLICED_SCHEDULES)}",
            )
    if cuts_sequences(plan):
        _check_lengths(plan)
        check_exchange(plan)


def check_slices(plan: Plan, args: Any) -> None:
    """Refuse what slices cannot do, before anything is started.

    Args:
        plan: The checked plan; nothing happens unless its schedule cuts sequences.
        args: Megatron's parsed arguments.

    Raises:
        PlanError: The first thing that does not fit.
    """
    check_slices_plan(plan)
    if not cuts_sequences(plan):
        return
    what = "slices" if is_sliced(plan) else "context parallelism, which cuts sequences as slices do"
    for name, is_refused, reason in _REFUSED:
        value = getattr(args, name, None)
        if is_refused(value):
            flag = "--" + name.replace("_", "-")
            raise PlanError(flag, value, f"cannot be used with {what}: {reason}")
    methods = getattr(args, "cp_comm_type", None) or ()
    if plan.context_parallel > 1 and any(method != "p2p" for method in methods):
        raise PlanError(
            "--cp-comm-type", " ".join(methods), "keys and values do not travel: with a plan, queries and outputs "
            "do (commuted context parallelism)", "Leave the flag out",
        )
    if args.position_embedding_type not in _POSITIONS:
        raise PlanError(
            "--position-embedding-type", args.position_embedding_type,
            f"positions of slices are known for {', '.join(_POSITIONS)} only",
        )


def _check_numbers(plan: Plan) -> None:
    for name, value in plan.schedule.parameters.items():
        if name not in _PARAMETERS:
            raise PlanError(
                f"schedule.parameters.{name}", value,
                f"schedule {plan.schedule.name} is run with the parameters {', '.join(_PARAMETERS)} only",
            )
    slices, stages, length = plan.schedule.parameters.get("slices"), len(plan.stages), plan.model.seq_length
    where = "--het-slices"
    if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1:
        raise PlanError(
            where, slices, f"schedule {plan.schedule.name} needs a number of slices per sequence, at least 1"
        )
    if length % slices:
        raise PlanError(where, slices, f"slices are equal, but do not divide --seq-length = {length}")
    if slices < stages:
        raise PlanError(
            where, slices, f"fewer slices than the {stages} stages leave stages without work",
            f"Use a multiple of {stages}",
        )
    chunks = max(len(stage.layers) for stage in plan.stages)
    if chunks > 1 and slices % stages:
        raise PlanError(
            where, slices, f"with {chunks} chunks per stage the {stages} stages must divide it: "
            "groups of slices take turns between chunks", f"Use a multiple of {stages}",
        )


def _check_lengths(plan: Plan) -> None:
    """Slices must divide over the context-parallel ranks, and those parts over TP ranks."""
    cp, tokens = plan.context_parallel, plan.model.seq_length // slices_of(plan)
    if cp > 1 and tokens % (2 * cp):
        raise PlanError(
            "--context-parallel-size", cp, f"a rank holds two of {2 * cp} equal blocks of every slice, or of the "
            f"sequence without slices; {tokens} tokens do not divide",
        )
    sizes = sorted({r.tp for stage in plan.stages for r in stage.replicas})
    if plan.training.sequence_parallel and any(tokens // cp % size for size in sizes):
        raise PlanError(
            "--het-slices", slices_of(plan), f"with sequence parallel, slices of {tokens // cp} tokens "
            f"must divide over TP size {sizes[-1]}",
        )
