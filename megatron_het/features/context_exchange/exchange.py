"""The attention context exchange on a rank (SlimPipe, section 4.2).

By the program, KV_SEND and KV_RECV move keys and values ahead of their use.  ATTEND_GIVE and ATTEND_HELP before a
FORWARD state the attention that this pass gives away and computes for others; a device without
a pass computes in its last ATTEND_HELP of the slot.  Attention is in the middle of a model's layers, so the
queries and results of every layer are transferred inside the pass, layer by layer, by :class:`_Layer`, which slice
attention calls.

No deadlock inside a slot: all devices exchange in the same number of layers, the first ones of their
chunks, as many as the smallest chunk has; forward from the first to the last, backward from the last to the
first.  Later layers attend alone.  A layer has two points at which transfers are posted, all at once: queries,
sent and received, at its begin, and results, sent and received, at its end.  Before each point the memory of
all messages is allocated and those to send are packed; after it a device computes, and waits for these transfers.
So if the host waits for the device, as it does at the first launch of a kernel, all running transfers were posted
at a point that the device has passed, and the peer posts the other end when it reaches the same point.
Suppose a slot were blocked, and take a device that has passed the fewest points.  It waits for transfers of a point
that all devices have passed, so it goes on.  Between slots, ``schedule/joint.py`` proves it.  In any case every wait
has the channels' timeout.

The order of posts is the host's.  On the device a transfer begins when its inputs are ready: results are sent when
they are computed, not when all work launched meanwhile is done (:meth:`Channels.send`).  Over host memory,
where the host does not wait for a device, results are sent and expected as early as possible.

A rank gives a part of the work to every rank of the helper that has some of its heads by the helper's TP.  The
helper needs no weights for it, so replicas may have different TP sizes.

A recomputed forward attends to all keys itself, because it runs in a slot of backward passes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from megatron_het.attention.core import SliceCoreAttention, head_width, score_scale
from megatron_het.attention.kernel_choice import choose_kernel
from megatron_het.attention.kernels import Kernel, Setting
from megatron_het.attention.places import NOTHING, Given, LayerExchange, TokenGradient, pack, unpack
from megatron_het.families import family_of_model
from megatron_het.features.context_exchange import helper
from megatron_het.features.context_exchange.kinds import HELPS, OWNERS
from megatron_het.features.context_exchange.spec import Units
from megatron_het.lowering.ranks import BoundaryMap, RankOp, RankProgram
from megatron_het.report import Timeline
from megatron_het.runtime.channels import Channels, Moment, PendingReceive
from megatron_het.schedule.ir import Kind, Program


def exchange_edges(programs: Sequence[Program], boundaries: BoundaryMap) -> list[tuple[int, int]]:
    """Directed rank pairs between which queries and results of the context exchange are sent."""
    pairs = {
        pair
        for program in programs
        for device, ops in enumerate(program.ops)
        for peer in {op.peer for op in ops if op.kind in HELPS}
        for pair in boundaries.pairs(device, peer)
    }
    return sorted(pairs | {(dst, src) for src, dst in pairs})


# One slot of the context exchange on a rank: the attention given away and computed for others, and its transfers.


class ExchangeError(RuntimeError):
    """The passes that run do not match the program's operations."""


@dataclass(slots=True)
class Message:
    """An expected message: its buffer and its receive."""

    buffer: torch.Tensor
    pending: PendingReceive


