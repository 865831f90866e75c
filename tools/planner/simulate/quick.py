"""The time of a program that has nothing but forwards and backwards, without building the program's transfers.

The simulator (``megatron_het.schedule.simulate``) says the same for any program, with a time line and memory.  A
search wants one number of many plans, most of which are such programs.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_het.lowering.programs import Inputs, assemble_compute
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.cost import Costs
from megatron_het.schedule.ir import Kind, Op, Shape

from ..errors import PlannerError

_NOT_YET = -1.0


def compute_orders(plan: Plan, inputs: Inputs) -> tuple[Shape, tuple[tuple[Op, ...], ...]] | None:
    """Returns what every replica computes, in order; None where the plan's program has further operations.

    Args:
        inputs: Of the plan's generator (``generator_inputs``).

    Raises:
        PlannerError: The schedule cannot run this shape.
    """
    try:
        program = assemble_compute(plan, inputs)
    except PlanError as error:
        raise PlannerError("plan", error.where, plan.schedule.parameters, error.problem, error.hint) from None
    return None if program is None else (program.shape, program.ops)


def can_price(shape: Shape, costs: Costs) -> bool:
    """Whether :func:`makespan_s` says what the simulator says."""
    return not (
        costs.host_blocks
        or costs.post_s
        or costs.measured_s
        or costs.parts
        or shape.sizes
        or shape.placement != "loop"
        or len({len(chunks) for chunks in shape.layers}) > 1
    )


def makespan_s(shape: Shape, orders: Sequence[Sequence[Op]], costs: Costs) -> float | None:
    """End of the last operation or message, with what follows it on its device.

    A message waits for the messages before it on its link, and takes the time of its bytes; its latency does not
    occupy the link.

    Returns:
        None where links are shared by several pairs of devices.

    Raises:
        PlannerError: The operations wait for each other.
    """
    stages, count, slices = shape.stages, shape.microbatches, shape.slices
    last = stages * len(shape.layers[0]) - 1
    wires = _Wires(costs, costs.message_bytes / slices)
    of_stage = [[first + r for r in row] for first, row in zip(shape.first_device, shape.route)]
    each = count * slices
    arrived = [_NOT_YET] * (2 * (last + 1) * each)  # by direction, place in the model, microbatch, slice
    waiting = [-1] * len(arrived)
    prices = _prices(shape, costs)
    now, at = [0.0] * len(orders), [0] * len(orders)
    ready = list(range(len(orders)))[::-1]
    while ready:
        d = ready.pop()
        order, stage, time_s, place = orders[d], shape.devices[d].stage, now[d], at[d]
        price, length = prices[d], len(order)
        while place < length:
            op = order[place]
            back, microbatch, piece = op[0] is Kind.BACKWARD, op[1], op[2]
            virtual = op[3] * stages + stage
            if virtual != (last if back else 0):
                key = (virtual + virtual + back) * each + microbatch * slices + piece
                came = arrived[key]
                if came < 0:
                    waiting[key] = d
                    break
                if came > time_s:
                    time_s = came
            time_s += price[back][op[3]][piece]
            place += 1
            if virtual == (0 if back else last):
                continue
            to = virtual - 1 if back else virtual + 1
            target = of_stage[to % stages][microbatch]
            come = time_s if target == d else wires.carry(d, target, time_s)
            if come is None:
                return None
            key = (to + to + back) * each + microbatch * slices + piece
            arrived[key] = come
            if waiting[key] >= 0:
                ready.append(waiting[key])
        now[d], at[d] = time_s, place
    if any(place < len(order) for place, order in zip(at, orders)):
        raise PlannerError("plan", "schedule", shape.stages, "its operations wait for each other")
    tails = costs.tail_s or (0.0,) * len(orders)
    ends = zip(range(len(orders)), now, tails, orders)
    return max(max(t, wires.last_s.get(d, 0.0)) + tail for d, t, tail, order in ends if order)


Prices = tuple[tuple[tuple[float, ...], ...], ...]
"""Seconds of a device's forwards and of its backwards, by chunk and slice."""


def _prices(shape: Shape, costs: Costs) -> list[Prices]:
    """Of every device; equal devices share them."""
    known: dict[object, Prices] = {}
    shares = [(piece + costs.diagonal) / costs.attention_total(shape.slices) for piece in range(shape.slices)]
    tables = (costs.forward_s, costs.attention_forward_s), (costs.backward_s, costs.attention_backward_s)
    out = []
    for d in range(len(shape.devices)):
        rows = tuple((whole[d], slices[d] if slices else ()) for whole, slices in tables)
        if rows not in known:
            known[rows] = tuple(
                tuple(_of_slices(s, mine[c] if mine else 0.0, shares, costs.operation_s) for c, s in enumerate(whole))
                for whole, mine in rows
            )
        out.append(known[rows])
    return out


def _of_slices(whole_s: float, attention_s: float, shares: Sequence[float], operation_s: float) -> tuple[float, ...]:
    """Seconds of each slice of a pass."""
    return tuple(whole_s / len(shares) + attention_s * share + operation_s for share in shares)


class _Wires:
    """The links between devices, and until when each is busy.

    All messages of a link are sent by one device, in the order in which it computes them.

    Attributes:
        last_s: By sender, when the last of its messages arrives.
    """

    def __init__(self, costs: Costs, size: float) -> None:
        self._costs, self._size = costs, size
        self._links: dict[tuple[int, int], list[float]] = {}
        self.last_s: dict[int, float] = {}

    def carry(self, source: int, target: int, time_s: float) -> float | None:
        """When a message that is ready at a time arrives; None where other pairs share the link."""
        known = self._links.get((source, target))
        if known is None:
            link = self._costs.link(source, target)
            if link.shared:
                return None
            known = self._links[source, target] = [self._size / link.bytes_per_s, link.latency_s, 0.0]
        wire, latency, busy = known
        known[2] = end = (busy if busy > time_s else time_s) + wire
        come = end + latency
        if come > self.last_s.get(source, 0.0):
            self.last_s[source] = come
        return come
