"""Lowers a Program over devices to the operations of one rank: transfers become pieces between ranks."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_het.features.registry import part_grain, slice_tokens
from megatron_het.plan import Cut, Placement, Plan, Replica
from megatron_het.plan.placement import Blocks, part_tokens, token_blocks
from megatron_het.schedule.deps import Dependencies
from megatron_het.schedule.ir import COMPUTE, RECEIVES, SENDS, Kind, Op, Program
from megatron_het.schedule.joint import counting_places
from megatron_het.schedule.kinds import INPUT_GRADIENTS, RULES, Role

# Stage boundaries: which ranks exchange which part of an activation.  Pure arithmetic.
#
# An activation is ``[s, b, h]``.  The context-parallel ranks of a replica hold blocks of the sequence
# (``plan/placement.py``).  Each of n TP ranks holds all elements of these blocks or, with sequence parallelism, the
# t-th of n equal intervals.  The transferred pieces are the intersections of the sender's and the receiver's elements;
# each element reaches each receiving rank exactly once, whatever the sizes of both sides.  Activations and gradients
# use the same function with the two sides exchanged.


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that world rank ``src`` sends to world rank ``dst``."""

    src: int
    dst: int
    sent: int  # index of the first element in the sender's tensor
    received: int  # index of the first element in the receiver's tensor
    length: int

    def rows(self, *, sending: bool) -> tuple[int, int]:
        """First and end index of the elements in the sender's or the receiver's tensor."""
        first = self.sent if sending else self.received
        return first, first + self.length


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a boundary: the ranks of a replica and how they divide a sequence."""

    groups: tuple[tuple[int, ...], ...]  # for each context-parallel rank its TP ranks
    divided: bool  # whether the TP ranks of a group divide the group's elements
    shares: tuple[int, ...] = (1,)  # relative sizes of the groups' parts of a sequence, as in ``plan/placement.py``
    grain: int = 1  # the number of tokens of every group is a multiple of it

    @property
    def is_divided(self) -> bool:
        """Whether the TP ranks of a group hold different elements."""
        return self.divided and len(self.groups[0]) > 1

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """(world rank, context-parallel rank, TP rank) of all ranks, group by group."""
        for part, group in enumerate(self.groups):
            for tp_rank, rank in enumerate(group):
                yield rank, part, tp_rank

    def blocks(self, tokens: int) -> list[Blocks]:
        """Returns the blocks of ``tokens`` elements that each context-parallel rank holds."""
        return list(token_blocks(self.shares, tokens, self.grain))

    def held(self, blocks: Blocks, tp_rank: int) -> Blocks:
        """Returns a TP rank's part of the blocks of its group, in the order of its tensor."""
        if not self.is_divided:
            return blocks
        n, whole = len(self.groups[0]), sum(end - first for first, end in blocks)
        lo, hi = tp_rank * whole // n, (tp_rank + 1) * whole // n
        found, before = [], 0
        for first, end in blocks:
            a, b = max(lo - before, 0), min(hi - before, end - first)
            if a < b:
                found.append((first + a, first + b))
            before += end - first
        return found

    def length(self, rank: int, tokens: int) -> int:
        """Number of elements that a world rank of this side holds, of ``tokens``."""
        blocks = self.blocks(tokens)
        return next(
            sum(b - a for a, b in self.held(blocks[part], t)) for other, part, t in self.ranks() if other == rank
        )


def pieces(sender: Side, receiver: Side, tokens: int) -> list[Piece]:
    """All pieces of one transfer, ordered by receiver, then sender, then position.

    If the TP ranks of a sender's group all hold the same elements, rank j of n sends to receiver j mod n,
    so that the load spreads over the sender's links.

    Args:
        sender: The side that has the elements.
        receiver: The side that needs them.
        tokens: Number of elements.
    """
    has, needs = sender.blocks(tokens), receiver.blocks(tokens)
    found: list[Piece] = []
    for dst, part, j in receiver.ranks():
        wanted = receiver.held(needs[part], j)
        for src, other, i in sender.ranks():
            if sender.is_divided or i == j % len(sender.groups[0]):
                found += _common(src, dst, sender.held(has[other], i), wanted)
    return found


def _common(src: int, dst: int, has: Blocks, wants: Blocks) -> list[Piece]:
    """Returns the pieces of elements that two ranks have in common, joined where contiguous in both tensors."""
    found: list[Piece] = []
    for (sent, have), (received, want) in itertools.product(_placed(has), _placed(wants)):
        lo, hi = max(have[0], want[0]), min(have[1], want[1])
        if lo >= hi:
            continue
        piece = Piece(src, dst, sent + lo - have[0], received + lo - want[0], hi - lo)
        last = found[-1] if found else None
        if last and last.rows(sending=True)[1] == piece.sent and last.rows(sending=False)[1] == piece.received:
            found[-1] = Piece(src, dst, last.sent, last.received, last.length + piece.length)
        else:
            found.append(piece)
    return found


