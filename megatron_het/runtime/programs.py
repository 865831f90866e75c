"""From a plan to the programs that its ranks run: generator and passes, chosen by the plan."""

from __future__ import annotations

import inspect

from megatron_het.plan import Placement
from megatron_het.plan.slices import (
    EXCHANGE_PARAMETERS,
    OFFLOAD,
    VOCABULARY,
    exchange_of,
    offload_ratio,
    slices_of,
    splits_vocabulary,
)
from megatron_het.runtime.window_options import PARAMETER_KINDS, split_parameters
from megatron_het.schedule.generators import GENERATORS, generate
from megatron_het.schedule.ir import EXCHANGE, TRANSFERS, Kind, Program, Shape
from megatron_het.schedule.joint import unequal_layers
from megatron_het.schedule.passes import (
    add_activation_offload,
    add_embedding,
    add_exchange,
    add_parameters,
    add_transfers,
    add_vocabulary,
)
from megatron_het.schedule.validate import check

_EXECUTED = frozenset((
        Kind.FORWARD, Kind.BACKWARD, Kind.VOCAB_FORWARD, Kind.VOCAB_BACKWARD, Kind.EMBED_FORWARD, Kind.EMBED_BACKWARD,
        Kind.ACT_OFFLOAD, Kind.ACT_FETCH, *TRANSFERS, *EXCHANGE, *PARAMETER_KINDS,
    )
)  # fmt: skip


def schedule_shape(placement: Placement) -> Shape:
    """What a schedule is a function of, taken from the plan."""
    plan = placement.plan
    return Shape(
        layers=tuple(s.layers for s in plan.stages),
        route=placement.route,
        replicas=tuple(len(s.replicas) for s in plan.stages),
        slices=slices_of(plan),
    )


def build_programs(placement: Placement) -> dict[bool, Program]:
    """The plan's training program (False) and evaluation program (True), with transfers.

    Raises:
        ValueError: The schedule is unknown, cannot run the plan's shape, or uses operations that the
            executor has no handler for.
    """
    spec, shape = placement.plan.schedule, schedule_shape(placement)
    speeds = [r.speed for s in placement.plan.stages for r in s.replicas]
    parameters, window = split_parameters(spec)
    for name in ("slices", VOCABULARY, OFFLOAD, *EXCHANGE_PARAMETERS):
        parameters.pop(name, None)
    if spec.name in GENERATORS and "speeds" in inspect.signature(GENERATORS[spec.name]).parameters:
        parameters["speeds"] = speeds
    programs = {}
    for forward_only in (False, True):
        program = generate(spec.name, shape, forward_only=forward_only, **parameters)
        program = _with_exchange(program, placement)
        if splits_vocabulary(placement.plan):
            program = add_embedding(add_vocabulary(program, speeds=speeds), speeds=speeds)
        program = add_transfers(program, speeds=speeds)
        if program.exchange_units:
            check(program)
        if window is not None:
            program = add_parameters(
                program,
                prefetch=window.prefetch,
                per_layer=window.per_layer,
                offload=window.offload,
                keep_at_turn=window.keep_at_turn,
                per_operation=window.per_microbatch,
                step="ministage" if window.updates_early else "none",
            )
        if offload_ratio(placement.plan) and not forward_only:
            program = add_activation_offload(program)
        _check_operations(program)
        programs[forward_only] = program
    return programs


def _with_exchange(program: Program, placement: Placement) -> Program:
    """The program with the plan's context exchange."""
    options = exchange_of(placement.plan)
    if options is None:
        return program
    reason = unequal_layers(program)
    if reason is not None:
        raise ValueError(reason)
    return add_exchange(program, units=options.units, keep=options.keep, helping=options.idle)


def _check_operations(program: Program) -> None:
    unknown = {op.kind for ops in program.ops for op in ops} - _EXECUTED
    if unknown:
        names = ", ".join(sorted(kind.name for kind in unknown))
        raise ValueError(f"it uses {names}, which can be simulated but not executed")
