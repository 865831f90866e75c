"""Options of the parameter window, read from the plan's schedule.  No torch in here.

They are parameters of the schedule ``ministage`` in the plan, because memory and time depend on
them: ``{"name": "ministage", "parameters": {"window": true, "prefetch": 1, ...}}``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from megatron_het.plan import Placement, Plan, PlanError, ScheduleSpec
from megatron_het.plan.shares import state_shares
from megatron_het.schedule.ir import Kind

SCHEDULE = "ministage"
UPDATES = ("exact", "at-once", "undo", "per-ministage")
PARAMETER_KINDS = (
    Kind.PARAM_PREFETCH,
    Kind.PARAM_GATHER,
    Kind.PARAM_RELEASE,
    Kind.PARAM_OFFLOAD,
    Kind.GRAD_REDUCE,
    Kind.OPTIMIZER_STEP,
)
"""What the window does; everything else in a program is the executor's."""


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """How parameters are sharded and opened (Zorse, section 4.1).

    Attributes:
        prefetch: Ministages that are opened ahead of the current one; 0 opens right before use.
        keep_at_turn: Keep the last ministage open between its forward and its backward.
        per_layer: Gather and reduce layer by layer instead of a whole ministage at once.
        per_microbatch: Open and release around every microbatch, as ZeRO-3 does; for comparison.
        offload: Shards live in host memory while their ministage is closed.
        offload_optimizer: The optimizer's state of a ministage lives in host memory while it is not
            being updated.
        update: ``exact``: a ministage is updated when it is next opened, after the global gradient
            norm and overflow are known; ``at-once``: as soon as its gradients are reduced; ``undo``:
            likewise, with the old state kept on the host and the update undone and made again when
            the global norm or an overflow asks for it; ``per-ministage``: as soon as its gradients
            are reduced, clipped by the norm of this ministage alone.
    """

    prefetch: int = 1
    keep_at_turn: bool = True
    per_layer: bool = True
    per_microbatch: bool = False
    offload: bool = False
    offload_optimizer: bool = False
    update: str = "exact"

    @property
    def updates_early(self) -> bool:
        """Whether updates are operations of the program, inside the iteration."""
        return self.update != "exact"


def split_parameters(spec: ScheduleSpec) -> tuple[dict[str, Any], WindowOptions | None]:
    """Separate the window's options from the generator's parameters.

    Returns:
        Parameters of the generator, and the options; None without a window.

    Raises:
        PlanError: A value of the wrong type or out of range, or options without ``window``.
    """
    names = {f.name: f for f in fields(WindowOptions)}
    given = {k: v for k, v in spec.parameters.items() if k in names}
    rest = {k: v for k, v in spec.parameters.items() if k not in names and k != "window"}
    window = spec.parameters.get("window", False)
    if spec.name != SCHEDULE:
        return dict(spec.parameters), None
    if not isinstance(window, bool):
        raise PlanError("schedule.parameters.window", window, "must be true or false")
    if not window:
        if given:
            name = next(iter(given))
            raise PlanError(
                f"schedule.parameters.{name}", given[name], "is an option of the parameter window",
                'Add "window": true',
            )
        return rest, None
    for name, value in given.items():
        wanted = type(names[name].default)
        if type(value) is not wanted:
            raise PlanError(f"schedule.parameters.{name}", value, f"must be of type {wanted.__name__}")
    options = WindowOptions(**given)
    if options.prefetch < 0:
        raise PlanError("schedule.parameters.prefetch", options.prefetch, "must not be negative")
    if options.update not in UPDATES:
        raise PlanError("schedule.parameters.update", options.update, f"must be one of {UPDATES}")
    return rest, options


# (attribute of Megatron's arguments, why it cannot be used with a window)
_REFUSED: tuple[tuple[str, str], ...] = (
    ("overlap_grad_reduce", "the window reduces gradients itself, overlapped with the next ministage"),
    ("overlap_param_gather", "the window gathers parameters itself"),
    ("async_save", "parameters are materialised only while a checkpoint is written synchronously"),
    ("log_params_norm", "it reads parameters that are not materialised"),
    ("check_weight_hash_across_dp_replicas_interval", "it reads parameters that are not materialised"),
    ("use_precision_aware_optimizer", "its main parameters are not the window's"),
    ("optimizer_cpu_offload", "use the window's own offload"),
    ("save_wgrads_interval", "gradients are freed as soon as they are reduced"),
    ("save_params_interval", "parameters are not materialised between iterations"),
    ("freeze_all_layers", "there is nothing to reduce"),
    ("ddp_param_name_patterns_for_fp32_local_accumulation", "the window reduces the gradient buffers, "
     "into which upstream copies these gradients in its own reduction only"),
    ("ddp_reduce_scatter_with_fp32_accumulation", "the window's own reduction sums in the type of the gradients"),
)  # fmt: skip