@dataclass
class Slot:
    """Exchange of this rank in the running slot."""

    # gives, helps: operations that belong to the pass
    gives: tuple[RankOp, ...]
    helps: tuple[RankOp, ...]
    is_backward: bool  # whether the pass runs through the layers from the last to the first
    layers: int  # number of layers that exchange
    done: int = 0  # number of these that the pass has completed
    # moment of the compute stream at which the running layer's receive buffers were allocated
    moment: Moment | None = None
    # queries expected from others in that layer, in the order of ``helps``
    queries: list[Message] = field(default_factory=list)
    # buffers for results from helpers in that layer, in the order of ``gives``
    results: list[torch.Tensor] = field(default_factory=list)
    expected: list[PendingReceive] = field(default_factory=list)  # receives into these, once they are posted
    # results for others that are not sent yet: the operation, the message, and the moment when it was computed
    answers: list[tuple[RankOp, torch.Tensor, Moment | None]] = field(default_factory=list)

    def layer_at(self, step: int) -> int:
        """Index of the layer that runs as number ``step`` in this slot."""
        return self.layers - 1 - step if self.is_backward else step


_BACKWARD = frozenset({Kind.ATTEND_GIVE_BACKWARD, Kind.ATTEND_HELP_BACKWARD, Kind.BACKWARD})
_SENDS = frozenset({Kind.KV_SEND, Kind.KV_SEND_BACKWARD})
_RECEIVES = frozenset({Kind.KV_RECV, Kind.KV_RECV_BACKWARD})
_GIVES = frozenset({Kind.ATTEND_GIVE, Kind.ATTEND_GIVE_BACKWARD})


