"""The ``--het-*`` flags of a run as one record, and what several plans of a run must have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import Plan


@dataclass(frozen=True, slots=True)
class HetConfig:
    """The ``--het-*`` flags, which launch reads and everything on a rank is given.

    Without a plan the extension is off; with ``auto_batch`` the plan is yet to be made.
    """

    plan: Plan | None = None
    plan_path: str = ""
    transport: str = "auto"
    report_dir: Path | None = None
    trace_dir: Path | None = None
    trace_iteration: int = 3
    auto_batch: Path | None = None
    least_zero: int = 0
    measured_cp_shares: bool = False
    """Whether the plan gets its context-parallel parts from measurements at the start."""
    turns: tuple[Plan, ...] = ()
    """All plans of the job, where several take turns, one for each global batch size."""
    turn_files: tuple[str, ...] = ()
    trust_checkpoint: bool = False
    """Whether the description of a checkpoint may name classes that are no part of its format."""

    @property
    def is_active(self) -> bool:
        """Whether there is a plan to run."""
        return self.plan is not None

    def report_file(self, rank: int) -> Path | None:
        """Where a rank's report goes; None when none was asked for."""
        return self.report_dir / f"rank-{rank}.json" if self.report_dir else None

    def trace_file(self, rank: int) -> Path | None:
        """Where a rank's trace goes; None when none was asked for."""
        return self.trace_dir / f"trace-rank-{rank}.json" if self.trace_dir else None


# Plans that take turns in one job, one for each global batch size: what they must have in common.
#
# ``elastic/sessions.py`` changes from one to the next.


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
