"""Lifetimes: what a device holds at an operation, and which operation brought it there.

Parameters are a state per chunk and layer: on the host, sharded on the device, gathered.  Gradients are reduced per
chunk and layer.  Activations are a state per FORWARD: kept, on the host.  Keys and values of others are there from
their receive on.  This is the part of the dependencies that depends on the order within one device rather than on
values, see ``deps.py``; graph, validator and memory curves read it from here.

Operations of side streams (gathers, copies from and to the host, reductions, keys and values sent ahead) are issued
when the compute operation before them in the list is done; compute waits for the parameters and activations brought
for it.  A gather with its first user right after it is on demand: it begins when the user's other data is there
(nothing is overlapped), except at the start of the iteration, and where devices share layers: parts of these wait for
other stages, whose replicas would wait for the gather.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from megatron_het.schedule.ir import Op, Program
from megatron_het.schedule.kinds import PARTS, RECEIVES, Direction, Effect, Kind, Role, Work, chunk_of, complete, where

Pass = tuple[int, int, int]
"""(microbatch, slice, chunk)"""

_ISSUED = where(lambda kind: kind.role in (Role.STATE, Role.ACTIVATIONS, Role.KEYS)) - RECEIVES
"""Kinds that are issued when the compute operation before them is done."""
_UNISSUED = where(lambda kind: kind.effect in (Effect.STEP, Effect.TO_HOST))
"""Of those, the ones that wait for what they need alone."""
_STATEFUL = _ISSUED | where(lambda kind: kind.role not in (Role.PASS, Role.PART) and kind.effect is not Effect.NOTHING)
"""Kinds that change what is held beyond what the order of values says already."""


class Unfit(NamedTuple):
    """Something that does not fit what a device holds.

    Attributes:
        device: the device.
        node: number of the operation in the graph, -1 for the end of the list.
        reason: in words.
    """

    device: int
    node: int
    reason: str


class Lifetimes:
    """Walks one device's list: says what each operation waits for, and what does not fit.

    Programs without PARAM_* operations have all parameters in place all the time.

    Args:
        program: the program.
        device: the device.
        kinds: all kinds in the program.

    Attributes:
        problems: what did not fit up to now.
        gathered: by chunk, the layers whose parameters are materialised.
        on_device: by chunk, whether the parameter shard is on the device.
        reduced: by chunk, the layers whose gradients are reduced.
        kept: passes whose activations are held, and whether they are on the host.
    """

    def __init__(self, program: Program, device: int, kinds: Set[Kind]) -> None:
        self.device, self.layers = device, program.shape.layers[program.devices[device].stage]
        self.problems: list[Unfit] = []
        effects = {kind.effect for kind in kinds}
        self.gathers, self.reduces = Effect.GATHER in effects, Effect.REDUCE in effects
        self.exchanges = Effect.KEYS_ARRIVE in effects
        self._shares = not kinds.isdisjoint(PARTS)
        self.gathered: list[set[int]] = [set() for _ in self.layers]
        self.on_device = [Effect.SHARD_FROM_HOST not in effects] * len(self.layers)
        self.reduced: list[set[int]] = [set() for _ in self.layers]
        self._reduced_by_pass = _reduced_by_pass(program.ops[device]) if self.reduces else frozenset()
        self.kept: dict[Pass, bool] = {}
        self.received: dict[tuple[int, int, int], set[int]] = {}
        self._compute = -1
        self._demanded: list[tuple[int, int, list[int]]] = []
        self._gathering: dict[int, list[int]] = {}
        self._reducing: dict[int, list[int]] = {}
        self._backward: dict[int, int] = {}
        self._prefetched: dict[int, int] = {}
        self._stepped: dict[int, int] = {}
        self._offloaded: dict[Pass, int] = {}
        self._fetched: dict[Pass, int] = {}
        self._effects = self._all_effects()

    @staticmethod
    def matter(kinds: Set[Kind]) -> bool:
        """Whether a program with these kinds has more states than FORWARD before BACKWARD, which values say too."""
        return not kinds.isdisjoint(_STATEFUL)

    def step(self, node: int, op: Op, found: list[int]) -> None:
        """The next operation of the device.

        Args:
            node: its number.
            op: the operation.
            found: what it waits for; what it waits for because of what the device holds is added.
        """
        kind = op.kind
        if kind in _ISSUED and kind not in _UNISSUED and self._compute >= 0:
            found.append(self._compute)
        if kind in PARTS and (self.gathers or self.reduces):
            self._part(node, op, found)
        self._effects[kind.effect](node, op, found)

    def finish(self) -> None:
        """The end of the list."""
        for chunk, gathered in enumerate(self.gathered):
            if self.gathers and gathered:
                self._unfit(-1, f"the parameters of chunk {chunk} are never released")
        for chunk in range(len(self.layers) if self.reduces else 0):
            if self._whole(chunk) - self.reduced[chunk]:
                self._unfit(-1, f"the gradients of chunk {chunk} are never (or not all) reduced")

    def covered(self, op: Op) -> set[int]:
        """The layers of its chunk that an operation is about; without a range all."""
        return self._whole(op.chunk) if op.start < 0 else set(range(op.start, op.stop))

    def _all_effects(self) -> dict[Effect, Callable[[int, Op, list[int]], None]]:
        return complete(
            Effect,
            {
                Effect.KEEP: self._keep,
                Effect.USE: self._use,
                Effect.USE_UP: self._use,
                Effect.USE_UP_WITHOUT_PARAMETERS: self._use,
                Effect.KEEP_LOGITS: self._nothing,
                Effect.USE_UP_LOGITS: self._nothing,
                Effect.TO_HOST: self._to_host,
                Effect.FROM_HOST: self._from_host,
                Effect.KEYS_ARRIVE: self._keys_arrive,
                Effect.USE_KEYS: self._use_keys,
                Effect.SHARD_FROM_HOST: self._shard_from_host,
                Effect.GATHER: self._gather,
                Effect.RELEASE: self._release,
                Effect.SHARD_TO_HOST: self._shard_to_host,
                Effect.REDUCE: self._reduce,
                Effect.STEP: self._step,
                Effect.NOTHING: self._nothing,
            },
        )

    def _unfit(self, node: int, reason: str) -> None:
        self.problems.append(Unfit(self.device, node, reason))

    def _whole(self, chunk: int) -> set[int]:
        return set(range(max(self.layers[chunk], 1)))

    def _nothing(self, node: int, op: Op, found: list[int]) -> None:
        """Nothing that the device holds changes."""

    def _part(self, node: int, op: Op, found: list[int]) -> None:
        """A part of a layer that devices share uses the parameters of the chunk that has its rows."""
        chunk = chunk_of(op.kind, op.chunk, len(self.layers))
        self._computes(node, chunk, found)
        self._has_parameters(node, chunk)
        if op.kind.direction is Direction.BACKWARD:
            self._makes_gradients(node, chunk)

    def _keep(self, node: int, op: Op, found: list[int]) -> None:
        self._computes(node, op.chunk, found)
        self._has_parameters(node, op.chunk)
        self.kept[op.microbatch, op.slice, op.chunk] = False

    def _use(self, node: int, op: Op, found: list[int]) -> None:
        key = (op.microbatch, op.slice, op.chunk)
        self._computes(node, op.chunk, found)
        if key in self._fetched:
            found.append(self._fetched.pop(key))
        if op.kind.effect is not Effect.USE_UP_WITHOUT_PARAMETERS:
            self._has_parameters(node, op.chunk)
        on_host = self.kept.get(key)
        if on_host is None:
            self._unfit(node, "its FORWARD has not run, or its activations are already released")
        elif on_host:
            self._unfit(node, "its activations are on the host (no fetch before it)")
        if op.kind.effect is not Effect.USE:
            self.kept.pop(key, None)
        self._makes_gradients(node, op.chunk)

    def _makes_gradients(self, node: int, chunk: int) -> None:
        self._backward[chunk] = node
        if chunk in self._reduced_by_pass:
            self.reduced[chunk] = set()  # the pass has made new gradients
        elif self.reduced[chunk]:
            self._unfit(node, f"the gradients of chunk {chunk} are already reduced")

    def _computes(self, node: int, chunk: int, found: list[int]) -> None:
        """A pass waits for the gathers of its chunk; a gather right before it waits for what it waits for by then."""
        for gathered, gather, waits in self._demanded:
            if gathered == chunk:
                waits.extend(other for other in found if not gather < other < node)
        self._demanded = []
        self._compute = node
        found += self._gathering.pop(chunk, ())

    def _has_parameters(self, node: int, chunk: int) -> None:
        if self.gathers:
            missing = self._whole(chunk) - self.gathered[chunk]
            if missing:
                self._unfit(node, f"the parameters of layers {_ranges(missing)} of chunk {chunk} are not gathered")

    def _to_host(self, node: int, op: Op, found: list[int]) -> None:
        self._offloaded[op.microbatch, op.slice, op.chunk] = node
        self._move(node, op, True)

    def _from_host(self, node: int, op: Op, found: list[int]) -> None:
        key = (op.microbatch, op.slice, op.chunk)
        if key in self._offloaded:
            found.append(self._offloaded.pop(key))
        self._fetched[key] = node
        self._move(node, op, False)

    def _move(self, node: int, op: Op, to_host: bool) -> None:
        key = (op.microbatch, op.slice, op.chunk)
        on_host = self.kept.get(key)
        if on_host is None:
            self._unfit(node, "there are no activations to move: no FORWARD before it, or released already")
        elif on_host == to_host:
            self._unfit(node, f"its activations are {'on the host' if to_host else 'on the device'} already")
        self.kept[key] = to_host

    def _keys_arrive(self, node: int, op: Op, found: list[int]) -> None:
        self.received.setdefault((op.peer, op.microbatch, op.peer_chunk), set()).update(range(op.start, op.stop))

    def _use_keys(self, node: int, op: Op, found: list[int]) -> None:
        """Attention for others needs the owner's keys and values, of this pass or kept from an earlier one."""
        have = self.received.get((op.peer, op.microbatch, op.peer_chunk), set())
        lacking = set(range(op.start, op.stop)) - have
        if self.exchanges and lacking:
            self._unfit(node, f"units {_ranges(lacking)} of the owner's keys and values were not received")

    def _in_chunk(self, node: int, op: Op) -> set[int]:
        """The layers of an operation, which must be in its chunk."""
        layers = self.covered(op)
        if not layers <= self._whole(op.chunk):
            count = self.layers[op.chunk]
            self._unfit(node, f"layers {_ranges(layers)} are not all in chunk {op.chunk}, which has {count}")
        return layers

    def _shard_from_host(self, node: int, op: Op, found: list[int]) -> None:
        self._in_chunk(node, op)
        found += self._after_step(op.chunk)
        self._prefetched[op.chunk] = node
        if self.on_device[op.chunk]:
            self._unfit(node, f"the parameter shard of chunk {op.chunk} is on the device already")
        self.on_device[op.chunk] = True

    def _gather(self, node: int, op: Op, found: list[int]) -> None:
        layers, chunk = self._in_chunk(node, op), op.chunk
        found += [self._prefetched[chunk]] if chunk in self._prefetched else []
        found += self._after_step(chunk)
        self._gathering.setdefault(chunk, []).append(node)
        if self._compute >= 0 and not self._shares:
            self._demanded.append((chunk, node, found))
        if not self.on_device[chunk]:
            self._unfit(node, f"the parameter shard of chunk {chunk} is on the host (no prefetch before it)")
        again = layers & self.gathered[chunk]
        if again:
            self._unfit(node, f"layers {_ranges(again)} of chunk {chunk} are gathered already")
        self.gathered[chunk] |= layers

    def _release(self, node: int, op: Op, found: list[int]) -> None:
        layers = self._in_chunk(node, op)
        absent = layers - self.gathered[op.chunk]
        if absent:
            self._unfit(node, f"layers {_ranges(absent)} of chunk {op.chunk} are not gathered")
        self.gathered[op.chunk] -= layers

    def _shard_to_host(self, node: int, op: Op, found: list[int]) -> None:
        self._in_chunk(node, op)
        found += self._after_step(op.chunk)
        if not self.on_device[op.chunk]:
            self._unfit(node, f"the parameter shard of chunk {op.chunk} is on the host already")
        self.on_device[op.chunk] = False

    def _reduce(self, node: int, op: Op, found: list[int]) -> None:
        layers, chunk = self._in_chunk(node, op), op.chunk
        found += [self._backward[chunk]] if chunk in self._backward else []
        self._reducing.setdefault(chunk, []).append(node)
        if layers & self.reduced[chunk] and chunk in self._reduced_by_pass:
            self.reduced[chunk] = set()  # a pass that this replica does not have
        elif layers & self.reduced[chunk]:
            self._unfit(node, f"the gradients of chunk {chunk} are reduced twice")
        self.reduced[chunk] |= layers

    def _step(self, node: int, op: Op, found: list[int]) -> None:
        self._in_chunk(node, op)
        chunk = op.chunk
        found += self._reducing.pop(chunk, ())
        if self.reduces and self._whole(chunk) - self.reduced[chunk]:
            self._unfit(node, f"the gradients of chunk {chunk} are not reduced")
        if not self.on_device[chunk]:
            self._unfit(node, f"the parameter shard of chunk {chunk} is on the host")
        if self.gathered[chunk]:
            self._unfit(node, f"the parameters of chunk {chunk} are still gathered from before the step")
        if chunk in self._stepped:
            self._unfit(node, f"chunk {chunk} is stepped twice")
        self._stepped[chunk] = node

    def _after_step(self, chunk: int) -> list[int]:
        return [self._stepped[chunk]] if chunk in self._stepped else []


def _reduced_by_pass(ops: Sequence[Op]) -> frozenset[int]:
    """Chunks whose gradients are reduced at least once per backward pass, as ZeRO-2 does, instead of once."""
    reductions = Counter((op.chunk, op.start) for op in ops if op.kind.effect is Effect.REDUCE)
    passes = Counter(op.chunk for op in ops if Work.WEIGHTS in op.kind.work)
    return frozenset(chunk for (chunk, _), count in reductions.items() if count >= max(passes[chunk], 2))


def _ranges(numbers: set[int]) -> str:
    ordered = sorted(numbers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
