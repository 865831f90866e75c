"""The parameter window, and what it cannot be combined with (Zorse, section 4.1; ZeRO-2 and 3: Poplar, section 3).

Its options are parameters of the schedule in the plan, because memory and time depend on them:
``{"name": "ministage", "parameters": {"window": true, "prefetch": 1, ...}}``, or, without a pipeline,
``{"name": "data-parallel", "parameters": {"window": true, "zero": 3}}``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from megatron_het.features.base import Feature, Figures, Option, Refusal, ViewFlag, option
from megatron_het.features.registry import rows_are_shared
from megatron_het.features.window.kinds import ZERO_STAGES
from megatron_het.plan import Plan, PlanError
from megatron_het.plan.placement import state_shares
from megatron_het.schedule.cost import Costs, PerChunk
from megatron_het.schedule.ir import Place, Program

SCHEDULE = "ministage"
ALONE = "data-parallel"  # the schedule without a pipeline, where the window is ZeRO-2 or 3
UPDATES = ("exact", "at-once", "undo", "per-ministage")
_FSDP = (
    "FSDP replaces the process groups that a plan sets up. A plan has ZeRO of its own: --het-schedule data-parallel "
    "--het-zero 3, or ministages with --het-window"
)


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """How parameters are sharded and gathered."""

    # ministages that are opened ahead of the current one; 0 opens right before use
    prefetch: int = option("prefetch", 1)
    # keep the last ministage open between its forward and its backward
    keep_at_turn: bool = option("keep_at_turn", True)
    per_layer: bool = option("per_layer", True)  # gather and reduce layer by layer instead of a whole ministage at once
    # open and release around every microbatch, as ZeRO-3 does; for comparison
    per_microbatch: bool = option("per_microbatch", False)
    offload: bool = option(
        "offload",
        False,
        on_host=True,
        flag="--het-offload-parameters",
        help="keep parameter shards in host memory while their ministage is not gathered",
    )
    offload_optimizer: bool = option(
        "offload_optimizer",
        False,
        on_host=True,
        flag="--het-offload-optimizer",
        help="keep the optimizer's state in host memory except during the update of its ministage",
    )
    # ``exact``: a ministage is updated when it is next opened, after the global gradient norm and overflow are known;
    # ``at-once``: as soon as its gradients are reduced; ``undo``: like ``at-once``, but the old state is kept on the
    # host, and the update is undone and made again if the global norm or an overflow requires it; ``per-ministage``: as
    # soon as its gradients are reduced, clipped by the norm of only this ministage
    update: str = option(
        "update",
        "exact",
        flag="--het-update",
        choices=UPDATES,
        help="update of a ministage: exact (after the global gradient norm, the default), at-once, "
        "undo (at once, reverted if the norm requires it), per-ministage (clipped by its own norm); at-once "
        "and per-ministage need --rerun-mode disabled",
    )

    # without a pipeline: 2 reduces gradients after every pass, 3 also gathers a chunk's parameters for every pass; 0
    # for ministages, whose window gathers and reduces once per iteration
    zero: int = option(
        "zero",
        0,
        flag="--het-zero",
        metavar="STAGE",
        accepts=lambda value, plan: value in ZERO_STAGES,
        problem="must be 2 or 3",
        help="with --het-schedule data-parallel: 2 reduces gradients to shards after every pass, 3 also gathers "
        "parameters for every pass (ZeRO-2 and 3); ZeRO-1 is --use-distributed-optimizer without this flag",
    )
    # place of the updates in a program that is only shown (``add_parameters``); for a plan, ``update`` decides
    steps: str = ""
    # (stage, chunk) of ministages that are updated last, because they have copies of tied embeddings
    late: tuple[Place, ...] = ()

    @property
    def updates_early(self) -> bool:
        """Whether updates are operations of the program, inside the iteration."""
        return self.update != "exact"


class Window(Feature):
    """Divides a stage's parameters over its replicas; only a few ministages are gathered at a time."""

    name = "window"
    title = "parameter window"
    called = "a parameter window"
    options = WindowOptions
    switch = Option(
        "window",
        flag="--het-window",
        help="with --het-schedule ministage: shard a stage's parameters over its replicas and keep only "
        "two ministages whole (Zorse, section 4.1); the next four flags imply it; shards are equal unless the "
        "plan's replicas have a state_share",
        problem="must be true or false",
    )
    implied = True
    schedules = (SCHEDULE, ALONE)
    view_flags = (
        ViewFlag("--parameters", "gather parameters per chunk, reduce gradients"),
        ViewFlag("--prefetch", "chunks gathered ahead (default %(default)s)", 1, most=10_000),
        ViewFlag("--step", "optimizer steps", "end", choices=("end", "ministage", "none")),
    )
    optimizer_layers = (
        "megatron_het.features.window.shards.divided",
        "megatron_het.features.window.chunk.chunk_by_chunk",
    )
    upstream_names: ClassVar[Mapping[str, str]] = {
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._copy_model_grads_to_main_grads": (
            "d7077b92f8a06cba"
        ),
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.step_with_ready_grads": "203a8a27eaec9bab",
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._compute_per_buffer_param_layout": (
            "327594ce0ba01506"
        ),
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._get_model_param_range_map": "ab408ff0d61dc4b3",
        "megatron.core.optimizer.optimizer.MegatronOptimizer.get_grads_for_grad_norm": "28869523be1544ea",
        "megatron.core.optimizer.optimizer.MegatronOptimizer._filter_grads_for_norm": "c72d5ca6a16e2497",
        "megatron.core.optimizer.clip_grads.get_grad_norm_fp32": "a190cbb1ba99eb60",
        "megatron.core.optimizer.clip_grads.clip_grad_by_total_norm_fp32": "e7e14463e81dee9a",
        "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads": "b8b3681b2ba049de",
        "megatron.core.distributed.param_and_grad_buffer.shard_buffer": "4ba2cc53483b6eb9",
        "megatron.core.distributed.param_and_grad_buffer.group_params_for_buffers": "a59d890cfc281af8",
        "megatron.training.models.gpt.GPTModelBuilder.build_distributed_models": "85df9d383a74ef40",
        "megatron.training.models.dist_utils.prepare_existing_model_chunks_for_distributed_training": (
            "c64b5a70420eeefd"
        ),
    }
    no_graphs = "a graph reads weights and adds to gradients where they were at its capture; a window moves them"
    refused_by_plans = tuple(Refusal(name, _FSDP) for name in ("use_torch_fsdp2", "use_megatron_fsdp"))
    refused = (
        Refusal("log_params_norm", "it reads parameters that are not materialised"),
        Refusal("qk_clip", "it changes parameters that are not materialised"),
        Refusal("check_weight_hash_across_dp_replicas_interval", "it reads parameters that are not materialised"),
        Refusal("use_precision_aware_optimizer", "its main parameters are not the window's"),
        Refusal("fp8_param_gather", "it gathers weights itself, as they are"),
        Refusal("optimizer_cpu_offload", "use the window's own offload"),
        Refusal("save_wgrads_interval", "gradients are freed as soon as they are reduced"),
        Refusal("save_params_interval", "parameters are not materialised between iterations"),
        Refusal("freeze_all_layers", "there is nothing to reduce"),
        Refusal("ddp_param_name_patterns_for_fp32_local_accumulation", "only upstream's reduction knows it"),
        Refusal("ddp_reduce_scatter_with_fp32_accumulation", "the window's reduction sums in the gradients' type"),
    )

    def viewed(self, flags: Mapping[str, Any]) -> WindowOptions | None:
        """Options for the command line's view: whole chunks, with updates at the place of ``--step``."""
        if not flags["parameters"]:
            return None
        return WindowOptions(flags["prefetch"], per_layer=False, offload=flags["offload"], steps=flags["step"])

    def options_of(self, plan: Plan) -> WindowOptions | None:
        """The options, completed by the ministages that have copies of tied embeddings."""
        options: WindowOptions | None = super().options_of(plan)
        if options is None or not plan.model.embeds_twice or plan.path[0] == plan.path[-1]:
            return options
        return replace(options, late=(plan.path[0], plan.path[-1]))

    def elsewhere(self, plan: Plan, given: Option) -> PlanError | None:
        """The error for a window with another schedule."""
        if given is not self.switch:
            return None
        problem = f"schedule {plan.schedule.name} has no parameter window"
        return PlanError(given.flag, plan.schedule.parameters["window"], problem, f"Use --het-schedule {SCHEDULE}")

    def check_off(self, plan: Plan) -> None:
        """Refuse unequal shares of a stage's state without a window."""
        for s, stage in enumerate(plan.stages):
            if state_shares(stage) is not None:
                raise PlanError(
                    f"stages[{s}].replicas[*].state_share",
                    [r.state_share for r in stage.replicas],
                    "unequal shares of a stage's state need a parameter window",
                    f'Use schedule {SCHEDULE} with "window": true, or leave state_share out',
                )

    def check_plan(self, plan: Plan, options: WindowOptions) -> None:
        """Refuse a plan that contradicts its own window."""
        if options.prefetch < 0:
            raise PlanError("schedule.parameters.prefetch", options.prefetch, "must not be negative")
        if not plan.training.distributed_optimizer:
            hint = "Set it to true (flag: --use-distributed-optimizer)"
            raise PlanError("training.distributed_optimizer", False, "the parameter window shards over it", hint)
        for s, stage in enumerate(plan.stages):
            kept = {r.cut for r in stage.replicas if r.state_share > 0}
            for replica in stage.replicas:
                if replica.cut not in kept:
                    raise PlanError(
                        f"stages[{s}].replicas[*].state_share",
                        [r.state_share for r in stage.replicas],
                        f"nobody keeps the state of the replicas of {replica.cut}: replicas that cut weights alike "
                        "share a copy of their own",
                        "Give one of them a share",
                    )
        _check_zero(plan, options)
        _check_shared_rows(plan, options)
        per_stage = [{len(r.microbatches) for r in stage.replicas} for stage in plan.stages]
        if options.per_microbatch and any(len(found) > 1 for found in per_stage):
            raise PlanError(
                "schedule.parameters.per_microbatch",
                True,
                "replicas gather together, so all replicas of a "
                f"stage need equally many microbatches; found {[sorted(found) for found in per_stage]}",
            )

    def check_copies(self, plan: Plan, options: WindowOptions) -> None:
        """Refuse updates by which two gradient norms would clip the copies of one weight."""
        if options.update == "per-ministage":
            raise PlanError(
                "schedule.parameters.update",
                options.update,
                "the copies of tied embeddings, in the first and the last ministage, would be clipped by two norms",
                'Use "exact", "undo" or "at-once", untie them, or split the vocabulary over one ministage per stage',
            )

    def check_arguments(self, plan: Plan, options: WindowOptions, args: Any) -> None:
        """Refuse the arguments of the table, and options that need all gradients at once."""
        super().check_arguments(plan, options, args)
        if options.update in ("at-once", "per-ministage"):
            _check_early(plan, args, options.update)

    def apply(self, plan: Plan, options: WindowOptions, args: Any) -> None:
        """Switch off Megatron's overlaps: the window overlaps gathers and reductions itself."""
        args.overlap_grad_reduce = args.overlap_param_gather = False

    def after_transfers(self, program: Program, options: WindowOptions) -> Program:
        """The program in which parameters are gathered before their use and gradients reduced after it."""
        from megatron_het.features.window.passes import add_parameters, add_sharded_passes

        opening = {name: getattr(options, name) for name in ("prefetch", "per_layer", "offload", "keep_at_turn")}
        if options.zero:
            return add_sharded_passes(program, zero=options.zero, **opening)
        step = options.steps or ("ministage" if options.updates_early else "none")
        return add_parameters(program, **opening, per_operation=options.per_microbatch, step=step, late=options.late)

    def in_order(self, program: Program, options: WindowOptions, speeds: Sequence[float] | None) -> Program:
        """The program in which replicas reach their gathers and reductions in one order."""
        from megatron_het.features.window.passes import post_together

        return post_together(program, speeds=speeds)

    def price(self, costs: Costs, options: WindowOptions, program: Program, figures: Figures) -> Costs:
        """Add the costs of gathers and reductions over the stage's replicas, and of shards from and to the host."""
        copies = _by_layers(program, figures.host_copy_s) if options.offload else ()
        return replace(
            costs,
            gather_s=_by_layers(program, figures.gather_s),
            reduce_s=_by_layers(program, figures.reduce_s),
            prefetch_s=copies,
            offload_s=copies,
        )


