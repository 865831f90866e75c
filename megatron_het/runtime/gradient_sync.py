"""From where on Megatron may reduce a chunk's gradients while backward passes still run (``--overlap-grad-reduce``).

Megatron's buckets of gradients count how often each parameter gets one from that point to the end of the first
iteration, and are reduced in later ones as soon as the same counts are reached.  So the point may be early, as
long as every parameter gets a gradient after it.  With a split vocabulary a chunk's gradients come from several
kinds of operations, whose last ones are at different places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_het.plan import Plan, PlanError
from megatron_het.plan.slices import splits_vocabulary
from megatron_het.schedule.ir import Kind, Program

Maker = tuple[Kind, int]
"""(kind, chunk) of the operations that make gradients; the vocabulary's have chunk 0."""


def last_makers(ops: Iterable[Any]) -> dict[Maker, int]:
    """Index of the last operation of each kind and chunk that makes gradients, in the order of these.

    Args:
        ops: Operations of a program, or of a rank's.
    """
    found: dict[Maker, int] = {}
    for index, op in enumerate(ops):
        if op.kind in (Kind.BACKWARD, Kind.VOCAB_BACKWARD, Kind.EMBED_BACKWARD):
            found[op.kind, op.chunk] = index
    return dict(sorted(found.items(), key=lambda item: item[1]))


def sync_points(ops: Iterable[Any], chunks: int) -> Mapping[int, tuple[int, ...]]:
    """Chunks whose gradients may be reduced from an operation on, by its index.

    The word embeddings are in the first chunk, the output layer is in the last one, and with tied
    embeddings in the first one too.
    """
    last = last_makers(ops)
    found: dict[int, tuple[int, ...]] = {}
    for chunk in range(chunks):
        makers: list[Maker] = [(Kind.BACKWARD, chunk)]
        if chunk in (0, chunks - 1):
            makers.append((Kind.VOCAB_BACKWARD, 0))
        if chunk == 0:
            makers.append((Kind.EMBED_BACKWARD, 0))
        places = [last[maker] for maker in makers if maker in last]
        if places:
            found[min(places)] = (*found.get(min(places), ()), chunk)
    return found


def check_overlap(plan: Plan, program: Program, args: Any) -> None:
    """Refuse an early reduction that would not meet that of other replicas.

    Args:
        plan: The plan.
        program: Its training program.
        args: Megatron's parsed arguments.

    Raises:
        PlanError: Gradients are to be reduced early, and replicas complete theirs in different orders.
    """
    stage = unequal_orders(program)
    if args.overlap_grad_reduce and splits_vocabulary(plan) and stage is not None:
        raise PlanError(
            "--overlap-grad-reduce", True, f"with --het-vocabulary-parallel the replicas of stage {stage} complete "
            "their gradients in different orders, so that their reductions would not meet",
            "Give all replicas of a stage as many microbatches, or leave the flag out",
        )


def unequal_orders(program: Program) -> int | None:
    """The first stage whose replicas end their gradients in different orders, None if there is none.

    Their reductions would meet in different orders.
    """
    orders: dict[int, set[tuple[Maker, ...]]] = {}
    for device, ops in zip(program.devices, program.ops, strict=True):
        orders.setdefault(device.stage, set()).add(tuple(last_makers(ops)))
    return next((stage for stage, found in sorted(orders.items()) if len(found) > 1), None)
