"""The tensors of the attention context exchange (section 4.2): messages, and attention for others.

Keys and values are sent ahead of time, queries when they are computed.  The helper merges its own parts and returns
one output and log-sum-exp.  In the backward pass the owner's merged output and log-sum-exp make the
helper's gradients exact.  All tensors to one device at one time are one message of bytes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megatron_het.attention.calls import EVERY, Attended, Call, Form, Reach, Sum, differentiate
from megatron_het.attention.core import SliceCoreAttention
from megatron_het.attention.kernels import Gradients, Kernel
from megatron_het.features.context_exchange.spec import Units
from megatron_het.lowering.ranks import RankOp, RankProgram, Side
from megatron_het.plan import Placement
from megatron_het.plan.placement import part_tokens
from megatron_het.runtime.channels import Channels, PendingReceive
from megatron_het.schedule.cutting import Span, Starts
from megatron_het.schedule.ir import Kind

Part = tuple[Tensor, Tensor]  # output ``[s, b, heads, d]`` and log-sum-exp ``[b, heads, s]``, or keys and values


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of an attention layer of this rank, or of those of its heads for which another rank attends."""

    slice_tokens: int  # tokens per slice
    batch: int
    heads: int  # query heads of this TP rank
    groups: int  # Key-value groups of this TP rank
    channels: int  # channels per head
    dtype: torch.dtype  # of queries, keys and values
    device: torch.device

    @property
    def lse_dtype(self) -> torch.dtype:
        """Type of log-sum-exps."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def query(self) -> tuple[int, ...]:
        """Shape of a query, an output and their gradients."""
        return self.slice_tokens, self.batch, self.heads, self.channels

    @property
    def lse(self) -> tuple[int, ...]:
        """Shape of a log-sum-exp."""
        return self.batch, self.heads, self.slice_tokens

    def keys(self, tokens: int) -> tuple[int, ...]:
        """Shape of the keys, or the values, of ``tokens`` tokens."""
        return tokens, self.batch, self.groups, self.channels

    def message(self, parts: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensor:
        """An empty message for tensors of these shapes and types."""
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def forward_query(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and type of the owner's message in a forward pass: the query."""
        return [(self.query, self.dtype)]

    def forward_result(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shapes and types of the result: log-sum-exp and output."""
        return [(self.lse, self.lse_dtype), (self.query, self.dtype)]

    def backward_query(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shapes and types of the owner's message in a backward: log-sum-exp, gradient, query, output."""
        return [(self.lse, self.lse_dtype), *[(self.query, self.dtype)] * 3]

    def backward_result(self, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Returns shapes and types of the result: gradients of the query and of ``tokens`` keys and values."""
        return [(self.query, self.dtype), *[(self.keys(tokens), self.dtype)] * 2]


def joined_heads(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Joins tensors with some heads each to tensors with all of them."""
    if len(parts) == 1:
        return list(parts[0])
    return [torch.cat(tensors, dim=head_dim(tensors[0])) for tensors in zip(*parts, strict=True)]


def head_dim(tensor: Tensor) -> int:
    """Dimension of the heads, or groups; log-sum-exps have three dimensions."""
    return 1 if tensor.dim() == 3 else 2


def attend(query: Tensor, keys: Sequence[Part], kernel: Kernel, scale: float) -> tuple[Tensor, Tensor]:
    """Full attention over several pieces of keys and values; output in the query's type."""
    rows = Attended(query)
    rows.attend((Call(Form.FULL, *piece) for piece in keys), kernel, scale)
    return rows.out.to(query.dtype), rows.lse


def attend_backward(
    mine: Sequence[Tensor], keys: Sequence[Part], kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the query, and of the pieces' keys and values, joined in the order of the pieces.

    Args:
        mine: Gradient of the owner's output, its query, its whole output and its whole log-sum-exp.
        keys: (keys, values) of the pieces.
    """
    total, grads = Sum(mine[1]), []
    for key, value in keys:
        own = Sum(key), Sum(value)
        differentiate([Call(Form.FULL, key, value, own=EVERY)], mine, (total, *own), kernel, scale)
        grads.append([part.total for part in own])
    dk, dv = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*grads, strict=True))
    return total.total.to(mine[1].dtype), dk, dv


# Attention for another device if documents or a sliding window limit its queries.
#
# The helper has the same limits as the owner, and makes the same blocks (``attention/calls.py``).


@dataclass(frozen=True, slots=True)
class Reached:
    """Limits of the owner's attention, and the tokens of its queries and keys."""

    reach: Reach  # documents and window
    rows: tuple[Span, ...]  # tokens of the queries in the sequence, in the order of their rows
    keys: tuple[Span, ...]

    def calls(self, query: Tensor, keys: Tensor, values: Tensor) -> Iterator[Call]:
        """Yields the kernel calls that the owner would make."""
        at: dict[Span, int] = {}
        for span in self.keys:
            at[span] = sum(end - first for first, end in at)
        row = 0
        for first, end in self.rows:
            for sequences, blocks in self.reach.blocks((first, end), self.keys, query.shape[1]):
                for block in blocks:
                    span = next(s for s in self.keys if s[0] <= block.keys[0] < s[1])
                    held = slice(*(at[span] + token - span[0] for token in block.keys))
                    rows = slice(row + block.rows[0] - first, row + block.rows[1] - first)
                    k, v = keys[held, sequences], values[held, sequences]
                    yield Call(block.form, k, v, rows, sequences, own=held)
            row += end - first


def attend_reached(
    query: Tensor, parts: Sequence[Part], reached: Reached, kernel: Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """Output in the query's type and log-sum-exp; zero and minus infinity for queries that reach no keys."""
    rows = Attended(query, has_blanks=True)
    rows.attend(reached.calls(query, *_joined(parts)), kernel, scale)
    return rows.out.to(query.dtype), rows.lse


def attend_reached_backward(
    mine: Sequence[Tensor], parts: Sequence[Part], reached: Reached, kernel: Kernel, scale: float
) -> Gradients:
    """Gradients of the query, keys and values, in the query's type.

    Args:
        mine: Gradient of the owner's output, its query, its whole output and its whole log-sum-exp.
        parts: (keys, values) to which the queries attend here.
        reached: Limits of the owner's attention.
    """
    query, (keys, values) = mine[1], _joined(parts)
    sums = Sum(query), Sum(keys), Sum(values)
    differentiate(reached.calls(query, keys, values), mine, sums, kernel, scale)
    dq, dk, dv = (part.total.to(query.dtype) for part in sums)
    return dq, dk, dv


def _joined(parts: Sequence[Part]) -> Part:
    keys, values = (torch.cat(own) if len(own) > 1 else own[0] for own in zip(*parts, strict=True))
    return keys, values


# Limits of slices' attention by documents or sliding windows in an iteration, for devices that attend for others.


@dataclass(eq=False)
class Limits:
    """Limits of the slices' attention in one iteration."""

    placement: Placement
    side: Callable[[int], Side]  # returns how the replica of a world rank divides a slice
    units: Units  # tokens of slices and their exchange units
    # number of earlier tokens that a query sees, by layer of the model with attention; None for all
    windows: Sequence[int | None]
    # where the documents of each sequence of a microbatch begin; None if documents do not matter
    starts: Callable[[int], tuple[Starts, ...] | None]

    def __post_init__(self) -> None:
        self._first_layers = first_layers(self.placement)

    def reached(self, op: RankOp, layer: int, ranges: Sequence[Span]) -> Reached:
        """Returns the limits and tokens for an ATTEND_HELP.

        Args:
            op: The operation for the pass of rank ``op.peer``.
            ranges: Units of the owner, in the order of their keys and values.
        """
        where = self.placement.locate(op.peer)
        first, end = self.units.slice(op.microbatch, op.slice)
        blocks = self.side(op.peer).blocks(end - first)
        count = len(blocks)
        # The rows of the other ranks that share the slice come first, from the next rank on, and then the owner's.
        ranks = [(where.cp_rank + k) % count for k in range(1, count + 1)]
        rows = tuple((first + a, first + b) for rank in ranks for a, b in blocks[rank])
        keys = tuple(span for units in ranges for span in self._spans(op, where.cp_rank, units))
        window = self.windows[self._first_layers[where.stage, op.chunk] + layer]
        return Reached(Reach(self.starts(op.microbatch), window), rows, keys)

    def _spans(self, op: RankOp, part: int, units: Span) -> Iterator[Span]:
        """Yields the tokens of the sequence in some units of an operation's owner, a context-parallel rank."""
        each, side = self.units.units, self.side(op.peer)
        start, stop = (self.units.first(op.peer, op.microbatch, unit) for unit in units)
        for index in range(units[0] // each, -(-units[1] // each)):
            first, end = self.units.slice(op.microbatch, index)
            own, begin = side.blocks(end - first)[part], self.units.first(op.peer, op.microbatch, index * each)
            lo, hi = max(start - begin, 0), min(stop - begin, part_tokens(own))
            before = 0
            for a, b in own:
                left, right = max(lo - before, 0), min(hi - before, b - a)
                if left < right:
                    yield first + a + left, first + a + right
                before += b - a


def first_layers(placement: Placement) -> Mapping[tuple[int, int], int]:
    """Index of the first layer of every (stage, chunk) among those of the model that have attention."""
    found: dict[tuple[int, int], int] = {}
    layers, counts = 0, placement.plan.attention_layers
    for stage, chunk in placement.path:
        found[stage, chunk] = layers
        layers += counts[stage][chunk]
    return found


# Keys and values of the context exchange: sent ahead, kept at the helper as long as the program needs them.
#
# If the helper keeps them for several passes, it also sums their gradients, and returns those of a unit
# with the last pass that uses the unit.

_SOURCE = {Kind.ATTEND_HELP: Kind.KV_RECV, Kind.ATTEND_HELP_BACKWARD: Kind.KV_RECV_BACKWARD}


@dataclass(frozen=True, slots=True)
class Use:
    """Units ``[start, stop)`` of a sequence, from the keys that one operation received."""

    source: RankOp
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class KeyUses:
    """Received keys that every ATTEND_HELP uses, and those that it is the last to use."""

    uses: dict[RankOp, tuple[Use, ...]]  # by ATTEND_HELP operation
    last: dict[RankOp, tuple[RankOp, ...]]  # by ATTEND_HELP operation: receives whose keys are freed after it

    @classmethod
    def of(cls, program: RankProgram) -> "KeyUses":
        """Finds the uses in a rank's program.

        The same units may already have been sent for the next slot.  Keys that were sent for a pass are
        used for that pass; other units are taken from earlier receives.

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
    """The receives that brought the units of an ATTEND_HELP."""
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
"""Returns the first token of a unit of an operation, as the rank that owns the keys numbers its tokens."""
Ranges = tuple[tuple[int, int], ...]  # ranges ``[start, stop)`` of units


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
        first_token: Returns the first token of a unit, among the tokens of the rank that owns the keys.
        channels: Channels of keys and values.
        keep: Whether gradients are summed here until the last pass.
    """

    def __init__(self, program: RankProgram, first_token: FirstToken, channels: Channels, keep: bool = False) -> None:
        self._plan = KeyUses.of(program)
        self._first_token = first_token
        self._channels = channels
        self._keep = keep
        self._returned = returned_units(program, Kind.ATTEND_HELP_BACKWARD, keep)
        uses = Counter(use.source for op in self._returned for use in self._plan.uses[op])
        self._shared = {source for source, count in uses.items() if count > 1}
        self._gradients: dict[RankOp, Tensor] = {}
        self._held: dict[RankOp, Tensor] = {}
        self._pending: dict[RankOp, PendingReceive] = {}

    def send(self, op: RankOp, modules: Sequence[SliceCoreAttention], shape: AttentionShape) -> None:
        """Send the keys and values of an operation, for all layers of the chunk ``modules``."""
        start, stop = self._first_token(op, op.start), self._first_token(op, op.stop)
        tensor = self._empty(op, len(modules), shape)
        for layer, module in enumerate(modules):
            module.cache.copy_tokens(op.microbatch, start, stop, tensor[layer], slice(op.lo, op.hi))
        self._channels.send(tensor, op.peer, op.label)

    def receive(self, op: RankOp, layers: int, shape: AttentionShape) -> None:
        """Post the receive of an operation's keys and values."""
        tensor = self._empty(op, layers, shape)
        self._held[op] = tensor
        self._pending[op] = self._channels.receive(tensor, op.peer, op.label)

    def wait(self, op: RankOp) -> None:
        """Wait for all keys and values that an ATTEND_HELP needs."""
        for use in self._plan.uses[op]:
            pending = self._pending.pop(use.source, None)
            if pending is not None:
                self._channels.wait_receive(pending)

    def parts(self, op: RankOp, layer: int) -> list[tuple[Tensor, Tensor]]:
        """(keys, values) of an ATTEND_HELP in a layer, in the order of their tokens."""
        found = []
        for use in self._plan.uses[op]:
            keys, values = self._held[use.source][layer, :, self._rows(use, use.start, use.stop)]
            found.append((keys, values))
        return found

    def ranges(self, op: RankOp) -> Ranges:
        """The units of each of the ``parts`` of an ATTEND_HELP."""
        return tuple((use.start, use.stop) for use in self._plan.uses[op])

    def collect(self, op: RankOp, layer: int, grad_keys: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
        """Add an ATTEND_HELP_BACKWARD's gradients of its units; returns those to send back now."""
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
        """Rows of units ``[start, stop)`` in the tensors that a use's source received."""
        first = self._first_token(use.source, use.source.start)
        return slice(self._first_token(use.source, start) - first, self._first_token(use.source, stop) - first)

    def drop(self, op: RankOp) -> None:
        """Free the keys and values that no operation after an ATTEND_HELP needs."""
        for source in self._plan.last.get(op, ()):
            del self._held[source]
            self._gradients.pop(source, None)

    def check_empty(self) -> None:
        """Raise if keys and values are held."""
        if self._held:
            raise RuntimeError(f"keys and values of other devices are left: {[op.label for op in self._held]}")

    def clear(self) -> None:
        """Free all keys and values, after a failed step."""
        self._held.clear()
        self._gradients.clear()
        self._pending.clear()

    def _empty(self, op: RankOp, layers: int, shape: AttentionShape) -> Tensor:
        """``[layers, 2, tokens, b, groups, d]``."""
        tokens = self._first_token(op, op.stop) - self._first_token(op, op.start)
        return torch.empty((layers, 2, *shape.keys(tokens)), dtype=shape.dtype, device=shape.device)
