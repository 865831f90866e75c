"""From a plan to the programs that its ranks run: the only place where generator and passes are put together.

Runtime, planner, command line, benchmarks and tests get their programs here.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_het.features import FEATURES, features_of
from megatron_het.features.base import Feature
from megatron_het.plan import DeviceCosts, LinkCosts, Placement, Plan, PlanError, PlannedCosts
from megatron_het.plan.schema import PER_CHUNK, PER_DEVICE
from megatron_het.schedule.cost import FREE, Costs, Link
from megatron_het.schedule.cutting import Parts
from megatron_het.schedule.generators import BY_PART, GENERATORS, generate
from megatron_het.schedule.generators.listing import Part, parts_of
from megatron_het.schedule.ir import SENDS, Kind, Op, Program, Shape, placement_of
from megatron_het.schedule.kinds import COLLECTIVES
from megatron_het.schedule.transfers import add_transfers, post_receives_early
from megatron_het.schedule.validate import check

# Conversion between the costs in a plan file and the costs that the simulator reads.


_SHARED = ("message_bytes", "weight_share", "diagonal", "operation_s", "post_s", "host_blocks")
_DIGITS = 6


def costs_of(plan: Plan) -> Costs | None:
    """Returns the costs from which the plan's prediction was made; None if the plan file has none."""
    planned = plan.predicted.costs if plan.predicted is not None else None
    if planned is None:
        return None
    rows = {device: row for row in planned.devices for device in row.devices}
    ordered = [rows[device] for device in sorted(rows)]
    tables: dict[str, Any] = {}
    for name in PER_CHUNK:
        if any(getattr(row, name) for row in ordered):
            tables[name] = tuple(getattr(row, name) or (0.0,) * len(row.forward_s) for row in ordered)
    for name in PER_DEVICE:
        tables[name] = tuple(getattr(row, name) for row in ordered)
    links = {(a, b): Link(link.latency_s, link.bytes_per_s) for link in planned.links for a, b in link.pairs}
    shared = {name: getattr(planned, name) for name in _SHARED}
    return Costs(**tables, **shared, link=lambda source, target: links.get((source, target), FREE))


def planned_costs(costs: Costs, program: Program) -> PlannedCosts:
    """Costs in the form of a plan file, with the links that the program's transfers use."""
    rows: dict[tuple[Any, ...], list[int]] = {}
    for device in range(len(program.ops)):
        chunks = tuple(
            tuple(map(_short, table[device])) if (table := getattr(costs, name)) else () for name in PER_CHUNK
        )
        figures = tuple(_short(row[device]) if (row := getattr(costs, name)) else 0.0 for name in PER_DEVICE)
        rows.setdefault((*chunks, *figures), []).append(device)
    names = (*PER_CHUNK, *PER_DEVICE)
    devices = tuple(DeviceCosts(tuple(found), **dict(zip(names, row, strict=True))) for row, found in rows.items())
    return PlannedCosts(devices, _links(costs, program), **{name: getattr(costs, name) for name in _SHARED})


def _links(costs: Costs, program: Program) -> tuple[LinkCosts, ...]:
    edges = sorted({(device, op.peer) for device, ops in enumerate(program.ops) for op in ops if op.kind in SENDS})
    found: dict[tuple[float, float], list[tuple[int, int]]] = {}
    for edge in edges:
        link = costs.link(*edge)
        if math.isfinite(link.bytes_per_s):  # links of infinite bandwidth are free
            found.setdefault((_short(link.latency_s), _short(link.bytes_per_s)), []).append(edge)
    return tuple(LinkCosts(tuple(pairs), *figures) for figures, pairs in found.items())


def _short(value: float) -> float:
    """Rounds to the significant digits of a prediction, so that equal devices share a row."""
    return float(f"{value:.{_DIGITS}g}")


# Choice of the transport for transfers between stages: the requested one, or one for the device and the backend.
#
# NCCL runs the transfers of a group one after the other on the device, so transfers that wait for each
# other in a cycle would hang it.  The validator refuses such programs: it assumes that every transfer blocks.
# If the process group's backend is not NCCL, tensors on a GPU are staged through host memory.