def _check_shared_rows(plan: Plan, options: WindowOptions) -> None:
    """Refuse options that cannot be combined with a split vocabulary."""
    if not rows_are_shared(plan):
        return
    switch = "--het-vocabulary-parallel"
    if plan.model.tied_embeddings and any(len(stage.layers) > 1 for stage in plan.stages):
        raise PlanError(
            "model.tied_embeddings",
            True,
            f"with a parameter window and {switch} a stage's rows are in its first ministage, which is closed "
            "when its last ministage needs them for the output layer",
            f"Use one ministage per stage, untie them, or leave out {switch}",
        )
    if not options.zero and (options.per_microbatch or not options.keep_at_turn):
        name = "per_microbatch" if options.per_microbatch else "keep_at_turn"
        raise PlanError(
            f"schedule.parameters.{name}",
            options.per_microbatch,
            "parts of the output layer run between the last ministage's forwards and backwards, all over the "
            "pipeline: its replicas would wait for each other if it was closed in between",
            f"Leave it out, or {switch}",
        )


def _check_zero(plan: Plan, options: WindowOptions) -> None:
    """Refuse ``zero`` with ministages, and without a pipeline a window that does not set it to 2 or 3."""
    where, alone = "schedule.parameters.zero", plan.schedule.name == ALONE
    if not alone and options.zero:
        problem = f"is for schedule {ALONE}; schedule {plan.schedule.name} gathers and reduces once per iteration"
        raise PlanError(where, options.zero, problem, f"Leave it out, or use schedule {ALONE} with one stage")
    if alone and not options.zero:
        raise PlanError(
            where, options.zero, f"schedule {ALONE} needs it for a window", "Say 2 or 3, or leave the window out"
        )
    if alone and options.per_microbatch:
        raise PlanError("schedule.parameters.per_microbatch", True, f"schedule {ALONE} has zero instead", "Use zero: 3")
    if alone and options.updates_early:
        problem = "the tokens of the batch, by which gradients are divided, are known after the last pass only"
        raise PlanError("schedule.parameters.update", options.update, problem, 'Use "exact"')


