"""Lifetimes: what a device holds at an operation, and which operation brought it there.

Activations are a state per FORWARD: kept, and on the device or elsewhere.  Features add states of their own
(:class:`State`): parameters that are gathered and released, gradients that are reduced, keys and values of others.
This is the part of the dependencies that depends on the order within one device rather than on values, see
``deps.py``; graph, validator and memory curves read it from here.

Operations of side streams (``Kind.is_issued``) are issued when the compute operation before them in the list is done;
compute waits for what is brought for it.
"""

from collections.abc import Set
from typing import NamedTuple

from megatron_het.schedule.ir import Op, Program
from megatron_het.schedule.kinds import PARTS, Direction, Kind, Role, chunk_of, where

Pass = tuple[int, int, int]
"""(microbatch, slice, chunk)"""

_STATEFUL = where(lambda kind: kind.is_issued or (kind.role is not Role.PASS and kind.effect.lifetime is not None))
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


class State:
    """What a feature's operations hold on one device; its effects step over them.

    Args:
        held: of the device.
        program: the program.
        kinds: all kinds in the program.
    """

    of_parameters = False
    """Whether it has to do with parameters or their gradients, which parts of shared layers have too."""

    def __init__(self, held: "Lifetimes", program: Program, kinds: Set[Kind]) -> None:
        self.held = held

    def computes(self, node: int, chunk: int, found: list[int]) -> None:
        """A pass of a chunk, or a part that uses it, comes next; what it waits for is added to ``found``."""

    def uses(self, key: Pass, found: list[int]) -> None:
        """The activations of a pass are used next."""

    def has_parameters(self, node: int, chunk: int) -> None:
        """The parameters of a chunk are used next."""

    def makes_gradients(self, node: int, chunk: int) -> None:
        """Gradients of a chunk are made next."""

    def finish(self) -> None:
        """The end of the list."""


class Lifetimes:
    """Walks one device's list: says what each operation waits for, and what does not fit.

    Args:
        program: the program.
        device: the device.
        kinds: all kinds in the program.

    Attributes:
        problems: what did not fit up to now.
        layers: of each chunk.
        kept: passes whose activations are held, and whether they are elsewhere.
        compute: the last operation that computed, -1 before the first.
    """

    def __init__(self, program: Program, device: int, kinds: Set[Kind]) -> None:
        self.device, self.layers = device, program.shape.layers[program.devices[device].stage]
        self.problems: list[Unfit] = []
        self.kept: dict[Pass, bool] = {}
        self.compute = -1
        self._program, self._kinds = program, kinds
        self._states: dict[type[State], State] = {}
        self._effects = {kind: kind.effect.lifetime(self) for kind in kinds if kind.effect.lifetime is not None}

    @staticmethod
    def matter(kinds: Set[Kind]) -> bool:
        """Whether a program with these kinds has more states than FORWARD before BACKWARD, which values say too."""
        return not kinds.isdisjoint(_STATEFUL)

    def state[S: State](self, state: type[S]) -> S:
        """A feature's state on this device."""
        found = self._states.get(state)
        if found is None:
            found = self._states[state] = state(self, self._program, self._kinds)
        assert isinstance(found, state)
        return found

    def step(self, node: int, op: Op, found: list[int]) -> None:
        """The next operation of the device.

        Args:
            node: its number.
            op: the operation.
            found: what it waits for; what it waits for because of what the device holds is added.
        """
        kind = op.kind
        if kind.is_issued and self.compute >= 0:
            found.append(self.compute)
        if kind in PARTS and any(state.of_parameters for state in self._states.values()):
            self._part(node, op, found)
        effect = self._effects.get(kind)
        if effect is not None:
            effect(node, op, found)

    def finish(self) -> None:
        """The end of the list."""
        for state in self._states.values():
            state.finish()

    def whole(self, chunk: int) -> set[int]:
        """All layers of a chunk; one that has none counts as one."""
        return set(range(max(self.layers[chunk], 1)))

    def covered(self, op: Op) -> set[int]:
        """The layers of its chunk that an operation is about; without a range all."""
        return self.whole(op.chunk) if op.start < 0 else set(range(op.start, op.stop))

    def unfit(self, node: int, reason: str) -> None:
        """Something does not fit."""
        self.problems.append(Unfit(self.device, node, reason))

    def _part(self, node: int, op: Op, found: list[int]) -> None:
        """A part of a layer that devices share uses the parameters of the chunk that has its rows."""
        chunk = chunk_of(op.kind, op.chunk, len(self.layers))
        self._computes(node, chunk, found)
        for state in self._states.values():
            state.has_parameters(node, chunk)
            if op.kind.direction is Direction.BACKWARD:
                state.makes_gradients(node, chunk)

    def _computes(self, node: int, chunk: int, found: list[int]) -> None:
        for state in self._states.values():
            state.computes(node, chunk, found)
        self.compute = node

    def keep(self, node: int, op: Op, found: list[int]) -> None:
        """A FORWARD leaves activations."""
        self._computes(node, op.chunk, found)
        for state in self._states.values():
            state.has_parameters(node, op.chunk)
        self.kept[op.microbatch, op.slice, op.chunk] = False

    def use_up(self, node: int, op: Op, found: list[int]) -> None:
        """A backward uses activations for the last time."""
        self.use(node, op, found)
        self.kept.pop((op.microbatch, op.slice, op.chunk), None)

    def use(self, node: int, op: Op, found: list[int], *, parameters: bool = True) -> None:
        """A backward uses activations, and parameters too or not."""
        key = (op.microbatch, op.slice, op.chunk)
        self._computes(node, op.chunk, found)
        for state in self._states.values():
            state.uses(key, found)
            if parameters:
                state.has_parameters(node, op.chunk)
        elsewhere = self.kept.get(key)
        if elsewhere is None:
            self.unfit(node, "its FORWARD has not run, or its activations are already released")
        elif elsewhere:
            self.unfit(node, "its activations are on the host (no fetch before it)")
        for state in self._states.values():
            state.makes_gradients(node, op.chunk)


def shown_ranges(numbers: set[int]) -> str:
    """Numbers in words, a run of them by its ends."""
    ordered = sorted(numbers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