def check_window_plan(plan: Plan) -> WindowOptions | None:
    """Refuse a plan that contradicts its own window, whatever the training's arguments.

    Returns:
        Its options, None without a window.

    Raises:
        PlanError: The first thing that does not fit.
    """
    _, options = split_parameters(plan.schedule)
    if options is None:
        _check_no_shares(plan)
        return None
    if not plan.training.distributed_optimizer:
        raise PlanError(
            "training.distributed_optimizer", False, "the parameter window shards over the distributed optimizer",
            "Set it to true",
        )
    if plan.model.tied_embeddings and len(plan.stages) > 1:
        raise PlanError(
            "model.tied_embeddings", True, "the copies of tied embeddings are reduced together, but the "
            "window has only one ministage's gradients at a time", "Untie them, or plan without a window",
        )
    placement = Placement(plan)
    for stage in range(placement.num_stages):
        if placement.is_mixed(stage):
            raise PlanError(
                f"stages[{stage}].replicas", placement.class_sizes(stage),
                "replicas of different TP cannot share the shards of a parameter window",
                "Give the replicas one TP size, or plan without a window",
            )
    per_stage = [{len(r.microbatches) for r in stage.replicas} for stage in plan.stages]
    if options.per_microbatch and any(len(found) > 1 for found in per_stage):
        raise PlanError(
            "schedule.parameters.per_microbatch", True, "replicas gather together, so all replicas of a "
            f"stage need equally many microbatches; found {[sorted(found) for found in per_stage]}",
        )
    return options


def check_window(plan: Plan, args: Any) -> None:
    """Refuse what cannot go together with the plan's window, if it has one.

    Raises:
        PlanError: The first thing that does not fit.
    """
    options = check_window_plan(plan)
    if options is None:
        return
    for name, reason in _REFUSED:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise PlanError(flag, getattr(args, name), f"cannot be used with a parameter window: {reason}")
    if getattr(args, "optimizer", "adam") != "adam":
        raise PlanError("--optimizer", args.optimizer, "the parameter window supports adam only")
    if options.update in ("at-once", "per-ministage"):
        _check_early(plan, args, options.update)


def _check_no_shares(plan: Plan) -> None:
    for s, stage in enumerate(plan.stages):
        if state_shares(stage) is not None:
            raise PlanError(
                f"stages[{s}].replicas[*].state_share", [r.state_share for r in stage.replicas],
                "unequal shares of a stage's state need a parameter window",
                f'Use schedule {SCHEDULE} with "window": true, or leave state_share out',
            )


def _check_early(plan: Plan, args: Any, update: str) -> None:
    """What needs all gradients cannot go with updates that are never taken back."""
    where, advice = "schedule.parameters.update", 'Use "exact" or "undo", or switch the option off'
    if args.clip_grad > 0 and update == "at-once":
        raise PlanError(where, update, f"--clip-grad {args.clip_grad} needs the norm of all gradients", advice)
    if plan.training.precision == "fp16":
        raise PlanError(where, update, "fp16 skips a whole step when any gradient overflows", advice)
    if args.log_num_zeros_in_grad:
        raise PlanError(where, update, "--log-num-zeros-in-grad needs all gradients at once", advice)
    if math.isfinite(getattr(args, "grad_norm_skip_threshold", math.inf)):
        raise PlanError(where, update, "--grad-norm-skip-threshold needs the norm of all gradients", advice)
    if args.rerun_mode != "disabled":
        raise PlanError(
            where, update, f"--rerun-mode {args.rerun_mode} runs an iteration a second time, with parameters that the "
            "first time has already updated", 'Add --rerun-mode disabled, or use "exact" or "undo"',
        )
