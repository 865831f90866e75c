"""Operations of the parameter window: gathers, releases, reductions and updates, and their dependencies.

Parameters have a state per chunk and layer: on the host, sharded on the device, gathered.  Gradients are reduced per
chunk and layer.  A gather directly before its first user is on demand: it begins when the user's other data is
ready (nothing is overlapped).  Exceptions are the start of the iteration, and layers that stages share: their parts
wait for other stages, whose replicas would wait for the gather.
"""

from collections import Counter
from collections.abc import Set
from functools import cached_property

from megatron_het.schedule.deps import Lifetimes, State, shown_ranges
from megatron_het.schedule.ir import Op, Program
from megatron_het.schedule.kinds import (
    FREE,
    GREY,
    NEITHER,
    NO_NEEDS,
    PARTS,
    Direction,
    Effect,
    Fields,
    Kind,
    Price,
    Role,
    Stream,
    Work,
    add_kinds,
    executed_by,
)
from megatron_het.schedule.memory import GRADIENTS, PARAMETERS, BytesOf, Holdings

ZERO_STAGES = (2, 3)


class Parameters(State):
    """Parameters, gradients and updates of one device's chunks."""

    of_parameters = True

    def __init__(self, held: Lifetimes, program: Program, kinds: Set[Kind]) -> None:
        super().__init__(held, program, kinds)
        layers = held.layers
        self._gathers, self._reduces = Kind.PARAM_GATHER in kinds, Kind.GRAD_REDUCE in kinds
        self._shares = not kinds.isdisjoint(PARTS)
        # by chunk, the layers whose parameters are gathered
        self.gathered: list[set[int]] = [set() for _ in layers]
        self.reduced: list[set[int]] = [set() for _ in layers]  # by chunk, the layers whose gradients are reduced
        self._on_device = [Kind.PARAM_PREFETCH not in kinds] * len(layers)
        self._ops = program.ops[held.device]
        self._demanded: list[tuple[int, int, list[int]]] = []
        self._gathering: dict[int, list[int]] = {}
        self._reducing: dict[int, list[int]] = {}
        self._backward: dict[int, int] = {}
        self._prefetched: dict[int, int] = {}
        self._stepped: dict[int, int] = {}

    def computes(self, node: int, chunk: int, found: list[int]) -> None:
        """A pass waits for the gathers of its chunk; an on-demand gather before it gets the pass's dependencies."""
        for gathered, gather, waits in self._demanded:
            if gathered == chunk:
                waits.extend(other for other in found if not gather < other < node)
        self._demanded = []
        found += self._gathering.pop(chunk, ())

    def has_parameters(self, node: int, chunk: int) -> None:
        """Check that the chunk's parameters are gathered."""
        if self._gathers and not self.held.whole(chunk) <= self.gathered[chunk]:
            missing = self.held.whole(chunk) - self.gathered[chunk]
            text = f"the parameters of layers {shown_ranges(missing)} of chunk {chunk} are not gathered"
            self.held.unfit(node, text)

    def makes_gradients(self, node: int, chunk: int) -> None:
        """Check that the chunk's gradients are not reduced yet."""
        self._backward[chunk] = node
        if self.reduced[chunk] and chunk in self._reduced_by_pass:
            self.reduced[chunk] = set()  # the pass has made new gradients
        elif self.reduced[chunk]:
            self.held.unfit(node, f"the gradients of chunk {chunk} are already reduced")

    def finish(self) -> None:
        """Check that no parameters stay gathered and no gradients unreduced."""
        for chunk, gathered in enumerate(self.gathered):
            if self._gathers and gathered:
                self.held.unfit(-1, f"the parameters of chunk {chunk} are never released")
        for chunk in range(len(self.held.layers) if self._reduces else 0):
            if self.held.whole(chunk) - self.reduced[chunk]:
                self.held.unfit(-1, f"the gradients of chunk {chunk} are never (or not all) reduced")

    def _in_chunk(self, node: int, op: Op) -> Set[int]:
        """The layers of an operation, which must be in its chunk."""
        layers = self.held.covered(op)
        if not layers <= self.held.whole(op.chunk):
            count = self.held.layers[op.chunk]
            text = f"layers {shown_ranges(layers)} are not all in chunk {op.chunk}, which has {count}"
            self.held.unfit(node, text)
        return layers

    def prefetch(self, node: int, op: Op, found: list[int]) -> None:
        """A shard comes from the host."""
        self._in_chunk(node, op)
        found += self._after_step(op.chunk)
        self._prefetched[op.chunk] = node
        if self._on_device[op.chunk]:
            self.held.unfit(node, f"the parameter shard of chunk {op.chunk} is on the device already")
        self._on_device[op.chunk] = True

    def gather(self, node: int, op: Op, found: list[int]) -> None:
        """Layers become whole."""
        layers, chunk = self._in_chunk(node, op), op.chunk
        found += [self._prefetched[chunk]] if chunk in self._prefetched else []
        found += self._after_step(chunk)
        self._gathering.setdefault(chunk, []).append(node)
        if self.held.compute >= 0 and not self._shares:
            self._demanded.append((chunk, node, found))
        if not self._on_device[chunk]:
            self.held.unfit(node, f"the parameter shard of chunk {chunk} is on the host (no prefetch before it)")
        again = layers & self.gathered[chunk]
        if again:
            self.held.unfit(node, f"layers {shown_ranges(again)} of chunk {chunk} are gathered already")
        self.gathered[chunk] |= layers

    def release(self, node: int, op: Op, found: list[int]) -> None:
        """Layers are shards again."""
        layers = self._in_chunk(node, op)
        absent = layers - self.gathered[op.chunk]
        if absent:
            self.held.unfit(node, f"layers {shown_ranges(absent)} of chunk {op.chunk} are not gathered")
        self.gathered[op.chunk] -= layers

    def offload(self, node: int, op: Op, found: list[int]) -> None:
        """A shard goes to the host."""
        self._in_chunk(node, op)
        found += self._after_step(op.chunk)
        if not self._on_device[op.chunk]:
            self.held.unfit(node, f"the parameter shard of chunk {op.chunk} is on the host already")
        self._on_device[op.chunk] = False

    def reduce(self, node: int, op: Op, found: list[int]) -> None:
        """Gradients are added up."""
        layers, chunk = self._in_chunk(node, op), op.chunk
        found += [self._backward[chunk]] if chunk in self._backward else []
        self._reducing.setdefault(chunk, []).append(node)
        if layers & self.reduced[chunk] and chunk in self._reduced_by_pass:
            self.reduced[chunk] = set()  # a pass that this replica does not have
        elif layers & self.reduced[chunk]:
            self.held.unfit(node, f"the gradients of chunk {chunk} are reduced twice")
        self.reduced[chunk] |= layers

    def step(self, node: int, op: Op, found: list[int]) -> None:
        """Parameters are updated."""
        self._in_chunk(node, op)
        chunk = op.chunk
        found += self._reducing.pop(chunk, ())
        if self._reduces and self.held.whole(chunk) - self.reduced[chunk]:
            self.held.unfit(node, f"the gradients of chunk {chunk} are not reduced")
        if not self._on_device[chunk]:
            self.held.unfit(node, f"the parameter shard of chunk {chunk} is on the host")
        if self.gathered[chunk]:
            self.held.unfit(node, f"the parameters of chunk {chunk} are still gathered from before the step")
        if chunk in self._stepped:
            self.held.unfit(node, f"chunk {chunk} is stepped twice")
        self._stepped[chunk] = node

    def _after_step(self, chunk: int) -> list[int]:
        return [self._stepped[chunk]] if chunk in self._stepped else []

    @cached_property
    def _reduced_by_pass(self) -> frozenset[int]:
        """Chunks whose gradients are reduced at least once per backward pass, as ZeRO-2 does, instead of once."""
        reductions = Counter((op.chunk, op.start) for op in self._ops if op.kind is Kind.GRAD_REDUCE)
        passes = Counter(op.chunk for op in self._ops if Work.WEIGHTS in op.kind.work)
        return frozenset(chunk for (chunk, _), count in reductions.items() if count >= max(passes[chunk], 2))


