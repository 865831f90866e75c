"""What a split vocabulary and offloaded activations cannot be combined with, each with its reason."""

from __future__ import annotations

from typing import Any

from megatron_het.plan import Plan, PlanError
from megatron_het.plan.slices import OFFLOAD, VOCABULARY, splits_vocabulary

_WHERE = "--het-vocabulary-parallel"
# (attribute of Megatron's arguments, why it cannot be used with a split vocabulary)
_REFUSED: tuple[tuple[str, str], ...] = (
    ("overlap_param_gather", "the output layer runs outside of the model's forward"),
    ("defer_embedding_wgrad_compute", "only the whole output layer of the last stage defers its gradient"),
    ("fp16_lm_cross_entropy", "the split cross entropy is computed in fp32"),
    ("logits_load_dir", "distillation needs whole logits"),
    ("use_mup", "its scaling of logits and embeddings is not split"),
    ("init_model_with_meta_device", "the parts replace layers that exist"),
)


def check_vocabulary_plan(plan: Plan) -> None:
    """Refuse a plan whose vocabulary cannot be split as it says, whatever the training's arguments.

    Raises:
        PlanError: The first thing that does not fit.
    """
    given = plan.schedule.parameters.get(VOCABULARY, False)
    if not isinstance(given, bool):
        raise PlanError(f"schedule.parameters.{VOCABULARY}", given, "must be true or false")
    if not given:
        return
    if plan.schedule.parameters.get("window"):
        raise PlanError(_WHERE, True, "a parameter window closes the layers that hold the vocabulary")
    sizes = sorted({r.tp for s in plan.stages for r in s.replicas})
    if len(sizes) > 1:
        raise PlanError(
            _WHERE, True, f"ranks of equal TP rank share it, but replicas have TP sizes {sizes}",
            "Give all replicas one TP size, or leave the vocabulary on the last stage",
        )


def check_vocabulary(plan: Plan, args: Any) -> None:
    """Refuse what a split vocabulary cannot do, before anything is started.

    Args:
        plan: The checked plan; nothing happens unless its schedule asks for the split.
        args: Megatron's parsed arguments.

    Raises:
        PlanError: The first thing that does not fit.
    """
    check_vocabulary_plan(plan)
    if not splits_vocabulary(plan):
        return
    for name, reason in _REFUSED:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise PlanError(flag, getattr(args, name), f"cannot be used with {_WHERE}: {reason}")
    _check_divides(plan, args, plan.stages[0].replicas[0].tp)


_NOT_OFFLOADED: tuple[tuple[str, str], ...] = (
    ("fine_grained_activation_offloading", "it moves the same activations"),
    ("cpu_offloading_num_layers", "it moves the same activations"),
)


def check_offload_plan(plan: Plan) -> None:
    """Refuse a plan whose share of activations on the host is none.

    Raises:
        PlanError: The share is not a number above 0 and at most 1.
    """
    if OFFLOAD not in plan.schedule.parameters:
        return
    ratio = plan.schedule.parameters[OFFLOAD]
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise PlanError("--het-offload-activations", ratio, "must be a share above 0 and at most 1")


def check_offload(plan: Plan, args: Any) -> None:
    """Refuse what the offload of activations cannot do, before anything is started.

    Raises:
        PlanError: The first thing that does not fit.
    """
    check_offload_plan(plan)
    if OFFLOAD not in plan.schedule.parameters:
        return
    for name, reason in _NOT_OFFLOADED:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise PlanError(flag, getattr(args, name), f"cannot be used with --het-offload-activations: {reason}")


def _check_divides(plan: Plan, args: Any, tp: int) -> None:
    parts, stages = len(plan.stages) * tp, len(plan.stages)
    padded = getattr(args, "padded_vocab_size", None)
    if padded is not None:
        if padded % parts:
            raise PlanError(
                "--padded-vocab-size", padded, f"does not divide over {stages} stages of TP size {tp}",
                f"Use a multiple of {parts}",
            )
    elif args.make_vocab_size_divisible_by % stages:
        # Megatron pads to a multiple of this times TP.
        raise PlanError(
            "--make-vocab-size-divisible-by", args.make_vocab_size_divisible_by,
            f"the vocabulary must divide over {stages} stages", f"Use a multiple of {stages}",
        )
