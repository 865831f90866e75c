"""Shapes, costs and shorthands shared by the schedule tests."""

from collections.abc import Set
from dataclasses import replace

from megatron_het.schedule import Costs, Kind, Memory, Op, Program, Shape, add_transfers, generate
from megatron_het.schedule.kinds import SETS
from megatron_het.schedule.simulate import Result, simulate


def unit_memory(shape: Shape) -> Memory:
    """One microbatch's activations of the whole model are 1 byte, spread evenly over the chunks."""
    share = 1.0 / len(shape.path)
    return Memory(activation_bytes=tuple((share,) * len(shape.layers[d.stage]) for d in shape.devices))


def run(program: Program, forward_s: float = 1.0, backward_s: float = 2.0, **costs: object) -> Result:
    shape = program.shape
    base = Costs.uniform(shape, forward_s=forward_s, backward_s=backward_s, memory=unit_memory(shape))
    return simulate(program, replace(base, **costs))


def full(name: str, shape: Shape, **parameters: object) -> Program:
    return add_transfers(generate(name, shape, **parameters))


def peaks(result: Result) -> list[float]:
    return [use.peak_bytes for use in result.memory]


def with_device(program: Program, device: int, ops: list[Op]) -> Program:
    rows = list(program.ops)
    rows[device] = tuple(ops)
    return replace(program, ops=tuple(rows))


def swapped(program: Program, device: int, i: int, j: int) -> Program:
    """The program with two operations of a device swapped."""
    ops = list(program.ops[device])
    ops[i], ops[j] = ops[j], ops[i]
    return with_device(program, device, ops)


def drop_kinds(names: Set[str]) -> None:
    """Takes rows out of the table of kinds, and of the sets that grow with it, again: the last ones that were added."""
    for name in names:
        gone = Kind.rows.pop(name)
        delattr(Kind, name)
        if Kind.by_mnemonic.get(gone.mnemonic) is gone:  # not where it was refused
            del Kind.by_mnemonic[gone.mnemonic]
        for _, found in SETS:
            found.discard(gone)
