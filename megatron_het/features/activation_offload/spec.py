"""Offload of activations to host memory (Zorse, section 4.1.3; SlimPipe, section 6.5)."""

import itertools
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from megatron_het.features.base import Feature, Figures, Refusal, ViewFlag, option
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.deps import Lifetimes, Pass, State
from megatron_het.schedule.ir import Kind, Op, Program, inserted
from megatron_het.schedule.kinds import (
    LIGHT,
    NEITHER,
    NO_NEEDS,
    OWN_OUTPUT,
    PASS_FIELDS,
    Direction,
    Effect,
    Price,
    Role,
    Stream,
    Value,
    Work,
    add_kinds,
)
from megatron_het.schedule.memory import ACTIVATIONS, BytesOf, Holdings

# The operations: activations of a FORWARD are copied to the host, and back ahead of the BACKWARD.


class _Away(State):
    """Passes whose activations are on the host or being copied."""

    def __init__(self, held: Lifetimes, program: Program, kinds: Set[Kind]) -> None:
        super().__init__(held, program, kinds)
        self._offloaded: dict[Pass, int] = {}
        self._fetched: dict[Pass, int] = {}

    def uses(self, key: Pass, found: list[int]) -> None:
        """Check that a backward's activations are on the device."""
        if key in self._fetched:
            found.append(self._fetched.pop(key))

    def offload(self, node: int, op: Op, found: list[int]) -> None:
        """Mark a pass's activations as offloaded."""
        self._offloaded[op.microbatch, op.slice, op.chunk] = node
        self._move(node, op, True)

    def fetch(self, node: int, op: Op, found: list[int]) -> None:
        """Mark a pass's activations as fetched."""
        key = (op.microbatch, op.slice, op.chunk)
        if key in self._offloaded:
            found.append(self._offloaded.pop(key))
        self._fetched[key] = node
        self._move(node, op, False)

    def _move(self, node: int, op: Op, to_host: bool) -> None:
        key = (op.microbatch, op.slice, op.chunk)
        on_host = self.held.kept.get(key)
        if on_host is None:
            self.held.unfit(node, "there are no activations to move: no FORWARD before it, or released already")
        elif on_host == to_host:
            self.held.unfit(node, f"its activations are {'on the host' if to_host else 'on the device'} already")
        self.held.kept[key] = to_host


class _AwayBytes(BytesOf):
    """Bytes of a pass's offloaded activations."""

    def __init__(self, held: Holdings, kinds: Set[Kind]) -> None:
        super().__init__(held, kinds)
        self._left = held.row(held.memory.boundary_bytes, held.slices)

    def _moved(self, op: Op) -> float:
        return (self.held.kept[op.chunk] - self._left[op.chunk]) * self.held.size(op)

    def offload(self, node: int, op: Op) -> None:
        """Subtract the offloaded bytes from the device."""
        self.held.found.append((self.held.end[node], -self._moved(op), ACTIVATIONS))

    def fetch(self, node: int, op: Op) -> None:
        """Add the fetched bytes to the device."""
        self.held.found.append((self.held.start[node], self._moved(op), ACTIVATIONS))


_COPY = NEITHER | {"executor": "activation_offload", "role": Role.OTHER, "fields": PASS_FIELDS, "colour": LIGHT}

# fmt: off
add_kinds({
    "ACT_OFFLOAD": _COPY | {
        "mnemonic": "AO", "stream": Stream.DEVICE_TO_HOST, "direction": Direction.FORWARD, "needs": OWN_OUTPUT,
        "effect": Effect(lifetime=lambda held: held.state(_Away).offload,
                         memory=lambda held: held.state(_AwayBytes).offload),
        "price": Price(seconds=lambda prices: prices.per_slice(prices.costs.act_offload_s))},
    "ACT_FETCH": _COPY | {
        "mnemonic": "AF", "stream": Stream.HOST_TO_DEVICE, "direction": Direction.BACKWARD, "needs": NO_NEEDS,
        "is_issued": True,
        "effect": Effect(lifetime=lambda held: held.state(_Away).fetch,
                         memory=lambda held: held.state(_AwayBytes).fetch),
        "price": Price(seconds=lambda prices: prices.per_slice(prices.costs.act_fetch_s))},
})
# fmt: on

# Adds the offload of activations to the host (Zorse, section 4.1.3; SlimPipe, section 6.5).


