"""Adds the offload of activations to the host (Zorse, section 4.1.3; SlimPipe, section 6.5)."""

from dataclasses import replace

from megatron_het.schedule.ir import Kind, Op, Program
from megatron_het.schedule.kinds import Value, Work


def add_activation_offload(program: Program, *, ahead: int = 1) -> Program:
    """The program with ACT_OFFLOAD after forwards and ACT_FETCH ahead of their backwards.

    They leave once their forward is complete: with the context exchange, after its last ATTEND_MERGE.
    Activations whose backward comes so soon that they would be fetched back at once stay on the device.
    What share of the activations leaves is a matter of the cost model (``Memory.boundary_bytes``).

    Args:
        program: with joint or split backwards, before or after other passes.
        ahead: activations are fetched while the backward ``ahead`` places before theirs runs.

    Raises:
        ValueError: ``ahead`` below 1, a forward-only program, or activations are offloaded already.
    """
    if ahead < 1:
        raise ValueError(f"ahead = {ahead}: must be at least 1")
    if program.forward_only:
        raise ValueError(f"program {program.name} is forward only and keeps no activations")
    if any(op.kind is Kind.ACT_OFFLOAD for ops in program.ops for op in ops):
        raise ValueError(f"program {program.name} offloads activations already")
    return replace(program, ops=tuple(_device(ops, ahead) for ops in program.ops))


def _device(ops: tuple[Op, ...], ahead: int) -> tuple[Op, ...]:
    forwards = {(op.microbatch, op.slice, op.chunk): i for i, op in enumerate(ops) if op.kind.makes is Value.OUTPUT}
    backwards = [i for i, op in enumerate(ops) if Work.INPUT in op.kind.work]
    offloads: dict[int, Op] = {}
    fetches: dict[int, list[Op]] = {}
    for j, position in enumerate(backwards):
        _, microbatch, piece, chunk, *_ = ops[position]
        forward = forwards[microbatch, piece, chunk]
        place = backwards[j - ahead] if j >= ahead else -1
        if place - forward < 2:
            continue
        offloads[forward] = Op(Kind.ACT_OFFLOAD, microbatch, piece, chunk)
        fetches.setdefault(place, []).append(Op(Kind.ACT_FETCH, microbatch, piece, chunk))
    out: list[Op] = []
    for i, op in enumerate(ops):
        out += fetches.get(i, ())
        out.append(op)
        if i in offloads:
            out.append(offloads[i])
    return tuple(out)
