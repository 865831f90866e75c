"""The time of 1F1B with any numbers of replicas by the compiled loops (``compiled/``), without a program.

``quick.py`` says the same of the program's operations, for this and other schedules.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_double, c_int32, c_uint8
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_het.lowering.programs import Inputs, assemble_compute
from megatron_het.plan import Plan, PlanError
from megatron_het.schedule.cost import Costs, Link
from megatron_het.schedule.generators.listing import ORDERS, Part, parts_of
from megatron_het.schedule.generators.one_f_one_b import Ways, ways
from megatron_het.schedule.ir import Kind, Op, Shape

from ..costs.candidate import Group
from ..errors import PlannerError
from .compiled import loops

# The time of a program that has nothing but forwards and backwards, without building the program's transfers.
#
# The simulator (``megatron_het.schedule.simulate``) says the same for any program, with a time line and memory.  A
# search wants one number of many plans, most of which are such programs.


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
    """Prices every device; equal devices share their prices."""
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


MOST_LINKS = 20_000_000
"""Pairs of replicas of neighbouring stages, each with a time of its own."""
_STUCK = -2.0


class Wiring:
    """Links between replicas, which depend on their kinds and on whether they share a node.

    Attributes:
        groups: By device, what kind of replica it is (of one).
        places: By device, its node.

    Args:
        price: The link between two kinds, and whether within a node; one that nobody shares.
    """

    def __init__(
        self, groups: Sequence[Group], places: Sequence[object], price: Callable[[Group, Group, bool], Link]
    ) -> None:
        self.groups, self.places, self._price = groups, places, price
        self._known: dict[tuple[Group, Group, bool], Link] = {}

    def between(self, source: Group, target: Group, local: bool) -> Link:
        """The link between two kinds of replicas."""
        key = source, target, local
        if key not in self._known:
            self._known[key] = self._price(*key)
        return self._known[key]

    def __call__(self, source: int, target: int) -> Link:
        return self.between(self.groups[source], self.groups[target], self.places[source] == self.places[target])


class Pipelines:
    """Plain 1F1B pipelines, ready to be timed in any order and with any number of microbatches in flight.

    Args:
        speeds: Of the generator.
    """

    def __init__(self, compiled: ctypes.CDLL, shape: Shape, speeds: Sequence[float], costs: Costs) -> None:
        wiring = costs.link
        assert isinstance(wiring, Wiring)  # the caller knows
        self._parts = [
            _Part(compiled, part, [speeds[d] for d in part.devices], costs, wiring)
            for part in _different(shape, parts_of(shape), speeds, costs, wiring)
        ]

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        """Returns the seconds of the iteration.

        Args:
            parameters: Of the generator.

        Raises:
            PlannerError: The schedule cannot run this shape.
        """
        try:
            return max([part.seconds(parameters) for part in self._parts])
        except ValueError as error:
            raise PlannerError("plan", "schedule.parameters", parameters, str(error)) from None


def pipelines_of(schedule: str, shape: Shape, speeds: Sequence[float], costs: Costs) -> Pipelines | None:
    """The pipelines; None for other schedules, for costs that are not so simple, and without a compiler.

    Args:
        speeds: Of the generator.
    """
    wiring = costs.link
    plain = schedule == "1f1b" and shape.slices == 1 and all(len(chunks) == 1 for chunks in shape.layers)
    if not plain or not isinstance(wiring, Wiring) or not can_price(shape, costs) or costs.attention_forward_s:
        return None
    compiled = loops()
    if compiled is None or sum(a * b for a, b in zip(shape.replicas, shape.replicas[1:])) > MOST_LINKS:
        return None
    return Pipelines(compiled, shape, speeds, costs)


def pipelines_s(
    schedule: str, shape: Shape, speeds: Sequence[float], costs: Costs, parameters: Mapping[str, Any]
) -> float | None:
    """Seconds of the iteration; None where :func:`pipelines_of` says so.

    Args:
        speeds, parameters: Of the generator.

    Raises:
        PlannerError: The schedule cannot run this shape.
    """
    found = pipelines_of(schedule, shape, speeds, costs)
    return None if found is None else found.seconds(parameters)


def _different(shape: Shape, parts: list[Part], speeds: Sequence[float], costs: Costs, wiring: Wiring) -> list[Part]:
    """Parts that are not alike in shape, speeds and kinds; where each is in a place of its own, all."""
    if len(parts) == 1:
        return parts
    tails = costs.tail_s or (0.0,) * len(shape.devices)
    known: dict[object, Part] = {}
    for part in parts:
        nodes: dict[object, int] = {}
        kinds = [
            (
                speeds[d],
                wiring.groups[d],
                nodes.setdefault(wiring.places[d], len(nodes)),
                costs.forward_s[d],
                costs.backward_s[d],
                tails[d],
            )
            for d in part.devices
        ]
        known.setdefault((part.shape, tuple(kinds)), part)
    return list(known.values())


class _Part:
    """One part of the pipelines, as the compiled loops want it."""

    def __init__(
        self, compiled: ctypes.CDLL, part: Part, speeds: Sequence[float], costs: Costs, wiring: Wiring
    ) -> None:
        shape, devices = part.shape, part.devices
        self._compiled, self._shape, self._speeds = compiled, shape, speeds
        self._layout = _Layout(shape)
        tails = costs.tail_s or (0.0,) * len(wiring.groups)
        own = costs.operation_s
        forward, backward = ([rows[d][0] + own for d in devices] for rows in (costs.forward_s, costs.backward_s))
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(wiring.groups[d] for d in devices))}
        nodes: dict[object, int] = {}
        links = [wiring.between(a, b, local) for local in (False, True) for a in kinds for b in kinds]
        self._first = _ints((*shape.first_device, len(devices)))
        self._costs = (
            _doubles(forward),
            _doubles(backward),
            _doubles([tails[d] for d in devices]),
            _ints([kinds[wiring.groups[d]] for d in devices]),
            _ints([nodes.setdefault(wiring.places[d], len(nodes)) for d in devices]),
            len(kinds),
            _doubles([costs.message_bytes / link.bytes_per_s for link in links]),
            _doubles([link.latency_s for link in links]),
        )

    def seconds(self, parameters: Mapping[str, Any]) -> float:
        orders = ways(self._shape, self._speeds, merge=self._merge, **parameters)
        flat = (c_uint8 * sum(map(len, orders))).from_buffer_copy(b"".join(map(bytes, orders)))
        seconds = self._compiled.het_makespan(*self._layout.arguments, self._first, flat, *self._costs)
        if seconds < 0:
            raise MemoryError if seconds != _STUCK else ValueError("its operations wait for each other")
        return float(seconds)

    def _merge(
        self, shape: Shape, limits: Sequence[int], forward_s: Sequence[float], backward_s: Sequence[float], order: str
    ) -> Ways:
        return self._layout.merge(self._compiled, limits, forward_s, backward_s, order)


class _Layout:
    """A shape as the compiled loops want it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        count = len(shape.devices)
        mine = [shape.microbatches_of(d) for d in range(count)]
        self.at = [0, *accumulate(map(len, mine))]
        runner = np.array(shape.route, dtype=np.int32) + np.array(shape.first_device, dtype=np.int32)[:, None]
        self.arguments = (
            count,
            shape.stages,
            shape.microbatches,
            _ints([d.stage for d in shape.devices]),
            _ints(runner.ravel()),
            _ints(list(chain.from_iterable(mine))),
            _ints(self.at),
        )

    def merge(
        self,
        compiled: ctypes.CDLL,
        limits: Sequence[int],
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        order: str,
    ) -> Ways:
        """Returns what ``fast_merge`` says."""
        out, done = (c_uint8 * (2 * self.at[-1]))(), (c_int32 * len(limits))()
        # Nobody has more in flight than there are microbatches.
        most = [min(n, self.shape.microbatches) for n in limits]
        passes = _doubles(forward_s), _doubles(backward_s)
        if compiled.het_merge(*self.arguments, _ints(most), *passes, ORDERS.index(order), out, done):
            raise MemoryError
        found = bytes(out)
        return [found[2 * at : 2 * at + n] for at, n in zip(self.at, done)]


def _ints(values: Sequence[int] | NDArray[np.int32]) -> ctypes.Array[c_int32]:
    return (c_int32 * len(values)).from_buffer(np.array(values, dtype=np.int32)) if len(values) else (c_int32 * 0)()


def _doubles(values: Sequence[float]) -> ctypes.Array[c_double]:
    return (c_double * len(values)).from_buffer(array("d", values)) if values else (c_double * 0)()