class _StateBytes(BytesOf):
    """Bytes of parameters and gradients over time."""

    def __init__(self, held: Holdings, kinds: Set[Kind]) -> None:
        super().__init__(held, kinds)
        memory = held.memory
        self._full, self._shard = held.row(memory.parameter_bytes), held.row(memory.parameter_shard_bytes)
        self._gradient = held.row(memory.gradient_bytes)
        self._gradient_shard = held.row(memory.gradient_shard_bytes)
        self._gathers, self._reduces, self._steps = (
            kind in kinds for kind in (Kind.PARAM_GATHER, Kind.GRAD_REDUCE, Kind.OPTIMIZER_STEP)
        )
        assert held.lifetimes is not None  # these operations matter
        self._walk, self._state = held.lifetimes, held.lifetimes.state(Parameters)
        self._with_gradients: set[int] = set()
        self._with_shards: set[tuple[int, int]] = set()
        # Without steps in the program a chunk is updated when it is first opened, by the gradients of the
        # iteration before, which were there from the start.
        self._updated: set[int] = set()

    def computed(self, node: int) -> None:
        """Allocate the buffers of the gather that follows this operation."""
        if self._gathers:
            self.held.issued = self.held.end[node]

    def makes_gradients(self, node: int, chunk: int) -> None:
        """The first pass since the last reduction allocates them."""
        if self._reduces:
            self._open_gradients(node, chunk)

    def _open_gradients(self, node: int, chunk: int) -> None:
        if chunk not in self._with_gradients:
            self._with_gradients.add(chunk)
            self.held.found.append((self.held.start[node], self._gradient[chunk], GRADIENTS))

    def _moved(self, node: int, op: Op) -> float:
        """Advance to the operation; returns the share of the chunk's layers that it gathers, releases or reduces."""
        whole, gathered = max(self.held.layers[op.chunk], 1), self._state.gathered[op.chunk]
        before = len(gathered)
        self._walk.step(node, op, [])
        if op.kind is Kind.GRAD_REDUCE:
            return len(self._walk.covered(op)) / whole
        return abs(len(gathered) - before) / whole

    def gather(self, node: int, op: Op) -> None:
        """Layers become whole."""
        chunk, at = op.chunk, min(self.held.start[node], self.held.issued)
        share = self._moved(node, op)
        if not self._steps and not self.held.program.forward_only and chunk not in self._updated:
            self._updated.add(chunk)
            self.held.found.append((at, -self._gradient_shard[chunk], GRADIENTS))
        self.held.found.append((at, self._full[chunk] * share, PARAMETERS))

    def release(self, node: int, op: Op) -> None:
        """Layers are shards again."""
        self.held.found.append((self.held.end[node], -self._full[op.chunk] * self._moved(node, op), PARAMETERS))

    def prefetch(self, node: int, op: Op) -> None:
        """A shard comes from the host."""
        at = min(self.held.start[node], self.held.issued)
        self.held.found.append((at, self._shard[op.chunk], PARAMETERS))

    def offload(self, node: int, op: Op) -> None:
        """A shard goes to the host."""
        self.held.found.append((self.held.end[node], -self._shard[op.chunk], PARAMETERS))

    def reduce(self, node: int, op: Op) -> None:
        """Whole gradients become shards."""
        chunk, share = op.chunk, self._moved(node, op)
        self._open_gradients(node, chunk)  # of a pass that this replica does not have: zeros
        self.held.found.append((self.held.end[node], -self._gradient[chunk] * share, GRADIENTS))
        # Reduced after every pass, the shards of all passes are added up in one place.
        if not self.held.program.forward_only and (chunk, op.start) not in self._with_shards:
            self._with_shards.add((chunk, op.start))
            self.held.found.append((self.held.start[node], self._gradient_shard[chunk] * share, GRADIENTS))
        if len(self._state.reduced[chunk]) == max(self.held.layers[chunk], 1):
            self._with_gradients.discard(chunk)  # the next pass allocates them again

    def step(self, node: int, op: Op) -> None:
        """Shards of gradients are freed."""
        self.held.found.append((self.held.end[node], -self._gradient_shard[op.chunk], GRADIENTS))