def add_activation_offload(program: Program) -> Program:
    """The program with ACT_OFFLOAD after forwards and ACT_FETCH ahead of their backwards.

    Activations are offloaded once their forward is complete: with the context exchange, after its last ATTEND_MERGE.
    Activations whose backward runs so soon that they would be fetched back at once stay on the device.
    The share of the activations to offload belongs to the cost model (``Memory.boundary_bytes``).

    Args:
        program: with joint or split backwards, before or after other passes.

    Raises:
        ValueError: A forward-only program, or activations are offloaded already.
    """
    if program.forward_only:
        raise ValueError(f"program {program.name} is forward only and keeps no activations")
    if Kind.ACT_OFFLOAD in program.kinds:
        raise ValueError(f"program {program.name} offloads activations already")
    return replace(program, ops=tuple(map(_device, program.ops)))


def _device(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    forwards = {(op.microbatch, op.slice, op.chunk): i for i, op in enumerate(ops) if op.kind.makes is Value.OUTPUT}
    backwards = [i for i, op in enumerate(ops) if Work.INPUT in op.kind.work]
    offloads: dict[int, list[Op]] = {}
    fetches: dict[int, list[Op]] = {}
    for place, position in itertools.pairwise(backwards):  # fetched while the backward before theirs runs
        _, microbatch, piece, chunk, *_ = ops[position]
        forward = forwards[microbatch, piece, chunk]
        if place - forward < 2:
            continue
        offloads[forward] = [Op(Kind.ACT_OFFLOAD, microbatch, piece, chunk)]
        fetches.setdefault(place, []).append(Op(Kind.ACT_FETCH, microbatch, piece, chunk))
    return inserted(ops, fetches, offloads)


_FLAG = "--het-offload-activations"


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Share of activations to offload."""

    ratio: float = option(
        "offload_activations",
        1.0,
        on_host=1.0,
        flag=_FLAG,
        metavar="RATIO",
        help="share (above 0, at most 1) of the activations of each forward that is offloaded to host memory "
        "until its backward, where the schedule leaves time for the copies",
        accepts=lambda value, plan: 0 < value <= 1,
        problem="must be a share above 0 and at most 1",
        where=_FLAG,
    )


class ActivationOffload(Feature):
    """Copies activations to the host after their forward and back ahead of their backward."""

    name = "activation_offload"
    title = "activations in host memory"
    called = _FLAG
    options = OffloadOptions
    view_flags = (ViewFlag("--offload", "parameters (with --parameters) and activations to host"),)
    no_graphs = "what a graph keeps for its backward stays in the graph's memory, which cannot be moved"
    refused = (
        Refusal("cpu_offloading_num_layers", "it moves the same activations"),
        Refusal("fp8_param_gather", "it would move weights like activations"),
    )

    def check_arguments(self, plan: Plan, options: OffloadOptions, args: Any) -> None:
        """Refuse arguments by the table, and overlapped reductions, which read a state of weights."""
        super().check_arguments(plan, options, args)
        if args.overlap_grad_reduce and getattr(args, "gradient_accumulation_fusion", False):
            problem = f"with {_FLAG}, layers that add to gradients cannot say so: autograd gives back copies of weights"
            hint = "Leave it out, or add --no-gradient-accumulation-fusion"
            raise PlanError("--overlap-grad-reduce", True, problem, hint)

    def viewed(self, flags: Mapping[str, Any]) -> OffloadOptions | None:
        """Returns the options from the flag."""
        return OffloadOptions() if flags["offload"] else None

    def after_transfers(self, program: Program, options: OffloadOptions) -> Program:
        """Adds the copies of activations to and from the host; an evaluation keeps no activations."""
        return program if program.forward_only else add_activation_offload(program)

    def price(self, costs: Costs, options: OffloadOptions, program: Program, figures: Figures) -> Costs:
        """Adds the costs of copies at the bandwidth of the host link, and the reduced activations."""
        kept = costs.memory.activation_bytes
        seconds = tuple(
            tuple(options.ratio * value / speed for value in row)
            for row, speed in zip(kept, figures.host_bytes_per_s, strict=True)
        )
        left = tuple(tuple((1 - options.ratio) * value for value in row) for row in kept)
        memory = replace(costs.memory, boundary_bytes=left)
        return replace(costs, act_offload_s=seconds, act_fetch_s=seconds, memory=memory)


def offload_ratio(plan: Plan) -> float:
    """Share of each forward's activations that a checked plan offloads; 0 for none."""
    options = ActivationOffload().options_of(plan)
    return 0.0 if options is None else float(options.ratio)