@dataclass(eq=False)
class ContextExchange:
    """This rank's part in the exchange."""

    programs: Mapping[bool, RankProgram]  # this rank's programs, by whether they only run forwards
    units: Units  # which tokens of each rank exchange units are: context-parallel ranks hold parts of slices
    rank: int
    layers: int  # number of layers that exchange in every chunk, from its first with attention
    keys_channels: Channels  # channels of keys and values
    # channels of queries and results only, because inside a pass their order is by layer and not by the
    # program
    channels: Channels
    timeline: Timeline  # records waits
    device: torch.device
    keep: bool = False  # whether helpers add up the gradients of the keys and values that they keep
    always: bool = False  # whether every pass counts as one with exchange

    def __post_init__(self) -> None:
        self._modes = {mode: self._held_keys(program) for mode, program in self.programs.items()}
        self._keys = self._modes[False]
        self._returned = helper.returned_units(self.programs[False], Kind.ATTEND_GIVE_BACKWARD, self.keep)
        self.returned = self._returned
        """The units whose gradients come back with each ATTEND_GIVE_BACKWARD."""
        self._limits: helper.Limits | None = None
        self._gives: list[RankOp] = []
        self._helps: list[RankOp] = []
        self.slot: Slot | None = None
        self._modules: list[list[SliceCoreAttention]] = []
        self._shape: helper.AttentionShape | None = None
        self._sequences: Callable[[int], int] = lambda microbatch: 1
        self._scale = 1.0
        self._kernels: Sequence[str] = ()
        self._kernel: Kernel | None = None

    def attach(
        self,
        modules: Sequence[list[SliceCoreAttention]],
        models: Sequence[torch.nn.Module],
        sequences: Callable[[int], int],
        kernels: Sequence[str] = (),
    ) -> None:
        """Connect the attention of every chunk.

        Args:
            modules: Slice attention of every chunk, in layer order.
            models: The chunks, without wrappers.
            kernels: Names of the attention kernels to choose from; empty for all.
        """
        self._kernels = kernels
        self._modules = [chunk[: self.layers] for chunk in modules]
        for chunk in self._modules:
            for layer, module in enumerate(chunk):
                module.exchange = _Layer(self, layer)
        attention = family_of_model(models[0]).attention_layers(models[0])[0].layer.self_attention
        self._sequences = sequences
        self._scale = score_scale(attention)
        self._shape = helper.AttentionShape(
            slice_tokens=1,
            batch=1,
            heads=attention.num_attention_heads_per_partition,
            groups=attention.num_query_groups_per_partition,
            channels=head_width(attention),
            dtype=attention.config.params_dtype,
            device=self.device,
        )

    def shape(self, op: RankOp) -> helper.AttentionShape:
        """Returns the shape of attention in an operation's pass, for the heads that two ranks have in common."""
        whole, groups = self._shape, op.hi - op.lo
        assert whole is not None, "the models are not attached"
        heads, batch = groups * whole.heads // whole.groups, self._sequences(op.microbatch)
        tokens = self.units.slice_tokens(op.microbatch, op.slice)
        return replace(whole, slice_tokens=tokens, batch=batch, groups=groups, heads=heads)

    def first_token(self, op: RankOp, unit: int) -> int:
        """First token of a unit of an operation, as the rank that owns the keys numbers its tokens."""
        return self.units.first(self.rank if op.kind in OWNERS else op.peer, op.microbatch, unit)

    def of_heads(self, op: RankOp, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The message with an operation's heads of tensors ``[s, b, heads, d]`` and log-sum-exps ``[b, heads, s]``."""
        assert self._shape is not None
        each = self._shape.heads // self._shape.groups
        rows = op.lo * each, (op.hi - op.lo) * each
        return pack(*(tensor.narrow(helper.head_dim(tensor), *rows) for tensor in tensors))

    # -- operations of the program ---------------------------------------------------------------

    def begin(self, forward_only: bool) -> None:
        """Begin an iteration of training or evaluation."""
        self._keys, self.returned, self._limits = self._modes[forward_only], self._returned, None

    def begin_limited(self, program: RankProgram, limits: helper.Limits) -> None:
        """Begin an iteration whose documents or windows limit the attention of slices.

        Args:
            program: This rank's program for the iteration.
            limits: The limits of attention.
        """
        self._keys, self._limits = self._held_keys(program), limits
        self.returned = helper.returned_units(program, Kind.ATTEND_GIVE_BACKWARD, self.keep)

    def _held_keys(self, program: RankProgram) -> helper.ExchangedKeys:
        return helper.ExchangedKeys(program, self.first_token, self.keys_channels, self.keep)

    def handle(self, op: RankOp) -> None:
        """Run one operation of the exchange."""
        if op.kind in _SENDS:
            self._keys.send(op, self._modules[op.chunk], self.shape(op))
        elif op.kind in _RECEIVES:
            self._keys.receive(op, self.layers, self.shape(op))
        elif op.kind in _GIVES:
            self._gives.append(op)
        elif op.kind in HELPS:
            self._help(op)
        elif self._gives:  # ATTEND_MERGE: the pass has merged the results already
            raise ExchangeError(f"{op.label} before its pass")

    def _help(self, op: RankOp) -> None:
        """Note an ATTEND_HELP for the pass that follows; the last one of a slot without a pass computes here."""
        self._helps.append(op)
        if not op.is_final_piece:
            return
        with self._run(op.kind in _BACKWARD) as slot:
            if self._kernel is None:
                shape = self.shape(op)
                like = torch.empty(shape.channels, dtype=shape.dtype, device=shape.device)
                self._kernel = choose_kernel(Setting.of(like), self._kernels)
            for _ in range(self.layers):
                self.give((), None)
                self.help(self._kernel, self._scale)
                self._answer(slot)
                slot.done += 1

    def joint(self, op: RankOp) -> contextlib.AbstractContextManager[Any]:
        """Context around a FORWARD or BACKWARD, to which the gives and helps noted before it belong."""
        for give in self._gives:
            if give.key != op.key or (give.kind in _BACKWARD) != (op.kind in _BACKWARD):
                raise ExchangeError(f"{give.label} is not for {op.label}, which follows it")
        return self._run(op.kind in _BACKWARD)

    @contextlib.contextmanager
    def _run(self, is_backward: bool) -> Iterator[Slot]:
        gives, helps = tuple(self._gives), tuple(self._helps)
        self._gives.clear()
        self._helps.clear()
        slot = Slot(gives, helps, is_backward, self.layers)
        self.slot = slot if gives or helps else None
        try:
            yield slot
        finally:
            self.slot = None
        if (gives or helps) and slot.done != self.layers:
            raise ExchangeError(f"{slot.done} of {self.layers} layers took part in the exchange")
        for help_ in helps:
            self._keys.drop(help_)

    # -- inside a layer ----------------------------------------------------------------------------

    def give(self, tensors: Sequence[torch.Tensor], expected: Callable[[RankOp], Any] | None) -> Given:
        """Begin a layer: send its query to all helpers, and post the receives of others' queries.

        Args:
            tensors: Tensors to send, with all heads of this rank.
            expected: Returns shapes and types of the results of an ATTEND_GIVE; None if no attention is given away.

        Returns:
            Tokens to which helpers attend.
        """
        slot = self.slot
        if slot is None:
            return NOTHING
        shapes = [self.shape(op) for op in slot.helps]
        queries = [s.message(s.backward_query() if slot.is_backward else s.forward_query()) for s in shapes]
        packed = [self.of_heads(op, tensors) for op in slot.gives]
        slot.results = [self.shape(op).message(expected(op)) for op in slot.gives if expected is not None]
        # From here to the last post no call makes the host wait for the device.
        slot.moment = self.channels.moment(self.device)
        for op, buffer in zip(slot.helps, queries, strict=True):
            slot.queries.append(Message(buffer, self.channels.receive(buffer, op.peer, op.label)))
        for op, message in zip(slot.gives, packed, strict=True):
            self.channels.send(message, op.peer, op.label)
        if not self.channels.on_device:
            self._expect_results(slot)
        if not slot.gives:
            return NOTHING
        first, end = min(op.start for op in slot.gives), max(op.stop for op in slot.gives)
        return self.first_token(slot.gives[0], first), self.first_token(slot.gives[0], end)

    def results(self) -> Iterator[tuple[RankOp, torch.Tensor]]:
        """End a layer: send the results for others, and yield this rank's results from helpers as they arrive."""
        slot = self.slot
        if slot is None:
            return
        self._answer(slot)
        self._expect_results(slot)
        buffers, expected = slot.results, slot.expected
        slot.results, slot.expected = [], []
        for op, buffer, pending in zip(slot.gives, buffers, expected, strict=True):
            with self.timeline.waiting():
                self.channels.wait_receive(pending)
            yield op, buffer

    def help(self, kernel: Kernel, scale: float) -> None:
        """Compute attention, or its gradients, for others in the current layer."""
        slot = self.slot
        if slot is None:
            return
        layer = slot.layer_at(slot.done)
        queries, slot.queries = slot.queries, []
        for op, message in zip(slot.helps, queries, strict=True):
            with self.timeline.waiting():
                self.channels.wait_receive(message.pending)
                self._keys.wait(op)
            attending = self._attend_backward if slot.is_backward else self._attend
            answer = attending(op, layer, message.buffer, kernel, scale)
            slot.answers.append((op, answer, self.channels.moment(self.device)))
            if not self.channels.on_device:
                self._answer(slot)

    def _answer(self, slot: Slot) -> None:
        for op, answer, moment in slot.answers:
            self.channels.send(answer, op.peer, op.label, moment)
        slot.answers.clear()

    def _expect_results(self, slot: Slot) -> None:
        """Post the receives of results from helpers in this layer."""
        if not slot.expected:
            posts = zip(slot.gives, slot.results, strict=True)
            slot.expected = [self.channels.receive(to, op.peer, op.label, slot.moment) for op, to in posts]

    def _attend(self, op: RankOp, layer: int, message: torch.Tensor, kernel: Kernel, scale: float) -> torch.Tensor:
        """The result for a query: log-sum-exp and output."""
        parts = self._keys.parts(op, layer)
        (query,) = unpack(message, self.shape(op).forward_query())
        if self._limits is None:
            out, lse = helper.attend(query, parts, kernel, scale)
        else:
            reached = self._limits.reached(op, layer, self._keys.ranges(op))
            out, lse = helper.attend_reached(query, parts, reached, kernel, scale)
        return pack(lse, out)

    def _attend_backward(
        self, op: RankOp, layer: int, message: torch.Tensor, kernel: Kernel, scale: float
    ) -> torch.Tensor:
        """The result for a gradient: gradients of the query, and of the keys and values that are returned now."""
        parts = self._keys.parts(op, layer)
        lse, grad, query, out = unpack(message, self.shape(op).backward_query())
        if self._limits is None:
            dq, *grads = helper.attend_backward((grad, query, out, lse), parts, kernel, scale)
        else:
            reached = self._limits.reached(op, layer, self._keys.ranges(op))
            dq, *grads = helper.attend_reached_backward((grad, query, out, lse), parts, reached, kernel, scale)
        return pack(dq, *self._keys.collect(op, layer, *grads))

    # -- life ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check at the end of an iteration that no attention is pending and no keys are held.

        Raises:
            ExchangeError: Attention was given or promised for a pass that did not run.
            RuntimeError: Keys and values of others are still held.
        """
        self.channels.wait_sends()
        if self._gives or self._helps:
            raise ExchangeError(f"no pass for {[op.label for op in (*self._gives, *self._helps)]}")
        self._keys.check_empty()

    def close(self) -> None:
        """Destroy the groups of queries and results, and free what is held."""
        for keys in (*self._modes.values(), self._keys):
            keys.clear()
        self.channels.close()


class _Layer(LayerExchange):
    """The exchange of one layer."""

    def __init__(self, exchange: ContextExchange, layer: int) -> None:
        self._exchange = exchange
        self._layer = layer

    @property
    def is_active(self) -> bool:
        return self._exchange.slot is not None or self._exchange.always

    def _check(self) -> None:
        slot = self._exchange.slot
        if slot is not None and slot.layer_at(slot.done) != self._layer:
            raise ExchangeError(f"layer {self._layer} where {slot.layer_at(slot.done)} was due")

    def _done(self) -> None:
        if self._exchange.slot is not None:
            self._exchange.slot.done += 1

    def begin_forward(self, query: torch.Tensor) -> Given:
        self._check()
        return self._exchange.give((query,), lambda op: self._exchange.shape(op).forward_result())

    def help(self, kernel: Kernel, scale: float) -> None:
        self._exchange.help(kernel, scale)

    def end_forward(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for parts in self._results(lambda op: self._exchange.shape(op).forward_result()):
            lse, out = helper.joined_heads([tensors for _, tensors in parts])
            yield out, lse
        self._done()

    def begin_backward(self, grad: torch.Tensor, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Given:
        self._check()
        return self._exchange.give(
            (lse, grad, query, out), lambda op: self._exchange.shape(op).backward_result(self._tokens(op))
        )

    def end_backward(self) -> Iterable[tuple[torch.Tensor, list[TokenGradient]]]:
        at = self._exchange.first_token
        for parts in self._results(lambda op: self._exchange.shape(op).backward_result(self._tokens(op))):
            dq, dk, dv = helper.joined_heads([tensors for _, tensors in parts])
            found, row = [], 0
            for units in self._exchange.returned[parts[0][0]]:
                first, end = (at(parts[0][0], unit) for unit in units)
                rows = slice(row, row + end - first)
                found.append((first, end, dk[rows], dv[rows]))
                row = rows.stop
            yield dq, found
        self._done()

    def _results(self, expected: Callable[[RankOp], Any]) -> Iterator[list[tuple[RankOp, list[torch.Tensor]]]]:
        """Yields results grouped by helper device, whose ranks have different heads of the same units."""
        for _, results in groupby(self._exchange.results(), key=lambda result: (result[0].start, result[0].stop)):
            yield [(op, unpack(buffer, expected(op))) for op, buffer in results]

    def _tokens(self, op: RankOp) -> int:
        """Number of tokens whose gradients are returned."""
        at = self._exchange.first_token
        return sum(at(op, stop) - at(op, start) for start, stop in self._exchange.returned[op])