_STATE = NEITHER | {
    "executor": "window",
    "role": Role.OTHER,
    "is_issued": True,
    "direction": Direction.NEITHER,
    "fields": Fields(names_pass=False),
    "needs": NO_NEEDS,
    "colour": GREY,
}

# fmt: off
add_kinds({
    # Parameter shards of ``chunk`` come from the host.
    "PARAM_PREFETCH": _STATE | {
        "mnemonic": "PP", "stream": Stream.HOST_TO_DEVICE,
        "effect": Effect(lifetime=lambda held: held.state(Parameters).prefetch,
                         memory=lambda held: held.state(_StateBytes).prefetch, absent=("parameter_shard_bytes",)),
        "price": Price(seconds=lambda prices: prices.per_chunk(prices.costs.prefetch_s))},
    # All-gather of the parameters of layers ``[start, stop)`` of ``chunk``.
    "PARAM_GATHER": _STATE | {
        "mnemonic": "PG", "stream": Stream.COLLECTIVE,
        "effect": Effect(lifetime=lambda held: held.state(Parameters).gather,
                         memory=lambda held: held.state(_StateBytes).gather, absent=("parameter_bytes",)),
        "price": Price(seconds=lambda prices: prices.per_layer(prices.costs.gather_s))},
    # The gathered parameters are dropped; the shards stay.
    "PARAM_RELEASE": _STATE | {
        "mnemonic": "PR", "stream": Stream.COMPUTE,
        "effect": Effect(lifetime=lambda held: held.state(Parameters).release,
                         memory=lambda held: held.state(_StateBytes).release),
        "price": FREE},
    # Parameter shards go to the host.
    "PARAM_OFFLOAD": _STATE | {
        "mnemonic": "PO", "stream": Stream.DEVICE_TO_HOST,
        "effect": Effect(lifetime=lambda held: held.state(Parameters).offload,
                         memory=lambda held: held.state(_StateBytes).offload),
        "price": Price(seconds=lambda prices: prices.per_chunk(prices.costs.offload_s))},
    # Reduce-scatter of the gradients of layers ``[start, stop)`` of ``chunk``.
    "GRAD_REDUCE": _STATE | {
        "mnemonic": "GR", "stream": Stream.COLLECTIVE,
        "effect": Effect(lifetime=lambda held: held.state(Parameters).reduce,
                         memory=lambda held: held.state(_StateBytes).reduce, absent=("gradient_bytes",)),
        "price": Price(seconds=lambda prices: prices.per_layer(prices.costs.reduce_s))},
    "OPTIMIZER_STEP": _STATE | {
        "mnemonic": "OS", "stream": Stream.COMPUTE, "is_issued": False,
        "effect": Effect(lifetime=lambda held: held.state(Parameters).step,
                         memory=lambda held: held.state(_StateBytes).step, absent=("gradient_shard_bytes",),
                         updates=True),
        "price": Price(seconds=lambda prices: prices.per_chunk(prices.costs.step_s))},
})
# fmt: on

PARAMETER_KINDS = executed_by("window")
