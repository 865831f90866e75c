"""Switches the extension on in a process that is about to run ``megatron.training``.

Rebinds the few functions of ``megatron.training`` that have no public hook (``megatron_patches/patches.py``).
Programs call :func:`megatron_het.launch.start.install`, which also handles the optional packages.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_het.arguments import megatron_args
from megatron_het.arguments.flags import het_help, split_arguments
from megatron_het.families import family_for
from megatron_het.features import features_of
from megatron_het.megatron_patches import releases
from megatron_het.megatron_patches.releases import PatchError, find
from megatron_het.plan import Placement, Plan, PlanError
from megatron_het.plan.run_config import HetConfig, check_batch_schedule, errors_of
from megatron_het.safe_io import FileError, check_target

if TYPE_CHECKING:  # it imports torch
    from megatron_het.device import Platform
    from megatron_het.runtime.session import HetSession
    from megatron_het.runtime.training import Boundary


Chooses = Callable[[HetConfig, list[str]], tuple[HetConfig, list[str]]]
"""Makes a run's plan if flags leave it to measurements: from (configuration, Megatron's words) to the same pair."""


def install(
    argv: list[str] | None = None,
    make_session: Callable[[HetConfig, Platform, int], HetSession] | None = None,
    boundary: Boundary | None = None,
    choose_plan: Chooses | None = None,
    measure: Callable[[HetConfig, Platform], HetConfig] | None = None,
) -> HetConfig:
    """Does the work of :func:`megatron_het.launch.start.install`, errors included, without the optional packages.

    Args:
        choose_plan: Makes the run's plan if flags leave it to measurements; default none is made.
        measure: Completes a plan by measurements on the devices if flags request it; default nothing.
    """
    argv = sys.argv if argv is None else argv
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(het_help() + "\nMegatron's own flags:\n\n")
    try:
        config, rest = split_arguments(argv[1:])
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if config.plan is not None and world_size != config.plan.world_size:
            problem = f"the plan {config.plan_path} has {config.plan.world_size} ranks"
            hint = "Start as many processes as the plan has ranks, or make a plan for this world size"
            raise PlanError("WORLD_SIZE", world_size, problem, hint)
        if config.plan is not None:
            refuse_yaml(rest)
        releases.check(find())
        check_outputs(config)
        if choose_plan is not None:
            config, rest = choose_plan(config, rest)
    except (PlanError, PatchError) as error:
        exit_with(error)
    if boundary is not None:
        config = replace(config, turns=boundary.plans)
    argv[1:] = rest
    if config.plan is not None:
        for name, value in megatron_args.environment_of(config.plan).items():
            os.environ.setdefault(name, value)  # before anything asks for a device

    from megatron_het import device as platform
    from megatron_het import megatron_patches as upstream

    device = platform.activate()
    upstream.install("stock")
    try:
        if measure is not None and config.measured_cp_shares:
            config = measure(config, device)
    except PlanError as error:
        exit_with(error)
    if config.plan is not None:
        _install_plan(config, device, make_session, boundary)
    return config


def check_outputs(config: HetConfig) -> None:
    """Refuse output folders that cannot be written to, before anything starts rather than after the training."""
    rank = int(os.environ.get("RANK", "0"))
    for file in (config.report_file(rank), config.trace_file(rank)):
        try:
            if file is not None:
                check_target(file)
        except FileError as error:  # perhaps only on this machine, so every rank prints it
            sys.stderr.write(f"megatron_het: rank {rank}: {error}\n")
            raise SystemExit(2) from None


def refuse_yaml(words: list[str]) -> None:
    """Refuse Megatron's YAML arguments before its parser reads the file and fails without a clear error."""
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if len(name) > 3 and "--yaml-cfg".startswith(name):
            file = value or next(iter(words[i + 1 : i + 2]), "")
            raise PlanError("--yaml-cfg", file, "cannot be used with a plan", "Give the options as flags")


