"""From a plan to the programs that its ranks run: generator and passes, chosen by the plan."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_het.plan import Placement
from megatron_het.plan.slices import slices_of
from megatron_het.schedule.generators import GENERATORS, generate
from megatron_het.schedule.ir import Program, Shape
from megatron_het.schedule.passes import add_transfers


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
        ValueError: The schedule is unknown, or cannot run the plan's shape.
    """
    spec, shape = placement.plan.schedule, schedule_shape(placement)
    speeds = [r.speed for s in placement.plan.stages for r in s.replicas]
    parameters: dict[str, Any] = {k: v for k, v in spec.parameters.items() if k != "slices"}
    if spec.name in GENERATORS and "speeds" in inspect.signature(GENERATORS[spec.name]).parameters:
        parameters["speeds"] = speeds
    programs = {}
    for forward_only in (False, True):
        program = generate(spec.name, shape, forward_only=forward_only, **parameters)
        programs[forward_only] = add_transfers(program, speeds=speeds)
    return programs
