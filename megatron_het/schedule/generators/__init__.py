"""Schedule generators: pure functions from a :class:`~megatron_het.schedule.ir.Shape` to a Program.

A generator decides the compute order only; transfers, parameters, vocabulary, exchange and offload are
added by the passes.
"""

from collections.abc import Callable

from megatron_het.schedule.generators.one_f_one_b import data_parallel, gpipe, interleaved, ministage, one_f_one_b
from megatron_het.schedule.ir import Program, Shape

GENERATORS: dict[str, Callable[..., Program]] = {
    "1f1b": one_f_one_b,
    "data-parallel": data_parallel,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "ministage": ministage,
}
"""By name; features add their own."""
BY_PART = {"1f1b", "data-parallel", "gpipe", "interleaved", "ministage"}
"""Schedules that order each part of a shape (``listing.parts_of``) as if it were alone."""


def generate(name: str, shape: Shape, *, forward_only: bool = False, **parameters: object) -> Program:
    """The compute order of a schedule.

    Args:
        shape: stages, chunks, replicas, microbatches, slices.
        forward_only: the evaluation program: forward operations only.
        **parameters: parameters of the generator, see its docstring.

    Raises:
        ValueError: an unknown name, or a shape that the schedule cannot run.
    """
    if name not in GENERATORS:
        raise ValueError(f"schedule = {name!r}: unknown (known: {', '.join(sorted(GENERATORS))})")
    return GENERATORS[name](shape, forward_only=forward_only, **parameters)