def _placed(blocks: Blocks) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields every block with the index of its first element in the tensor that holds the blocks."""
    at = 0
    for first, end in blocks:
        yield at, (first, end)
        at += end - first


# Which part of a full parameter a tensor-parallel rank holds, and which rows two ranks have in common.
#
# Megatron splits a parameter along ``partition_dim``.  A plain parameter is cut into n equal
# intervals.  A gated one (SwiGLU's fused gate and up projection, ``partition_stride`` 2) is
# ``[gate, up]`` in full and ``[gate_t, up_t]`` on rank t.  The input projection of a recurrent layer
# has parts, too, but of different sizes.  Fused QKV weights are stored group by
# group, so cutting them into n intervals keeps whole query groups together as long as TP divides
# the number of groups, which plans guarantee.

Stride = int | tuple[int, ...]
"""Blocks that are each split over TP ranks: the number of equal blocks, or the relative sizes of unequal ones."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Local rows ``[local, local + length)`` are full rows ``[full, full + length)``."""

    local: int
    full: int
    length: int


@dataclass(frozen=True, slots=True)
class Overlap:
    """Rows that two shards share: at ``mine`` in the one and at ``theirs`` in the other."""

    mine: int
    theirs: int
    length: int


def segments(full_size: int, tp: int, tp_rank: int, stride: Stride = 1) -> list[Segment]:
    """The segments of a shard in local order.

    Args:
        tp_rank: Rank in the TP group.
        stride: The blocks that are each split over the ranks (2 for gated weights).
    """
    sizes = (1,) * stride if isinstance(stride, int) else stride
    unit, rest = divmod(full_size, sum(sizes))
    if rest or any(unit * size % tp for size in sizes):
        raise ValueError(f"{full_size} rows cannot be split into blocks {sizes} over TP {tp}")
    lengths = [unit * size // tp for size in sizes]
    begins = itertools.accumulate(lengths[:-1], initial=0)
    return [
        Segment(first, tp * first + tp_rank * length, length) for first, length in zip(begins, lengths, strict=True)
    ]


def stride_of(parameter: object) -> Stride:
    """The blocks of a parameter that TP splits, from the attributes that Megatron's layers set on it."""
    sizes = getattr(parameter, "partition_sizes", None)
    return tuple(sizes) if sizes else int(getattr(parameter, "partition_stride", 1))


def overlaps(mine: list[Segment], theirs: list[Segment]) -> list[Overlap]:
    """Common rows of two shards, in ascending order of the full parameter.

    Both sides compute the same list (with the roles exchanged), so that a flat message needs no
    headers.
    """
    found = []
    for a in sorted(mine, key=lambda s: s.full):
        for b in sorted(theirs, key=lambda s: s.full):
            lo, hi = max(a.full, b.full), min(a.full + a.length, b.full + b.length)
            if lo < hi:
                found.append(Overlap(a.local + lo - a.full, b.local + lo - b.full, hi - lo))
    return found


# Which experts of a layer a rank holds, which part of each, and the names of their parameters.
#
# A layer's experts are divided over the ranks of an expert group, which is one TP group or several.  The group has
# EP parts of consecutive ranks.  Each part has experts of its own, and its ranks divide each of them like a TP
# group.


_NAME = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")


class ExpertName(NamedTuple):
    """Name of an expert's parameter, split at the expert's number."""

    before: str  # name of the layer and, in grouped layers, of the parameter
    expert: int  # number of the expert, on this rank or in the layer
    after: str  # name of the parameter, in layers with one module per expert

    def of(self, expert: int) -> str:
        """Returns the name of the same parameter of another expert."""
        return f"{self.before}{expert}{self.after}"


def expert_name(name: str) -> ExpertName | None:
    """Splits a parameter's name; None if the parameter belongs to no single expert."""
    match = _NAME.fullmatch(name)
    return ExpertName(match[1], int(match[2]), match[3]) if match else None


def held_experts(experts: int, cut: Cut, expert_rank: int) -> range:
    """Numbers, within the layer, of the experts that a rank holds."""
    each = experts // cut.ep
    first = expert_rank // cut.expert_tp * each
    return range(first, first + each)


def expert_segments(
    full_size: int, cut: Cut, expert_rank: int, stride: Stride, expert: int, experts: int
) -> list[Segment]:
    """The segments of an expert's parameter that a rank holds; none if it does not hold the expert.

    Args:
        stride: See :func:`segments`.
    """
    if expert not in held_experts(experts, cut, expert_rank):
        return []
    return segments(full_size, cut.expert_tp, expert_rank % cut.expert_tp, stride)


Slot = tuple[Kind, tuple[int, int, int]]
"""A transfer's kind and the (microbatch, slice, chunk) of the operation that it serves."""


@dataclass(frozen=True, slots=True)
class RankOp:
    """One operation of one rank.

    ``lo`` and ``hi`` are rows of the *local* tensor ``[s, b, h]`` of a slice of nominal length.  In operations of the
    context exchange they are the key-value groups that both ranks have, as the owner numbers its groups.  ``peer`` is
    a world rank.
    ``is_final_piece`` marks the last piece of a transfer, after which the tensor may be freed.  Among ATTEND_HELP
    operations it marks the one in which a rank without a pass in the slot computes.
    ``start`` and ``stop`` are copied from the schedule's operation (layers, or units of the context exchange).
    """

    kind: Kind
    microbatch: int
    slice: int
    chunk: int
    label: str
    peer: int = -1
    lo: int = 0
    hi: int = 0
    is_final_piece: bool = True
    start: int = -1
    stop: int = -1

    @property
    def key(self) -> tuple[int, int, int]:
        """(microbatch, slice, chunk) of the compute operation that this operation is or serves."""
        return self.microbatch, self.slice, self.chunk


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The operations of one rank in order.

    ``backwards[c]`` counts the passes of chunk c that compute the gradient of its input.  ``sends`` holds
    (kind, key) of the results that this rank sends.  ``handovers`` maps results that this rank itself consumes
    to the consumer: (kind, key) of the send and of the receive that a transfer would have had.
    ``losses_known`` is the number of operations before all ranks add up their tokens, if updates inside the
    iteration need the sum; otherwise None.
    """

    ops: tuple[RankOp, ...]
    num_microbatches: int
    backwards: tuple[int, ...]
    sends: frozenset[Slot]
    handovers: dict[Slot, Slot] = field(default_factory=dict)
    losses_known: int | None = None


class BoundaryMap:
    """The pieces of every transfer between two devices of a plan.

    Args:
        tokens: Length of the transferred sequence or slice.
        sequence_parallel: Whether replicas with TP > 1 split the sequence.
    """

    def __init__(self, placement: Placement, tokens: int, sequence_parallel: bool) -> None:
        plan = placement.plan
        self.tokens, self._groups = tokens, plan.model.num_query_groups
        self._replicas = [replica for stage in plan.stages for replica in stage.replicas]
        self._sides = [side_of(plan, replica, sequence_parallel) for replica in self._replicas]
        self._cache: dict[tuple[int, int], list[Piece]] = {}

    def pieces(self, sender: int, receiver: int) -> list[Piece]:
        """Pieces of a transfer between two devices (indices of the Program)."""
        if (sender, receiver) not in self._cache:
            found = pieces(self._sides[sender], self._sides[receiver], self.tokens)
            self._cache[sender, receiver] = found
        return self._cache[sender, receiver]

    def shared_groups(self, owner: int, helper: int) -> list[Piece]:
        """The key-value groups that ranks of two devices have in common, numbered locally on each rank.

        Every TP rank of a device has an equal interval of the groups, and so of the heads that attend to them.
        The attention that a context-parallel rank gives away goes to one context-parallel rank of the helper.
        """
        has, gets = self._replicas[owner], self._replicas[helper]
        found: list[Piece] = []
        for part in range(has.cp):
            sides = Side((has.tp_group(part),), True), Side((gets.tp_group(part % gets.cp),), True)
            found += pieces(*sides, self._groups)
        return found

    def pairs(self, owner: int, helper: int) -> list[tuple[int, int]]:
        """Pairs of world ranks (owner, helper) that have attention heads in common."""
        return [(piece.src, piece.dst) for piece in self.shared_groups(owner, helper)]

    def side(self, rank: int) -> Side:
        """The side of a world rank's replica."""
        return next(side for side in self._sides if any(rank in group for group in side.groups))

    def local_length(self, device: int, rank: int) -> int:
        """Number of an activation's tokens on a world rank of a device."""
        return self._sides[device].length(rank, self.tokens)

    def part_lengths(self) -> dict[int, int]:
        """Number of tokens on each world rank, before TP ranks divide them."""
        found: dict[int, int] = {}
        for side in self._sides:
            tokens = [part_tokens(blocks) for blocks in side.blocks(self.tokens)]
            found.update((rank, tokens[part]) for rank, part, _ in side.ranks())
        return found


def side_of(plan: Plan, replica: Replica, divided: bool) -> Side:
    """The side of a replica; ``divided``: whether TP ranks divide the tokens of their context-parallel rank."""
    groups = tuple(replica.tp_group(part) for part in range(replica.cp))
    return Side(groups, divided, replica.shares, part_grain(plan, replica))


def boundary_map(placement: Placement) -> BoundaryMap:
    """The boundary map for a slice of nominal length; pieces of longer or shorter slices are in proportion."""
    plan = placement.plan
    return BoundaryMap(placement, slice_tokens(plan), plan.training.sequence_parallel)


def lower(program: Program, boundaries: BoundaryMap, device: int, rank: int) -> RankProgram:
    """The program of one world rank, in the order of its device's operations."""
    ops: list[RankOp] = []
    backwards = [0] * len(program.shape.layers[program.devices[device].stage])
    busy = frozenset[Op]().union(*(rules.busy(program, device) for rules in RULES))
    counting, losses_known = counting_places(program), None
    for position, op in enumerate(program.ops[device]):
        if counting is not None and position <= counting[device]:
            losses_known = len(ops)
        if op.kind.fields.by_heads or op.kind in SENDS or op.kind in RECEIVES:
            ops.extend(_by_piece(op, boundaries, device, rank, op in busy))
        else:
            if op.kind in INPUT_GRADIENTS:
                backwards[op.chunk] += 1
            ops.append(RankOp(op.kind, op.microbatch, op.slice, op.chunk, _label(op), start=op.start, stop=op.stop))
    sends = frozenset((op.kind, op.key) for op in ops if op.kind in SENDS and op.kind.role is Role.TRANSFER)
    return RankProgram(
        tuple(ops), program.shape.microbatches, tuple(backwards), sends, _handovers(program, device), losses_known
    )


def _handovers(program: Program, device: int) -> dict[Slot, Slot]:
    """Results that stay on the device: the send to the receive that a transfer would have had."""
    dependencies = Dependencies.of(program)
    found: dict[Slot, Slot] = {}
    for op in program.ops[device]:
        send = op.kind.sent_by
        if send is not None and send.other_end is not None and op.kind in COMPUTE:
            target = dependencies.target(device, op)
            if target is not None and target[0] == device:
                key = (op.microbatch, op.slice, op.chunk)
                found[send, key] = (send.other_end, (op.microbatch, op.slice, target[1]))
    return found


def _by_piece(op: Op, boundaries: BoundaryMap, device: int, rank: int, is_work: bool) -> list[RankOp]:
    """One operation per rank of the other device that exchanges tokens, or has attention heads in common, with this.

    Args:
        is_work: For operations by heads: whether a rank without a pass in the slot computes in this one.
    """
    by_heads = op.kind.fields.by_heads
    # Pieces lead from the sender, or the owner of the heads, to the receiver, or the helper.
    is_source = not op.kind.fields.of_peer if by_heads else op.kind in SENDS
    ends = (device, op.peer) if is_source else (op.peer, device)
    shared = boundaries.shared_groups(*ends) if by_heads else boundaries.pieces(*ends)
    mine = [piece for piece in shared if rank == (piece.src if is_source else piece.dst)]
    found = []
    for i, piece in enumerate(mine):
        lo, hi = piece.rows(sending=is_source or by_heads)  # heads as their owner numbers them
        found.append(
            RankOp(
                kind=op.kind,
                microbatch=op.microbatch,
                slice=op.slice,
                chunk=op.chunk,
                label=_label(op),
                peer=piece.dst if is_source else piece.src,
                lo=lo,
                hi=hi,
                is_final_piece=(is_work or not by_heads) and i == len(mine) - 1,
                start=op.start,
                stop=op.stop,
            )
        )
    return found


def _label(op: Op) -> str:
    text = f"{op.kind.mnemonic} microbatch {op.microbatch}"
    if op.chunk:
        text += f" chunk {op.chunk}"
    return text + (f" slice {op.slice}" if op.slice else "")


def edges(programs: Sequence[Program], boundaries: BoundaryMap) -> list[tuple[int, int]]:
    """Directed rank pairs between which the programs transfer, in an order that is the same on every rank.

    This includes keys and values of the context exchange, but not its queries and results.

    Args:
        programs: Training and evaluation.
    """
    found: set[tuple[int, int]] = set()
    for program in programs:
        for device, ops in enumerate(program.ops):
            for kind, peer in {(op.kind, op.peer) for op in ops if op.kind in SENDS}:
                if kind.fields.by_heads:
                    found.update(boundaries.pairs(device, peer))
                else:
                    found.update((p.src, p.dst) for p in boundaries.pieces(device, peer))
    return sorted(found)
