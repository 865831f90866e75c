"""GPipe and 1F1B (PipeDream-Flush), with one or several replicas per stage."""

import math
from collections.abc import Sequence

from megatron_het.schedule.generators.listing import (
    Speeds,
    alternate,
    compute_ops,
    forward_program,
    merge,
    require,
    single_replicas,
)
from megatron_het.schedule.ir import Kind, Op, Program, Shape


def _check(name: str, shape: Shape) -> None:
    require(name, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    require(name, all(len(c) == 1 for c in shape.layers), "every stage has exactly one chunk (use interleaved)")


def _orders(shape: Shape, kind: Kind) -> list[list[Op]]:
    return [compute_ops(kind, shape.microbatches_of(d), (0,), 0) for d in range(len(shape.devices))]


def in_flight_limits(shape: Shape) -> list[int]:
    """Microbatches that each device may hold between forward and backward in 1F1B.

    Stages after ``s`` keep one microbatch per device busy; a device of stage ``s`` feeds them in
    proportion to its share of the microbatches, and works on one itself.  With one replica per stage this
    is ``stages - s``, as in Megatron.
    """
    limits = []
    for d, (stage, _) in enumerate(shape.devices):
        share = len(shape.microbatches_of(d)) / shape.microbatches
        limits.append(1 + math.ceil(share * sum(shape.replicas[stage + 1 :]) - 1e-9))
    return limits


def one_f_one_b(shape: Shape, *, forward_only: bool = False, speeds: Sequence[float] | None = None) -> Program:
    """1F1B.

    With one replica per stage the order is Megatron's: ``stages - 1 - stage`` warm-up forwards, then pairs
    of a forward and a backward.  With several replicas the order of each device comes from a simulation of
    the iteration (:func:`~megatron_het.schedule.generators.listing.merge`): forwards and backwards ascend
    in the microbatch, and their number in flight is bounded by :func:`in_flight_limits`.

    Args:
        shape: one chunk per stage, no slices.
        forward_only: forwards only.
        speeds: relative speed of each device, used with several replicas; all equal by default.

    Raises:
        ValueError: the shape has chunks or slices, or ``speeds`` do not fit the devices.
    """
    _check("1f1b", shape)
    forward = _orders(shape, Kind.FORWARD)
    if forward_only:
        return forward_program("1f1b", shape, forward)
    backward = _orders(shape, Kind.BACKWARD)
    costs = Speeds.of(shape, speeds)
    if single_replicas(shape):
        ops = tuple(alternate(f, b, shape.stages - 1 - s) for s, (f, b) in enumerate(zip(forward, backward)))
    else:
        ops = merge(shape, forward, backward, in_flight_limits(shape), costs)
    return Program("1f1b", shape, ops)


def gpipe(shape: Shape, *, forward_only: bool = False) -> Program:
    """GPipe: all forwards, then all backwards in the same order.

    Raises:
        ValueError: the shape has chunks or slices.
    """
    _check("gpipe", shape)
    forward = _orders(shape, Kind.FORWARD)
    if forward_only:
        return forward_program("gpipe", shape, forward)
    backward = _orders(shape, Kind.BACKWARD)
    return Program("gpipe", shape, tuple(tuple(f + b) for f, b in zip(forward, backward)))