def _check_early(plan: Plan, args: Any, update: str) -> None:
    """Refuse arguments that need all gradients together with updates that are never undone."""
    where, advice = "schedule.parameters.update", 'Use "exact" or "undo", or switch the option off'
    if args.clip_grad > 0 and update == "at-once":
        raise PlanError(where, update, f"--clip-grad {args.clip_grad} needs the norm of all gradients", advice)
    if plan.training.precision == "fp16":
        raise PlanError(where, update, "fp16 skips a whole step when any gradient overflows", advice)
    if args.log_num_zeros_in_grad:
        raise PlanError(where, update, "--log-num-zeros-in-grad needs all gradients at once", advice)
    if args.rerun_mode != "disabled":
        raise PlanError(
            where,
            update,
            f"--rerun-mode {args.rerun_mode} runs an iteration a second time, with parameters that the "
            "first time has already updated",
            'Add --rerun-mode disabled, or use "exact" or "undo"',
        )


def _by_layers(program: Program, whole: Sequence[float]) -> PerChunk:
    """Divide a figure of each device over its chunks in proportion to their layers."""
    rows = []
    for device, value in zip(program.devices, whole, strict=True):
        layers = program.shape.layers[device.stage]
        total = sum(layers)
        rows.append(tuple(value * (n / total if total else 1 / len(layers)) for n in layers))
    return tuple(rows)
