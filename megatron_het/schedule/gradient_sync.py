"""From where on Megatron may reduce a chunk's gradients while backward passes still run (``--overlap-grad-reduce``).

Megatron's buckets of gradients count how often each parameter gets one from that point to the end of the first
iteration, and are reduced in later ones as soon as the same counts are reached.  So the point may be early, as
long as every parameter gets a gradient after it.  With a split vocabulary a chunk's gradients come from several
kinds of operations, whose last ones are at different places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_het.schedule.graph import Graph, ScheduleError
from megatron_het.schedule.ir import Program
from megatron_het.schedule.joint import event_places
from megatron_het.schedule.kinds import INPUT_GRADIENTS, OUTPUT_PARTS, WORD_PARTS, Direction, Kind, Work, where

# Half a backward that leaves gradients of linear layers for later makes those of norms and embeddings.
_MAKERS = where(lambda kind: kind.direction is Direction.BACKWARD and (kind.work is not Work.NONE or kind.meets))
_UPDATES = where(lambda kind: kind.effect.updates)

Maker = tuple[Kind, int]
"""(kind, chunk) of the operations that make gradients; parts of layers that devices share have chunk 0."""


def last_makers(ops: Iterable[Any]) -> dict[Maker, int]:
    """Index of the last operation of each kind and chunk that makes gradients, in the order of these.

    Args:
        ops: Operations of a program, or of a rank's.
    """
    found: dict[Maker, int] = {}
    for index, op in enumerate(ops):
        if op.kind in _MAKERS:
            found[op.kind, op.chunk] = index
    return dict(sorted(found.items(), key=lambda item: item[1]))


def last_before_losses_are_known(ops: Iterable[Any]) -> int:
    """Index of the last forward, or of the last part of the output layer, which counts tokens when it goes back.

    No such operation comes after an update of parameters on any device: an update waits for all microbatches.

    Args:
        ops: Operations of a device or rank.

    Returns:
        -1 without such operations.
    """
    found = (index for index, op in enumerate(ops) if op.kind.direction is Direction.FORWARD or op.kind in OUTPUT_PARTS)
    return max(found, default=-1)


def counting_places(program: Program) -> list[int] | None:
    """How many operations of each device come before all devices add up the tokens of an iteration.

    That is one event of an order of all, after the last loss and before the first update: a device that waits for the
    sum, or whose host waits for the device, then needs nothing of another one that has not come to it.

    Args:
        program: With transfers.

    Returns:
        None without updates inside the iteration.  Each device's own place where receives are posted early.
    """
    if not any(op.kind in _UPDATES for ops in program.ops for op in ops):
        return None
    graph = Graph(program)
    own = [last_before_losses_are_known(ops) for ops in program.ops]
    lasts = [first + last for first, last in zip(graph.first, own) if last >= 0]
    steps = [node for node, op in enumerate(graph.ops) if op.kind in _UPDATES]
    places = event_places(graph, graph.teams(), extra=[(last, step) for last in lasts for step in steps])
    if min(places) < 0 and min(event_places(graph, graph.teams())) < 0:
        # Receives are posted ahead of the order of all, by a host that does not wait for a device: any place will do.
        return [last + 1 for last in own]
    known = max(places[last] for last in lasts)
    if min(places) < 0 or min(places[step] for step in steps) < known:
        raise ScheduleError(f"program {program.name}: an update comes before all losses are known")
    bounds = zip(graph.first, graph.first[1:])
    return [sum(place <= known for place in places[first:end]) for first, end in bounds]


def sync_points(ops: Iterable[Any], chunks: int) -> Mapping[int, tuple[int, ...]]:
    """Chunks whose gradients may be reduced from an operation on, by its index.

    The word embeddings are in the first chunk, the output layer is in the last one, and with tied
    embeddings in the first one too.
    """
    last = last_makers(ops)
    found: dict[int, tuple[int, ...]] = {}
    for chunk in range(chunks):
        makers: list[Maker] = [(kind, chunk) for kind in INPUT_GRADIENTS]
        if chunk in (0, chunks - 1):
            makers += [(kind, 0) for kind in OUTPUT_PARTS]
        if chunk == 0:
            makers += [(kind, 0) for kind in WORD_PARTS]
        places = [last[maker] for maker in makers if maker in last]
        if places:
            found[min(places)] = (*found.get(min(places), ()), chunk)
    return found


def unequal_orders(program: Program) -> int | None:
    """The first stage whose replicas end their gradients in different orders, None if there is none.

    Their reductions would meet in different orders.
    """
    orders: dict[int, set[tuple[Maker, ...]]] = {}
    for device, ops in zip(program.devices, program.ops, strict=True):
        orders.setdefault(device.stage, set()).add(tuple(last_makers(ops)))
    return next((stage for stage, found in sorted(orders.items()) if len(found) > 1), None)
