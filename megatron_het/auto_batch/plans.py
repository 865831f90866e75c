"""The plans of automatic batches: the one that is measured, and the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_het.auto_batch.allocation import Allocation
from megatron_het.plan import Plan, PlanError, Replica, ScheduleSpec, Stage
from megatron_het.plan.from_flags import plan_from_flags
from megatron_het.plan.validate import check_plan

ZERO_STAGES = (0, 1, 2, 3)
_FLAG = "--het-auto-batch"
_CHUNKS = 16  # most chunks that ZeRO-2 and 3 cut the layers into
_IMPLIED = "--calculate-per-token-loss"
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


def base_plan(words: Sequence[str], world_size: int) -> tuple[Plan, list[str]]:
    """The plan of Megatron's flags with one sequence per pass, and the words for Megatron.

    Args:
        words: Megatron's part of the command line.
        world_size: Number of ranks.

    Raises:
        PlanError: A flag is missing, or says what is measured.
    """
    given = {word.split("=", 1)[0]: word for word in words}
    if "--micro-batch-size" in given:
        raise PlanError("--micro-batch-size", "given", f"{_FLAG} measures it", "Leave the flag out")
    if "--global-batch-size" not in given:
        raise PlanError("--global-batch-size", None, f"required with {_FLAG}", "Say how many sequences a step has")
    # As many passes as ranks, whatever the batch: only the model and the numerics are taken from this plan.
    position = next(i for i, word in enumerate(words) if word.split("=", 1)[0] == "--global-batch-size")
    value = given["--global-batch-size"].partition("=")[2] or next(iter(words[position + 1 : position + 2]), "")
    if not value.isdecimal() or len(value) > 9 or int(value) < 1:
        raise PlanError("--global-batch-size", value, "must be a positive number of sequences")
    size = int(value)
    if size < world_size:
        raise PlanError(
            "--global-batch-size", size, f"is less than one sequence for each of {world_size} ranks", "Use fewer ranks"
        )
    rest = _without(words, "--global-batch-size")
    shape = [*rest, "--micro-batch-size", "1", "--global-batch-size", str(world_size)]
    plan, _ = plan_from_flags(shape, world_size, ScheduleSpec("data-parallel"))
    if len(plan.stages) > 1 or plan.stages[0].replicas[0].ranks != (0,) or len(plan.stages[0].layers) > 1:
        raise PlanError(
            _FLAG, "given", "is for data parallelism alone", "Leave out tensor, pipeline and context parallel sizes"
        )
    plan = replace(plan, training=replace(plan.training, global_batch_size=size))
    return plan, rest + ([] if _IMPLIED in given else [_IMPLIED])


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(flag + "="):
            kept.append(word)
    return kept


def with_zero(base: Plan, zero: int, passes: Sequence[Sequence[int]], devices: Sequence[str]) -> Plan:
    """The plan of a ZeRO stage in which every rank runs passes of these sizes.

    Args:
        base: Model and numerics.
        zero: ZeRO stage.
        passes: Sizes by rank, in order.
        devices: Name of each rank's device.
    """
    rows = [list(own) for own in passes]
    owners = [(turn, rank) for rank, own in enumerate(rows) for turn in range(len(own))]
    ids: list[list[int]] = [[] for _ in rows]
    sizes = []
    for m, (turn, rank) in enumerate(sorted(owners)):  # the global order of samples goes round
        ids[rank].append(m)
        sizes.append(rows[rank][turn])
    replicas = tuple(
        Replica((rank,), tuple(own), device=device) for rank, (own, device) in enumerate(zip(ids, devices, strict=True))
    )
    training = replace(
        base.training,
        micro_batch_size=max(sizes),
        micro_batch_sizes=tuple(sizes),
        global_batch_size=sum(sizes),
        distributed_optimizer=zero > 0,
    )
    parameters = {"window": True, "zero": zero} if zero > 1 else {}
    layers = _chunks(base) if zero > 1 else base.stages[0].layers
    plan = replace(
        base, training=training, stages=(Stage(layers, replicas),), schedule=ScheduleSpec("data-parallel", parameters)
    )
    check_plan(plan)
    return plan


def allocated(base: Plan, zero: int, allocation: Allocation, devices: Sequence[str]) -> Plan:
    """The plan that is trained."""
    return with_zero(base, zero, allocation.passes, devices)


def extra_words(plan: Plan, words: Sequence[str]) -> list[str]:
    """Flags of Megatron that the plan's ZeRO stage asks for and that are not there."""
    given = {word.split("=", 1)[0] for word in words}
    saves = given & {"--save", "--load"}
    return [_RESHARDABLE] if plan.training.distributed_optimizer and saves and _RESHARDABLE not in given else []


def first_stage(base: Plan) -> int:
    """The ZeRO stage to begin with: 0, or 1 where the flags ask for the distributed optimizer."""
    return 1 if base.training.distributed_optimizer else 0


def _chunks(base: Plan) -> tuple[int, ...]:
    """The layers in as many chunks as ZeRO-2 and 3 use, of nearly equal size."""
    layers = base.model.num_layers
    count = min(layers, _CHUNKS)
    even, more = divmod(layers, count)
    return (even + 1,) * more + (even,) * (count - more)