def exit_with(error: Exception, speakers: Collection[int] = (0,)) -> NoReturn:
    """Exit on every rank; only ``speakers`` print the error, each for the ranks that fail alike."""
    if int(os.environ.get("RANK", "0")) in speakers:
        sys.stderr.write(f"megatron_het: {error}\n")
    raise SystemExit(2) from error


def _install_plan(
    config: HetConfig,
    device: Platform,
    make_session: Callable[[HetConfig, Platform, int], HetSession] | None,
    boundary: Boundary | None,
) -> None:
    from megatron_het import megatron_patches as upstream
    from megatron_het.megatron_patches import torch_checkpoints
    from megatron_het.runtime.session import HetSession
    from megatron_het.runtime.training import Boundary, PretrainHook, single_iterations

    assert config.plan is not None
    for feature, _ in features_of(config.plan):
        upstream.watch(f"the feature {feature.name}", feature.upstream_names)
    family = family_for(config.plan)
    upstream.watch(f"training a {family.model} under a plan", family.upstream_names)
    try:
        session = (make_session or HetSession)(config, device, int(os.environ.get("RANK", "0")))
    except PlanError as error:
        exit_with(error)
    torch_checkpoints.guard_reads(trusts=config.trust_checkpoint)
    boundary = boundary or Boundary()
    pretrain = PretrainHook(session, boundary)
    upstream.install(
        "plan",
        builders={
            "plan_arguments": _validate_args_hook(config, device, session, boundary.prepare),
            "plan_schedule": pretrain.wrap_schedule_getter,
            "plan_pretrain": pretrain.wrap,
            "plan_log": single_iterations,
            "plan_save": pretrain.wrap_generate_state_dict,
            "plan_load": pretrain.wrap_load,
        },
    )


def _check_transport(transport: str, backend: str, device: Platform) -> None:
    from megatron_het.lowering.programs import choose_transport

    if backend == "gloo" and (device.is_cuda or device.plays_cuda):
        raise PlanError(
            "--distributed-backend",
            backend,
            "groups of gloo cannot train with CUDA tensors: they cannot sum gradients, and change tensors that a "
            "backward pass still needs",
            "Leave the flag out. Ranks that share a device use NCCL, too: torchrun and het-run prepare them for it. "
            "--het-transport staged moves activations by way of host memory",
        )
    try:
        choose_transport(transport, backend, device.has_nccl)
    except ValueError as error:
        raise PlanError("--het-transport", transport, str(error)) from error


def _check_platform(device: Platform, args: Any) -> None:
    """Name all missing flags that this machine needs at once; without them Megatron fails late, one flag at a time."""
    if getattr(args, "cuda_graph_impl", "none") != "none" and not (device.is_cuda or device.plays_cuda):
        problem = f"this machine ({device.device_name}) has no CUDA device"
        raise PlanError("--cuda-graph-impl", args.cuda_graph_impl, problem, "Leave it out")
    missing = device.unmet_flags(args)
    if missing:
        raise PlanError(
            "--" + missing[0].attribute.replace("_", "-"),
            getattr(args, missing[0].attribute),
            f"this machine ({device.device_name}) needs other flags",
            "Add " + ", ".join(str(flag) for flag in missing),
        )


def _check_wandb(args: Any) -> None:
    """Refuse a missing wandb early: Megatron imports it on the last rank only, after all groups exist."""
    project = getattr(args, "wandb_project", None)
    if project and args.rank == args.world_size - 1 and importlib.util.find_spec("wandb") is None:
        error = PlanError("--wandb-project", project, "wandb is not installed", "Install it, or leave the flag out")
        sys.stderr.write(f"megatron_het: rank {args.rank}: {error}\n")
        raise SystemExit(2)


