"""Which replica of each stage runs which microbatch: Zorse's rule (section 4.2).

All of it is computed when a plan is made, from measured or modelled times.  A replica's *share* is how
many microbatches it runs; the rule says which ones: the i-th microbatch that a stage completes goes to
the replica of the next stage with the i-th most remaining work.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_het.plan.errors import PlanError
from megatron_het.plan.schema import Plan

# Plans that take turns in one job, one for each global batch size: what they must have in common.
#
# ``elastic/turns.py`` changes from one to the next.


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


def shares(seconds: Sequence[float], total: int) -> list[int]:
    """Microbatches per replica so that the busiest one is done as early as possible, at least one each.

    Args:
        seconds: Time of one microbatch on each replica, forward and backward.
        total: Microbatches of the stage.

    Raises:
        PlanError: A time that is not positive, or fewer microbatches than replicas.
    """
    if any(not second > 0 for second in seconds):
        raise PlanError("seconds", list(seconds), "times of microbatches must be positive")
    if total < len(seconds):
        raise PlanError("microbatches", total, f"are fewer than the {len(seconds)} replicas of a stage")
    counts = [1] * len(seconds)
    ends = [(2 * second, q) for q, second in enumerate(seconds)]  # if it took one more
    heapq.heapify(ends)
    for _ in range(total - len(seconds)):
        end, q = heapq.heappop(ends)
        counts[q] += 1
        heapq.heappush(ends, (end + seconds[q], q))
    return counts


def route(
    seconds: Sequence[Sequence[float]], total: int, counts: Sequence[Sequence[int]] | None = None
) -> list[list[tuple[int, ...]]]:
    """Microbatch ids of every replica of every stage.

    Args:
        seconds: ``seconds[s][q]``: time of one microbatch on replica q of stage s.
        total: Microbatches of an iteration.
        counts: Shares per stage and replica; by default those of :func:`shares`.

    Returns:
        ``ids[s][q]``, ascending.
    """
    completed = [(0.0, m) for m in range(total)]  # all are there for the first stage
    ids: list[list[tuple[int, ...]]] = []
    for s, row in enumerate(seconds):
        wanted = shares(row, total) if counts is None else counts[s]
        if sum(wanted) != total:
            raise PlanError(f"counts[{s}]", list(wanted), f"do not add up to {total} microbatches")
        # One place per microbatch: a replica with n of them has work for n, n - 1, ..., 1 left.
        places = sorted(
            (-left * second, q)
            for q, (count, second) in enumerate(zip(wanted, row, strict=True))
            for left in range(count, 0, -1)
        )
        mine: list[list[int]] = [[] for _ in row]
        free_s = [0.0] * len(row)
        ends: list[tuple[float, int]] = []
        for (ready_s, m), (_, q) in zip(sorted(completed), places, strict=True):
            free_s[q] = max(free_s[q], ready_s) + row[q]
            ends.append((free_s[q], m))
            mine[q].append(m)
        ids.append([tuple(sorted(own)) for own in mine])
        completed = ends
    return ids
