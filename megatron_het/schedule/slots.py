"""Aligned slots: devices run their passes in step, one slot after the other.

In forward slot ``k`` stage ``s`` runs its ``(k - s)``-th forward, in backward slot ``k`` its
``(k - (stages - 1 - s))``-th backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.kinds import Work


class Slot(NamedTuple):
    """One aligned slot of a pipeline.

    Attributes:
        index: number among the forward or backward slots.
        backward: which of the two.
        passes: the pass that each device runs; idle devices are absent.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    backward: bool
    passes: dict[int, Op]


def aligned_slots(program: Program) -> list[Slot]:
    """Every slot, in the one order that all devices' lists agree with.

    Of several pipelines the slots of one come after those of another.

    Raises:
        ValueError: the lists do not agree with any order of slots, microbatches change between replicas,
            backwards are split into two operations, chunks are placed in a V, or stages have different numbers of them.
    """
    if program.shape.placement != "loop":
        raise ValueError(f"program {program.name}: its chunks are placed in a V, so its slots are not aligned")
    if len(set(map(len, program.shape.layers))) > 1:
        raise ValueError(f"program {program.name}: stages have different numbers of chunks, so slots are not aligned")
    if any(op.kind.work in (Work.INPUT, Work.WEIGHTS) for ops in program.ops for op in ops):
        raise ValueError(f"program {program.name}: its backwards are split in two, so its slots are not aligned")
    pipelines = program.shape.pipelines()
    if pipelines is None:
        raise ValueError(f"program {program.name}: replicas are not separate pipelines, so their slots are not aligned")
    return [slot for devices in pipelines for slot in _pipeline_slots(program, devices)]


def _pipeline_slots(program: Program, devices: Sequence[int]) -> list[Slot]:
    lists = {d: program.compute(d) for d in devices}
    passes: tuple[list[dict[int, Op]], list[dict[int, Op]]] = ([], [])
    for stage, d in enumerate(devices):
        for backward in (False, True):
            shift = len(devices) - 1 - stage if backward else stage
            for i, op in enumerate(op for op in lists[d] if (op.kind is not Kind.FORWARD) == backward):
                slots = passes[backward]
                slots.extend({} for _ in range(shift + i + 1 - len(slots)))
                slots[shift + i][d] = op
    at, position = [0, 0], dict.fromkeys(devices, 0)
    out: list[Slot] = []
    while at[0] < len(passes[0]) or at[1] < len(passes[1]):
        for backward in (False, True):
            if at[backward] == len(passes[backward]):
                continue
            slot = passes[backward][at[backward]]
            if all(position[d] < len(lists[d]) and lists[d][position[d]] == op for d, op in slot.items()):
                out.append(Slot(at[backward], backward, slot))
                at[backward] += 1
                for d in slot:
                    position[d] += 1
                break
        else:
            raise ValueError(f"program {program.name}: its passes are not aligned in slots, so there is no exchange")
    return out
