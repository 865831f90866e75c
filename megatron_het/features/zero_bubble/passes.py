"""Zero-bubble schedules: ZB-H1, ZB-V and V-Half.

The backward is split: gradients of inputs are sent to the previous stage, gradients of weights fill idle time.
The V schedules place chunk 0 down the stages and chunk 1 back up, and repeat one *building block* per
microbatch: moving one stage on delays each pass by a fixed number of slots.  The sum of the delays of a
chunk's forward and backward determines how long activations live, hence the memory: 6 slots, the length of
the block, for ZB-V (the memory of 1F1B), 3 for V-Half (half of it).
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

from megatron_het.schedule.cost import Prices
from megatron_het.schedule.deps import Dependencies, Lifetimes
from megatron_het.schedule.generators import listing
from megatron_het.schedule.generators.one_f_one_b import in_flight_limits
from megatron_het.schedule.ir import Kind, Op, Program, Shape
from megatron_het.schedule.kinds import BACKWARD_PASS, OWN_GRADIENT, Effect, Price, Value, Work, add_kinds

# Kinds of the two halves of a backward.


def _input_gradient(prices: Prices) -> Callable[[int, Op], float]:
    def seconds(device: int, op: Op) -> float:
        costs = prices.costs
        attention = prices.attention(costs.attention_backward_s, device, op)
        return prices.linear_backward(device, op) * (1 - costs.weight_share) + attention + costs.operation_s

    return seconds


def _weight_gradient(prices: Prices) -> Callable[[int, Op], float]:
    costs = prices.costs
    return lambda device, op: prices.linear_backward(device, op) * costs.weight_share + costs.operation_s


def _use_up(held: Lifetimes) -> Callable[[int, Op, list[int]], None]:
    """Returns the rule for the last use of activations in an operation that needs no parameters."""

    def step(node: int, op: Op, found: list[int]) -> None:
        held.use(node, op, found, parameters=False)
        held.kept.pop((op.microbatch, op.slice, op.chunk), None)

    return step


add_kinds(
    {
        # Gradient of the chunk's input only.
        "BACKWARD_INPUT": {
            **BACKWARD_PASS,
            "mnemonic": "I",
            "work": Work.INPUT,
            "effect": Effect(lifetime=lambda held: held.use),
            "price": Price(seconds=_input_gradient, is_pass=True, attends=True),
            "plain_s": 1.0,
        },
        # Gradients of the chunk's weights only.
        "BACKWARD_WEIGHT": {
            **BACKWARD_PASS,
            "mnemonic": "W",
            "executor": "zero_bubble",
            "work": Work.WEIGHTS,
            "needs": OWN_GRADIENT,
            "makes": Value("the weight gradient"),
            "fed_by": None,
            "sent_by": None,
            "effect": Effect(lifetime=_use_up, memory=lambda held: held.use_up),
            "price": Price(seconds=_weight_gradient, is_pass=True),
            "plain_s": 1.0,
            "colour": (0.42, 0.22, 0.25),
        },
    }
)

BLOCK = 6  # slots of a building block: forward, input and weight gradient of two chunks


class _Filler(listing.Loop):
    """Runs forwards and input gradients in a given order, and weight gradients when idle or short of memory."""

    def __init__(
        self, deps: Dependencies, orders: Sequence[Sequence[Op]], limits: Sequence[int], speeds: listing.Speeds
    ) -> None:
        super().__init__(deps, speeds)
        self.orders, self.limits = orders, limits
        self.next = [0] * len(orders)
        self.pending: list[deque[Op]] = [deque() for _ in orders]
        self.held = [0] * len(orders)

    def choose(self, device: int, now: float) -> tuple[Op, float] | float | None:
        order, i, pending = self.orders[device], self.next[device], self.pending[device]
        time = None
        if i < len(order):
            op = order[i]
            full = op.kind == Kind.FORWARD and self.held[device] >= self.limits[device] and bool(pending)
            time = None if full else self.ready_at(device, op)
            if time is not None and time <= now:
                self.next[device] += 1
                if op.kind == Kind.FORWARD:
                    self.held[device] += 1
                else:
                    pending.append(op._replace(kind=Kind.BACKWARD_WEIGHT))
                return op, self.speeds.forward_s[device][op.chunk]
        if pending:
            self.held[device] -= 1
            op = pending.popleft()
            return op, self.speeds.forward_s[device][op.chunk]
        return time


def _fill(
    name: str, shape: Shape, orders: Sequence[Sequence[Op]], limits: Sequence[int], speeds: listing.Speeds | None = None
) -> Program:
    filler = _Filler(Dependencies(shape), orders, limits, speeds or listing.Speeds.of(shape))
    return Program(name, shape, filler.run())


def _check(name: str, shape: Shape, chunks: int, placement: str) -> None:
    listing.require(name, shape.slices == 1, f"slices = {shape.slices}: sequences are not cut into slices here")
    listing.require(name, all(len(c) == chunks for c in shape.layers), f"every stage has exactly {chunks} chunk(s)")
    listing.require(name, shape.placement == placement, f"placement = {shape.placement}: must be {placement}")


def zb_h1(shape: Shape, *, forward_only: bool = False, speeds: Sequence[float] | None = None) -> Program:
    """ZB-H1: 1F1B with the weight gradients delayed into its bubbles, within the memory of 1F1B's first stage.

    With several replicas per stage the order of forwards and input gradients comes from a simulation of the
    iteration, as in 1F1B; a device holds activations in proportion to its share of the microbatches.

    Args:
        shape: one chunk per stage, no slices.

    Raises:
        ValueError: chunks or slices, or ``speeds`` do not fit the devices.
    """
    _check("zb-h1", shape, 1, "loop")
    devices = range(len(shape.devices))
    forward = [listing.compute_ops(Kind.FORWARD, shape.microbatches_of(d), (0,), 0) for d in devices]
    if forward_only:
        return listing.forward_program("zb-h1", shape, forward)
    costs = listing.Speeds.of(shape, speeds)
    costs = listing.Speeds(costs.forward_s, costs.forward_s)  # either half of a backward takes as long as a forward
    backward = [listing.compute_ops(Kind.BACKWARD_INPUT, shape.microbatches_of(d), (0,), 0) for d in devices]
    in_flight = in_flight_limits(shape)
    shares = [len(shape.microbatches_of(d)) / shape.microbatches for d in devices]
    limits = [max(n, 1 + math.ceil(share * sum(shape.replicas[1:]) - 1e-9)) for n, share in zip(in_flight, shares)]
    if listing.single_replicas(shape):
        orders = [listing.alternate(f, b, shape.stages - 1 - s) for s, (f, b) in enumerate(zip(forward, backward))]
    else:
        orders = list(listing.merge(shape, forward, backward, in_flight, costs))
    return _fill("zb-h1", shape, orders, limits, costs)


def zb_v(shape: Shape, *, forward_only: bool = False, speeds: Sequence[float] | None = None) -> Program:
    """ZB-V: two chunks per stage in a V.

    If forward and both gradients take equally long, the last device is never idle after its first pass, so the
    bubble is only the wait for that pass, ``stages - 1`` passes.

    Args:
        shape: two chunks per stage, placed "v", no slices.

    Raises:
        ValueError: another shape, or ``speeds`` do not fit the devices.
    """
    return _v_schedule("zb-v", shape, forward_only, speeds)


def v_half(shape: Shape, *, forward_only: bool = False, speeds: Sequence[float] | None = None) -> Program:
    """V-Half: like ZB-V, with half the memory and some bubble.

    Args:
        shape: two chunks per stage, placed "v", no slices.

    Raises:
        ValueError: another shape, or ``speeds`` do not fit the devices.
    """
    return _v_schedule("v-half", shape, forward_only, speeds)


_V_PASSES = ((Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD_INPUT, 1), (Kind.BACKWARD_INPUT, 0))
_LIFESPANS = {"zb-v": BLOCK, "v-half": BLOCK // 2}


def _v_schedule(name: str, shape: Shape, forward_only: bool, speeds: Sequence[float] | None) -> Program:
    _check(name, shape, 2, "v")
    costs = listing.Speeds.of(shape, speeds)
    offsets = block_offsets(shape.stages, _LIFESPANS[name])
    starts = _block_starts(shape, costs)
    orders = []
    for d, device in enumerate(shape.devices):
        timed = [
            (starts[m] + offset, Op(kind, m, 0, chunk))
            for offset, (kind, chunk) in zip(offsets[device.stage], _V_PASSES, strict=True)
            for m in shape.microbatches_of(d)
        ]
        timed.sort(key=lambda entry: entry[0])
        orders.append([op for _, op in timed if op.kind == Kind.FORWARD or not forward_only])
    if forward_only:
        return listing.forward_program(name, shape, orders)
    limits = [_held_at_most(offsets[device.stage]) for device in shape.devices]
    return _fill(name, shape, orders, limits, listing.Speeds(costs.forward_s, costs.forward_s))


def _block_starts(shape: Shape, costs: listing.Speeds) -> list[float]:
    """Start of every microbatch's building block, in slots.

    A device that runs a microbatch begins no other for the length of a block, or for longer if another replica of
    its stage is faster.  So the order on each device is that of a pipeline whose other microbatches run on
    other devices.  All devices of a microbatch use one start, so that the orders of all devices are compatible.
    """
    fastest = [math.inf] * shape.stages
    for device, row in zip(shape.devices, costs.forward_s, strict=True):
        fastest[device.stage] = min(fastest[device.stage], sum(row))
    length = [BLOCK * sum(row) / fastest[d.stage] for d, row in zip(shape.devices, costs.forward_s, strict=True)]
    free, starts = [0.0] * len(shape.devices), []
    for m in range(shape.microbatches):
        path = [shape.runner(stage, m) for stage in range(shape.stages)]
        starts.append(max(free[d] for d in path))
        for d in path:
            free[d] = starts[m] + length[d]
    return starts


def _held_at_most(offsets: Sequence[int]) -> int:
    """Chunks in flight in the steady state, with weight gradients in the first free slots after input gradients."""
    taken = {offset % BLOCK for offset in offsets}
    weight_slots = []
    for offset in offsets[2:]:
        slot = next(offset + i for i in range(1, 2 * BLOCK) if (offset + i) % BLOCK not in taken)
        taken.add(slot % BLOCK)
        weight_slots.append(slot)
    spans = [(offsets[0], weight_slots[1]), (offsets[1], weight_slots[0])]
    horizon = range(max(offsets) + 1, max(offsets) + 1 + BLOCK)
    return max(sum((t - a) // BLOCK - (t - b - 1) // BLOCK for a, b in spans) for t in horizon)


@lru_cache(maxsize=256)
def block_offsets(stages: int, lifespan: int) -> tuple[tuple[int, int, int, int], ...]:
    """Slots of F0, F1, I1, I0 of microbatch 0 on every stage, repeated every :data:`BLOCK` slots.

    ``lifespan`` is the delay per stage of a chunk's forward plus that of its backward.  Of all delays and
    gaps at the turns of the V for which no stage has two passes in one slot, the choice is by the least memory,
    then by the earliest turn, then by the fastest descent.
    """
    best: tuple[tuple[int, ...], tuple[tuple[int, int, int, int], ...]] | None = None
    for f0, f1 in itertools.product(range(1, lifespan), repeat=2):
        for gaps in itertools.product(range(1, BLOCK + 1), repeat=3):
            rows = []
            for stage in range(stages):
                row = _row(stage, stages, (f0, f1, lifespan - f1, lifespan - f0), gaps)
                if len({slot % BLOCK for slot in row}) < 4:
                    break
                rows.append(row)
            else:
                score = (max(map(_held_at_most, rows)), sum(gaps), f0, -f1)
                if best is None or score < best[0]:
                    best = score, tuple(rows)
    if best is None:
        raise ValueError(f"there is no V schedule for {stages} stages and a lifespan of {lifespan} slots")
    return best[1]


def _row(
    stage: int, stages: int, delays: tuple[int, int, int, int], gaps: tuple[int, ...]
) -> tuple[int, int, int, int]:
    f0, f1, i1, i0 = delays
    last = stages - 1
    forward_1 = last * f0 + gaps[0]
    backward_1 = forward_1 + last * f1 + gaps[1]
    backward_0 = backward_1 + last * i1 + gaps[2]
    return stage * f0, forward_1 + (last - stage) * f1, backward_1 + stage * i1, backward_0 + (last - stage) * i0