def argument_problems(config: HetConfig, device: Platform, session: HetSession, args: Any) -> Iterator[PlanError]:
    """Problems of Megatron's parsed, not yet validated arguments under a plan; one error per kind of check.

    Flags that this machine needs are not checked here; see ``Platform.unmet_flags``.

    Args:
        config: A configuration with a plan.
        session: A session of the same configuration; not open.
        args: The result of Megatron's ``parse_args``.
    """
    plan = config.plan
    assert plan is not None
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_batch_schedule(config.turns or (plan,), args),
        *(functools.partial(_check_turn, one, config.turns, args) for one in config.turns or (plan,)),
        lambda: session.check(args),
        *(functools.partial(_check_programs, one, config.turns, args) for one in config.turns if one is not plan),
        lambda: _check_transport(config.transport, args.distributed_backend, device),
    )
    for check in checks:
        try:
            check()
        except PlanError as error:
            yield error


def _check_turn(plan: Plan, turns: Sequence[Plan], args: Any) -> None:
    """Check the arguments against another plan of the job, which may be used only hours later."""
    with errors_of(_turn_of(plan), turns):
        megatron_args.check_arguments(plan, args, args.world_size)


def _check_programs(plan: Plan, turns: Sequence[Plan], args: Any) -> None:
    """Checks the programs of another plan than this session's."""
    from megatron_het.runtime.session import check_programs

    with errors_of(_turn_of(plan), turns):
        check_programs(plan, args)


def _turn_of(plan: Plan) -> str:
    return f"the plan for a global batch size of {plan.training.global_batch_size}"


def _speakers(plan: Plan, rank: int) -> set[int]:
    """The first rank of the job and of each TP size, and this one where it is the first of its node."""
    replicas = [replica for stage in plan.stages for replica in stage.replicas]
    tp = next((replica.tp for replica in replicas if rank in replica.ranks), 0)  # 0: more ranks than the plan has
    first = min((replica.ranks[0] for replica in replicas if replica.tp == tp), default=0)
    return {0, first, rank if os.environ.get("LOCAL_RANK", "0") == "0" else 0}


def _validate_args_hook(
    config: HetConfig, device: Platform, session: HetSession, prepare: Callable[[Any], None]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Builds the replacement of ``megatron.training.arguments.validate_args``."""
    from megatron_het.checkpoint.choice import CheckpointError, check_tracked_form

    plan = config.plan
    assert plan is not None

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate_args(args: Any, defaults: dict[str, Any] | None = None) -> Any:
            try:
                for problem in argument_problems(config, device, session, args):
                    raise problem
                _check_platform(device, args)
            except PlanError as error:
                exit_with(error, _speakers(plan, args.rank))
            _check_wandb(args)
            if getattr(args, "sequence_parallel", False) and not plan.training.sequence_parallel and args.rank == 0:
                sys.stderr.write("megatron_het: --sequence-parallel is left out: the plan has TP 1 everywhere\n")
            if device.is_cuda:
                import torch

                name = torch.cuda.get_device_name(args.local_rank % torch.cuda.device_count())
                try:
                    megatron_args.check_device_kind(plan, args.rank, name)
                except PlanError as error:  # on this rank only
                    exit_with(error, {args.rank})
            prepare(args)
            world_size = args.world_size
            args.world_size = megatron_args.apply_plan(plan, Placement(plan), args, args.rank)
            try:
                result = original(args, defaults or {})
                args.world_size = world_size
                megatron_args.check_chunks(plan, args)  # validation has read more iterations to skip from a file
                check_tracked_form(args)
            except (PlanError, CheckpointError) as error:
                exit_with(error, _speakers(plan, args.rank))
            except (AssertionError, ValueError) as error:  # an elastic job returns to its previous plan
                why = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
                refusal = ValueError(f"Megatron refuses the flags under this plan: {why}")
                exit_with(refusal, _speakers(plan, args.rank))
            megatron_args.apply_after_validation(plan, args)
            args.het_plan = config.plan_path
            return result

        return validate_args

    return wrap