TRANSPORTS = ("auto", "nccl", "gloo", "staged")


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and why it was chosen."""

    transport: str
    reason: str

    def __str__(self) -> str:
        return f"{self.transport} ({self.reason})"


def choose_transport(requested: str, backend: str, on_cuda: bool) -> Choice:
    """Resolve ``auto`` and refuse a transport that cannot work; validated programs have no cycle of transfers.

    Args:
        requested: One of ``TRANSPORTS``.
        backend: The default process group's backend.
        on_cuda: Whether activations live on a CUDA device.

    Raises:
        ValueError: A transport that cannot move the tensors of this machine.
    """
    if requested == "nccl" and not on_cuda:
        raise ValueError("--het-transport nccl needs CUDA devices; use gloo or staged")
    if requested == "gloo" and on_cuda:
        raise ValueError("--het-transport gloo moves host tensors only; use nccl or staged")
    if requested != "auto":
        return Choice(requested, "as asked for")
    possible = "no cycle of transfers is possible"
    if not on_cuda:
        return Choice("gloo", f"tensors are on the host; {possible}")
    if "nccl" not in backend:
        return Choice("staged", f"the backend is {backend}; {possible}")
    return Choice("nccl", possible)


def posted_for(transport: str, program: Program) -> Program:
    """The program with its receives at the positions that suit the transport.

    gloo moves data once both ends are posted, but the posting host may be busy with compute (on the
    CPU) or wait for received data (staged).  So receives are posted one operation ahead.  For NCCL they stay in
    the global order, in which no cycle is possible.
    """
    return program if transport == "nccl" else post_receives_early(program)


Chosen = Sequence[tuple[Feature, Any]]  # features with their options, in the order of ``FEATURES``

_MODES = (False, True)  # ``forward_only`` of the training and of the evaluation program


def build(plan: Plan, rank: int | None = None) -> dict[bool, Program]:
    """The plan's training program (False) and evaluation program (True), which ranks run as they are.

    Args:
        plan: Checked (``features.registry.check_plan_alone``).
        rank: Build only the operations that this rank needs.  Replicas that never exchange anything form separate
            parts (``schedule/generators/listing.py``).  Then only the devices of the rank's own part have operations,
            the same ones as in the whole program.  All parts are validated, equal ones once, so every rank
            refuses the same plans.

    Raises:
        PlanError: The schedule cannot run the plan's shape, the program has operations that no handler executes,
            or it breaks a rule of the validator.
    """
    if rank is not None:
        programs = _of_own_part(plan, rank)
        if programs is not None:
            return programs
    programs = {forward_only: program_of(plan, forward_only) for forward_only in _MODES}
    try:
        for program in programs.values():
            _check_operations(program, list(features_of(plan)))
            check(program)
    except ValueError as error:
        raise _refused(plan, error) from error
    return programs


def _of_own_part(plan: Plan, rank: int) -> dict[bool, Program] | None:
    """The programs with the operations of a rank's part alone; None if the whole program has to be built.

    The whole is needed if replicas share collectives, joint passes or attention, or if the schedule is not built from
    parts.  It is also built if a part is invalid, so that the error is about the whole.
    """
    placement, features = Placement(plan), list(features_of(plan))
    where = placement.locate(rank)
    shape = schedule_shape(plan)
    parts = parts_of(shape) if plan.schedule.name in BY_PART else []
    own = next((part for part in parts if shape.device(where.stage, where.replica) in part.devices), None)
    if own is None or len(parts) < 2 or shape.companions:
        return None
    speeds, parameters = _speeds(plan), parameters_of(plan)
    made: dict[tuple[Shape, tuple[float, ...]], dict[bool, Program]] = {}
    try:
        for part in parts:
            key = part.shape, tuple(speeds[d] for d in part.devices)
            if key in made:
                continue
            made[key] = {
                mode: assemble(part.shape, plan.schedule.name, features, speeds=key[1], forward_only=mode, **parameters)
                for mode in _MODES
            }
            for program in made[key].values():
                if program.attention_units or not program.kinds.isdisjoint(COLLECTIVES):
                    return None
                _check_operations(program, features)
                check(program)
    except (ValueError, TypeError):
        return None
    alone = made[own.shape, tuple(speeds[d] for d in own.devices)]
    return {mode: _in_whole(program, own, shape) for mode, program in alone.items()}


def _in_whole(program: Program, part: Part, shape: Shape) -> Program:
    """A part's program renumbered to the microbatches and devices of the whole shape."""

    def renamed(op: Op) -> Op:
        microbatch = part.microbatches[op.microbatch] if op.microbatch >= 0 else op.microbatch
        return op._replace(microbatch=microbatch, peer=part.devices[op.peer] if op.peer >= 0 else op.peer)

    ops: list[tuple[Op, ...]] = [()] * len(shape.devices)
    for device, row in zip(part.devices, program.ops, strict=True):
        ops[device] = tuple(map(renamed, row))
    return replace(program, shape=shape, ops=tuple(ops))


