"""No pipeline: every replica runs its microbatches one after the other (Poplar, section 3)."""

from megatron_het.schedule.generators.listing import compute_ops, forward_program, require
from megatron_het.schedule.ir import Kind, Program, Shape

NAME = "data-parallel"


def data_parallel(shape: Shape, *, forward_only: bool = False) -> Program:
    """Each microbatch forward through all chunks and back, then the next microbatch.

    Activations of one microbatch are held at most, and of the chunks one after the other is needed, which is what
    ZeRO-2 and 3 need (``features/window/passes.py``).

    Args:
        shape: one stage; any chunks and replicas, no slices.
        forward_only: forwards only.

    Raises:
        ValueError: several stages, slices, or the V placement.
    """
    require(NAME, shape.stages == 1, f"stages = {shape.stages}: it is for plans of one stage")
    require(NAME, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(NAME, shape.placement == "loop", f"placement = {shape.placement}: must be loop")
    chunks = range(len(shape.layers[0]))
    orders = []
    for d in range(len(shape.devices)):
        order = []
        for m in shape.microbatches_of(d):
            order += [op for c in chunks for op in compute_ops(Kind.FORWARD, (m,), (0,), c)]
            if not forward_only:
                order += [op for c in reversed(chunks) for op in compute_ops(Kind.BACKWARD, (m,), (0,), c)]
        orders.append(order)
    if forward_only:
        return forward_program(NAME, shape, orders)
    return Program(NAME, shape, tuple(map(tuple, orders)))
