"""Plans that take turns in one job, one for each global batch size: what they must have in common.

``elastic/turns.py`` changes from one to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import Plan


@contextlib.contextmanager
def errors_of(name: object, plans: Sequence[object]) -> Iterator[None]:
    """An error that has to do with one of several plans says with which.

    Args:
        name: Of the plan.
        plans: All of them; an error of an only plan stays as it is.

    Raises:
        PlanError: With the name before the place.
    """
    try:
        yield
    except PlanError as error:
        if len(plans) < 2 or error.value == name:
            raise
        raise PlanError(f"{name}: {error.where}", error.value, error.problem, error.hint) from None


def check_turns(plans: Sequence[Plan], files: Sequence[str]) -> None:
    """Plans that take turns are for one training, and differ in the global batch size.

    Raises:
        PlanError: The first thing that does not fit.
    """
    first, sizes = plans[0], dict[int, str]()
    for plan, file in zip(plans, files, strict=True):
        for name, value, wanted in (
            ("model", plan.model, first.model),
            ("number of ranks", plan.world_size, first.world_size),
            ("training.precision", plan.training.precision, first.training.precision),
            (
                "training.distributed_optimizer",
                plan.training.distributed_optimizer,
                first.training.distributed_optimizer,
            ),
        ):
            if value != wanted:
                raise PlanError("--het-plan", file, f"its {name} is {value}, that of {files[0]} is {wanted}")
        size = plan.training.global_batch_size
        if size in sizes:
            raise PlanError(
                "--het-plan",
                file,
                f"has the global batch size {size}, as {sizes[size]} has",
                "Several plans take turns: give one for each global batch size",
            )
        sizes[size] = file


def check_batch_schedule(plans: Sequence[Plan], args: Any) -> None:
    """Compare Megatron's schedule of batch sizes with the plans of a job, of which each has one size.

    Args:
        plans: All of them.
        args: Megatron's parsed arguments.

    Raises:
        PlanError: The first thing that does not fit.
    """
    given, flag = getattr(args, "step_batch_size_schedule", None), "--step-batch-size-schedule"
    known = sorted({plan.training.global_batch_size for plan in plans})
    if not given:
        if len(plans) > 1:
            raise PlanError("--het-plan", f"{len(plans)} plans", f"plans take turns as {flag} says", f"Give {flag}")
        return
    sizes = [word.rpartition(":")[2] for word in given.split()]
    if unknown := [size for size in sizes if not size.isdecimal() or int(size) not in known]:
        raise PlanError(
            flag,
            given,
            f"a plan routes a fixed number of microbatches, and none is for a global batch size of {unknown[0]}; there "
            f"are plans for {', '.join(map(str, known))}",
            "Give a plan for each size: --het-plan PLAN PLAN ...",
        )
    if not args.train_samples:
        raise PlanError(
            "--train-samples",
            args.train_samples,
            f"with {flag} Megatron counts learning rates by samples",
            "Give --train-samples, and --lr-decay-samples and --lr-warmup-samples in place of iterations",
        )
