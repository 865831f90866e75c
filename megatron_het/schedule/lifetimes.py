"""Lifetimes: what must be on a device at an operation, and what must not.

Parameters are a state per chunk and layer: on the host, sharded on the device, gathered.  Activations are
a state per FORWARD: kept, offloaded.  This is the part of the dependencies that depends on the order
within one device rather than on values, see ``deps.py``.
"""

from collections.abc import Iterator

from megatron_het.schedule.ir import Kind, Op, Program


class Lifetimes:
    """Walks one device's list and reports what does not fit.

    Programs without PARAM_* operations have all parameters in place all the time.
    """

    def __init__(self, program: Program, device: int) -> None:
        kinds = {op.kind for ops in program.ops for op in ops}
        self.layers = program.shape.layers[program.devices[device].stage]
        self.gathers, self.offloads = Kind.PARAM_GATHER in kinds, Kind.PARAM_PREFETCH in kinds
        self.reduces = Kind.GRAD_REDUCE in kinds
        self.gathered: list[set[int]] = [set() for _ in self.layers]
        self.on_device = [not self.offloads] * len(self.layers)
        self.kept: dict[tuple[int, int, int], str] = {}
        self.reduced: list[set[int]] = [set() for _ in self.layers]
        self.stepped: set[int] = set()
        self.exchanges = Kind.KV_RECV in kinds
        self.received: dict[tuple[int, int, int], set[int]] = {}

    def step(self, op: Op) -> Iterator[str]:
        """Problems of the next operation of the device."""
        kind = op[0]
        if kind < 4:
            if self.gathers:
                yield from self._parameters(op)
            yield from self._activations(op)
        elif kind in _EXCHANGE:
            yield from self._keys_and_values(op)
        elif Kind.PARAM_PREFETCH <= kind <= Kind.ACT_FETCH:
            yield from self._bookkeeping(op)

    def _keys_and_values(self, op: Op) -> Iterator[str]:
        """Attention for others needs the owner's keys and values, of this pass or kept from an earlier one."""
        have = self.received.setdefault((op.peer, op.microbatch, op.peer_chunk), set())
        if op.kind in (Kind.KV_RECV, Kind.KV_RECV_BACKWARD):
            have.update(range(op.start, op.stop))
        elif self.exchanges and not have.issuperset(range(op.start, op.stop)):
            lacking = _ranges(set(range(op.start, op.stop)) - have)
            yield f"units {lacking} of the owner's keys and values were not received"

    def _range(self, op: Op) -> set[int]:
        if op.start < 0:
            return set(range(max(self.layers[op.chunk], 1)))
        return set(range(op.start, op.stop))

    def _parameters(self, op: Op) -> Iterator[str]:
        missing = self._whole(op.chunk) - self.gathered[op.chunk]
        if missing and op[0] != Kind.BACKWARD_WEIGHT:
            yield f"the parameters of layers {_ranges(missing)} of chunk {op.chunk} are not gathered"

    def _whole(self, chunk: int) -> set[int]:
        return set(range(max(self.layers[chunk], 1)))

    def _activations(self, op: Op) -> Iterator[str]:
        key = (op[1], op[2], op[3])
        if op[0] == Kind.FORWARD:
            self.kept[key] = "kept"
            return
        state = self.kept.get(key)
        if state is None:
            yield "its FORWARD has not run, or its activations are already released"
        elif state == "offloaded":
            yield "its activations are on the host (no fetch before it)"
        if op[0] in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self.kept.pop(key, None)
        if self.reduced[op.chunk]:
            yield f"the gradients of chunk {op.chunk} are already reduced"

    def _bookkeeping(self, op: Op) -> Iterator[str]:
        chunk, layers = op.chunk, self._range(op) if 0 <= op.chunk < len(self.layers) else set()
        if op.kind <= Kind.OPTIMIZER_STEP and not layers <= self._whole(chunk):
            yield f"layers {_ranges(layers)} are not all in chunk {chunk}, which has {self.layers[chunk]}"
        match op.kind:
            case Kind.PARAM_PREFETCH:
                if self.on_device[chunk]:
                    yield f"the parameter shard of chunk {chunk} is on the device already"
                self.on_device[chunk] = True
            case Kind.PARAM_GATHER:
                if not self.on_device[chunk]:
                    yield f"the parameter shard of chunk {chunk} is on the host (no prefetch before it)"
                if layers & self.gathered[chunk]:
                    yield f"layers {_ranges(layers & self.gathered[chunk])} of chunk {chunk} are gathered already"
                self.gathered[chunk] |= layers
            case Kind.PARAM_RELEASE:
                if layers - self.gathered[chunk]:
                    yield f"layers {_ranges(layers - self.gathered[chunk])} of chunk {chunk} are not gathered"
                self.gathered[chunk] -= layers
            case Kind.PARAM_OFFLOAD:
                if not self.on_device[chunk]:
                    yield f"the parameter shard of chunk {chunk} is on the host already"
                self.on_device[chunk] = False
            case Kind.GRAD_REDUCE:
                if layers & self.reduced[chunk]:
                    yield f"the gradients of chunk {chunk} are reduced twice"
                self.reduced[chunk] |= layers
            case Kind.OPTIMIZER_STEP:
                if self.reduces and self._whole(chunk) - self.reduced[chunk]:
                    yield f"the gradients of chunk {chunk} are not reduced"
                if not self.on_device[chunk]:
                    yield f"the parameter shard of chunk {chunk} is on the host"
                if self.gathered[chunk]:
                    yield f"the parameters of chunk {chunk} are still gathered from before the step"
                if chunk in self.stepped:
                    yield f"chunk {chunk} is stepped twice"
                self.stepped.add(chunk)
            case Kind.ACT_OFFLOAD | Kind.ACT_FETCH:
                yield from self._move(op)

    def _move(self, op: Op) -> Iterator[str]:
        key, to_host = (op[1], op[2], op[3]), op.kind == Kind.ACT_OFFLOAD
        state = self.kept.get(key)
        if state is None:
            yield "there are no activations to move: no FORWARD before it, or released already"
        elif (state == "offloaded") == to_host:
            yield f"its activations are {'on the host' if to_host else 'on the device'} already"
        self.kept[key] = "offloaded" if to_host else "kept"

    def finish(self) -> Iterator[str]:
        """Problems at the end of the list."""
        for chunk, gathered in enumerate(self.gathered):
            if self.gathers and gathered:
                yield f"the parameters of chunk {chunk} are never released"
        if self.reduces:
            for chunk in range(len(self.layers)):
                if self._whole(chunk) - self.reduced[chunk]:
                    yield f"the gradients of chunk {chunk} are never (or not all) reduced"


_EXCHANGE = frozenset({Kind.KV_RECV, Kind.KV_RECV_BACKWARD, Kind.ATTEND_HELP, Kind.ATTEND_HELP_BACKWARD})


def _ranges(layers: set[int]) -> str:
    ordered = sorted(layers)
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
