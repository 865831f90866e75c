"""Zorse's schedule: GPipe over ministages (Zorse, section 4.1.1)."""

from megatron_het.schedule.generators.listing import compute_ops, forward_program, require
from megatron_het.schedule.ir import Kind, Program, Shape

NAME = "ministage"


def ministage(shape: Shape, *, forward_only: bool = False) -> Program:
    """All microbatches of a ministage, then the next ministage; backward exactly reversed.

    A ministage is a chunk; stages may have different numbers of them, of different sizes, and any
    replicas and routes.  Parameters are needed one ministage at a time, which is the point of it.

    Args:
        shape: any with ``placement`` loop and without slices.
        forward_only: forwards only.

    Raises:
        ValueError: slices, or the V placement.
    """
    require(NAME, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(NAME, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    orders = []
    for d, device in enumerate(shape.devices):
        own = shape.microbatches_of(d)
        orders.append(
            [op for c in range(len(shape.layers[device.stage])) for op in compute_ops(Kind.FORWARD, own, (0,), c)]
        )
    if forward_only:
        return forward_program(NAME, shape, orders)
    ops = tuple(tuple(order + [op._replace(kind=Kind.BACKWARD) for op in reversed(order)]) for order in orders)
    return Program(NAME, shape, ops)
