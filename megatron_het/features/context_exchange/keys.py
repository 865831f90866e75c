"""Keys and values of the context exchange: sent ahead, kept at the helper as long as the program needs them.

Where the helper keeps them for several passes, it also adds up their gradients, and returns those of a unit
with the last pass that uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from megatron_het.attention.core import SliceCoreAttention
from megatron_het.features.context_exchange.helper import AttentionShape
from megatron_het.lowering.ranks import RankOp, RankProgram
from megatron_het.runtime.channels import Channels, PendingReceive
from megatron_het.schedule.ir import Kind

_SOURCE = {Kind.ATTEND_HELP: Kind.KV_RECV, Kind.ATTEND_HELP_BACKWARD: Kind.KV_RECV_BACKWARD}


@dataclass(frozen=True, slots=True)
class Use:
    """Units ``[start, stop)`` of a sequence, from what one operation received."""

    source: RankOp
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class KeyUses:
    """Which received keys every ATTEND_HELP uses, and which it is the last to use.

    Attributes:
        uses: By ATTEND_HELP operation.
        last: By ATTEND_HELP operation: what may go after it.
    """

    uses: dict[RankOp, tuple[Use, ...]]
    last: dict[RankOp, tuple[RankOp, ...]]

    @classmethod
    def of(cls, program: RankProgram) -> KeyUses:
        """From a rank's program.

        The same units may be on their way for the next slot already; what was sent for a pass is
        used for that pass, and only what was not is taken from earlier ones.

        Raises:
            ValueError: Units that were never received.
        """
        received: dict[tuple[int, int, int], list[RankOp]] = {}
        uses: dict[RankOp, tuple[Use, ...]] = {}
        last_user: dict[RankOp, RankOp] = {}
        for op in program.ops:
            place = op.peer, op.microbatch, op.chunk
            if op.kind in _SOURCE.values():
                received.setdefault(place, []).append(op)
            elif op.kind in _SOURCE:
                uses[op] = _cover(op, received.get(place, []))
                last_user.update((use.source, op) for use in uses[op])
        last: dict[RankOp, list[RankOp]] = {}
        for source, user in last_user.items():
            last.setdefault(user, []).append(source)
        return cls(uses, {user: tuple(sources) for user, sources in last.items()})


def _cover(op: RankOp, received: Sequence[RankOp]) -> tuple[Use, ...]:
    """Where the units of an ATTEND_HELP come from."""
    mine = [r for r in received if r.kind == _SOURCE[op.kind] and r.slice == op.slice]
    sources = {}
    for unit in range(op.start, op.stop):
        found = next((r for r in [*mine, *received] if r.start <= unit < r.stop), None)
        if found is None:
            raise ValueError(f"{op.label}: unit {unit} of rank {op.peer} was not received")
        sources[unit] = found
    runs = [(source, list(units)) for source, units in groupby(sources, key=sources.__getitem__)]
    return tuple(Use(source, units[0], units[-1] + 1) for source, units in runs)


FirstToken = Callable[[RankOp, int], int]
"""Where a unit of what an operation moves or attends to begins, as the rank counts that owns it."""
Ranges = tuple[tuple[int, int], ...]
"""Ranges ``[start, stop)`` of units."""


def returned_units(program: RankProgram, kind: Kind, keep: bool) -> dict[RankOp, Ranges]:
    """The units whose gradients return with each backward pass that exchanges.

    Owner and helper find the same, because the operations of a pair come in the same order on both.

    Args:
        program: A rank's program.
        kind: ATTEND_GIVE_BACKWARD or ATTEND_HELP_BACKWARD.
        keep: Whether a unit's gradient returns once, with the last pass; otherwise with every pass.
    """
    later: dict[tuple[int, int, int], set[int]] = {}
    found: dict[RankOp, Ranges] = {}
    for op in reversed(program.ops):
        if op.kind == kind:
            seen = later.setdefault((op.peer, op.microbatch, op.chunk), set())
            units = [u for u in range(op.start, op.stop) if not keep or u not in seen]
            runs = [[u for _, u in run] for _, run in groupby(enumerate(units), key=lambda n: n[1] - n[0])]
            found[op] = tuple((run[0], run[-1] + 1) for run in runs)
            seen.update(units)
    return found


class ExchangedKeys:
    """Sends this rank's keys and values and holds those of others.

    Args:
        program: This rank's training or evaluation program.
        first_token: Where units begin among the tokens of the rank that owns the keys.
        channels: Carry them.
        keep: Whether gradients are added up here until the last pass.
    """

    def __init__(self, program: RankProgram, first_token: FirstToken, channels: Channels, keep: bool = False) -> None:
        self._plan = KeyUses.of(program)
        self._first_token = first_token
        self._channels = channels
        self._keep = keep
        self._returned = returned_units(program, Kind.ATTEND_HELP_BACKWARD, keep)
        uses = Counter(use.source for op in self._returned for use in self._plan.uses[op])
        self._shared = {source for source, count in uses.items() if count > 1}
        self._gradients: dict[RankOp, torch.Tensor] = {}
        self._held: dict[RankOp, torch.Tensor] = {}
        self._pending: dict[RankOp, PendingReceive] = {}

    def send(self, op: RankOp, modules: Sequence[SliceCoreAttention], shape: AttentionShape) -> None:
        """Send what an operation names, of all layers of the chunk ``modules``."""
        start, stop = self._first_token(op, op.start), self._first_token(op, op.stop)
        tensor = self._empty(op, len(modules), shape)
        for layer, module in enumerate(modules):
            module.cache.copy_tokens(op.microbatch, start, stop, tensor[layer], slice(op.lo, op.hi))
        self._channels.send(tensor, op.peer, op.label)

    def receive(self, op: RankOp, layers: int, shape: AttentionShape) -> None:
        """Post the receive of what an operation names."""
        tensor = self._empty(op, layers, shape)
        self._held[op] = tensor
        self._pending[op] = self._channels.receive(tensor, op.peer, op.label)

    def wait(self, op: RankOp) -> None:
        """Wait for everything that an ATTEND_HELP needs."""
        for use in self._plan.uses[op]:
            pending = self._pending.pop(use.source, None)
            if pending is not None:
                self._channels.wait_receive(pending)

    def parts(self, op: RankOp, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) of an ATTEND_HELP in a layer, in the order of their tokens."""
        found = []
        for use in self._plan.uses[op]:
            keys, values = self._held[use.source][layer, :, self._rows(use, use.start, use.stop)]
            found.append((keys, values))
        return found

    def ranges(self, op: RankOp) -> Ranges:
        """The units of each of the ``parts`` of an ATTEND_HELP."""
        return tuple((use.start, use.stop) for use in self._plan.uses[op])

    def collect(
        self, op: RankOp, layer: int, grad_keys: torch.Tensor, grad_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the gradients that an ATTEND_HELP_BACKWARD made of its units; gives those to return now."""
        uses = self._plan.uses[op]
        if not self._keep or self._shared.isdisjoint(use.source for use in uses):
            return grad_keys, grad_values
        first = 0
        for use in uses:
            if use.source not in self._gradients:
                held = self._held[use.source]  # many passes are added up, so in at least fp32
                wide = torch.promote_types(held.dtype, torch.float32)
                self._gradients[use.source] = torch.zeros_like(held, dtype=wide)
            total = self._gradients[use.source][layer, :, self._rows(use, use.start, use.stop)]
            for rows, part in zip(total, (grad_keys, grad_values), strict=True):
                rows.add_(part[first : first + rows.shape[0]])
            first += total.shape[1]
        parts = [
            self._gradients[use.source][layer, :, self._rows(use, max(start, use.start), min(stop, use.stop))]
            for start, stop in self._returned[op]
            for use in uses
            if start < use.stop and use.start < stop
        ]
        if not parts:
            return grad_keys[:0], grad_values[:0]
        keys, values = torch.cat(parts, dim=1).to(grad_keys.dtype)
        return keys, values

    def _rows(self, use: Use, start: int, stop: int) -> slice:
        """Rows of units ``[start, stop)`` in what a use's source brought."""
        first = self._first_token(use.source, use.source.start)
        return slice(self._first_token(use.source, start) - first, self._first_token(use.source, stop) - first)

    def drop(self, op: RankOp) -> None:
        """Let go of what nothing after an ATTEND_HELP needs."""
        for source in self._plan.last.get(op, ()):
            del self._held[source]
            self._gradients.pop(source, None)

    def check_empty(self) -> None:
        """Raise if anything is held.

        Raises:
            RuntimeError: Naming what.
        """
        if self._held:
            raise RuntimeError(f"keys and values of other devices are left: {[op.label for op in self._held]}")

    def clear(self) -> None:
        """Forget everything, after a failed step."""
        self._held.clear()
        self._gradients.clear()
        self._pending.clear()

    def _empty(self, op: RankOp, layers: int, shape: AttentionShape) -> torch.Tensor:
        """``[layers, 2, tokens, b, groups, d]``."""
        tokens = self._first_token(op, op.stop) - self._first_token(op, op.start)
        return torch.empty((layers, 2, *shape.keys(tokens)), dtype=shape.dtype, device=shape.device)