def program_of(plan: Plan, forward_only: bool = False, parts: Parts = ()) -> Program:
    """One of the plan's programs, with all passes; not validated.  Raises PlanError if the schedule refuses the shape.

    Args:
        parts: The tokens that slices see, by microbatch and slice, if documents or sliding windows limit them.
    """
    try:
        return assemble(
            schedule_shape(plan),
            plan.schedule.name,
            [(feature.limited(parts), options) for feature, options in features_of(plan)],
            speeds=_speeds(plan),
            forward_only=forward_only,
            **parameters_of(plan),
        )
    except (ValueError, TypeError) as error:
        raise _refused(plan, error) from error


def assemble_compute(plan: Plan, inputs: "Inputs") -> Program | None:
    """The plan's program without transfers; None if it has more than forwards and backwards; raises PlanError."""
    shape, speeds, parameters = inputs
    try:
        program = assemble(shape, plan.schedule.name, speeds=speeds, transfers="none", **parameters)
    except (ValueError, TypeError) as error:
        raise _refused(plan, error) from error
    return program if program.kinds <= {Kind.FORWARD, Kind.BACKWARD} else None


Inputs = tuple[Shape, list[float], dict[str, Any]]  # inputs of a generator: shape, speeds of devices, parameters


def generator_inputs(plan: Plan) -> Inputs | None:
    """Inputs of the plan's generator: shape, speeds of the devices and parameters.

    None if features add operations, or replicas run passes together.
    """
    if any(_adds_operations(feature) for feature, _ in features_of(plan)):
        return None
    shape = schedule_shape(plan)
    return None if shape.companions else (shape, _speeds(plan), parameters_of(plan))


def _adds_operations(feature: Feature) -> bool:
    """Whether a feature overrides a program pass or the pricing of operations."""
    theirs = type(feature)
    return (
        theirs.before_transfers is not Feature.before_transfers
        or theirs.after_transfers is not Feature.after_transfers
        or theirs.price is not Feature.price
    )


def _speeds(plan: Plan) -> list[float]:
    return [r.speed for s in plan.stages for r in s.replicas]


def parameters_of(plan: Plan) -> dict[str, Any]:
    """The schedule's parameters that belong to the generator and to no feature."""
    name = plan.schedule.name
    taken = {option.parameter for feature in FEATURES if feature.goes_with(name) for option in feature.parameters}
    return {key: value for key, value in plan.schedule.parameters.items() if key not in taken}


def schedule_shape(plan: Plan) -> Shape:
    """Returns the plan's schedule shape, of which schedules are pure functions."""
    fields: dict[str, Any] = {}
    for feature, options in features_of(plan):
        fields |= feature.shape(options)
    placement, first = Placement(plan), 0
    companions: list[tuple[int, ...]] = []
    for s, stage in enumerate(plan.stages):
        companions += (tuple(first + q for q in together) for together in placement.companions(s))
        first += len(stage.replicas)
    return Shape(
        layers=tuple(s.layers for s in plan.stages),
        route=placement.route,
        replicas=tuple(len(s.replicas) for s in plan.stages),
        placement=placement_of(plan.schedule.name),
        sizes=plan.training.micro_batch_sizes,
        attention=plan.attention_layers if plan.model.pattern else (),
        companions=tuple(companions),
        **fields,
    )


def assemble(
    shape: Shape,
    schedule: str,
    features: Chosen = (),
    *,
    speeds: Sequence[float] | None = None,
    forward_only: bool = False,
    transfers: str = "global",
    **parameters: Any,
) -> Program:
    """The program of a shape: generator, passes before transfers, transfers, passes after them.

    Args:
        shape: Stages, chunks, replicas, microbatches, slices.
        features: Features with their options; their passes run in this order.
        transfers: Order of receives (``add_transfers``), or "none" for a program without transfers.

    Raises:
        ValueError: An unknown schedule, or one that cannot run the shape with these features.
        TypeError: A parameter that the generator does not have.
    """
    if schedule in GENERATORS and "speeds" in inspect.signature(GENERATORS[schedule]).parameters:
        parameters["speeds"] = speeds
    program = generate(schedule, shape, forward_only=forward_only, **parameters)
    for feature, options in features:
        program = feature.before_transfers(program, options, speeds)
    if transfers != "none":
        program = add_transfers(program, speeds=speeds, order=transfers)
    for feature, options in features:
        program = feature.after_transfers(program, options)
    for feature, options in features if transfers == "global" else ():
        program = feature.in_order(program, options, speeds)
    return program


def _refused(plan: Plan, error: Exception) -> PlanError:
    return PlanError("schedule", plan.schedule.name, str(error), "Choose another schedule or other parameters")


def _check_operations(program: Program, features: Chosen) -> None:
    executors = {"compute", "transfer", *(feature.name for feature, _ in features)}
    unknown = {kind for kind in program.kinds if kind.executor not in executors}
    if unknown:
        names = ", ".join(sorted(kind.name for kind in unknown))
        raise ValueError(f"it uses {names}, which can be simulated but not executed")
